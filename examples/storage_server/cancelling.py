"""What goes on to its end, whoever is cancelled meanwhile, and however often."""

import asyncio
from collections.abc import Awaitable

import anyio

__all__ = ["to_its_end"]


async def to_its_end(what: Awaitable[None]) -> None:
    """Await something, whoever is cancelled meanwhile: by a scope, or by a server that stops. That is raised then."""
    doing = asyncio.ensure_future(what)
    cancelled = None
    with anyio.CancelScope(shield=True):
        while not doing.done():
            try:
                await asyncio.wait([doing])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        _ = doing.cancelled() or doing.exception()  # nobody waits for what came of it
        raise cancelled
    doing.result()
