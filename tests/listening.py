"""Addresses and TCP ports of this host."""

import contextlib
import os
import socket
from ipaddress import IPv4Address
from pathlib import Path

__all__ = ["free_port", "listens", "own_address"]

_LISTENING = "0A"


def own_address() -> str:
    """Of the loopback network, and no other process's tests': all of its ports are these tests' own."""
    return str(IPv4Address((127 << 24) + 0x800000 + os.getpid()))


def free_port() -> int:
    """One that nobody had just now."""
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def listens(port: int) -> bool:
    """Whether somebody waits at a TCP port: to try it would be to be its only peer."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    return True
    return False
