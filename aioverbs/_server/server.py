"""Listening for connections, and serving them with a handler."""

import asyncio
import functools
import logging
import socket
import ssl as tls
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Self

import anyio.abc

from aioverbs._connection.connect import Transport, check_transport
from aioverbs._connection.connection import Connection, on_closed
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, CrossLoopCondition, running_loop, wait_uncancelled
from aioverbs._lifecycle.cross_loop import CrossLoopFuture
from aioverbs._lifecycle.resource import Resource, check_open, lifecycle_of, suppress_warning
from aioverbs._pool.placement import Key
from aioverbs._pool.pool import (
    WorkerPool,
    check_unbroken,
    send_socket_call,
    socket_call_factory_for,
    wait_while_accepting_calls,
)
from aioverbs._server.accept import AcceptSettings, TlsContext, try_accept
from aioverbs._server.acceptor import Acceptor, ServerStatistics
from aioverbs._server.handler import Handler, HandlerResult, Service, handle, handle_on_worker
from aioverbs._server.pending_peer import PendingPeer
from aioverbs._verbs.base_domain import Domain, check_caller
from aioverbs.addresses import Address, check_socket_port, format_address
from aioverbs.errors import BrokenResourceError, ClosedResourceError, VerbsError, WorkerDiedError

__all__ = ["ConnectionListener", "Handler", "Server", "listen", "serve"]

logger = logging.getLogger("aioverbs")


class _AcceptorResource(anyio.abc.AsyncResource):
    """Base of `ConnectionListener` and `Server`. Owns an acceptor, and belongs to the event loop that opens it.

    ``async with`` opens the object, gives the object itself and closes it at the end of the block.

    :param listen_args: arguments of `Acceptor.open`.
    :param acceptor: the acceptor, which is not open yet.
    :param parent: domain or pool that the connections are created on.
    :raises ValueError: the port of `listen_args` is not in 0..65535.
    """

    def __init__(
        self, listen_args: tuple[str | None, int, int, Transport, Domain | None], acceptor: Acceptor, parent: Resource
    ) -> None:
        check_socket_port(listen_args[1])
        self._listen_args = listen_args
        self._domain = listen_args[-1]
        self._acceptor = acceptor
        self._parent = parent  # domain or pool that the connections are created on
        self._owner: Affinity | None = None  # None until opened
        self._closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {', '.join(map(format_address, self.addresses)) or 'no address'}>"

    async def open(self) -> Self:
        """Start listening for peers and accepting them. If listening fails, this object can be opened again.

        :returns: this object.
        :raises AffinityError: another event loop owns the domain.
        :raises ClosedResourceError: this object is open or was closed before, or the domain or pool is not open. If
            this object is open, it stays open.
        :raises OSError: the name has no address, an address is in use or does not belong to this machine, or no file
            descriptor is left.
        :raises ValueError: the transport is ``"rdmacm"`` and the domain is on a software device; or rdma_cm is used,
            and the backlog is less than 1.
        :raises LibraryNotFoundError: the transport is ``"rdmacm"`` and librdmacm is not installed.
        :raises VerbsError: the transport is ``"rdmacm"``, and rdma_cm does not work on this machine, or the address is
            in use or belongs to no RDMA device.
        :raises RuntimeError: no asyncio event loop is running.
        """
        if self._owner is not None or self._closed:
            raise ClosedResourceError(f"{self!r} cannot be opened again: make a new one")
        self._check_caller("open")
        self._owner = Affinity.of_running_loop()
        try:
            lifecycle_of(self._parent).attach(self._acceptor)
            await self._acceptor.open(*self._listen_args)
        except BaseException:
            self._owner = None
            lifecycle_of(self._parent).detach(self._acceptor)
            raise
        return self

    def _check_caller(self, operation: str) -> None:
        """Check that the owner's event loop is running, because tasks and futures belong to that loop.

        The owner is the loop that opened this object; before that, the loop that owns the domain. Any caller passes if
        there is no owner, or if this object is closed.

        :param operation: name of the caller's method, for the error message.
        :raises AffinityError: another event loop or none is running.
        :raises ForkedProcessError: this process was forked from the one that opened this object.
        """
        if self._closed:
            return
        if self._owner is not None:
            self._owner.check(self, operation)
        elif self._domain is not None:
            check_caller(self._domain, operation)

    @property
    def _orphaned(self) -> bool:
        """Whether the event loop that opened this object is closed, so that any other loop may close the object."""
        return self._owner is not None and self._owner.orphaned

    @property
    def _inherited(self) -> bool:
        """Whether this process was forked from the process that opened this object."""
        return self._owner is not None and self._owner.inherited

    async def __aenter__(self) -> Self:
        return await self.open()

    def close(self) -> None:
        """Stop listening, and end all handshakes and connections that this object still owns, without waiting.

        This can be called at any moment, in a callback or while the event loop is shutting down. When it returns, the
        port is free, and the peers have been notified, except for those on a worker of a pool and those in the TLS
        handshake, which the loops notify in their next turns. The rest is done in the background, and `aclose` waits
        for that. Closing twice has no effect.

        On another thread or event loop than the one that opened this object, as in a finalizer, this only schedules the
        call on that loop. If that loop is closed, the TCP sockets are closed here. In a forked child this method does
        nothing: the object belongs to the parent.
        """
        owner = self._owner
        if owner is None or self._closed or owner.inherited:
            return
        if owner.owns():
            self._close_now()
            return
        try:
            assert owner.loop is not None
            owner.loop.call_soon_threadsafe(self._close_now)
        except RuntimeError:  # the loop is closed
            self._acceptor.destroy()

    def _close_now(self) -> None:
        """Do the work of `close` on the loop that opened this object."""
        lifecycle_of(self._parent).detach(self._acceptor)
        self._acceptor.close(self._set_closed)

    def _set_closed(self) -> None:
        """Record that nothing is left to wait for after `close`."""
        self._closed = True

    @property
    def addresses(self) -> list[Address]:
        """Host and port of each address at which this object listens; empty before opening and after closing."""
        return self._acceptor.addresses

    @property
    def port(self) -> int:
        """Port at which this object listens, the same for all addresses.

        :raises ClosedResourceError: this object is not open.
        """
        if not self.addresses:
            raise ClosedResourceError(f"{self!r} is not listening, so it has no port: open it first")
        return self.addresses[0][1]

    def statistics(self) -> ServerStatistics:
        """Return a `ServerStatistics`: how many handshakes are in progress, how many connections are open, and how many
        peers were accepted and refused so far.
        """
        return self._acceptor.statistics()


