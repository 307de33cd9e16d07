"""Host names that stand for the addresses of software devices."""

import contextlib
import errno
import logging
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address

from aioverbs._providers.software_names import SoftAddress, SoftHost
from aioverbs.errors import VerbsError

__all__ = ["is_resolved", "resolve_host"]

logger = logging.getLogger("aioverbs")

# Addresses of this host by host name, so that a name stands for the same device as long as the host has them.
_resolved: dict[str, tuple[IPv4Address | IPv6Address, ...]] = {}
_ELSEWHERE = (socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")  # reserved for documentation


def is_resolved(host: SoftHost) -> bool:
    """Return whether `resolve_host` would not ask the resolver.

    :raises OSError: no socket can be created, for example because the process has no file descriptors left.
    """
    return _known(host.name) is not None


def resolve_host(host: SoftHost) -> SoftAddress:
    """Return the address of this host that a host name stands for.

    The resolver may take seconds. It is asked again after it failed, and after this host has lost one of the addresses.

    :raises VerbsError: with EADDRNOTAVAIL if the name cannot be resolved, or stands for no address of this host that a
        device can have.
    """
    try:
        if (found := _known(host.name)) is None:
            found = _ask(host.name)
            chosen = host.choose(found).host  # an answer without a usable address is not kept
            if chosen.is_loopback and host.name != "localhost":
                logger.warning("%s is %s, which no other host reaches: see /etc/hosts", host.name, chosen)
            found = _resolved.setdefault(host.name, found)  # another thread may have asked meanwhile
        return host.choose(found)
    except (OSError, ValueError) as error:
        advice = f"the host name {host.name!r} in the name of the device: {error}"
        raise VerbsError("ibv_open_device", errno.EADDRNOTAVAIL, advice) from error


def _known(name: str) -> tuple[IPv4Address | IPv6Address, ...] | None:
    """Return the addresses that a host name was resolved to; None if it was not, or if this host has lost one of them.

    :raises OSError: no socket can be created, for example because the process has no file descriptors left.
    """
    known = _resolved.get(name)
    if known is None or all(map(_is_local, known)):
        return known
    _resolved.pop(name, None)
    return None


def _ask(name: str) -> tuple[IPv4Address | IPv6Address, ...]:
    """Return the addresses of this host that a host name stands for, in the order of the resolver.

    For this host's own name, if a device could have no other of its addresses than those of the loopback network, as on
    Debian, the addresses of this host's default routes come first.

    :raises OSError: the name cannot be resolved.
    :raises ValueError: the name stands for addresses of other hosts only.
    """
    found = dict.fromkeys(ip_address(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    local = tuple(filter(_is_local, found))
    if found and not local:
        raise ValueError(f"it stands for {', '.join(map(str, found))}, but this host has no such address")
    if name == "localhost" or _label(name) != _label(socket.gethostname()):
        return local
    try:
        best = SoftHost(name, 0).choose(local)  # with any other port, a device can have these addresses as well
    except ValueError:
        return local
    outward = tuple(_outward()) if best.host.is_loopback else ()
    if outward:
        logger.info("%s is %s, because /etc/hosts says %s, which no other host reaches", name, outward[0], best.host)
    return outward + local


def _label(name: str) -> str:
    """Return the first label of a host name, in lower case."""
    return name.partition(".")[0].lower()


def _is_local(address: IPv4Address | IPv6Address) -> bool:
    """Return whether this host has an address.

    :raises OSError: no socket can be created, for example because the process has no file descriptors left.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except socket.gaierror:  # its scope is not an interface of this host
        return False
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            raise
        return False
    return True


def _outward() -> Iterator[IPv4Address | IPv6Address]:
    """Yield the addresses that other hosts see this one at, by its default routes, IPv4 first."""
    for family, elsewhere in _ELSEWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:  # there may be no route
            probe.connect((elsewhere, 9))  # sends nothing
            yield ip_address(probe.getsockname()[0])
