"""The domain of each event loop on which Dask communicates."""

import asyncio
import logging

from aioverbs._lifecycle.resource import open_now, suppress_warning
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.device import Device
from aioverbs._verbs.resource_domain import ResourceDomain
from aioverbs._verbs.shared_device import shared_device
from aioverbs.distributed.configuration import device_name, message_model

__all__ = ["get_domain"]

logger = logging.getLogger("aioverbs")

_Key = tuple[asyncio.AbstractEventLoop, str | None, MessageModel]

# Each key is added by the thread of its loop only, and removed by the one thread whose `pop` returns the domain.
_domains: dict[_Key, tuple[Device, ResourceDomain]] = {}


async def get_domain() -> ResourceDomain:
    """Return the open domain of the running loop, on the process's shared device.

    The first call on a loop opens the domain. It stays open as long as its loop and its device: the next call on
    another loop closes the domains of closed loops, the next call after the device was lost replaces the domain, and
    the end of the process closes the rest together with the device. A forked child opens a device and domains of its
    own.

    :returns: the domain, which the caller does not close.
    :raises ValueError: a setting of the backend is invalid.
    :raises Exception: whatever `shared_device` or opening a `ResourceDomain` raises.
    """
    key = asyncio.get_running_loop(), device_name(), message_model()
    device = shared_device(key[1])  # another one than before if that was lost or closed, or belongs to a parent process
    known, domain = _domains.get(key, (None, None))
    if domain is not None and known is device and not domain.closed:
        return domain
    # There is no await from here to the assignment, so no other task of this loop opens a domain in the meantime.
    made = device.resource_domain(message_model=key[2])
    open_now(made)
    suppress_warning(made)
    _domains[key] = device, made
    orphans = [_domains.pop(other, (None, None))[1] for other in tuple(_domains) if other[0].is_closed()]
    for orphan in (domain, *orphans):
        if orphan is not None:
            try:
                await orphan.aclose()
            except Exception:
                logger.exception(
                    "the domain of comms that are gone could not be closed; the end of the process closes it"
                )
    return made
