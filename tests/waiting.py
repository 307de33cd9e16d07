"""Waiting for what nobody tells: it is looked at again and again, and not for ever."""

import asyncio
import time
from collections.abc import Callable

from tests.pace import patience

__all__ = ["until", "wait_until"]


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something is so.

    :raises TimeoutError: it did not become so in that time, on a usual machine.
    """
    async with asyncio.timeout(patience(seconds)):
        while not condition():  # noqa: ASYNC110  (of another process, or another layer)
            await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """The same where there is no loop: it is looked at as soon as may be."""
    end = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(10e-6)
