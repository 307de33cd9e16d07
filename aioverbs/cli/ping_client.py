"""The client of `aioverbs ping`: how long a request takes, one after the other."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import anyio

from aioverbs._connection.connect import Transport, connect
from aioverbs._connection.connection import Connection
from aioverbs._verbs.base_domain import Domain
from aioverbs.cli.histogram import Histogram
from aioverbs.cli.ping_request import PingRequest, check_answer
from aioverbs.errors import BrokenResourceError, UnreachableError, VerbsError, WorkCompletionError
from aioverbs.types import AccessFlags

__all__ = ["Pings", "Tally", "connected"]

_CONNECT_S = 10.0

Once = Callable[[int], Awaitable[None]]
"""Makes a request of this number, and waits for its answer."""


@dataclass
class Tally:
    """What has come of all requests.

    :param broken: what ended the connection.
    """

    times_ns: Histogram = field(default_factory=Histogram)
    sent: int = 0
    broken: str | None = None

    @property
    def received(self) -> int:
        """Answers that came in time."""
        return self.times_ns.count

    @property
    def lost(self) -> int:
        """Those that did not."""
        return self.sent - self.received


async def connected(
    stack: AsyncExitStack, domain: Domain, host: str, port: int, transport: Transport, request: PingRequest
) -> Once:
    """Connect to a server of pings and ask it for this; what makes one request.

    :param stack: closes the connection and the memory.
    :raises ConnectionError: there is no way, nobody there, somebody else there, or it refuses.
    """
    try:
        connection = await connect(host, port, domain=domain, transport=transport, timeout_s=_CONNECT_S)
        await stack.enter_async_context(connection)
        async with asyncio.timeout(_CONNECT_S):
            return await _ask(stack, connection, domain, request)
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
        if isinstance(error, VerbsError) and not isinstance(error, UnreachableError):
            raise
        reason = str(error) or ("it took too long" if isinstance(error, TimeoutError) else "the peer closed it")
        raise ConnectionError(f"no connection to {host}, port {port}: {reason}") from error


async def _ask(stack: AsyncExitStack, connection: Connection, domain: Domain, request: PingRequest) -> Once:
    await connection.send(request.pack())
    check_answer(await connection.receive())
    if request.verb == "send":
        return _Echo(connection, request.size).once
    granted = await connection.receive_grant()
    local = await stack.enter_async_context(domain.register(request.size, AccessFlags.LOCAL_WRITE))
    # Before the memory is given back nothing is under way there any more.
    stack.push_async_callback(connection.abort)
    remote = granted[: request.size]

    async def once(number: int) -> None:
        await (connection.read(local, remote) if request.verb == "read" else connection.write(local, remote))

    return once


class _Echo:
    """Messages that come back. An answer that came too late is passed over, before the next one."""

    def __init__(self, connection: Connection, size: int) -> None:
        self._connection = connection
        self._rest = bytes(index % 251 for index in range(size - 8))

    async def once(self, number: int) -> None:
        message = number.to_bytes(8) + self._rest
        await self._connection.send(message)
        while (answer := await self._connection.receive()) != message:
            if not int.from_bytes(answer[:8]) < number:
                raise BrokenResourceError(f"what came back is not message {number} as it was sent")


@dataclass
class Pings:
    """Requests, one after the other.

    :param once: makes one.
    :param count: how many; None: until it is cancelled.
    :param interval_s: from the beginning of one to the beginning of the next, where it has its answer by then.
    :param timeout_s: how long an answer may take before it counts as lost.
    :param tell: is told each number, and its nanoseconds, or None where it is lost.
    """

    once: Once
    count: int | None
    interval_s: float
    timeout_s: float
    tell: Callable[[int, int | None], None]

    async def run(self, tally: Tally) -> None:
        """Make them all, or until the connection breaks."""
        clock = time.perf_counter_ns
        while self.count is None or tally.sent < self.count:
            begin = time.monotonic()
            tally.sent += 1
            taken: int | None = None
            try:
                with anyio.move_on_after(self.timeout_s):
                    start = clock()
                    await self.once(tally.sent)
                    taken = clock() - start
            except (anyio.BrokenResourceError, anyio.EndOfStream, WorkCompletionError) as error:
                tally.broken = str(error) or "the peer closed the connection"
                return
            except asyncio.CancelledError:
                tally.sent -= 1  # nobody knows what would have come of it
                raise
            if taken is not None:
                tally.times_ns.record(taken)
            self.tell(tally.sent, taken)
            rest = begin + self.interval_s - time.monotonic()
            if rest > 0 and tally.sent != self.count:
                await anyio.sleep(rest)
