"""The domain of each event loop on which Dask communicates."""

import asyncio

from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import open_now, suppress_warning
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.resource_domain import ResourceDomain
from aioverbs._verbs.shared_device import shared_device
from aioverbs.distributed.configuration import device_name, message_model

__all__ = ["get_domain"]

_Key = tuple[asyncio.AbstractEventLoop, str | None, MessageModel]

# Each key is added by the thread of its loop only, and removed by the one thread whose `pop` returns the domain.
_domains: dict[_Key, ResourceDomain] = {}


async def get_domain() -> ResourceDomain:
    """Return the open domain of the running loop, on the process's shared device.

    The first call on a loop opens the domain. It stays open as long as its loop: the next call on another loop closes
    the domains of closed loops, and the end of the process closes the rest together with the device. A forked child
    opens a device and domains of its own.

    :returns: the domain, which the caller does not close.
    :raises ValueError: a setting of the backend is invalid.
    :raises Exception: whatever `shared_device` or opening a `ResourceDomain` raises.
    """
    key = asyncio.get_running_loop(), device_name(), message_model()
    domain = _domains.get(key)
    if domain is None or domain.state is not ResourceState.OPEN or domain.closed:  # closed by other code, or inherited
        # There is no await from here to the assignment, so no other task of this loop opens a domain in the meantime.
        domain = shared_device(key[1]).resource_domain(message_model=key[2])
        open_now(domain)
        suppress_warning(domain)
        _domains[key] = domain
        for other in [each for each in tuple(_domains) if each[0].is_closed()]:
            orphan = _domains.pop(other, None)
            if orphan is not None:
                await orphan.aclose()
    return domain
