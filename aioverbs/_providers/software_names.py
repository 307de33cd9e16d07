"""PURE: the names of software devices, and the addresses in them."""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

__all__ = ["DEFAULT_PORT", "SoftAddress", "is_software", "parse_name"]

_DEVICE = "soft0"
DEFAULT_PORT = 7470

_HINT = "write an address such as 10.0.0.1:7470 or [fd00::1]:7470"
_UNSPECIFIC = "it is not the address of one host: give one of a network interface of this host"


@dataclass(frozen=True, slots=True)
class SoftAddress:
    """Address at which other hosts reach a software device.

    :param host: address of this host that other hosts can reach.
    :param port: TCP port, 1..65535. Devices that reach each other by IPv6 must all have the same port.
    """

    host: IPv4Address | IPv6Address
    port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        """Check that a device can have the address.

        :raises ValueError: no device can have the address; the message says why.
        """
        if problem := _problem(self.host):
            raise ValueError(f"{self.host} cannot be a software device's address: {problem}")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"`port` must be 1 to 65535, got {self.port}")

    def __str__(self) -> str:
        """Return the address as text that `parse` accepts, such as ``10.0.0.1:7470`` or ``[fd00::1]:7470``."""
        return f"[{self.host}]:{self.port}" if self.host.version == 6 else f"{self.host}:{self.port}"

    @property
    def name(self) -> str:
        """Name of the software device with this address, such as ``soft0@10.0.0.1:7470``."""
        return f"{_DEVICE}@{self}"

    @classmethod
    def parse(cls, text: str) -> "SoftAddress":
        """Parse an address such as ``10.0.0.1``, ``10.0.0.1:7470``, ``[fd00::1]`` or ``[fd00::1]:7470``.

        :param text: IP address with or without a TCP port, which is 7470 by default. Host names are not resolved.
        :returns: a new `SoftAddress`.
        :raises ValueError: `text` is not such an address, or no device can have the address; the message says what to
            write.
        """
        if not text:
            raise ValueError(f"the address is empty: {_HINT}")
        if text.startswith("["):
            literal, bracket, rest = text[1:].partition("]")
            if not bracket or (rest and not rest.startswith(":")):
                raise ValueError(f"{text!r} is not an address: {_HINT}")
            host = _host(literal, text)
            if host.version == 4:
                raise ValueError(f"brackets are for IPv6: write {host}{rest}")
            return cls(host, _port(rest[1:], text) if rest else DEFAULT_PORT)
        if text.count(":") > 1:
            raise ValueError(f"an IPv6 address must be in brackets, as in [fd00::1]:{DEFAULT_PORT}, got {text!r}")
        literal, colon, rest = text.partition(":")
        return cls(_host(literal, text), _port(rest, text) if colon else DEFAULT_PORT)


def _host(literal: str, text: str) -> IPv4Address | IPv6Address:
    """Parse an IP address and return it.

    :param literal: text of the address, without brackets.
    :param text: the whole text that contains `literal`, for the error message.
    :raises ValueError: `literal` is not an IP address.
    """
    try:
        return ip_address(literal)
    except ValueError:
        raise ValueError(
            f"{literal!r} in {text!r} is not an IP address, and host names are not resolved: {_HINT}"
        ) from None


def _port(digits: str, text: str) -> int:
    """Parse a port number and return it. The number may still be out of the range of ports.

    :param digits: text of the number.
    :param text: the whole text that contains `digits`, for the error message.
    :raises ValueError: `digits` does not consist of one to five decimal digits.
    """
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 5):
        raise ValueError(f"{digits!r} in {text!r} is not a port: {_HINT}")
    return int(digits)


def _problem(host: IPv4Address | IPv6Address) -> str | None:
    """Return text that says why a device cannot have an IP address and what to do; None if it can."""
    if host.is_link_local or (isinstance(host, IPv6Address) and host.scope_id is not None):
        return "it is valid on one link only: give an address that other hosts can reach"
    if isinstance(host, IPv4Address):
        return None if 0 < host.packed[0] < 224 else _UNSPECIFIC
    if not any(host.packed[:8]) and host.packed[10:12] == b"\xff\xff":
        return f"it maps an IPv4 address: write {IPv4Address(host.packed[12:])}"
    return _UNSPECIFIC if host.is_multicast or (not any(host.packed[:12]) and not host.is_loopback) else None


def is_software(name: str) -> bool:
    """Return whether `name` is ``soft0``, alone or followed by ``@`` and an address, which need not be valid."""
    return name.partition("@")[0] == _DEVICE


def parse_name(name: str) -> SoftAddress | None:
    """Return the `SoftAddress` in the name of a software device; None if the name contains no address.

    :raises ValueError: the name or the address is invalid; the message says what to write.
    """
    plain, at, text = name.partition("@")
    if not at and plain == _DEVICE:
        return None
    try:
        if plain != _DEVICE:
            raise ValueError(f"the software device's name is {_DEVICE}")
        return SoftAddress.parse(text)
    except ValueError as error:
        raise ValueError(f"{name!r} is not the name of a software device: {error}") from None
