"""Accepting peers: listening sockets, and limits on concurrent handshakes and connections."""

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
from aioverbs.errors import BrokenResourceError, LibraryNotFoundError, VerbsError
from aioverbs.rdma_cm import Listener as CmListener

__all__ = ["Acceptor", "PendingPeer", "ServerStatistics"]

logger = logging.getLogger("aioverbs")

_ACCEPT_RETRY_S = 0.1  # delay after a failed accept
_MIN_HANDSHAKE_S = 0.5  # time that each peer gets for its handshake, however many other peers are waiting
_EXPIRY_GRACE_S = 2.0  # time that an expired handshake may take to end, as on a busy worker, before the next is expired


@dataclass(frozen=True)
class ServerStatistics:
    """Counters of a listener or server, returned by its method ``statistics``.

    :param handshakes: number of handshakes in progress.
    :param connections: number of connections that are open, including those that `ConnectionListener.accept` has not
        returned yet.
    :param accepted: number of peers that have ever completed the handshake.
    :param refused: number of peers that did not, by reason: the name of a handshake `Reason`, such as ``"SECRET"``, or
        of an exception, such as ``"TimeoutError"``.
    :param workers: number of open connections on each worker of the pool, by worker number; empty without a pool.
    """

    handshakes: int
    connections: int
    accepted: int
    refused: tuple[tuple[str, int], ...]
    workers: tuple[int, ...] = ()


class AcceptState(enum.Enum):
    """States of an accepted peer."""

    HANDSHAKING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class PendingPeer:
    """An accepted peer from its arrival to the end of its connection, as the acceptor counts it.

    :param endpoint: the accepted socket or the rdma_cm request. A socket may be detached and passed to another loop.
    :param address: address of the peer.
    :param on_state_change: called after each change with this object, its previous state and, if the peer was refused,
        the reason.
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
        """Number of the pool's worker that handles the peer; None if no worker has been chosen."""
        self.timeout: asyncio.Timeout | None = None  # limit of the handshake
        self.is_expiring = False
        self._loop = running_loop()
        self.started_at = 0.0  # loop time at which the handshake began
        self._control: TcpControlChannel | None = None
        self._on_state_change = on_state_change

    @property
    def peer(self) -> str:
        """Address of the peer as text, such as ``10.0.0.1:7471``."""
        return format_address(self.address)

    async def open_control(self, accept_settings: AcceptSettings) -> ControlChannel:
        """Open the control channel to the peer. Call only once, and on the loop that accepted the peer.

        :param accept_settings: TLS context, and limit of the TLS handshake.
        :returns: the channel, to be closed by the caller.
        :raises OSError: the peer is gone, or the TLS handshake failed (`ssl.SSLError`) or took too long.
        :raises Exception: whatever `AcceptSettings.context` raises, if it was not used in this process before.
        """
        endpoint, self.endpoint = self.endpoint, None
        assert endpoint is not None
        if isinstance(endpoint, CmControlChannel):
            return endpoint
        self._control = await accept_tcp(endpoint, accept_settings.context, accept_settings.handshake_timeout_s)
        return self._control

    @property
    def has_received(self) -> bool:
        """Whether the peer is known to have sent data; always False with rdma_cm, or if a worker handles the peer."""
        return self._control is not None and self._control.has_received

    def expire(self) -> None:
        """Make the peer's handshake time out at once, because another peer needs its slot."""
        self.is_expiring = True
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(self._loop.time())

    def report_open(self, is_open: bool) -> None:
        """Report that the peer has become a connection (True), or that its connection is closed (False).

        This can be called from any thread. Only the first report of each kind counts.
        """
        if asyncio._get_running_loop() is self._loop:
            self._set_open(is_open)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing is counted any longer
                self._loop.call_soon_threadsafe(self._set_open, is_open)

    def _set_open(self, is_open: bool) -> None:
        """Set the state for `report_open`, on the loop that accepted the peer. Repeated reports have no effect."""
        if self.state is (AcceptState.HANDSHAKING if is_open else AcceptState.OPEN):
            if is_open and self.timeout is not None and not self.timeout.expired():
                self.timeout.reschedule(None)
            self._set_state(AcceptState.OPEN if is_open else AcceptState.CLOSED, "")

    def refuse(self, reason: str) -> None:
        """Report that the peer does not become a connection.

        This has no effect if the peer has already become a connection or was refused.

        :param reason: name under which the refusal is counted.
        """
        if self.state is AcceptState.HANDSHAKING:
            self._set_state(AcceptState.CLOSED, reason)

    def _set_state(self, state: AcceptState, reason: str) -> None:
        """Set the state, and call `on_state_change` with the previous state and the reason."""
        previous, self.state = self.state, state
        self._on_state_change(self, previous, reason)


