"""PURE: socket addresses, their representation as text, and the range of ports."""

__all__ = ["Address", "check_socket_port", "format_address"]

Address = tuple[str, int] | tuple[str, int, int, int]
"""Socket address: host and port; for IPv6 also flow information and scope ID."""


def format_address(address: Address | None) -> str:
    """Return an address as text, such as ``10.0.0.1:7471`` or ``[fd00::1]:7471``.

    :param address: socket address, or None.
    :returns: the text; ``nowhere`` if the address is None.
    """
    if address is None:
        return "nowhere"
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"


def check_socket_port(port: int, lowest: int = 0) -> None:
    """Check that a port of a socket address is in its range.

    :param port: port of TCP or rdma_cm, not of a device.
    :param lowest: lowest valid port: 0 if it stands for any free port, else 1.
    :raises ValueError: the port is not in `lowest`..65535.
    """
    if not lowest <= port <= 0xFFFF:
        raise ValueError(f"`port` must be from {lowest} to 65535, got {port}")
