"""Serving connections with a handler."""

import asyncio
import logging
import socket
import ssl as tls
from collections.abc import Callable
from typing import Self

import anyio

from aioverbs._connection.connect import Transport
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import CrossLoopCondition, running_loop, wait_uncancelled
from aioverbs._lifecycle.cross_loop import CrossLoopFuture
from aioverbs._lifecycle.resource import check_open, lifecycle_of
from aioverbs._pool.placement import Key
from aioverbs._pool.pool import (
    WorkerPool,
    check_unbroken,
    send_socket_call,
    socket_call_factory_for,
    wait_while_accepting_calls,
)
from aioverbs._server.accept import TlsContext
from aioverbs._server.acceptor import Acceptor, ServerStatistics
from aioverbs._server.acceptor_resource import AcceptorResource, make_accept_settings
from aioverbs._server.handler import Handler, HandlerResult, Service, handle, handle_on_worker
from aioverbs._server.pending_peer import PendingPeer
from aioverbs._verbs.base_domain import Domain
from aioverbs.addresses import Address
from aioverbs.errors import BrokenResourceError, ClosedResourceError, VerbsError, WorkerDiedError

__all__ = ["Handler", "Server", "serve"]

logger = logging.getLogger("aioverbs")


def _parent_of(domain: Domain | None, pool: WorkerPool | None) -> Domain | WorkerPool:
    """Return the domain or the pool, whichever is not None.

    :raises ValueError: both are None, or neither is.
    """
    if domain is not None and pool is None:
        return domain
    if pool is not None and domain is None:
        return pool
    raise ValueError("pass exactly one of `domain` and `pool`")


def _check_drain_timeout(name: str, timeout_s: float) -> None:
    """Check that a time for handlers to end is 0 or more.

    :param name: name of the argument, for the error message.
    :raises ValueError: the time is negative or not a number.
    """
    if not timeout_s >= 0:
        raise ValueError(f"`{name}` must be 0 or more, got {timeout_s}")


class Server(AcceptorResource):
    """Server that calls a handler with each connection. Use `serve` to create one.

    Each call to the handler runs in a task of its own. When the handler returns, all sent messages are delivered and
    the connection is closed. When the handler raises, the connection is aborted. The exception is logged, except for
    `anyio.EndOfStream` and `anyio.BrokenResourceError`, which report that the peer is gone.

    With a pool, each connection is one call of the pool, from the handshake to the end of the connection, and is
    counted and placed like any other call. When a worker dies, its connections break. When the pool is closed or fails,
    the server stops. Without a pool, it closes itself when the domain has been closed, or when the next peer arrives
    while the domain is being closed or after its device was lost.

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
    :raises ValueError: `port` is not in 0..65535, `drain_timeout_s` is negative or not a number, not exactly one of
        `domain` and `pool` is given, or arguments cannot be combined.
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
        _check_drain_timeout("drain_timeout_s", drain_timeout_s)
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
        :raises ClosedResourceError: the domain or pool is not open, or the server is open, or was closed before or
            during this call. A server that is open stays open.
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
        :raises ValueError: `timeout_s` is negative or not a number.
        :raises VerbsError: the rdma_cm listener cannot be closed. This is raised when the handlers have ended. The
            server counts as closed nevertheless, and the next call tries again to close the listener.
        """
        wait_s = self._drain_timeout_s if timeout_s is None else timeout_s
        _check_drain_timeout("timeout_s", wait_s)
        if self._orphaned and not self._inherited:
            await self._stop_orphaned()
            return
        self._check_caller("drain")
        if self._closed:
            await self._acceptor.stop()
            return
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
    handshake_timeout_s: float = 30.0,
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
    :param drain_timeout_s: time in seconds that handlers have to end when the server stops, 0 or more.
    :returns: a server to open with ``async with``. It does not listen until it is open.
    :raises ValueError: an argument is out of range, not exactly one of `domain` and `pool` is given, or arguments
        cannot be combined.
    :raises pickle.PicklingError: the workers of `pool` are processes, and `handler` or another argument cannot be
        pickled. `pickle` may raise other exceptions instead.
    :raises Exception: whatever the function `ssl` raises, which is called immediately.
    """
    accept_settings = make_accept_settings(
        transport, ssl, secret, settings, handshake_timeout_s, max_handshakes, max_connections
    )
    service = Service(handler, accept_settings)
    return Server(service, host, port, domain, pool, key, transport, backlog, drain_timeout_s)


publish(__name__)