class ConnectionListener(_AcceptorResource):
    """Listener for connections. Use `listen` to create one.

    ``async for`` yields a `Connection` for each peer that completes the handshake. The caller closes these connections;
    closing the listener ends the loop and leaves them open. Connections that were not yielded yet are aborted. The
    listener belongs to the event loop that opens it.

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
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._open = False

    async def open(self) -> Self:
        """Start listening for peers and accepting them. If listening fails, the listener can be opened again.

        :returns: the listener itself.
        :raises AffinityError: another event loop owns the domain.
        :raises ClosedResourceError: the listener is open or was closed before, or the domain is not open. A listener
            that is open stays open.
        :raises OSError: the name has no address, an address is in use or does not belong to this machine, or no file
            descriptor is left.
        :raises ValueError: the transport is ``"rdmacm"`` and the domain is on a software device; or rdma_cm is used,
            and the backlog is less than 1.
        :raises LibraryNotFoundError: the transport is ``"rdmacm"`` and librdmacm is not installed.
        :raises VerbsError: the transport is ``"rdmacm"``, and rdma_cm does not work on this machine, or the address is
            in use or belongs to no RDMA device.
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
        on_closed(connection, functools.partial(pending.report_open, False))
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
        while self._ready:
            self._ready.popleft().abort()

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
        if self._inherited or self._closed:
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
            while self._ready:
                connection = self._ready.popleft()
                connection.abort()
                await connection.aclose()
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
    handshake_timeout_s: float = 5.0,
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
    :param handshake_timeout_s: limit of a peer's handshake in seconds, above 0.
    :param max_handshakes: largest number of handshakes at the same time, 1 or more. When that many are in progress,
        further peers wait in the kernel's backlog until one of them ends. Meanwhile, the oldest handshake whose peer
        owes the next message for half a second is cancelled; peers that have sent nothing come first.
    :param max_connections: largest number of open connections, 1 or more; further peers are refused. None for no limit.
    :param backlog: number of peers that the kernel queues until they are accepted; further ones have to try again.
    :returns: a listener to open with ``async with``. It does not listen until it is open.
    :raises ValueError: an argument is out of range, or `transport` and `ssl` cannot be combined.
    :raises Exception: whatever the function `ssl` raises, which is called immediately.
    """
    accept_settings = _accept_settings(
        transport, ssl, secret, settings, handshake_timeout_s, max_handshakes, max_connections
    )
    return ConnectionListener(host, port, domain, transport, accept_settings, backlog)


def _accept_settings(
    transport: Transport,
    ssl: TlsContext | None,
    secret: bytes | None,
    settings: ConnectionSettings | None,
    handshake_timeout_s: float,
    max_handshakes: int,
    max_connections: int | None,
) -> AcceptSettings:
    """Check arguments of `listen` or `serve`, and return them as `AcceptSettings`.

    :raises ValueError: an argument is out of range, or `transport` and `ssl` cannot be combined.
    :raises Exception: whatever the function `ssl` raises, which is called immediately.
    """
    chosen = settings if settings is not None else ConnectionSettings()
    accept_settings = AcceptSettings(ssl, secret, chosen, handshake_timeout_s, max_handshakes, max_connections)
    check_transport(transport, accept_settings.context)
    return accept_settings


def _parent_of(domain: Domain | None, pool: WorkerPool | None) -> Domain | WorkerPool:
    """Return the domain or the pool, whichever is not None.

    :raises ValueError: both are None, or neither is.
    """
    if domain is not None and pool is None:
        return domain
    if pool is not None and domain is None:
        return pool
    raise ValueError("pass exactly one of `domain` and `pool`")


class Server(_AcceptorResource):
    """Server that calls a handler with each connection. Use `serve` to create one.

    Each call to the handler runs in a task of its own. When the handler returns, all sent messages are delivered and
    the connection is closed. When the handler raises, the connection is aborted. The exception is logged, except for
    `anyio.EndOfStream` and `anyio.BrokenResourceError`, which report that the peer is gone.

    With a pool, each connection is one call of the pool, from the handshake to the end of the connection, and is
    counted and placed like any other call. When a worker dies, its connections break. When the pool is closed or fails,
    the server stops.

    The server belongs to the event loop that opens it.

    :param service: the handler and the settings for accepted peers.
    :param host: address or name to listen at; None for all addresses of this machine.
    :param port: port to listen at; 0 for a free port.
    :param domain: domain that the queue pairs are created on; None if there is a pool.
    :param pool: pool whose workers handle the connections; None if there is a domain.
    :param key: function that returns, for the address of a peer, the key that chooses the worker; None if the pool's
        ``placement`` chooses it.
    :param transport: ``"tcp"``, ``"rdmacm"`` or ``"auto"``.
    :param backlog: number of peers that the kernel queues until they are accepted.
    :param drain_timeout_s: time in seconds that handlers have to end when the server stops.
    :raises ValueError: `port` is not in 0..65535, not exactly one of `domain` and `pool` is given, or arguments cannot
        be combined.
    :raises pickle.PicklingError: the workers are processes, and the service cannot be pickled. `pickle` may raise other
        exceptions instead.
    """

    def __init__(
        self,
        service: Service,
        host: str | None,
        port: int,
        domain: Domain | None,
        pool: WorkerPool | None,
        key: Callable[[Address], Key] | None,
        transport: Transport,
        backlog: int,
        drain_timeout_s: float,
    ) -> None:
        parent = _parent_of(domain, pool)
        if pool is None and key is not None:
            raise ValueError("`key` chooses a worker of a pool: pass `pool`, or leave out `key`")
        if pool is not None and transport == "rdmacm":
            raise ValueError('a pool cannot serve peers by rdma_cm: pass `domain`, or transport="tcp"')
        if pool is not None and pool.processes and isinstance(service.accept_settings.ssl, tls.SSLContext):
            raise ValueError(
                "an SSLContext cannot be sent to worker processes: pass a function of a module that makes one"
            )
        super().__init__(
            (host, port, backlog, transport, domain), Acceptor(service.accept_settings, self._on_peer), parent
        )
        self._service = service
        self._pool = pool
        self._socket_calls = socket_call_factory_for(pool, handle_on_worker, service) if pool is not None else None
        self._key = key
        self._drain_timeout_s = drain_timeout_s
        self._condition = CrossLoopCondition()  # notified when the server has stopped
        self._stopping: asyncio.Future[None] | None = None
        self._drain_scope: anyio.CancelScope | None = None  # limits the wait for handlers, for all calls of `drain`
        self._pool_watcher: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Start listening for peers and serving them. If listening fails, the server can be opened again.

        :returns: the server itself.
        :raises AffinityError: another event loop owns the domain.
        :raises ClosedResourceError: the domain or pool is not open, or the server is open or was closed before. A
            server that is open stays open.
        :raises OSError: the name has no address, an address is in use or does not belong to this machine, or no file
            descriptor is left.
        :raises ValueError: the transport is ``"rdmacm"`` and the domain is on a software device; or rdma_cm is used,
            and the backlog is less than 1.
        :raises LibraryNotFoundError: the transport is ``"rdmacm"`` and librdmacm is not installed.
        :raises VerbsError: the transport is ``"rdmacm"``, and rdma_cm does not work on this machine, or the address is
            in use or belongs to no RDMA device.
        :raises RuntimeError: no asyncio event loop is running.
        """
        if self._pool is not None:
            check_open(self._pool)
        await super().open()
        if self._pool is not None:
            self._pool_watcher = running_loop().create_task(self._stop_with_pool(self._pool))
        return self

    async def _stop_with_pool(self, pool: WorkerPool) -> None:
        """Wait until the pool takes no more calls because it is closing, closed or broken; then stop the server."""
        await wait_while_accepting_calls(pool)
        await self.drain()

    def statistics(self) -> ServerStatistics:
        """Return a `ServerStatistics`: how many handshakes are in progress, how many connections are open, and how many
        peers were accepted and refused so far.
        """
        return self._acceptor.statistics(self._pool.size if self._pool is not None else 0)

    async def _on_peer(self, pending: PendingPeer) -> str:
        """Handle a peer from the handshake to the end of the connection, and log the handler's exception, if any.

        :returns: ``""``, or the reason why the peer did not become a connection: that of `try_accept`, or the name of
            the class of another exception.
        """
        try:
            result = await self._run_handler(pending)
        except (BrokenResourceError, ClosedResourceError, WorkerDiedError) as error:
            logger.warning("the connection with %s is lost: %s", pending.peer, error)
            return type(error).__name__
        except Exception as error:
            logger.exception("the connection with %s could not be handled", pending.peer)
            return type(error).__name__
        finally:
            pending.report_open(False)
        if result.failure is not None:
            logger.error("the handler of the connection with %s failed", pending.peer, exc_info=result.failure)
        return result.reason

    async def _run_handler(self, pending: PendingPeer) -> HandlerResult:
        """Handle a peer on this loop, or if there is a pool, on one of its workers, and wait until that is done.

        :returns: the result of `handle`.
        :raises ClosedResourceError: the domain or the pool is closed. If it is the pool, the peer was rejected.
        :raises BrokenResourceError: the pool is broken and the peer was rejected; or, as `WorkerDiedError`, the worker
            died.
        :raises Exception: any other exception that `handle` or the function ``key`` raises.
        """
        if self._pool is None or self._socket_calls is None:
            assert self._domain is not None
            control = pending.open_control(self._service.accept_settings)
            return await handle(control, pending.peer, pending.report_open, self._domain, self._service)
        assert isinstance(pending.endpoint, socket.socket)
        assert pending.address is not None
        key = self._key(pending.address) if self._key is not None else None
        future: CrossLoopFuture[HandlerResult] = CrossLoopFuture(running_loop())
        try:
            call = send_socket_call(self._pool, self._socket_calls(pending.endpoint, pending.report_open), future, key)
        except (BrokenResourceError, ClosedResourceError):
            self._acceptor.reject_busy(pending)
            raise
        pending.worker = call.handle.number
        return await future.wait(call.withdraw)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Stop accepting peers, wait for the handlers to end, then cancel those that have not ended, and close.

        A handler on a pool's worker that does not end within the pool's ``grace_s`` after its cancellation is left to
        the pool: when the pool is closed, it kills worker processes and reports worker threads that do not end. If this
        call is cancelled, the server still closes. Draining twice has no effect.

        If the loop that opened the server is closed, only the sockets are closed.

        :param timeout_s: time in seconds that the handlers have to end, 0 or more; None for the ``drain_timeout_s``
            given to `serve`. If there are several concurrent calls, the earliest deadline counts.
        :raises AffinityError: an event loop other than the one that opened the server is running; nothing was done.
        :raises ForkedProcessError: the server was opened in the process that this one was forked from.
        :raises VerbsError: the rdma_cm listener cannot be closed. This is raised when the handlers have ended. The
            server counts as closed nevertheless, and the next call tries again to close the listener.
        """
        if self._orphaned:
            await self._stop_orphaned()
            return
        self._check_caller("drain")
        if self._closed:
            await self._acceptor.stop()
            return
        wait_s = self._drain_timeout_s if timeout_s is None else timeout_s
        deadline = anyio.current_time() + wait_s
        # cancelled before its first step
        if self._stopping is None or self._drain_scope is None or self._stopping.cancelled():
            self._drain_scope = anyio.CancelScope(deadline=deadline)
            self._stopping = asyncio.ensure_future(self._stop(self._drain_scope))
        else:
            self._drain_scope.deadline = min(self._drain_scope.deadline, deadline)
        await asyncio.shield(self._stopping)

    async def _stop(self, drain_scope: anyio.CancelScope) -> None:
        """Stop accepting peers, wait for the handlers until `drain_scope` ends, and cancel the remaining ones.

        This runs once, in a task of its own.

        :raises VerbsError: the rdma_cm listener cannot be closed. This is raised when the handlers have ended.
        """
        lifecycle_of(self._parent).detach(self._acceptor)
        failure: VerbsError | None = None
        try:
            try:
                await self._acceptor.stop()
            except VerbsError as error:
                failure = error
            drained = False
            with drain_scope:
                drained = await self._acceptor.wait(None)
            if not drained:
                await self._cancel()
            if failure is not None:
                raise failure
        finally:
            self._set_closed()

    def _set_closed(self) -> None:
        """Record that the server has stopped and its handlers have ended, and end waiting calls to `wait_closed`."""
        if self._pool_watcher is not None:
            self._pool_watcher.cancel()
        super()._set_closed()
        self._condition.notify()

    async def _stop_orphaned(self) -> None:
        """Close the sockets of a server whose loop is closed, without waiting for its tasks, which can no longer run.

        :raises VerbsError: the rdma_cm listener cannot be closed.
        """
        self._pool_watcher = self._stopping = None
        lifecycle_of(self._parent).detach(self._acceptor)
        await self._acceptor.stop()
        self._set_closed()

    async def _cancel(self) -> None:
        """Cancel the handlers and wait until they have ended; if there is a pool, for at most its ``grace_s``.

        If handlers are still running after that time, this is logged.
        """
        if await self._acceptor.cancel(self._pool.grace_s if self._pool is not None else None):
            return
        # A blocked worker could delay this forever. The pool ends that worker when the pool is closed.
        logger.error("handlers did not end after their cancellation and were left to %r", self._pool)

    async def wait_closed(self) -> None:
        """Wait until the server has stopped and its handlers have ended (see `drain`), without stopping the server.

        :raises AffinityError: an event loop other than the one that opened the server is running.
        :raises BrokenResourceError: the pool failed, because a worker died and was not replaced.
        :raises ClosedResourceError: the server was not opened, or was opened in the process that this one was forked
            from.
        """
        self._check_caller("wait_closed")
        if self._owner is None and not self._closed:
            raise ClosedResourceError(f"{self!r} is not open: open it first")
        await self._condition.wait_while(lambda: not self._closed)
        if self._pool is not None:
            check_unbroken(self._pool)

    async def aclose(self) -> None:
        """Close the server in the same way as `drain`. If this call is cancelled, the handlers are cancelled at once.

        Closing twice has no effect.

        In a forked child this method does nothing: the server belongs to the parent. If the loop that opened the server
        is closed, another loop may close the server, without waiting for handlers. Closing the pool or the domain also
        closes such a server.

        :raises AffinityError: an event loop other than the one that opened the server is running; nothing was done.
        :raises VerbsError: the rdma_cm listener cannot be closed. This is raised when the handlers have ended, and the
            server is closed nevertheless.
        """
        if self._inherited:
            return
        try:
            await self.drain()
        except asyncio.CancelledError:
            await wait_uncancelled(self._stop_now())
            raise

    async def _stop_now(self) -> None:
        """Stop the server without waiting for the handlers to end by themselves: cancel them at once.

        :raises VerbsError: the rdma_cm listener cannot be closed. This is raised when the handlers have ended.
        """
        try:
            await self._acceptor.stop()
        finally:
            await self._cancel()
            await self.drain()


def serve(
    handler: Handler,
    host: str | None = None,
    port: int = 0,
    *,
    domain: Domain | None = None,
    pool: WorkerPool | None = None,
    key: Callable[[Address], Key] | None = None,
    transport: Transport = "auto",
    ssl: TlsContext | None = None,
    secret: bytes | None = None,
    settings: ConnectionSettings | None = None,
    handshake_timeout_s: float = 5.0,
    max_handshakes: int = 128,
    max_connections: int | None = None,
    backlog: int = 256,
    drain_timeout_s: float = 10.0,
) -> Server:
    """Serve connections: ``async with serve(handler, …) as server: await server.wait_closed()``.

    :param handler: async function called with each `Connection`, in a task of its own. The connection is closed when
        the handler returns.
    :param host: as for `listen`.
    :param port: as for `listen`.
    :param domain: domain that the queue pairs are created on. Connections and handlers belong to the loop that opens
        the server.
    :param pool: pool of workers, instead of a domain. Each connection is made and handled on a worker, using the
        worker's domain. Limits apply to the connections of all workers together. Peers connect by TCP. If the workers
        are processes, the handler must be picklable, such as a function of a module, and `ssl` must be a function that
        makes the context.
    :param key: function that returns a key for the address of a peer. Peers with the same key are handled by the same
        worker: with ``key=lambda address: address[0]``, all peers on one host. None if the pool's ``placement`` chooses
        the worker.
    :param transport: how peers reach the server: ``"tcp"``, ``"rdmacm"``, or ``"auto"`` for TCP, and for rdma_cm as
        well if there is a domain, its device supports rdma_cm and there is no TLS.
    :param ssl: as for `listen`.
    :param secret: as for `listen`.
    :param settings: as for `listen`.
    :param handshake_timeout_s: as for `listen`.
    :param max_handshakes: as for `listen`.
    :param max_connections: as for `listen`.
    :param backlog: as for `listen`.
    :param drain_timeout_s: time in seconds that handlers have to end when the server stops.
    :returns: a server to open with ``async with``. It does not listen until it is open.
    :raises ValueError: an argument is out of range, not exactly one of `domain` and `pool` is given, or arguments
        cannot be combined.
    :raises pickle.PicklingError: the workers of `pool` are processes, and `handler` or another argument cannot be
        pickled. `pickle` may raise other exceptions instead.
    :raises Exception: whatever the function `ssl` raises, which is called immediately.
    """
    accept_settings = _accept_settings(
        transport, ssl, secret, settings, handshake_timeout_s, max_handshakes, max_connections
    )
    service = Service(handler, accept_settings)
    return Server(service, host, port, domain, pool, key, transport, backlog, drain_timeout_s)


publish(__name__)
