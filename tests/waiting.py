"""Wait for conditions that cause no notification, by polling with a time limit."""

import asyncio
import time
from collections.abc import Callable

from tests.pace import patience

__all__ = ["until", "wait_until"]


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a condition is true.

    :param condition: polled every 2 ms.
    :param seconds: time limit on a usual machine.
    :raises TimeoutError: the condition did not become true in time.
    """
    async with asyncio.timeout(patience(seconds)):
        while not condition():  # noqa: ASYNC110  (the condition causes no event here)
            await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a condition is true, without an event loop, polling every 10 µs.

    :raises AssertionError: the condition did not become true in time.
    """
    end = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(10e-6)
