"""Handles of verbs objects, for the software device and RDMA devices alike."""
