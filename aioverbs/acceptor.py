"""Where peers knock: listening sockets, and limits on those who do not get through."""

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import ssl as tls
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from aioverbs.affinity import running_loop
from aioverbs.cm_line import CmLine, SharedChannel
from aioverbs.connection import Connection, Line, Transport, answer, by_manager
from aioverbs.connection_settings import ConnectionSettings
from aioverbs.domain import Domain
from aioverbs.errors import BrokenResourceError, HandshakeError, LibraryNotFoundError, WorkCompletionError
from aioverbs.handshake import Reason, Refusal
from aioverbs.identifier import Address, written
from aioverbs.lifeline import adopt
from aioverbs.rdma_cm import Listener as CmListener

__all__ = ["Acceptor", "AcceptorStatistics", "Arrival", "Terms"]

logger = logging.getLogger("aioverbs")

_WHILE_S = 0.1  # after which accepting is tried again


@dataclass(frozen=True)
class Terms:
    """On which terms peers are taken in.

    :param ssl: for TLS on the TCP connections, with a certificate.
    :param secret: what peers are to know.
    :param settings: of the connections.
    :param handshake_timeout_s: the longest that a peer may take to get through.
    :param max_handshakes: peers that may be on their way at once; who comes then is refused.
    :param max_connections: open connections, at most; likewise.
    """

    ssl: tls.SSLContext | None
    secret: bytes | None
    settings: ConnectionSettings
    handshake_timeout_s: float
    max_handshakes: int
    max_connections: int | None

    def __post_init__(self) -> None:
        if self.secret is not None and not self.secret:
            raise ValueError("a secret has one byte at least; None is for no secret")
        if not self.handshake_timeout_s > 0:
            raise ValueError(f"handshake_timeout_s is above 0, not {self.handshake_timeout_s}")
        for name in ("max_handshakes", "max_connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is 1 or more, not {value}")


@dataclass(frozen=True)
class AcceptorStatistics:
    """Whom a listener or a server has seen.

    :param handshakes: peers that are on their way.
    :param connections: those that are open, or wait to be taken.
    :param accepted: those that ever got through.
    :param refused: those that did not, by what stopped them, as ``"SECRET"``, ``"TimeoutError"``.
    """

    handshakes: int
    connections: int
    accepted: int
    refused: tuple[tuple[str, int], ...]


class Arrival:
    """A peer that was accepted, and is nobody's connection yet.

    Called with a domain, on the loop of that domain, it becomes one there; so one that came by TCP can be carried to
    another loop before. It is called once, or `drop` is.

    :param peer: who it is, for people.
    :param line: makes the line to the peer, once.
    :param give_up: called instead, where nobody wants it.
    :param through: called when the handshake is over, with the connection, or None, by the loop that it went to.
    """

    def __init__(
        self,
        peer: str,
        terms: Terms,
        line: Callable[[], Coroutine[Any, Any, Line]],
        give_up: Callable[[], object],
        through: Callable[["Connection | None", str | None], object],
    ) -> None:
        self.taken = False
        self._peer = peer
        self._terms = terms
        self._line = line
        self._give_up = give_up
        self._through = through

    async def __call__(self, domain: Domain) -> Connection | None:
        """The connection; None where it did not come about, which was logged."""
        self.taken = True
        terms = self._terms
        why: str | None = None
        connection: Connection | None = None
        peer = self._peer
        try:
            async with asyncio.timeout(terms.handshake_timeout_s):
                connection = await answer(await self._line(), domain, terms.secret, terms.settings)
        except HandshakeError as error:
            why = _reason(error)
            logger.info("%s did not become a connection: %s", peer, error)
        except (OSError, BrokenResourceError, MemoryError, WorkCompletionError) as error:
            # Of OSError are TimeoutError, SSLError and VerbsError.
            why = type(error).__name__
            logger.info("%s did not become a connection: %s", peer, str(error) or why)
        finally:
            self._through(connection, why if why is not None or connection is not None else "cancelled")
        return connection

    def drop(self) -> None:
        """Nobody takes it."""
        self.taken = True
        self._give_up()
        self._through(None, "dropped")


def _reason(error: HandshakeError) -> str:
    try:
        return Reason(error.reason).name
    except ValueError:
        return str(error.reason)


def _by_identifier(line: CmLine) -> tuple[Callable[[], Coroutine[Any, Any, Line]], Callable[[], object]]:
    async def take() -> Line:
        return line

    def give_up() -> None:
        closing.append(running_loop().create_task(line.aclose()))

    closing: list[asyncio.Task[None]] = []  # a loop keeps weak references only
    return take, give_up


def _peer(sock: socket.socket) -> str:
    try:
        return written(sock.getpeername())
    except OSError:
        return "a peer that is gone"


