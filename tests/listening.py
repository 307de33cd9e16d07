"""Addresses and TCP ports of this host."""

import contextlib
import os
import socket
from ipaddress import IPv4Address
from pathlib import Path

__all__ = ["free_port", "listens", "own_address"]

_LISTENING = "0A"


def own_address() -> str:
    """Return a loopback address that only this process's tests use, so that all of its ports are free."""
    return str(IPv4Address((127 << 24) + 0x800000 + os.getpid()))


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def listens(port: int) -> bool:
    """Return whether a process listens at a TCP port, without connecting, since the listener may expect one peer."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    return True
    return False
