"""Awaiting a result without being interrupted by cancellation."""

import asyncio
from collections.abc import Awaitable

import anyio

__all__ = ["wait_uncancelled"]


async def wait_uncancelled(awaitable: Awaitable[None]) -> None:
    """Await a result to its end, and raise its exception if it fails.

    If the caller is cancelled meanwhile, by a scope or a server that stops, raise that afterwards instead.

    :raises asyncio.CancelledError: the caller was cancelled; the awaitable has ended by then.
    """
    task = asyncio.ensure_future(awaitable)
    cancelled = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        _ = task.cancelled() or task.exception()  # mark the exception as retrieved
        raise cancelled
    task.result()
