"""Two ends of a connection in one process, and what tests do with them."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from aioverbs import Connection, ConnectionListener, ConnectionSettings, Device, ResourceDomain, connect, listen

__all__ = ["SMALL", "Pair", "pair"]

SMALL = ConnectionSettings(buffer_size=1024, receive_depth=4, send_buffers=2, send_depth=16, max_message=1 << 20)
"""Of few and small buffers, so that everything has to wait."""

HOST = "127.0.0.1"


@dataclass
class Pair:
    """Both ends, the domain of both, and where the far one came from."""

    near: Connection
    far: Connection
    domain: ResourceDomain
    listener: ConnectionListener


@contextlib.asynccontextmanager
async def pair(
    device: Device,
    settings: ConnectionSettings = SMALL,
    far_settings: ConnectionSettings | None = None,
    **both: Any,
) -> AsyncIterator[Pair]:
    """Connected ends; who closes one in the block does no harm."""
    async with (
        device.resource_domain() as domain,
        listen(HOST, domain=domain, settings=far_settings or settings, **both) as listener,
    ):
        near = await connect(HOST, listener.port, domain=domain, settings=settings, **both)
        try:
            far = await listener.accept()
            try:
                yield Pair(near, far, domain, listener)
            finally:
                await far.abort()
        finally:
            await near.abort()


def deeper(settings: ConnectionSettings, **changes: Any) -> ConnectionSettings:
    """The same but for that."""
    return replace(settings, **changes)
