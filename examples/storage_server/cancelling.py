"""Awaiting a result without being interrupted by cancellation."""

import asyncio
from collections.abc import Awaitable

import anyio

__all__ = ["wait_uncancelled"]


async def wait_uncancelled(awaitable: Awaitable[None]) -> None:
    """Wait until an awaitable has ended, even if the caller is cancelled meanwhile; raise its exception if it fails.

    :raises asyncio.CancelledError: the caller was cancelled while it waited, for example by a cancel scope. The
        awaitable has ended, and its exception is not raised.
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
