"""Registered memory: memory regions, buffer pools and the registration cache."""
