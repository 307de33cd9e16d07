"""What only the software device has: its contexts, shared protection domains, peers and fault plan."""
