"""Features that only the software device has: contexts, shared protection domains, peers, and the fault plan."""
