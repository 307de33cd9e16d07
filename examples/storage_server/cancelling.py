"""What goes on to its end, whoever is cancelled meanwhile, and however often."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio

__all__ = ["to_its_end"]


async def to_its_end(what: Coroutine[Any, Any, None]) -> None:
    """Await something, whoever is cancelled meanwhile: by a scope, or by a server that stops."""
    doing = asyncio.create_task(what)
    cancelled = None
    with anyio.CancelScope(shield=True):
        while not doing.done():
            try:
                await asyncio.wait([doing])
            except asyncio.CancelledError as error:
                cancelled = error
    doing.result()
    if cancelled is not None:
        raise cancelled
