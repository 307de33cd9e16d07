"""Listening for connections, and serving them."""

import asyncio
import contextlib
import logging
import ssl as tls
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

import anyio
import anyio.abc

from aioverbs.acceptor import Acceptor, AcceptorStatistics, Arrival, Terms
from aioverbs.affinity import running_loop, to_the_end
from aioverbs.connection import Connection, Transport, check_transport
from aioverbs.connection_settings import ConnectionSettings
from aioverbs.domain import Domain
from aioverbs.errors import BrokenResourceError, ClosedResourceError
from aioverbs.identifier import Address

__all__ = ["ConnectionListener", "Handler", "Place", "Server", "listen", "serve"]

logger = logging.getLogger("aioverbs")

Handler = Callable[[Connection], Awaitable[object]]
"""What a server calls with each connection."""

Place = Callable[[Callable[[Domain], Awaitable[None]]], Awaitable[object]]
"""What has a connection made and handled somewhere: it is given a function, which it calls and awaits once, with a
domain of the loop that it calls it on."""


class _Accepting(anyio.abc.AsyncResource):
    """Who has an acceptor, and is open as long as that listens."""

    def __init__(self, where: tuple[str | None, int, int, Transport, Domain | None], acceptor: Acceptor) -> None:
        self._where = where
        self._acceptor = acceptor

    async def open(self) -> Self:
        """Begin to listen.

        :raises OSError: the address is in use, or not this machine's.
        """
        await self._acceptor.open(*self._where)
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    @property
    def addresses(self) -> list[Address]:
        """Where it listens."""
        return self._acceptor.addresses

    @property
    def port(self) -> int:
        """The port of all of them."""
        return self.addresses[0][1]

    def statistics(self) -> AcceptorStatistics:
        """Whom it has seen."""
        return self._acceptor.statistics()


class ConnectionListener(_Accepting):
    """Where peers ask for connections. Made by `listen`.

    ``async for`` gives a `Connection` for each that got through its handshake; they are the caller's to close, and stay
    when the listener is closed, which ends the loop. Those that nobody took by then are aborted.
    """

    def __init__(
        self, host: str | None, port: int, domain: Domain, transport: Transport, terms: Terms, backlog: int
    ) -> None:
        super().__init__((host, port, backlog, transport, domain), Acceptor(terms, self._arrived))
        self._domain = domain
        self._ready: deque[Connection] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._open = False

    async def open(self) -> Self:
        """Listen.

        :raises OSError: the address is in use, or not this machine's.
        """
        await super().open()
        self._open = True
        return self

    async def _arrived(self, arrival: Arrival) -> None:
        connection = await arrival(self._domain)
        if connection is None:
            return
        connection._life.quiet = True  # nobody's fault that it is open, before somebody took it
        self._ready.append(connection)
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def accept(self) -> Connection:
        """The next connection.

        :raises ClosedResourceError: the listener is closed.
        """
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
        connection._life.quiet = False
        if self._ready:
            self._wake()
        return connection

    async def __aiter__(self) -> AsyncIterator[Connection]:
        while True:
            try:
                connection = await self.accept()
            except ClosedResourceError:
                return
            yield connection

    async def aclose(self) -> None:
        """Listen no more."""
        self._open = False
        await to_the_end(self._close())

    async def _close(self) -> None:
        await self._acceptor.stop()
        await self._acceptor.cancel()
        while self._waiters:
            self._wake()
        while self._ready:
            await self._ready.popleft().abort()


