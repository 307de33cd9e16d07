"""PURE: the names of software devices, and the addresses and host names in them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

__all__ = ["DEFAULT_PORT", "SoftAddress", "SoftHost", "is_software", "parse_address", "parse_name"]

_DEVICE = "soft0"
DEFAULT_PORT = 7470

_HINT = "write an address such as 10.0.0.1:7470, [fd00::1]:7470 or storage-1:7470"
_HOST_NAME = re.compile(r"\w([\w-]{0,61}\w)?(\.\w([\w-]{0,61}\w)?)*", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_MAX_HOST_NAME = 253
_UNSPECIFIC = "it is not the address of one host: give one of a network interface of this host"


@dataclass(frozen=True, slots=True)
class SoftAddress:
    """Address at which other hosts reach a software device.

    :param host: address of this host that other hosts can reach.
    :param port: TCP port; 0 for one that the system chooses, with IPv4 only. Devices that reach each other by IPv6 must
        all have the same port: an IPv4 GID has room for the port, and tells it to peers, but an IPv6 GID has none.
    """

    host: IPv4Address | IPv6Address
    port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        """Check that a device can have the address.

        :raises ValueError: no device can have the address; the message says why.
        """
        if problem := _problem(self.host):
            raise ValueError(f"{self.host} cannot be a software device's address: {problem}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"`port` must be 0 to 65535, got {self.port}")
        if not self.port and self.host.version == 6:
            raise ValueError(
                f"port 0 needs an IPv4 address, got {self.host}: peers find an IPv6 device by its address alone, so "
                "leave the port out"
            )

    def __str__(self) -> str:
        """Return the address as text that `parse_address` accepts, such as ``10.0.0.1:7470`` or ``[fd00::1]:7470``."""
        return f"[{self.host}]:{self.port}" if self.host.version == 6 else f"{self.host}:{self.port}"

    @property
    def name(self) -> str:
        """Name of the software device with this address, such as ``soft0@10.0.0.1:7470``."""
        return f"{_DEVICE}@{self}"


@dataclass(frozen=True, slots=True)
class SoftHost:
    """Host name of this host, and a port, which stand for the address of a software device.

    :param name: host name.
    :param port: TCP port, as for `SoftAddress`.
    """

    name: str
    port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        """Check the port.

        :raises ValueError: the port is not in 0..65535.
        """
        if not 0 <= self.port <= 65535:
            raise ValueError(f"`port` must be 0 to 65535, got {self.port}")

    def __str__(self) -> str:
        """Return the text that `parse_address` accepts, such as ``storage-1:7470``."""
        return f"{self.name}:{self.port}"

    def choose(self, found: Iterable[IPv4Address | IPv6Address]) -> SoftAddress:
        """Return the best address of the host for a device.

        Addresses that other hosts reach come first, among them IPv4 ones: only these tell peers the port. Otherwise the
        order of the resolver decides.

        :param found: addresses of the host, in the order of the resolver.
        :raises ValueError: a device can have none of the addresses; the message says why.
        """
        usable: list[SoftAddress] = []
        reason = "it has no address"
        for host in found:
            try:
                usable.append(SoftAddress(host, self.port))
            except ValueError as error:
                reason = str(error)
        if not usable:
            raise ValueError(f"the host name {self.name!r} stands for no address that a device can have: {reason}")
        return min(usable, key=lambda address: (address.host.is_loopback, address.host.version))


def parse_address(text: str) -> SoftAddress | SoftHost:
    """Parse an address such as ``10.0.0.1``, ``10.0.0.1:7470``, ``[fd00::1]:7470`` or ``storage-1:0``.

    :param text: IP address or host name, with or without a TCP port, which is 7470 by default.
    :returns: a new `SoftAddress`; for a host name, which the caller resolves, a new `SoftHost`.
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
        if isinstance(host, str) or host.version == 4:
            raise ValueError(f"brackets are for IPv6: write {host}{rest}")
        return SoftAddress(host, _port(rest[1:], text) if rest else DEFAULT_PORT)
    if text.count(":") > 1:
        raise ValueError(f"an IPv6 address must be in brackets, as in [fd00::1]:{DEFAULT_PORT}, got {text!r}")
    literal, colon, rest = text.partition(":")
    host = _host(literal, text)
    port = _port(rest, text) if colon else DEFAULT_PORT
    return SoftHost(host, port) if isinstance(host, str) else SoftAddress(host, port)


def _host(literal: str, text: str) -> IPv4Address | IPv6Address | str:
    """Parse an IP address and return it, or return the text of a host name.

    :param literal: text of the address, without brackets.
    :param text: the whole text that contains `literal`, for the error message.
    :raises ValueError: `literal` is neither an IP address nor a host name.
    """
    try:
        return ip_address(literal)
    except ValueError:
        name = literal.removesuffix(".")  # the dot ends a full name
        # A name that ends in a number is an address with a mistake, which the resolver would take for another one.
        is_name = len(name) <= _MAX_HOST_NAME and _HOST_NAME.fullmatch(name)
        if is_name and not _NUMBER.fullmatch(name.rpartition(".")[2]):
            return literal
        raise ValueError(f"{literal!r} in {text!r} is neither an IP address nor a host name: {_HINT}") from None


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


def parse_name(name: str) -> SoftAddress | SoftHost | None:
    """Return the address in the name of a software device, as `parse_address` does; None if the name contains none.

    :raises ValueError: the name or the address is invalid; the message says what to write.
    """
    plain, at, text = name.partition("@")
    if not at and plain == _DEVICE:
        return None
    try:
        if plain != _DEVICE:
            raise ValueError(f"the software device's name is {_DEVICE}")
        return parse_address(text)
    except ValueError as error:
        raise ValueError(f"{name!r} is not the name of a software device: {error}") from None
