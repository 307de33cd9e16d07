"""Verbs in which the kernel looks for a peer's neighbour: they are called in threads, and the event loop goes on."""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable

import anyio
from anyio.lowlevel import RunVar

from aioverbs._core.handles import handles
from aioverbs._lifecycle.affinity import running_loop, wait_uncancelled, wake
from aioverbs.errors import VerbsError

__all__ = ["in_helper", "may_block"]

# Threads of a loop in which such verbs are called. The kernel gives up after a second, and a server that many knock at
# lets go of each of the 128 on their way after half a second: so 256 verbs of peers that nobody answers for are under
# way at once, and another peer's is not to wait for theirs. With 64 threads half of the others had no connection.
_HELPERS = 256


def may_block(context: handles.Context) -> bool:
    """Whether its verbs may wait for other machines."""
    return not context.software


_limiter: RunVar[anyio.CapacityLimiter] = RunVar("helpers that look for neighbours")


async def in_helper(verb: str, function: Callable[[], object]) -> None:
    """Call a function in a thread. The running loop has so many at once, whatever peers make their verbs wait.

    Once it was begun a cancellation is raised after its end. What is waited for is no task: a loop that ends cancels
    those, too. What the function raises is raised here.

    :param verb: what it calls.
    :raises VerbsError: with EAGAIN: the process can have no more threads; nothing was called.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(_HELPERS)
        _limiter.set(limiter)
    async with limiter:
        loop = running_loop()
        over: asyncio.Future[None] = loop.create_future()
        failures: list[BaseException] = []

        def call() -> None:
            try:
                function()
            except BaseException as error:
                failures.append(error)
            finally:
                with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits
                    loop.call_soon_threadsafe(wake, over)

        try:
            threading.Thread(target=call, name="aioverbs: looks for a neighbour").start()
        except RuntimeError as error:  # at a limit of processes, such as `ulimit -u` or a container's
            raise VerbsError(verb, errno.EAGAIN, f"no thread could be started for it: {error}") from error
        await wait_uncancelled(over)
        if failures:
            raise failures.pop()
