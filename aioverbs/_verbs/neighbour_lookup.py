"""Helper threads for verbs that wait for address resolution, so that the event loop is not blocked."""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable

import anyio
from anyio.lowlevel import RunVar

from aioverbs._core.handles import handles
from aioverbs._lifecycle.affinity import running_loop, wait_uncancelled
from aioverbs.errors import VerbsError

__all__ = ["may_block", "run_in_helper_thread"]

# Maximum number of helper threads per loop. After one second, the kernel gives up on a peer that does not answer. A
# server that receives many connection attempts abandons each of its 128 handshakes after half a second. So verbs for up
# to 256 silent peers are in progress at once, and verbs for other peers must not wait for them. In a test with 64
# threads, half of the other peers got no connection.
_MAX_HELPERS = 256


def may_block(context: handles.Context) -> bool:
    """Return whether verbs on a device may wait until other machines answer address requests: True for RDMA devices."""
    return not context.software


_limiter: RunVar[anyio.CapacityLimiter] = RunVar("helper threads")


async def run_in_helper_thread(verb: str, function: Callable[[], object]) -> None:
    """Call a function in a helper thread and wait until it has returned. The function's exceptions propagate unchanged.

    Each loop has at most `_MAX_HELPERS` helper threads, 256; if all of them are busy, wait for one. Once the function
    has been called, a cancellation is raised only after it has returned; an exception of the function is then the cause
    of the cancellation. The function is awaited through a future, not a task, because a loop that ends would cancel a
    task.

    :param verb: name of the verb that the function calls, for the error message.
    :param function: function to call; its result is dropped.
    :raises VerbsError: with EAGAIN, if no thread can be started; the function was not called.
    :raises RuntimeError: no asyncio event loop is running; the function was not called.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(_MAX_HELPERS)
        _limiter.set(limiter)
    async with limiter:
        loop = running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def settle(failure: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, no task waits
                loop.call_soon_threadsafe(_settle, ended, failure)

        def run() -> None:
            try:
                function()
            except BaseException as error:
                settle(error)
            else:
                settle(None)

        try:
            threading.Thread(target=run, name="aioverbs: address resolution").start()
        except RuntimeError as error:  # the process limit is reached: `ulimit -u` or that of a container
            raise VerbsError(verb, errno.EAGAIN, f"no helper thread can be started: {error}") from error
        await wait_uncancelled(ended)


def _settle(future: "asyncio.Future[None]", failure: BaseException | None) -> None:
    """Complete a future, with an exception if `failure` is not None. Call on the loop of the future."""
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)