def listen(
    host: str | None = None,
    port: int = 0,
    *,
    domain: Domain,
    transport: Transport = "auto",
    ssl: tls.SSLContext | None = None,
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
    :param ssl: for TLS on the TCP connections: see `connect`.
    :param secret: what peers are to know.
    :param settings: sizes and times; None: those of `ConnectionSettings()`.
    :param handshake_timeout_s: the longest that a peer may take to get through, in seconds.
    :param max_handshakes: peers that may be on their way at once; who comes then is refused.
    :param max_connections: connections that may be open at once; likewise. None: any number.
    :param backlog: peers that the kernel keeps until they are accepted.
    """
    check_transport(transport, ssl)
    terms = _terms(ssl, secret, settings, handshake_timeout_s, max_handshakes, max_connections)
    return ConnectionListener(host, port, domain, transport, terms, backlog)


def _terms(
    ssl: tls.SSLContext | None,
    secret: bytes | None,
    settings: ConnectionSettings | None,
    handshake_timeout_s: float,
    max_handshakes: int,
    max_connections: int | None,
) -> Terms:
    chosen = settings if settings is not None else ConnectionSettings()
    return Terms(ssl, secret, chosen, handshake_timeout_s, max_handshakes, max_connections)


class Server(_Accepting):
    """Has a handler called with each connection. Made by `serve`.

    The handler runs in a task of its own. When it returns its connection is closed, with everything delivered; when it
    raises the connection is aborted and the error logged, but for those by which a peer's end is told.
    """

    def __init__(
        self,
        handler: Handler,
        host: str | None,
        port: int,
        domain: Domain | None,
        place: Place | None,
        transport: Transport,
        terms: Terms,
        backlog: int,
        drain_timeout_s: float,
    ) -> None:
        if (domain is None) == (place is None):
            raise ValueError("a server has its connections on a domain, or where `place` puts them: give one of these")
        if place is not None and transport == "rdmacm":
            raise ValueError("what rdma_cm accepts stays with its loop: give a domain, or have it by TCP")
        super().__init__((host, port, backlog, transport, domain), Acceptor(terms, self._arrived))
        self._handler = handler
        self._domain = domain
        self._place = place
        self._drain_timeout_s = drain_timeout_s
        self._closed = asyncio.Event()
        self._stopping: asyncio.Future[None] | None = None

    async def _arrived(self, arrival: Arrival) -> None:
        async def here(domain: Domain) -> None:
            connection = await arrival(domain)
            if connection is not None:
                await self._handle(connection)

        try:
            if self._place is not None:
                await self._place(here)
            else:
                assert self._domain is not None
                await here(self._domain)
        except Exception:
            logger.exception("a connection could not be placed")

    async def _handle(self, connection: Connection) -> None:
        try:
            await self._handler(connection)
        except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
            logger.debug("%r ended: %s", connection, error)
        except Exception:
            logger.exception("the handler of %r failed", connection)
        except BaseException:
            await to_the_end(connection.abort())
            raise
        else:
            with contextlib.suppress(BrokenResourceError):
                await connection.aclose()
            return
        await connection.abort()

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Accept nobody any more, let the handlers end, then cancel those that have not.

        :param drain_timeout_s: how long the handlers have, in seconds; None: as `serve` was told.
        """
        wait_s = self._drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(wait_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, wait_s: float) -> None:
        try:
            await self._acceptor.stop()
            if not await self._acceptor.wait(wait_s):
                await self._acceptor.cancel()
        finally:
            self._closed.set()

    async def wait_closed(self) -> None:
        """Until it is stopped and all handlers have ended."""
        await self._closed.wait()

    async def aclose(self) -> None:
        """`stop`; where this is cancelled, the handlers are cancelled at once."""
        try:
            await self.stop()
        except asyncio.CancelledError:
            await to_the_end(self._cut_short())
            raise

    async def _cut_short(self) -> None:
        await self._acceptor.stop()
        await self._acceptor.cancel()
        await self.stop()


def serve(
    handler: Handler,
    host: str | None = None,
    port: int = 0,
    *,
    domain: Domain | None = None,
    place: Place | None = None,
    transport: Transport = "auto",
    ssl: tls.SSLContext | None = None,
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
    :param place: where the connections are made and handled, instead of on `domain`: see `Place`.
    :param drain_timeout_s: how long handlers have to end when the server is stopped, in seconds.
    """
    check_transport(transport, ssl)
    terms = _terms(ssl, secret, settings, handshake_timeout_s, max_handshakes, max_connections)
    return Server(handler, host, port, domain, place, transport, terms, backlog, drain_timeout_s)
