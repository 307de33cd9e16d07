"""Where peers knock: listening sockets, and limits on those who do not get through."""

import asyncio
import contextlib
import enum
import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import anyio

from aioverbs._connection.cm_control import CmControlChannel, SharedChannel
from aioverbs._connection.connect import Transport, by_manager
from aioverbs._connection.connection import ControlChannel
from aioverbs._connection.handshake import Reason, Reject
from aioverbs._connection.tcp_control import TcpControlChannel, adopt
from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import Affinity, running_loop, wait_socket_ready, wait_uncancelled
from aioverbs._lifecycle.resource import open_part
from aioverbs._server.accept import AcceptSettings
from aioverbs._verbs.base_domain import Domain
from aioverbs.addresses import Address, format_address
from aioverbs.errors import BrokenResourceError, LibraryNotFoundError
from aioverbs.rdma_cm import Listener as CmListener

__all__ = ["Acceptor", "PendingPeer", "ServerStatistics"]

logger = logging.getLogger("aioverbs")

_WHILE_S = 0.1  # after which accepting is tried again
_PATIENCE_S = 0.5  # that each peer has for its handshake, however many others wait
_LEAVING_S = 2.0  # that one who gives way may take, as on a worker that is busy, before another one does


@dataclass(frozen=True)
class ServerStatistics:
    """Whom a listener or a server has seen.

    :param handshakes: peers that are on their way.
    :param connections: those that are open, or wait to be taken.
    :param accepted: those that ever got through.
    :param refused: those that did not, by what stopped them, as ``"SECRET"``, ``"TimeoutError"``.
    :param workers: the connections that are open on each worker, by its number, where a pool has them.
    """

    handshakes: int
    connections: int
    accepted: int
    refused: tuple[tuple[str, int], ...]
    workers: tuple[int, ...] = ()


class AcceptState(enum.Enum):
    """How far a peer has come."""

    HANDSHAKING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class PendingPeer:
    """A peer that was accepted, as the acceptor counts it, on its loop.

    :param way: how it came: by rdma_cm, or by a socket, which may be taken out of its object and to another loop.
    :param address: where from.
    :param moved: called when it has come to another stage, with that it had before, and what stopped it.
    """

    def __init__(
        self,
        way: CmControlChannel | socket.socket,
        address: Address | None,
        moved: Callable[["PendingPeer", AcceptState, str], object],
    ) -> None:
        self.way: CmControlChannel | socket.socket | None = way
        self.address = address
        self.stage = AcceptState.HANDSHAKING
        self.worker: int | None = None
        """That it was given to, of a pool's."""
        self.until: asyncio.Timeout | None = None  # it has to be through
        self.gives_way = False
        self._loop = running_loop()
        self.since = 0.0  # by the loop's clock: when it was given the time to get through
        self._line: TcpControlChannel | None = None
        self._moved = moved

    @property
    def peer(self) -> str:
        """Who it is, for people."""
        return format_address(self.address)

    async def line(self, terms: AcceptSettings) -> ControlChannel:
        """What is said to it goes by this, on the loop that accepted it. For once."""
        way, self.way = self.way, None
        assert way is not None
        if isinstance(way, CmControlChannel):
            return way
        self._line = await adopt(way, terms.context, terms.handshake_timeout_s)
        return self._line

    @property
    def has_spoken(self) -> bool:
        """Whether it is known to have said something."""
        return self._line is not None and self._line.has_heard

    def give_way(self) -> None:
        """Its time is over: another one waits for its place."""
        self.gives_way = True
        if self.until is not None and not self.until.expired():
            self.until.reschedule(self._loop.time())

    def tell(self, is_open: bool) -> None:
        """It has become a connection, or that is closed. From any loop; the first time of each counts."""
        if asyncio._get_running_loop() is self._loop:
            self._reach(is_open)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody counts
                self._loop.call_soon_threadsafe(self._reach, is_open)

    def _reach(self, is_open: bool) -> None:
        if self.stage is (AcceptState.HANDSHAKING if is_open else AcceptState.OPEN):
            if is_open and self.until is not None and not self.until.expired():
                self.until.reschedule(None)
            self._move(AcceptState.OPEN if is_open else AcceptState.CLOSED, "")

    def refuse(self, why: str) -> None:
        """It does not become a connection, where it has not."""
        if self.stage is AcceptState.HANDSHAKING:
            self._move(AcceptState.CLOSED, why)

    def _move(self, stage: AcceptState, why: str) -> None:
        before, self.stage = self.stage, stage
        self._moved(self, before, why)


