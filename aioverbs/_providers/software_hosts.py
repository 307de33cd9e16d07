"""Host names that stand for the addresses of software devices."""

import errno
import logging
import socket
from ipaddress import ip_address

from aioverbs._providers.software_names import SoftAddress, SoftHost
from aioverbs.errors import VerbsError

__all__ = ["is_resolved", "resolve_host"]

logger = logging.getLogger("aioverbs")

_resolved: dict[SoftHost, SoftAddress] = {}  # a name stands for the same device as long as the process exists


def is_resolved(host: SoftHost) -> bool:
    """Return whether `resolve_host` would return at once."""
    return host in _resolved


def resolve_host(host: SoftHost) -> SoftAddress:
    """Return the address that a host name stands for. The resolver is asked once, and may take seconds.

    :raises VerbsError: with EADDRNOTAVAIL if the name cannot be resolved, or stands for no address that a device can
        have.
    """
    if (known := _resolved.get(host)) is not None:
        return known
    try:
        found = socket.getaddrinfo(host.name, None, type=socket.SOCK_STREAM)
        address = host.choose(ip_address(each[4][0]) for each in found)
    except (OSError, ValueError) as error:
        advice = f"the host name {host.name!r} in the name of the device: {error}"
        raise VerbsError("ibv_open_device", errno.EADDRNOTAVAIL, advice) from error
    if address.host.is_loopback and host.name != "localhost":
        logger.warning("soft0@%s is %s, which no other host reaches: see /etc/hosts", host, address.name)
    return _resolved.setdefault(host, address)
