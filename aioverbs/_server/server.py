"""Listening for connections, and serving them."""

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
from aioverbs._pool.pool import WorkerPool, check_unbroken, send_socket_call, socket_call_factory_for, wait_until_over
from aioverbs._server.accept import AcceptSettings, TlsContext, try_accept
from aioverbs._server.acceptor import Acceptor, PendingPeer, ServerStatistics
from aioverbs._server.handler import Handler, HandlerResult, Service, handle, handle_on_worker
from aioverbs._verbs.base_domain import Domain, check_caller
from aioverbs.addresses import Address, format_address
from aioverbs.errors import BrokenResourceError, ClosedResourceError, WorkerDiedError

__all__ = ["ConnectionListener", "Handler", "Server", "listen", "serve"]

logger = logging.getLogger("aioverbs")


class _AcceptorResource(anyio.abc.AsyncResource):
    """Who has an acceptor, and is open as long as that listens: for the loop that opens it."""

    def __init__(
        self, listen_args: tuple[str | None, int, int, Transport, Domain | None], acceptor: Acceptor, parent: Resource
    ) -> None:
        self._listen_args = listen_args
        self._domain = listen_args[-1]
        self._acceptor = acceptor
        self._parent = parent  # that its connections are made on
        self._owner: Affinity | None = None  # from its opening on
        self._closed = False  # it was closed

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {', '.join(map(format_address, self.addresses)) or 'no address'}>"

    async def open(self) -> Self:
        """Begin to listen.

        :raises AffinityError: the domain is another event loop's, on which nobody could be served here.
        :raises ClosedResourceError: it was opened before, or closed: if it listens, it goes on. Or what its connections
            are to be made on is not open.
        :raises OSError: the address is in use, or not this machine's.
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
        """See that its owner calls, before anything is done: what it does is in the tasks and futures of that loop.

        Before it is opened that is the owner of its domain, if that is one loop's.
        """
        if self._closed:
            return
        if self._owner is not None:
            self._owner.check(self, operation)
        elif self._domain is not None:
            check_caller(self._domain, operation)

    @property
    def _orphaned(self) -> bool:
        """Whether the loop that opened it is gone, so that any other one may close it."""
        return self._owner is not None and self._owner.orphaned

    @property
    def _inherited(self) -> bool:
        """Whether it is of the process that this one was forked from."""
        return self._owner is not None and self._owner.inherited

    async def __aenter__(self) -> Self:
        return await self.open()

    @property
    def addresses(self) -> list[Address]:
        """Where it listens."""
        return self._acceptor.addresses

    @property
    def port(self) -> int:
        """The port of all of them.

        :raises ClosedResourceError: it does not listen.
        """
        if not self.addresses:
            raise ClosedResourceError(f"{self!r} does not listen, and has no port")
        return self.addresses[0][1]

    def statistics(self) -> ServerStatistics:
        """Whom it has seen."""
        return self._acceptor.statistics()


class ConnectionListener(_AcceptorResource):
    """Where peers ask for connections. Made by `listen`.

    ``async for`` gives a `Connection` for each that got through its handshake; they are the caller's to close, and stay
    when the listener is closed, which ends the loop. Those that nobody took by then are aborted. It belongs to the loop
    that opens it.
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
        """Listen.

        :raises AffinityError: the domain is another event loop's.
        :raises ClosedResourceError: it was opened before, or closed; if it listens, it goes on.
        :raises OSError: the address is in use, or not this machine's.
        """
        await super().open()
        self._open = True
        return self

    async def _on_peer(self, pending: PendingPeer) -> str:
        assert self._domain is not None
        connection, reason = await try_accept(
            pending.open_control(self._accept_settings), pending.peer, self._domain, self._accept_settings
        )
        if connection is None:
            return reason
        on_closed(connection, functools.partial(pending.report_open, False))
        pending.report_open(True)
        suppress_warning(connection)  # nobody's fault that it is open, before somebody took it
        self._ready.append(connection)
        self._wake()
        return reason

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def accept(self) -> Connection:
        """The next connection.

        :raises AffinityError: another event loop than that of its opening is running; nothing was done.
        :raises ClosedResourceError: the listener is closed.
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
                    self._wake()  # it is another one's
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

    async def aclose(self) -> None:
        """Listen no more. Closing twice is fine. In the child of a fork nothing is done: it is the parent's.

        Where the loop of its opening is closed, another one may close it; so does closing what its domain is made from.

        :raises AffinityError: another event loop than that of its opening is running; nothing was done.
        """
        if self._inherited or self._closed:
            return
        if self._orphaned:
            self._waiters.clear()  # they wait on that loop
        else:
            self._check_caller("aclose")
        self._open = False
        await wait_uncancelled(self._close())

    async def _close(self) -> None:
        lifecycle_of(self._parent).detach(self._acceptor)
        await self._acceptor.stop()
        await self._acceptor.cancel()
        while self._waiters:
            self._wake()
        while self._ready:
            await self._ready.popleft().abort()
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

    :param host: the address to listen at, or a name; None: all of this machine's.
    :param port: 0 for one that is free.
    :param domain: what the queue pairs are made on; the connections belong to the running loop.
    :param transport: by what peers find it: ``"tcp"``, ``"rdmacm"``, or ``"auto"``: by both where the device has them.
    :param ssl: for TLS on the TCP connections: see `connect`; or a function that makes it.
    :param secret: what peers are to know.
    :param settings: sizes and times; None: those of `ConnectionSettings()`.
    :param handshake_timeout_s: the longest that a peer may take to get through, in seconds.
    :param max_handshakes: peers that may be on their way at once. Who comes then waits until one of them is through, or
        has had half a second: then the oldest one gives way, those who have said nothing first.
    :param max_connections: connections that may be open at once; who comes then is refused. None: any number.
    :param backlog: peers that the kernel keeps until they are accepted.
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
    chosen = settings if settings is not None else ConnectionSettings()
    accept_settings = AcceptSettings(ssl, secret, chosen, handshake_timeout_s, max_handshakes, max_connections)
    check_transport(transport, accept_settings.context)
    return accept_settings


def _parent_of(domain: Domain | None, pool: WorkerPool | None) -> Domain | WorkerPool:
    if domain is not None and pool is None:
        return domain
    if pool is not None and domain is None:
        return pool
    raise ValueError("a server has its connections on a domain, or on a pool's workers: give one of these")


class Server(_AcceptorResource):
    """Has a handler called with each connection. Made by `serve`.

    The handler runs in a task of its own. When it returns its connection is closed, with everything delivered; when it
    raises the connection is aborted and the error logged, but for those by which a peer's end is told.

    Where the connections are those of a pool, each is a call that the pool has, from the handshake to its end: it is
    counted and placed as others are. A worker that dies takes its connections with it, and their peers find them
    broken. When the pool is closed, or fails, the server is stopped.

    It belongs to the loop that opens it.
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
            raise ValueError("a key chooses one of a pool's workers, and there is no pool")
        if pool is not None and transport == "rdmacm":
            raise ValueError("what rdma_cm accepts stays with its loop: give a domain, or have a pool's by TCP")
        if pool is not None and pool.processes and isinstance(service.accept_settings.ssl, tls.SSLContext):
            raise ValueError("a TLS context cannot go to other processes: give a function of a module that makes it")
        super().__init__(
            (host, port, backlog, transport, domain), Acceptor(service.accept_settings, self._on_peer), parent
        )
        self._service = service
        self._pool = pool
        self._socket_calls = socket_call_factory_for(pool, handle_on_worker, service) if pool is not None else None
        self._key = key
        self._drain_timeout_s = drain_timeout_s
        self._condition = CrossLoopCondition()  # rings when it is over
        self._stopping: asyncio.Future[None] | None = None
        self._drain_scope: anyio.CancelScope | None = None  # until handlers end, at most; of all who stop it
        self._pool_watcher: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Begin to listen.

        :raises AffinityError: the domain is another event loop's.
        :raises ClosedResourceError: the pool is not open; or this was opened before, or closed: if it listens, it goes
            on.
        :raises OSError: the address is in use, or not this machine's.
        """
        if self._pool is not None:
            check_open(self._pool)
        await super().open()
        if self._pool is not None:
            self._pool_watcher = running_loop().create_task(self._stop_with_pool(self._pool))
        return self

    async def _stop_with_pool(self, pool: WorkerPool) -> None:
        await wait_until_over(pool)
        await self.stop()

    def statistics(self) -> ServerStatistics:
        """Whom it has seen."""
        return self._acceptor.statistics(self._pool.size if self._pool is not None else 0)

    async def _on_peer(self, pending: PendingPeer) -> str:
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

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Accept nobody any more, let the handlers end, then cancel those that have not.

        Those on a pool's workers that do not end even so within the pool's ``grace_s`` are left to the pool, which
        kills processes when it is closed, and tells of threads.

        :param drain_timeout_s: how long the handlers have, in seconds; None: as `serve` was told. Of several calls the
            one whose time ends first counts.
        :raises AffinityError: another event loop than that of its opening is running; nothing was done.
        """
        if self._orphaned:
            await self._stop_orphaned()
            return
        self._check_caller("stop")
        if self._closed:
            return
        wait_s = self._drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        deadline = anyio.current_time() + wait_s
        if self._stopping is None or self._drain_scope is None or self._stopping.cancelled():  # before it began
            self._drain_scope = anyio.CancelScope(deadline=deadline)
            self._stopping = asyncio.ensure_future(self._stop(self._drain_scope))
        else:
            self._drain_scope.deadline = min(self._drain_scope.deadline, deadline)
        await asyncio.shield(self._stopping)

    async def _stop(self, drain_scope: anyio.CancelScope) -> None:
        lifecycle_of(self._parent).detach(self._acceptor)
        try:
            await self._acceptor.stop()
            drained = False
            with drain_scope:
                drained = await self._acceptor.wait(None)
            if not drained:
                await self._cancel()
        finally:
            if self._pool_watcher is not None:
                self._pool_watcher.cancel()
            self._closed = True
            self._condition.notify()

    async def _stop_orphaned(self) -> None:
        # The tasks of the loop that opened it do not go on, and nobody waits for them.
        self._pool_watcher = self._stopping = None
        lifecycle_of(self._parent).detach(self._acceptor)
        await self._acceptor.stop()
        self._closed = True
        self._condition.notify()

    async def _cancel(self) -> None:
        if await self._acceptor.cancel(self._pool.grace_s if self._pool is not None else None):
            return
        # A worker that is inside of something would keep this waiting. The pool knows what to do with it.
        logger.error("handlers that do not end are left to %r", self._pool)

    async def wait_closed(self) -> None:
        """Until it is stopped and all handlers have ended.

        :raises AffinityError: another event loop than that of its opening is running.
        :raises BrokenResourceError: the pool had failed.
        :raises ClosedResourceError: it was not opened.
        """
        self._check_caller("wait_closed")
        if self._owner is None and not self._closed:
            raise ClosedResourceError(f"{self!r} is not open: there is no end to wait for")
        await self._condition.wait_while(lambda: not self._closed)
        if self._pool is not None:
            check_unbroken(self._pool)

    async def aclose(self) -> None:
        """`stop`; where this is cancelled, the handlers are cancelled at once. Closing twice is fine.

        In the child of a fork nothing is done: it is the parent's. Where the loop of its opening is closed, another one
        may close it, with nothing to wait for; so does closing its pool, or what its domain is made from.

        :raises AffinityError: another event loop than that of its opening is running; nothing was done.
        """
        if self._inherited:
            return
        try:
            await self.stop()
        except asyncio.CancelledError:
            await wait_uncancelled(self._stop_now())
            raise

    async def _stop_now(self) -> None:
        await self._acceptor.stop()
        await self._cancel()
        await self.stop()


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

    What `listen` takes, and:

    :param handler: called with each connection, in a task of its own.
    :param domain: what the queue pairs are made on; the connections and their handlers are on the running loop.
    :param pool: instead of a domain: each connection is made on one of its workers, with that one's domain, belongs to
        it, and is handled there. The limits are those of all of them together. Its peers come by TCP. Where the workers
        are processes the handler goes there by pickle, as a function of a module does, and `ssl` is a function that
        makes the context.
    :param key: of a peer's address: peers with the same key are handled by the same worker, as
        ``key=lambda address: address[0]`` has all of one host. None: the pool's ``placement`` chooses.
    :param drain_timeout_s: how long handlers have to end when the server is stopped, in seconds.
    """
    accept_settings = _accept_settings(
        transport, ssl, secret, settings, handshake_timeout_s, max_handshakes, max_connections
    )
    service = Service(handler, accept_settings)
    return Server(service, host, port, domain, pool, key, transport, backlog, drain_timeout_s)


publish(__name__)
