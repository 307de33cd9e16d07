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
from aioverbs._connection.connect import Transport, uses_rdma_cm
from aioverbs._connection.connection import ControlChannel
from aioverbs._connection.handshake import Reason, Reject
from aioverbs._connection.tcp_control import TcpControlChannel, accept_tcp
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

_ACCEPT_RETRY_S = 0.1  # after which accepting is tried again
_MIN_HANDSHAKE_S = 0.5  # that each peer has for its handshake, however many others wait
_EXPIRY_GRACE_S = 2.0  # that one who gives way may take, as on a worker that is busy, before another one does


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
        endpoint: CmControlChannel | socket.socket,
        address: Address | None,
        on_state_change: Callable[["PendingPeer", AcceptState, str], object],
    ) -> None:
        self.endpoint: CmControlChannel | socket.socket | None = endpoint
        self.address = address
        self.state = AcceptState.HANDSHAKING
        self.worker: int | None = None
        """That it was given to, of a pool's."""
        self.timeout: asyncio.Timeout | None = None  # it has to be through
        self.is_expiring = False
        self._loop = running_loop()
        self.started_at = 0.0  # by the loop's clock: when it was given the time to get through
        self._control: TcpControlChannel | None = None
        self._on_state_change = on_state_change

    @property
    def peer(self) -> str:
        """Who it is, for people."""
        return format_address(self.address)

    async def open_control(self, accept_settings: AcceptSettings) -> ControlChannel:
        """What is said to it goes by this, on the loop that accepted it. For once."""
        endpoint, self.endpoint = self.endpoint, None
        assert endpoint is not None
        if isinstance(endpoint, CmControlChannel):
            return endpoint
        self._control = await accept_tcp(endpoint, accept_settings.context, accept_settings.handshake_timeout_s)
        return self._control

    @property
    def has_received(self) -> bool:
        """Whether it is known to have said something."""
        return self._control is not None and self._control.has_received

    def expire(self) -> None:
        """Its time is over: another one waits for its place."""
        self.is_expiring = True
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(self._loop.time())

    def report_open(self, is_open: bool) -> None:
        """It has become a connection, or that is closed. From any loop; the first time of each counts."""
        if asyncio._get_running_loop() is self._loop:
            self._set_open(is_open)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody counts
                self._loop.call_soon_threadsafe(self._set_open, is_open)

    def _set_open(self, is_open: bool) -> None:
        if self.state is (AcceptState.HANDSHAKING if is_open else AcceptState.OPEN):
            if is_open and self.timeout is not None and not self.timeout.expired():
                self.timeout.reschedule(None)
            self._set_state(AcceptState.OPEN if is_open else AcceptState.CLOSED, "")

    def refuse(self, reason: str) -> None:
        """It does not become a connection, where it has not."""
        if self.state is AcceptState.HANDSHAKING:
            self._set_state(AcceptState.CLOSED, reason)

    def _set_state(self, state: AcceptState, reason: str) -> None:
        previous, self.state = self.state, state
        self._on_state_change(self, previous, reason)


