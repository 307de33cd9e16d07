"""PURE: addresses of hosts and ports, as sockets have them, and as people write them."""

__all__ = ["Address", "written"]

Address = tuple[str, int] | tuple[str, int, int, int]
"""As those of sockets: host and port, for IPv6 with flow information and scope."""


def written(address: Address | None) -> str:
    """An address as people write it, ``10.0.0.1:7471`` or ``[fd00::1]:7471``.

    :param address: None: there is none.
    """
    if address is None:
        return "nowhere"
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
