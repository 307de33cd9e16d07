"""Servers: accepting connections, limits, and a handler for each connection."""
