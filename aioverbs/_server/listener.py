"""Listening for connections, which the caller accepts one by one."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Self

from aioverbs._connection.connect import Transport
from aioverbs._connection.connection import Connection, on_closed
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import running_loop, wait_uncancelled
from aioverbs._lifecycle.resource import lifecycle_of, suppress_warning
from aioverbs._server.accept import AcceptSettings, TlsContext, try_accept
from aioverbs._server.acceptor import Acceptor
from aioverbs._server.acceptor_resource import AcceptorResource, make_accept_settings
from aioverbs._server.pending_peer import PendingPeer
from aioverbs._verbs.base_domain import Domain
from aioverbs.errors import ClosedResourceError, VerbsError

__all__ = ["ConnectionListener", "listen"]

logger = logging.getLogger("aioverbs")


class ConnectionListener(AcceptorResource):
    """Listener for connections. Use `listen` to create one.

    ``async for`` yields a `Connection` for each peer that completes the handshake. The caller closes these connections;
    closing the listener ends the loop and leaves them open. Connections that were not yielded yet are aborted. When the
    domain has been closed, or the next peer arrives while it is being closed or after its device was lost, the listener
    closes itself. The listener belongs to the event loop that opens it.

    :param host: address or name to listen at; None for all addresses of this machine.
    :param port: port to listen at; 0 for a free port.
    :param domain: domain that the queue pairs are created on.
    :param transport: ``"tcp"``, ``"rdmacm"`` or ``"auto"``.
    :param accept_settings: settings for accepted peers.
    :param backlog: number of peers that the kernel queues until they are accepted.
    :raises ValueError: `port` is not in 0..65535.
    """

    def __init__(
        self,
        host: str | None,
        port: int,
        domain: Domain,
        transport: Transport,
        accept_settings: AcceptSettings,
        backlog: int,
    ) -> None:
        super().__init__((host, port, backlog, transport, domain), Acceptor(accept_settings, self._on_peer), domain)
        self._accept_settings = accept_settings
        self._ready: deque[Connection] = deque()
        self._aborted: list[Connection] = []  # instead of being accepted; `aclose` waits for their end
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._open = False

    async def open(self) -> Self:
        """Start listening for peers and accepting them. If listening fails, the listener can be opened again.

        :returns: the listener itself.
        :raises AffinityError: another event loop owns the domain.
        :raises ClosedResourceError: the listener is open, or was closed before or during this call, or the domain is
            not open. A listener that is open stays open.
        :raises OSError: the name has no address, an address is in use or does not belong to this machine, no file
            descriptor is left, or the process cannot map the memory for the buffers of connections.
        :raises MemoryError: no memory is left for the buffers.
        :raises ValueError: the transport is ``"rdmacm"`` and the domain is on a software device; or rdma_cm is used,
            and the backlog is less than 1.
        :raises LibraryNotFoundError: the transport is ``"rdmacm"`` and librdmacm is not installed.
        :raises VerbsError: the device cannot register the memory for the buffers; or the transport is ``"rdmacm"``, and
            rdma_cm does not work on this machine, or the address is in use or belongs to no RDMA device.
        :raises RuntimeError: no asyncio event loop is running.
        """
        await super().open()
        self._open = True
        return self

    async def _on_peer(self, pending: PendingPeer) -> str:
        """Make a connection to an accepted peer, and store it until `accept` returns it.

        :returns: ``""``, or the reason why the peer did not become a connection: see `try_accept`.
        :raises Exception: whatever `try_accept` raises.
        """
        assert self._domain is not None
        connection, reason = await try_accept(
            pending.open_control(self._accept_settings), pending.peer, self._domain, self._accept_settings
        )
        if connection is None:
            return reason
        on_closed(connection, pending.report_closed)
        pending.report_open(True)
        suppress_warning(connection)  # the caller cannot have closed it: it was not returned yet
        self._ready.append(connection)
        self._wake()
        return reason

    def _wake(self) -> None:
        """Wake one task that is waiting in `accept`, if there is one."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def accept(self) -> Connection:
        """Wait for the next connection. A cancelled call loses no connection.

        :returns: an open connection, to be closed by the caller. If the peer has gone meanwhile, the methods of the
            connection report that.
        :raises AffinityError: an event loop other than the one that opened the listener is running; nothing was done.
        :raises ClosedResourceError: the listener is closed or was not opened.
        """
        self._check_caller("accept")
        while not self._ready:
            if not self._open:
                raise ClosedResourceError("the listener is not open")
            waiter: asyncio.Future[None] = running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # pass the wake-up on to another caller
                raise
        connection = self._ready.popleft()
        suppress_warning(connection, False)
        if self._ready:
            self._wake()
        return connection

    def __aiter__(self) -> AsyncIterator[Connection]:
        return self

    async def __anext__(self) -> Connection:
        try:
            return await self.accept()
        except ClosedResourceError:
            raise StopAsyncIteration from None

    def _close_now(self) -> None:
        """Do the work of `close`: end waiting calls to `accept`, and abort the connections that it has not returned."""
        self._open = False
        super()._close_now()
        self._end_waiting()
        self._abort_ready()

    def _abort_ready(self) -> None:
        """Abort the connections that `accept` has not returned. A failure is logged, and left to `aclose`."""
        while self._ready:
            connection = self._ready.popleft()
            self._aborted.append(connection)
            try:
                connection.abort()
            except VerbsError as error:
                logger.warning("a connection that was not accepted could not be closed: %s", error)

    def _end_waiting(self) -> None:
        """End all waiting calls to `accept`."""
        while self._waiters:
            self._wake()

    async def aclose(self) -> None:
        """Stop listening, and abort the connections that `accept` has not returned. Closing twice has no effect.

        A cancellation is raised only after the listener is closed.

        In a forked child this method does nothing: the listener belongs to the parent. If the loop that opened the
        listener is closed, another loop may close the listener. Closing the domain also closes such a listener.

        :raises AffinityError: an event loop other than the one that opened the listener is running; nothing was done.
        :raises VerbsError: the rdma_cm listener or a connection cannot be closed. The listener accepts no more peers,
            and can be closed again.
        """
        is_done = self._closed and not self._aborted and self._acceptor.is_stopped
        if self._inherited or is_done:
            return
        if self._orphaned:
            self._waiters.clear()  # the waiters belong to the closed loop
        else:
            self._check_caller("aclose")
        self._open = False
        await wait_uncancelled(self._close())

    async def _close(self) -> None:
        """Stop accepting peers, cancel handshakes in progress, end waiting calls to `accept`, and abort the connections
        that `accept` has not returned.

        :raises VerbsError: the rdma_cm listener or a connection cannot be closed. If it is the listener, the rest is
            done nevertheless.
        """
        lifecycle_of(self._parent).detach(self._acceptor)
        try:
            await self._acceptor.stop()
        finally:
            await self._acceptor.cancel()
            self._end_waiting()
            self._abort_ready()
            for connection in tuple(self._aborted):
                await connection.aclose()
            self._aborted.clear()
        self._closed = True


