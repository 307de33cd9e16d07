"""Count how often an event loop polls a completion queue."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import CompletionQueue

__all__ = ["TURNS", "polled_turns"]

TURNS = 20


async def polled_turns(cq: CompletionQueue) -> int:
    """Run `TURNS` turns of the loop, and return how many of them the completion queue was scheduled to be polled in."""
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon
    count = 0

    def counted(callback: Callable[..., object], *args: Any, **more: Any) -> asyncio.Handle:
        nonlocal count
        count += getattr(callback, "__self__", None) is cq._cq_dispatcher
        return call_soon(callback, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_soon", counted)
        for _ in range(TURNS):
            await asyncio.sleep(0)
    return count