class Acceptor:
    """Accepts peers at TCP ports, and hands each to `arrived` unless there are too many.

    :param arrived: called with each, on the loop that this is opened by, and awaited in a task, which is cancelled
        where the peer does not get through in time; returns what stopped it, if anything did.
    """

    def __init__(self, terms: AcceptSettings, arrived: Callable[[PendingPeer], Coroutine[Any, Any, str]]) -> None:
        self._terms = terms
        self._arrived = arrived
        self._sockets: list[socket.socket] = []
        self._bound: list[Address] = []  # their addresses, which the child of a fork cannot ask them for
        self._tasks: dict[asyncio.Task[None], PendingPeer] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._acceptors: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: Affinity | None = None  # whoever opened it
        self._manager: tuple[SharedChannel, CmListener] | None = None
        self._left = asyncio.Event()  # a handshake or a connection ended
        self._handshakes = self._connections = self._accepted = 0
        self._refused: Counter[str] = Counter()

    async def open(
        self, host: str | None, port: int, backlog: int, transport: Transport, domain: Domain | None
    ) -> None:
        """Listen.

        :param domain: whose connections they become, where that is known: for rdma_cm.
        :raises OSError: the address is in use, or not this machine's.
        """
        self._loop, self._owner = running_loop(), Affinity.of_running_loop()
        try:
            if transport != "rdmacm":
                await self._open_tcp(host, port, backlog)
            if domain is not None and by_manager(transport, domain, self._terms.context):
                await self._open_manager(host, self.addresses[0][1] if self._sockets else port, backlog, transport)
        except BaseException:
            await self.stop()
            raise

    async def _open_manager(self, host: str | None, port: int, backlog: int, transport: Transport) -> None:
        assert self._loop is not None
        channel = SharedChannel()
        try:
            await channel.open()
            listener = await open_part(channel.channel.listener(host, port, backlog=backlog))
        except BaseException as error:
            await channel.leave()
            if transport == "rdmacm" or not isinstance(error, OSError | LibraryNotFoundError):  # of these VerbsError
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
            if port == 0 and self._bound:  # the others are to have the same
                address = (address[0], self._bound[0][1], *address[2:])
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
        forks.keep_from_children(sock)  # or peers could connect to one when this process has ended
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(backlog)
        self._bound.append(sock.getsockname())

    @property
    def addresses(self) -> list[Address]:
        """Where it listens."""
        found = list(self._bound)
        if not found and self._manager is not None:
            found.append(self._manager[1].address)
        return found

    def statistics(self, workers: int = 0) -> ServerStatistics:
        """Whom it has seen.

        :param workers: how many there are that they are given to.
        """
        refused = tuple(sorted(self._refused.items()))
        where = Counter(arrival.worker for arrival in self._tasks.values() if arrival.stage is AcceptState.OPEN)
        each = tuple(where[worker] for worker in range(workers))
        return ServerStatistics(self._handshakes, self._connections, self._accepted, refused, each)

    async def _accept(self, listening: socket.socket) -> None:
        assert self._loop is not None
        while True:
            try:
                sock, address = await self._next(listening)
            except OSError as error:
                if error.errno != errno.ECONNABORTED:  # one that gave up before it was accepted
                    # As while this process, or the machine, has no more descriptors.
                    logger.warning("no peers are accepted for now: %s", error)
                    await asyncio.sleep(_WHILE_S)
                continue
            try:
                has_place = await self._wait_for_place()
            except BaseException:
                sock.close()
                raise
            self._knocked(sock, address, has_place)

    async def _next(self, listening: socket.socket) -> tuple[socket.socket, Address]:
        assert self._owner is not None
        while not self._owner.inherited:
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                await wait_socket_ready(listening)
            else:
                forks.keep_from_children(sock)
                return sock, address
        # This is a child's copy of the loop, and who knocks is the parent's: until that loop ends, and cancels this.
        never: asyncio.Future[tuple[socket.socket, Address]] = running_loop().create_future()
        return await never

    async def _accept_by_manager(self, channel: SharedChannel, listener: CmListener) -> None:
        try:
            async for identifier in listener:
                try:
                    has_place = await self._wait_for_place()
                except BaseException:
                    await wait_uncancelled(identifier.aclose())
                    raise
                if not has_place:
                    await identifier.aclose()
                    continue
                channel.use()
                self._take(CmControlChannel(identifier, channel), identifier.peer_address)
        except BrokenResourceError as error:
            logger.warning("peers are not heard by rdma_cm any more: %s", error)

    def _knocked(self, sock: socket.socket, address: Address, has_place: bool) -> None:
        sock.setblocking(False)
        if has_place:
            self._take(sock, address)
        else:
            self._refuse(sock)

    # To connect and say nothing costs a peer next to nothing, so there may be very many who do. One peer of each
    # listening socket waits here for a place, the others in its backlog. Where no handshake ends meanwhile, the oldest
    # one gives way that has had _PATIENCE_S; one that has said nothing, for all that is known, before one that has. So
    # those who are silent hold honest ones up for _PATIENCE_S for each `max_handshakes` of them that came before, and
    # keep none out.

    async def _wait_for_place(self) -> bool:
        """Until a handshake may begin; whether it may, or there are as many connections as there may be."""
        while True:
            most = self._terms.max_connections
            if most is not None and self._connections >= most:
                self._refused["BUSY"] += 1
                return False
            if self._handshakes < self._terms.max_handshakes and (
                most is None or self._handshakes + self._connections < most
            ):
                return True
            self._left.clear()
            with anyio.move_on_after(self._make_way()):
                await self._left.wait()

    def _make_way(self) -> float:
        """Have the first one give way who may, and is not about to; how long to wait before another one may."""
        waiting = [
            each
            for each in self._tasks.values()
            if each.stage is AcceptState.HANDSHAKING and each.until is not None and not each.gives_way
        ]
        latest = running_loop().time() - _PATIENCE_S
        ripe = [each for each in waiting if each.since <= latest]
        if ripe:
            min(ripe, key=lambda each: (each.has_spoken, each.since)).give_way()
            return _LEAVING_S
        return min((each.since - latest for each in waiting), default=_PATIENCE_S)

    def _take(self, way: CmControlChannel | socket.socket, address: Address | None) -> None:
        assert self._loop is not None
        self._handshakes += 1
        arrival = PendingPeer(way, address, self._moved)
        task = self._loop.create_task(self._attend(arrival))
        self._tasks[task] = arrival
        task.add_done_callback(self._done)

    async def _attend(self, arrival: PendingPeer) -> None:
        why = "cancelled"
        try:
            arrival.since = running_loop().time()
            async with asyncio.timeout(self._terms.handshake_timeout_s) as arrival.until:
                why = await self._arrived(arrival)
        except TimeoutError:
            why = "TimeoutError"
        finally:
            arrival.refuse(why)

    def _done(self, task: asyncio.Task[None]) -> None:
        arrival = self._tasks.pop(task)
        arrival.refuse("cancelled")  # before it began

    def turn_away(self, arrival: PendingPeer) -> None:
        """Tell a peer that there is no room for it after all."""
        if isinstance(arrival.way, socket.socket):
            self._refuse(arrival.way)
        arrival.refuse("BUSY")

    def _refuse(self, sock: socket.socket) -> None:
        # Of those that would get TLS, or do not take it at once, nothing is waited for.
        with sock, contextlib.suppress(OSError):
            if self._terms.ssl is None:
                sock.send(Reject(Reason.BUSY).pack())
                sock.shutdown(socket.SHUT_WR)
                sock.recv(4096)  # what is unread when it is closed would be answered by a reset

    # ---- What became of those that arrived

    def _moved(self, arrival: PendingPeer, before: AcceptState, why: str) -> None:
        self._left.set()
        if before is AcceptState.OPEN:
            self._connections -= 1
            return
        self._handshakes -= 1
        if arrival.stage is AcceptState.OPEN:
            self._accepted += 1
            self._connections += 1
            return
        self._refused[why] += 1
        if isinstance(arrival.way, CmControlChannel):  # nobody has taken it
            assert self._loop is not None
            task = self._loop.create_task(arrival.way.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        elif arrival.way is not None:
            arrival.way.close()

    # ---- Its end

    async def stop(self) -> None:
        """Accept nobody any more; those that are on their way go on, unless their loop is gone."""
        acceptors, self._acceptors = self._acceptors, []
        manager, self._manager = self._manager, None
        try:
            if self._is_deserted():
                self._desert()
            else:
                for task in acceptors:
                    task.cancel()
                if acceptors:
                    await asyncio.wait(acceptors)
        finally:  # also where this is cancelled: who looked at the sockets was before, and has let go of them
            self._close_sockets()
            if manager is not None:
                channel, listener = manager
                try:
                    await listener.aclose()
                finally:
                    await channel.leave()

    def destroy(self) -> None:
        """What its connections are made on is being closed: where its loop is gone, too, its ports are closed.

        Else that loop closes them. It is named as what a `Lifecycle` does to its handles. From any thread.
        """
        if self._is_deserted():
            self._desert()

    def _is_deserted(self) -> bool:
        return self._owner is not None and self._owner.orphaned

    def _desert(self) -> None:
        # Its tasks do not go on, and those of a closed loop cannot be cancelled. What they have of connections is what
        # these are made on to close.
        self._close_sockets()
        arrivals = list(self._tasks.values())
        self._tasks.clear()
        self._closing.clear()
        for arrival in arrivals:
            if isinstance(arrival.way, socket.socket):  # nobody has taken it
                arrival.way.close()

    def _close_sockets(self) -> None:
        sockets, self._sockets = self._sockets, []
        self._bound.clear()
        for sock in sockets:
            sock.close()

    async def wait(self, timeout_s: float | None) -> bool:
        """Until all tasks are done, but no longer than that; whether they are."""
        if waiting := {*self._tasks, *self._closing}:
            await asyncio.wait(waiting, timeout=timeout_s)
        return not self._tasks and not self._closing

    async def cancel(self, timeout_s: float | None = None) -> bool:
        """End the tasks; whether they have ended, within that time."""
        for task in self._tasks:
            task.cancel()
        return await self.wait(timeout_s)


publish(__name__)
