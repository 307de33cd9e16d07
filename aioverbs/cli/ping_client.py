"""Client of `aioverbs ping`: makes requests one after the other and measures their latency."""

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

__all__ = ["Pings", "Tally", "connect_pings"]

_CONNECT_S = 10.0

PingOnce = Callable[[int], Awaitable[None]]
"""Coroutine function that makes the request with the given number and waits for its answer."""


@dataclass
class Tally:
    """Results of all requests.

    :param times_ns: latencies of the answered requests, in nanoseconds.
    :param sent: number of requests.
    :param broken: message of the error that ended the connection; None if the connection did not fail.
    """

    times_ns: Histogram = field(default_factory=Histogram)
    sent: int = 0
    broken: str | None = None

    @property
    def received(self) -> int:
        """Number of requests that were answered within the timeout."""
        return self.times_ns.count

    @property
    def lost(self) -> int:
        """Number of requests that were not answered within the timeout."""
        return self.sent - self.received


async def connect_pings(
    stack: AsyncExitStack, domain: Domain, host: str, port: int, transport: Transport, request: PingRequest
) -> PingOnce:
    """Connect to a ping server and agree with it on the verb and size of the requests.

    :param stack: exit stack that closes the connection and the memory.
    :param domain: domain that owns the connection.
    :param host: the server's host name or address.
    :param port: the server's port.
    :param transport: how the connection is set up.
    :param request: verb and size of each request.
    :returns: a coroutine function that makes the request with the given number and returns once it is answered; if the
        connection fails, it raises `BrokenResourceError`, `WorkCompletionError` or `anyio.EndOfStream`.
    :raises ConnectionError: the host is unreachable, no server listens at the port, the server is not a ping server, it
        refuses the request, or it did not answer within 10 s.
    :raises VerbsError: the connection's resources cannot be created.
    :raises ClosedResourceError: the domain is not open.
    :raises ValueError: `transport` is not valid, or is ``"rdmacm"`` and the domain is on a software device.
    """
    try:
        connection = await connect(host, port, domain=domain, transport=transport, timeout_s=_CONNECT_S)
        await stack.enter_async_context(connection)
        async with asyncio.timeout(_CONNECT_S):
            return await _request_pings(stack, connection, domain, request)
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
        if isinstance(error, VerbsError) and not isinstance(error, UnreachableError):
            raise
        reason = str(error) or ("timed out" if isinstance(error, TimeoutError) else "the peer closed the connection")
        raise ConnectionError(f"cannot connect to {host}, port {port}: {reason}") from error


async def _request_pings(
    stack: AsyncExitStack, connection: Connection, domain: Domain, request: PingRequest
) -> PingOnce:
    """Send the request on an open connection; return the function that `connect_pings` returns.

    :raises PingRefusedError: the server refused the request, or is not a ping server of this version.
    :raises anyio.BrokenResourceError: the connection broke.
    :raises anyio.EndOfStream: the server closed the connection.
    :raises VerbsError: the memory for reads or writes cannot be registered.
    """
    await connection.send(request.pack())
    check_answer(await connection.receive())
    if request.verb == "send":
        return _Echo(connection, request.size).ping_once
    grant = await connection.receive_grant()
    local = await stack.enter_async_context(domain.register(request.size, AccessFlags.LOCAL_WRITE))
    # The stack runs this before it deregisters the memory, so that no operation on the memory is in flight then.
    stack.push_async_callback(connection.aclose)
    stack.callback(connection.abort)
    remote = grant[: request.size]

    async def ping_once(number: int) -> None:
        await (connection.read(local, remote) if request.verb == "read" else connection.write(local, remote))

    return ping_once


class _Echo:
    """Messages that the server sends back. Late answers to earlier messages are skipped."""

    def __init__(self, connection: Connection, size: int) -> None:
        self._connection = connection
        self._padding = bytes(index % 251 for index in range(size - 8))

    async def ping_once(self, number: int) -> None:
        """Send a message and wait until the server sends it back.

        :param number: number of the message, larger than that of the previous message.
        :raises BrokenResourceError: the answer is wrong, or the connection broke.
        :raises anyio.EndOfStream: the server closed the connection.
        """
        message = number.to_bytes(8) + self._padding
        await self._connection.send(message)
        while (answer := await self._connection.receive()) != message:
            if not int.from_bytes(answer[:8]) < number:
                raise BrokenResourceError(f"the answer to message {number} differs from the message")


@dataclass
class Pings:
    """Series of requests, one after the other.

    :param ping_once: function that makes one request.
    :param count: number of requests; None to continue until cancelled.
    :param interval_s: seconds from the start of a request to the start of the next, if the answer has arrived by then.
    :param timeout_s: seconds after which an answer counts as lost.
    :param on_answer: called after each request with its number and its latency in nanoseconds, or with its number and
        None if the answer was lost.
    """

    ping_once: PingOnce
    count: int | None
    interval_s: float
    timeout_s: float
    on_answer: Callable[[int, int | None], None]

    async def run(self, tally: Tally) -> None:
        """Make requests until their number is reached or the connection breaks. A broken connection raises nothing; the
        error message is stored in `Tally.broken`. Other exceptions of `ping_once` propagate unchanged.

        :param tally: collects the results, even if the call is cancelled. The request that a cancellation interrupts is
            not counted.
        """
        clock = time.perf_counter_ns
        while self.count is None or tally.sent < self.count:
            begin = time.monotonic()
            tally.sent += 1
            elapsed_ns: int | None = None
            try:
                with anyio.move_on_after(self.timeout_s):
                    start = clock()
                    await self.ping_once(tally.sent)
                    elapsed_ns = clock() - start
            except (anyio.BrokenResourceError, anyio.EndOfStream, WorkCompletionError) as error:
                tally.broken = str(error) or "the peer closed the connection"
                return
            except asyncio.CancelledError:
                tally.sent -= 1  # neither answered nor lost
                raise
            if elapsed_ns is not None:
                tally.times_ns.record(elapsed_ns)
            self.on_answer(tally.sent, elapsed_ns)
            remaining_s = begin + self.interval_s - time.monotonic()
            if remaining_s > 0 and tally.sent != self.count:
                await anyio.sleep(remaining_s)
