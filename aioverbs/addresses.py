"""PURE: socket addresses and their representation as text."""

__all__ = ["Address", "format_address"]

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