class Acceptor:
    """Accepts peers at TCP ports, and hands each to `arrived` unless there are too many.

    :param arrived: called with each, on the loop that this is opened by; what it returns is awaited in a task.
    """

    def __init__(self, terms: Terms, arrived: Callable[[Arrival], Coroutine[Any, Any, None]]) -> None:
        self._terms = terms
        self._arrived = arrived
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._acceptors: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._manager: tuple[SharedChannel, CmListener] | None = None
        self._handshakes = self._connections = self._accepted = 0
        self._refused: Counter[str] = Counter()

    async def open(
        self, host: str | None, port: int, backlog: int, transport: Transport, domain: Domain | None
    ) -> None:
        """Listen.

        :param domain: whose connections they become, where that is known: for rdma_cm.
        :raises OSError: the address is in use, or not this machine's.
        """
        self._loop = running_loop()
        try:
            if transport != "rdmacm":
                await self._open_tcp(host, port, backlog)
            if domain is not None and by_manager(transport, domain, self._terms.ssl):
                await self._open_manager(host, self.addresses[0][1] if self._sockets else port, backlog, transport)
        except BaseException:
            await self.stop()
            raise

    async def _open_manager(self, host: str | None, port: int, backlog: int, transport: Transport) -> None:
        assert self._loop is not None
        channel = SharedChannel()
        try:
            await channel.open()
            listener = channel.channel.listener(host, port, backlog=backlog)
            listener._life.quiet = True
            await listener.open()
        except (OSError, LibraryNotFoundError) as error:  # of these VerbsError
            await channel.leave()
            if transport == "rdmacm":
                raise
            logger.debug("peers are not heard by rdma_cm: %s", error)
            return
        self._manager = channel, listener
        self._acceptors.append(self._loop.create_task(self._accept_by_manager(channel, listener)))

    async def _open_tcp(self, host: str | None, port: int, backlog: int) -> None:
        assert self._loop is not None
        found = await self._loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, family=socket.AF_UNSPEC
        )
        for family, _, _, _, address in dict.fromkeys(found):
            if port == 0 and self._sockets:  # the others are to have the same
                address = (address[0], self._sockets[0].getsockname()[1], *address[2:])
            self._listen(family, address, backlog)
        for sock in self._sockets:
            self._acceptors.append(self._loop.create_task(self._accept(sock)))

    def _listen(self, family: int, address: tuple[object, ...], backlog: int) -> None:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:  # as where IPv6 is switched off
                return
            raise
        self._sockets.append(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(backlog)

    @property
    def addresses(self) -> list[Address]:
        """Where it listens."""
        found: list[Address] = [sock.getsockname() for sock in self._sockets]
        if not found and self._manager is not None:
            found.append(self._manager[1].address)
        return found

    def statistics(self) -> AcceptorStatistics:
        """Whom it has seen."""
        refused = tuple(sorted(self._refused.items()))
        return AcceptorStatistics(self._handshakes, self._connections, self._accepted, refused)

    async def _accept(self, listening: socket.socket) -> None:
        assert self._loop is not None
        while True:
            try:
                sock, _ = await self._loop.sock_accept(listening)
            except OSError as error:
                if error.errno != errno.ECONNABORTED:  # one that gave up before it was accepted
                    # As while this process, or the machine, has no more descriptors.
                    logger.warning("no peers are accepted for now: %s", error)
                    await asyncio.sleep(_WHILE_S)
                continue
            self._knocked(sock)

    async def _accept_by_manager(self, channel: SharedChannel, listener: CmListener) -> None:
        try:
            async for identifier in listener:
                if self._busy():
                    await identifier.aclose()
                    continue
                channel.use()
                self._take(written(identifier.peer_address), *_by_identifier(CmLine(identifier, channel)))
        except BrokenResourceError as error:
            logger.warning("peers are not heard by rdma_cm any more: %s", error)

    def _knocked(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if self._busy():
            self._refuse(sock)
            return
        limit_s = self._terms.handshake_timeout_s
        self._take(_peer(sock), functools.partial(adopt, sock, self._terms.ssl, limit_s), sock.close)

    def _busy(self) -> bool:
        most = self._terms.max_connections
        if self._handshakes < self._terms.max_handshakes and (
            most is None or self._handshakes + self._connections < most
        ):
            return False
        self._refused["BUSY"] += 1
        return True

    def _take(self, peer: str, line: Callable[[], Coroutine[Any, Any, Line]], give_up: Callable[[], object]) -> None:
        assert self._loop is not None
        self._handshakes += 1
        arrival = Arrival(peer, self._terms, line, give_up, self._through)
        task = self._loop.create_task(self._arrived(arrival))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._done, arrival))

    def _done(self, arrival: Arrival, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not arrival.taken:  # it was cancelled before it began, or nobody wanted it
            arrival.drop()

    def _refuse(self, sock: socket.socket) -> None:
        # Of those that would get TLS, or do not take it at once, nothing is waited for.
        with sock, contextlib.suppress(OSError):
            if self._terms.ssl is None:
                sock.send(Refusal(Reason.BUSY).pack())
                sock.shutdown(socket.SHUT_WR)
                sock.recv(4096)  # what is unread when it is closed would be answered by a reset

    # ---- What became of those that arrived

    def _through(self, connection: Connection | None, why: str | None) -> None:
        # On whatever loop it went to.
        assert self._loop is not None
        if asyncio._get_running_loop() is self._loop:
            self._count(connection, why)
        else:
            self._loop.call_soon_threadsafe(self._count, connection, why)

    def _count(self, connection: Connection | None, why: str | None) -> None:
        self._handshakes -= 1
        if connection is None or connection._end is None:
            self._refused[why or "?"] += 1
            return
        self._accepted += 1
        self._connections += 1
        connection._end.when_closed = self._gone
        if connection.closed:  # meanwhile, on another loop
            self._count_gone()

    def _gone(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody counts
            self._loop.call_soon_threadsafe(self._count_gone)

    def _count_gone(self) -> None:
        self._connections -= 1

    # ---- Its end

    async def stop(self) -> None:
        """Accept nobody any more; those that are on their way go on."""
        acceptors, self._acceptors = self._acceptors, []
        for task in acceptors:
            task.cancel()
        if acceptors:
            await asyncio.wait(acceptors)
        for sock in self._sockets:
            sock.close()
        manager, self._manager = self._manager, None
        if manager is not None:
            channel, listener = manager
            await listener.aclose()
            await channel.leave()

    async def wait(self, timeout_s: float | None) -> bool:
        """Until all tasks are done, but no longer than that; whether they are."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks

    async def cancel(self) -> None:
        """End the tasks."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
