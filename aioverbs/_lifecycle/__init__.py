"""Lifecycle of resources: the resource tree, owners, calls between event loops, forks."""
