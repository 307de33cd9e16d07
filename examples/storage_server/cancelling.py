"""Awaiting a result without being interrupted by cancellation."""

import asyncio
from collections.abc import Awaitable

import anyio

__all__ = ["to_its_end"]


async def to_its_end(what: Awaitable[None]) -> None:
    """Await a result to its end.

    If the caller is cancelled meanwhile, by a scope or a server that stops, raise that afterwards.
    """
    doing = asyncio.ensure_future(what)
    cancelled = None
    with anyio.CancelScope(shield=True):
        while not doing.done():
            try:
                await asyncio.wait([doing])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        _ = doing.cancelled() or doing.exception()  # mark the exception as retrieved
        raise cancelled
    doing.result()
