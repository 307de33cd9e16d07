"""Devices and what is made from them: domains, queue pairs, completion queues, shared receive queues."""
