"""Connections between processes: handshake, messages, flow control, grants and byte streams."""