class Acceptor:
    """Accepts peers at TCP ports, and hands each to `arrived` unless there are too many.

    :param arrived: called with each, on the loop that this is opened by, and awaited in a task, which is cancelled
        where the peer does not get through in time; returns what stopped it, if anything did.
    """

    def __init__(
        self, accept_settings: AcceptSettings, on_peer: Callable[[PendingPeer], Coroutine[Any, Any, str]]
    ) -> None:
        self._accept_settings = accept_settings
        self._on_peer = on_peer
        self._sockets: list[socket.socket] = []
        self._bound: list[Address] = []  # their addresses, which the child of a fork cannot ask them for
        self._tasks: dict[asyncio.Task[None], PendingPeer] = {}
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._accept_tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: Affinity | None = None  # whoever opened it
        self._cm: tuple[SharedChannel, CmListener] | None = None
        self._slot_freed = asyncio.Event()  # a handshake or a connection ended
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
            if domain is not None and uses_rdma_cm(transport, domain, self._accept_settings.context):
                await self._open_rdma_cm(host, self.addresses[0][1] if self._sockets else port, backlog, transport)
        except BaseException:
            await self.stop()
            raise

    async def _open_rdma_cm(self, host: str | None, port: int, backlog: int, transport: Transport) -> None:
        assert self._loop is not None
        channel = SharedChannel()
        try:
            await channel.open()
            listener = await open_part(channel.channel.listener(host, port, backlog=backlog))
        except BaseException as error:
            await channel.release()
            if transport == "rdmacm" or not isinstance(error, OSError | LibraryNotFoundError):  # of these VerbsError
                raise
            logger.debug("peers are not heard by rdma_cm: %s", error)
            return
        self._cm = channel, listener
        self._accept_tasks.append(self._loop.create_task(self._accept_rdma_cm(channel, listener)))

    async def _open_tcp(self, host: str | None, port: int, backlog: int) -> None:
        assert self._loop is not None
        addresses = await self._loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, family=socket.AF_UNSPEC
        )
        for family, _, _, _, address in dict.fromkeys(addresses):
            if port == 0 and self._bound:  # the others are to have the same
                address = (address[0], self._bound[0][1], *address[2:])
            self._listen(family, address, backlog)
        for sock in self._sockets:
            self._accept_tasks.append(self._loop.create_task(self._accept(sock)))

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
        addresses = list(self._bound)
        if not addresses and self._cm is not None:
            addresses.append(self._cm[1].address)
        return addresses

    def statistics(self, workers: int = 0) -> ServerStatistics:
        """Whom it has seen.

        :param workers: how many there are that they are given to.
        """
        refused = tuple(sorted(self._refused.items()))
        per_worker = Counter(pending.worker for pending in self._tasks.values() if pending.state is AcceptState.OPEN)
        each = tuple(per_worker[worker] for worker in range(workers))
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
                    await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            try:
                has_slot = await self._wait_for_slot()
            except BaseException:
                sock.close()
                raise
            self._start_or_refuse(sock, address, has_slot)

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

    async def _accept_rdma_cm(self, channel: SharedChannel, listener: CmListener) -> None:
        try:
            async for identifier in listener:
                try:
                    has_slot = await self._wait_for_slot()
                except BaseException:
                    await wait_uncancelled(identifier.aclose())
                    raise
                if not has_slot:
                    await identifier.aclose()
                    continue
                channel.acquire()
                self._start_handshake(CmControlChannel(identifier, channel), identifier.peer_address)
        except BrokenResourceError as error:
            logger.warning("peers are not heard by rdma_cm any more: %s", error)

    def _start_or_refuse(self, sock: socket.socket, address: Address, has_slot: bool) -> None:
        sock.setblocking(False)
        if has_slot:
            self._start_handshake(sock, address)
        else:
            self._refuse(sock)

    # To connect and say nothing costs a peer next to nothing, so there may be very many who do. One peer of each
    # listening socket waits here for a place, the others in its backlog. Where no handshake ends meanwhile, the oldest
    # one gives way that has had _PATIENCE_S; one that has said nothing, for all that is known, before one that has. So
    # those who are silent hold honest ones up for _PATIENCE_S for each `max_handshakes` of them that came before, and
    # keep none out.

    async def _wait_for_slot(self) -> bool:
        """Until a handshake may begin; whether it may, or there are as many connections as there may be."""
        while True:
            max_connections = self._accept_settings.max_connections
            if max_connections is not None and self._connections >= max_connections:
                self._refused["BUSY"] += 1
                return False
            if self._handshakes < self._accept_settings.max_handshakes and (
                max_connections is None or self._handshakes + self._connections < max_connections
            ):
                return True
            self._slot_freed.clear()
            with anyio.move_on_after(self._expire_oldest()):
                await self._slot_freed.wait()

    def _expire_oldest(self) -> float:
        """Have the first one give way who may, and is not about to; how long to wait before another one may."""
        waiting = [
            each
            for each in self._tasks.values()
            if each.state is AcceptState.HANDSHAKING and each.timeout is not None and not each.is_expiring
        ]
        threshold = running_loop().time() - _MIN_HANDSHAKE_S
        expirable = [each for each in waiting if each.started_at <= threshold]
        if expirable:
            min(expirable, key=lambda each: (each.has_received, each.started_at)).expire()
            return _EXPIRY_GRACE_S
        return min((each.started_at - threshold for each in waiting), default=_MIN_HANDSHAKE_S)

    def _start_handshake(self, endpoint: CmControlChannel | socket.socket, address: Address | None) -> None:
        assert self._loop is not None
        self._handshakes += 1
        pending = PendingPeer(endpoint, address, self._on_state_change)
        task = self._loop.create_task(self._run_handshake(pending))
        self._tasks[task] = pending
        task.add_done_callback(self._on_task_done)

    async def _run_handshake(self, pending: PendingPeer) -> None:
        reason = "cancelled"
        try:
            pending.started_at = running_loop().time()
            async with asyncio.timeout(self._accept_settings.handshake_timeout_s) as pending.timeout:
                reason = await self._on_peer(pending)
        except TimeoutError:
            reason = "TimeoutError"
        finally:
            pending.refuse(reason)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        pending = self._tasks.pop(task)
        pending.refuse("cancelled")  # before it began

    def reject_busy(self, pending: PendingPeer) -> None:
        """Tell a peer that there is no room for it after all."""
        if isinstance(pending.endpoint, socket.socket):
            self._refuse(pending.endpoint)
        pending.refuse("BUSY")

    def _refuse(self, sock: socket.socket) -> None:
        # Of those that would get TLS, or do not take it at once, nothing is waited for.
        with sock, contextlib.suppress(OSError):
            if self._accept_settings.ssl is None:
                sock.send(Reject(Reason.BUSY).pack())
                sock.shutdown(socket.SHUT_WR)
                sock.recv(4096)  # what is unread when it is closed would be answered by a reset

    # ---- What became of those that arrived

    def _on_state_change(self, pending: PendingPeer, previous: AcceptState, reason: str) -> None:
        self._slot_freed.set()
        if previous is AcceptState.OPEN:
            self._connections -= 1
            return
        self._handshakes -= 1
        if pending.state is AcceptState.OPEN:
            self._accepted += 1
            self._connections += 1
            return
        self._refused[reason] += 1
        if isinstance(pending.endpoint, CmControlChannel):  # nobody has taken it
            assert self._loop is not None
            task = self._loop.create_task(pending.endpoint.aclose())
            self._closing_tasks.add(task)
            task.add_done_callback(self._closing_tasks.discard)
        elif pending.endpoint is not None:
            pending.endpoint.close()

    # ---- Its end

    async def stop(self) -> None:
        """Accept nobody any more; those that are on their way go on, unless their loop is gone."""
        accept_tasks, self._accept_tasks = self._accept_tasks, []
        cm, self._cm = self._cm, None
        try:
            if self._is_orphaned():
                self._abandon()
            else:
                for task in accept_tasks:
                    task.cancel()
                if accept_tasks:
                    await asyncio.wait(accept_tasks)
        finally:  # also where this is cancelled: who looked at the sockets was before, and has let go of them
            self._close_sockets()
            if cm is not None:
                channel, listener = cm
                try:
                    await listener.aclose()
                finally:
                    await channel.release()

    def destroy(self) -> None:
        """What its connections are made on is being closed: where its loop is gone, too, its ports are closed.

        Else that loop closes them. It is named as what a `Lifecycle` does to its handles. From any thread.
        """
        if self._is_orphaned():
            self._abandon()

    def _is_orphaned(self) -> bool:
        return self._owner is not None and self._owner.orphaned

    def _abandon(self) -> None:
        # Its tasks do not go on, and those of a closed loop cannot be cancelled. What they have of connections is what
        # these are made on to close.
        self._close_sockets()
        pending_peers = list(self._tasks.values())
        self._tasks.clear()
        self._closing_tasks.clear()
        for pending in pending_peers:
            if isinstance(pending.endpoint, socket.socket):  # nobody has taken it
                pending.endpoint.close()

    def _close_sockets(self) -> None:
        sockets, self._sockets = self._sockets, []
        self._bound.clear()
        for sock in sockets:
            sock.close()

    async def wait(self, timeout_s: float | None) -> bool:
        """Until all tasks are done, but no longer than that; whether they are."""
        if waiting := {*self._tasks, *self._closing_tasks}:
            await asyncio.wait(waiting, timeout=timeout_s)
        return not self._tasks and not self._closing_tasks

    async def cancel(self, timeout_s: float | None = None) -> bool:
        """End the tasks; whether they have ended, within that time."""
        for task in self._tasks:
            task.cancel()
        return await self.wait(timeout_s)


publish(__name__)