def listen(
    host: str | None = None,
    port: int = 0,
    *,
    domain: Domain,
    transport: Transport = "auto",
    ssl: TlsContext | None = None,
    secret: bytes | None = None,
    settings: ConnectionSettings | None = None,
    handshake_timeout_s: float = 30.0,
    max_handshakes: int = 128,
    max_connections: int | None = None,
    backlog: int = 256,
) -> ConnectionListener:
    """Listen for connections: ``async with listen(…) as listener``, then ``async for connection in listener``.

    The connections belong to the event loop that opens the listener.

    :param host: address or name to listen at; None for all addresses of this machine.
    :param port: port to listen at, 0..65535; 0 for a free port.
    :param domain: domain that the queue pairs are created on.
    :param transport: how peers reach the listener: ``"tcp"``, ``"rdmacm"``, or ``"auto"`` for TCP, and for rdma_cm as
        well if the device supports it and there is no TLS.
    :param ssl: TLS context for the TCP connections (see `connect`), or a function that makes one; None for no TLS.
    :param secret: shared secret, at least 1 byte, that peers must prove that they know; None for no secret.
    :param settings: sizes and times; None for ``ConnectionSettings()``.
    :param handshake_timeout_s: limit of a peer's handshake in seconds, above 0. A silent peer gets less while others
        wait: see `max_handshakes`.
    :param max_handshakes: largest number of handshakes at the same time, 1 or more. When that many are in progress,
        further peers wait in the kernel's backlog until one of them ends. Meanwhile, the oldest handshake whose peer
        owes the next message for half a second is cancelled; peers that have sent nothing come first.
    :param max_connections: largest number of open connections, 1 or more; further peers are refused. None for no limit.
    :param backlog: number of peers that the kernel queues until they are accepted; further ones have to try again.
    :returns: a listener to open with ``async with``. It does not listen until it is open.
    :raises ValueError: an argument is out of range, or `transport` and `ssl` cannot be combined.
    :raises Exception: whatever the function `ssl` raises, which is called immediately.
    """
    accept_settings = make_accept_settings(
        transport, ssl, secret, settings, handshake_timeout_s, max_handshakes, max_connections
    )
    return ConnectionListener(host, port, domain, transport, accept_settings, backlog)


publish(__name__)
