"""Allocators of memory for queues and buffers."""