class Acceptor:
    """Acceptor of peers by TCP and rdma_cm, which limits the number of handshakes and connections.

    :param accept_settings: settings and limits for accepted peers.
    :param on_peer: coroutine function called with each peer in a task of its own, on the loop that opened the acceptor.
        The task is cancelled if the handshake takes too long. The function returns the reason if the peer did not
        become a connection, else ``""``.
    """

    def __init__(
        self, accept_settings: AcceptSettings, on_peer: Callable[[PendingPeer], Coroutine[Any, Any, str]]
    ) -> None:
        self._accept_settings = accept_settings
        self._on_peer = on_peer
        self._sockets: list[socket.socket] = []
        self._bound: list[Address] = []  # addresses of the sockets; a forked child cannot get them from the sockets
        self._tasks: dict[asyncio.Task[None], PendingPeer] = {}
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._accept_tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: Affinity | None = None  # the loop that opened the acceptor
        self._cm: tuple[SharedChannel, CmListener] | None = None
        self._slot_freed = asyncio.Event()  # set when a handshake or a connection ends
        self._handshakes = self._connections = self._accepted = 0
        self._refused: Counter[str] = Counter()

    async def open(
        self, host: str | None, port: int, backlog: int, transport: Transport, domain: Domain | None
    ) -> None:
        """Start listening for peers and accepting them. On failure, nothing is left open.

        :param host: address or name to listen at; None for all addresses of this machine.
        :param port: port to listen at, 0..65535, which the caller has checked; 0 for a free port, the same for all
            addresses.
        :param backlog: number of peers that the kernel queues for each address.
        :param transport: ``"tcp"`` for TCP only; ``"rdmacm"`` for rdma_cm only; ``"auto"`` for TCP, and for rdma_cm as
            well if the domain is on an RDMA device, there is no TLS, and rdma_cm works on this machine.
        :param domain: domain of the connections, which rdma_cm needs. Pass None if the workers of a pool handle the
            connections, because each worker has a domain of its own; then peers cannot connect by rdma_cm.
        :raises OSError: the name has no address, an address is in use or does not belong to this machine, or no file
            descriptor is left.
        :raises LibraryNotFoundError: `transport` is ``"rdmacm"`` and librdmacm is not installed.
        :raises VerbsError: `transport` is ``"rdmacm"``, and rdma_cm does not work on this machine, or the address is in
            use or belongs to no RDMA device.
        :raises ValueError: `transport` is ``"rdmacm"`` and the domain is on a software device; or rdma_cm is used, and
            `backlog` is less than 1.
        :raises ClosedResourceError: the domain is not open.
        :raises RuntimeError: no asyncio event loop is running.
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
        """Start listening with rdma_cm and accepting peers.

        If `transport` is ``"auto"``, a `LibraryNotFoundError`, `VerbsError` or `OSError` is only logged.

        :param host: address or name to listen at; None for all addresses of this machine.
        :param port: port to listen at; 0 for a free port.
        :param backlog: number of peers that the kernel queues.
        :param transport: ``"rdmacm"`` or ``"auto"``.
        :raises LibraryNotFoundError: librdmacm is not installed.
        :raises VerbsError: rdma_cm is not available, or the address is in use or belongs to no RDMA device.
        :raises OSError: the name has no address.
        :raises ValueError: `backlog` is less than 1.
        """
        assert self._loop is not None
        channel = SharedChannel()
        try:
            await channel.open()
            listener = await open_part(channel.channel.listener(host, port, backlog=backlog))
        except BaseException as error:
            await channel.release()
            # OSError includes VerbsError
            if transport == "rdmacm" or not isinstance(error, OSError | LibraryNotFoundError):
                raise
            logger.debug("rdma_cm is not available, peers can connect by TCP only: %s", error)
            return
        self._cm = channel, listener
        self._accept_tasks.append(self._loop.create_task(self._accept_rdma_cm(channel, listener)))

    async def _open_tcp(self, host: str | None, port: int, backlog: int) -> None:
        """Start listening with TCP at all addresses of `host`, and accepting peers.

        :raises OSError: the name has no address, an address is in use or does not belong to this machine, or no file
            descriptor is left.
        """
        assert self._loop is not None
        addresses = await self._loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, family=socket.AF_UNSPEC
        )
        for family, _, _, _, address in dict.fromkeys(addresses):
            if port == 0 and self._bound:  # all addresses use the same port
                address = (address[0], self._bound[0][1], *address[2:])
            self._listen(family, address, backlog)
        for sock in self._sockets:
            self._accept_tasks.append(self._loop.create_task(self._accept(sock)))

    def _listen(self, family: int, address: tuple[object, ...], backlog: int) -> None:
        """Open a listening socket for one address and store it. Do nothing if the machine lacks the address family.

        :raises OSError: the address is in use or does not belong to this machine, or no file descriptor is left.
        """
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:  # such as when IPv6 is disabled
                return
            raise
        self._sockets.append(sock)
        forks.keep_from_children(sock)  # else peers could still connect to a child after this process has ended
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(backlog)
        self._bound.append(sock.getsockname())

    @property
    def addresses(self) -> list[Address]:
        """Addresses and ports at which the acceptor listens: those of TCP, or if there is no TCP, that of rdma_cm.

        Empty before `open` and after `stop`.
        """
        addresses = list(self._bound)
        if not addresses and self._cm is not None:
            addresses.append(self._cm[1].address)
        return addresses

    def statistics(self, workers: int = 0) -> ServerStatistics:
        """Return a `ServerStatistics`: how many handshakes are in progress, how many connections are open, in total and
        on each worker, and how many peers were accepted and refused so far.

        :param workers: number of workers of the pool; 0 if there is no pool.
        """
        refused = tuple(sorted(self._refused.items()))
        per_worker = Counter(pending.worker for pending in self._tasks.values() if pending.state is AcceptState.OPEN)
        counts = tuple(per_worker[worker] for worker in range(workers))
        return ServerStatistics(self._handshakes, self._connections, self._accepted, refused, counts)

    async def _accept(self, listening: socket.socket) -> None:
        """Accept peers at a listening socket until cancelled.

        Start each peer's handshake when a slot for a handshake is free; refuse the peer if there are too many
        connections. A failure to accept is logged, and accepting is retried.
        """
        assert self._loop is not None
        while True:
            try:
                sock, address = await self._accept_one(listening)
            except OSError as error:
                if error.errno != errno.ECONNABORTED:  # ECONNABORTED: the peer gave up before it was accepted
                    # Such as while the process or the machine has no more file descriptors.
                    logger.warning("accepting peers failed, retrying: %s", error)
                    await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            try:
                has_slot = await self._wait_for_slot()
            except BaseException:
                sock.close()
                raise
            self._start_or_refuse(sock, address, has_slot)

    async def _accept_one(self, listening: socket.socket) -> tuple[socket.socket, Address]:
        """Wait for the next peer. In a forked child, wait until cancelled.

        :returns: a tuple of the connected socket, which the caller closes, and the peer's address.
        :raises OSError: the peer gave up, or no file descriptor is left.
        """
        assert self._owner is not None
        while not self._owner.inherited:
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                await wait_socket_ready(listening)
            else:
                forks.keep_from_children(sock)
                return sock, address
        # This loop is a forked child's copy, but the peers belong to the parent. Wait until the loop ends and cancels
        # the task.
        never: asyncio.Future[tuple[socket.socket, Address]] = running_loop().create_future()
        return await never

    async def _accept_rdma_cm(self, channel: SharedChannel, listener: CmListener) -> None:
        """Accept peers with rdma_cm until the listener is closed or fails.

        Start each peer's handshake when a slot for a handshake is free; refuse the peer if there are too many
        connections. The listener fails if the device is removed or events cannot be read, which is logged.
        """
        try:
            async for identifier in listener:
                channel.acquire()
                control = CmControlChannel(identifier, channel)
                try:
                    has_slot = await self._wait_for_slot()
                except BaseException:
                    await wait_uncancelled(_close_refused(control))
                    raise
                if has_slot:
                    self._start_handshake(control, identifier.peer_address)
                else:
                    await _close_refused(control)
        except (BrokenResourceError, VerbsError) as error:
            logger.warning("peers can no longer connect by rdma_cm: %s", error)

    def _start_or_refuse(self, sock: socket.socket, address: Address, has_slot: bool) -> None:
        """Start the handshake of an accepted peer if `has_slot` is True; otherwise refuse the peer."""
        sock.setblocking(False)
        if has_slot:
            self._start_handshake(sock, address)
        else:
            self._refuse(sock)

    # Connecting and sending nothing costs a peer next to nothing, so there may be very many such peers. For each
    # listening socket, one peer waits here for a slot, and the others wait in the kernel's backlog. If no handshake
    # ends in the meantime, the oldest handshake that has had _MIN_HANDSHAKE_S is expired; peers that are not known to
    # have sent anything are expired first. So silent peers delay an honest peer by _MIN_HANDSHAKE_S for every
    # `max_handshakes` of them that arrived earlier, but cannot keep it out.

    async def _wait_for_slot(self) -> bool:
        """Wait until there is a slot for a handshake.

        While all slots are in use, expire one handshake after another.

        :returns: True if there is a slot; False, without waiting further, as soon as there are ``max_connections``
            connections, in which case the peer is counted as refused.
        """
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
        """Expire the oldest handshake that has lasted at least half a second, if there is one.

        Peers that are not known to have sent anything come first.

        :returns: how long to wait before the next call, in seconds.
        """
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
        """Count a peer as in the handshake, and start a task that calls `on_peer` with it."""
        assert self._loop is not None
        self._handshakes += 1
        pending = PendingPeer(endpoint, address, self._on_state_change)
        task = self._loop.create_task(self._run_handshake(pending))
        self._tasks[task] = pending
        task.add_done_callback(self._on_task_done)

    async def _run_handshake(self, pending: PendingPeer) -> None:
        """Call `on_peer` with a peer, and limit the time of the handshake.

        If the peer has not become a connection when this ends, the peer is counted as refused, with the reason that
        `on_peer` returned, ``"TimeoutError"``, ``"cancelled"``, or the name of the class of the exception that
        `on_peer` raised. That exception is logged.
        """
        reason = "cancelled"
        try:
            pending.started_at = running_loop().time()
            async with asyncio.timeout(self._accept_settings.handshake_timeout_s) as pending.timeout:
                reason = await self._on_peer(pending)
        except TimeoutError:
            reason = "TimeoutError"
        except Exception as error:
            reason = type(error).__name__
            logger.exception("the connection with %s could not be handled", pending.peer)
        finally:
            pending.refuse(reason)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Remove a task that has ended. The peer of a task that was cancelled before it ran is counted as refused."""
        pending = self._tasks.pop(task)
        pending.refuse("cancelled")  # cancelled before its first step

    def reject_busy(self, pending: PendingPeer) -> None:
        """Reject a peer because the pool is closed or broken, and count it as refused with the reason ``"BUSY"``."""
        if isinstance(pending.endpoint, socket.socket):
            self._refuse(pending.endpoint)
        pending.refuse("BUSY")

    def _refuse(self, sock: socket.socket) -> None:
        """Send a rejection with the reason BUSY to a TCP peer, and close the socket, without waiting.

        With TLS, or if the socket's buffer is full, the socket is closed without a rejection.
        """
        with sock, contextlib.suppress(OSError):
            if self._accept_settings.ssl is None:
                sock.send(Reject(Reason.BUSY).pack())
                sock.shutdown(socket.SHUT_WR)
                sock.recv(4096)  # closing a socket with unread data would reset it, and discard the rejection

    # ---- Results of handshakes

    def _on_state_change(self, pending: PendingPeer, previous: AcceptState, reason: str) -> None:
        """Update the counters after the state of a peer has changed. If the peer was refused, close its endpoint.

        :param pending: the peer, in its new state.
        :param previous: its previous state.
        :param reason: name under which a refusal is counted.
        """
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
        if isinstance(pending.endpoint, CmControlChannel):  # not opened: still owned here
            assert self._loop is not None
            task = self._loop.create_task(_close_refused(pending.endpoint))
            self._closing_tasks.add(task)
            task.add_done_callback(self._closing_tasks.discard)
        elif pending.endpoint is not None:
            pending.endpoint.close()

    # ---- Closing

    async def stop(self) -> None:
        """Stop accepting peers. Handshakes in progress continue unless their loop is closed.

        Stopping twice has no effect.

        :raises VerbsError: the rdma_cm listener cannot be closed. Peers are no longer accepted nevertheless.
        """
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
        finally:  # also if cancelled: the accept tasks were cancelled before and no longer use the sockets
            self._close_sockets()
            if cm is not None:
                channel, listener = cm
                try:
                    await listener.aclose()
                finally:
                    await channel.release()

    def destroy(self) -> None:
        """Close the sockets if the loop that opened the acceptor is closed; otherwise leave that to the loop.

        This is called from any thread when the parent domain or pool is closed: its `Lifecycle` calls ``destroy`` on
        each handle that it holds.
        """
        if self._is_orphaned():
            self._abandon()

    def _is_orphaned(self) -> bool:
        """Return whether the loop that opened the acceptor is closed."""
        return self._owner is not None and self._owner.orphaned

    def _abandon(self) -> None:
        """Close the sockets, and remove the tasks of the closed loop.

        The tasks of a closed loop neither run nor can be cancelled. Connections that they opened are closed together
        with the domain or pool.
        """
        self._close_sockets()
        pending_peers = list(self._tasks.values())
        self._tasks.clear()
        self._closing_tasks.clear()
        for pending in pending_peers:
            if isinstance(pending.endpoint, socket.socket):  # not opened: still owned here
                pending.endpoint.close()

    def _close_sockets(self) -> None:
        sockets, self._sockets = self._sockets, []
        self._bound.clear()
        for sock in sockets:
            sock.close()

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait until the tasks of all handshakes and handlers have ended.

        :param timeout_s: limit in seconds; None for no limit.
        :returns: True if all tasks have ended; False if some tasks are still running after the limit.
        """
        if waiting := {*self._tasks, *self._closing_tasks}:
            await asyncio.wait(waiting, timeout=timeout_s)
        return not self._tasks and not self._closing_tasks

    async def cancel(self, timeout_s: float | None = None) -> bool:
        """Cancel the tasks of all handshakes and handlers, and wait until they have ended.

        :param timeout_s: limit of waiting in seconds; None for no limit.
        :returns: True if all tasks have ended; False if some tasks are still running after the limit.
        """
        for task in self._tasks:
            task.cancel()
        return await self.wait(timeout_s)


async def _close_refused(control: CmControlChannel) -> None:
    """Close the control channel of a refused peer. If that fails, log it; the rdma_cm channel then closes the peer's
    identifier when it is closed itself."""
    try:
        await control.aclose()
    except VerbsError as error:
        logger.warning("the rdma_cm identifier of a refused peer could not be closed: %s", error)


publish(__name__)
