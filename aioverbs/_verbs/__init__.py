"""Devices and the resources made from them: domains, queue pairs, completion queues, shared receive queues."""
