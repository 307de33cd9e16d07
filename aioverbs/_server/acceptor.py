"""Accepting peers by TCP and rdma_cm, with limits on concurrent handshakes and connections."""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from aioverbs._connection.cm_control import CmControlChannel, SharedChannel
from aioverbs._connection.connect import Transport, uses_rdma_cm
from aioverbs._connection.connection import Connection, await_while_busy
from aioverbs._connection.handshake import Reason, Reject
from aioverbs._connection.shared_queues import prepare
from aioverbs._connection.spare_ends import SpareEnd, spare_end_of
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, running_loop, wait_uncancelled
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import lifecycle_of, open_part
from aioverbs._server.accept import AcceptSettings
from aioverbs._server.pending_peer import AcceptState, PendingPeer
from aioverbs._server.tcp_listener import TcpListener, resolve
from aioverbs._verbs.async_events import EventPump
from aioverbs._verbs.base_domain import Domain
from aioverbs.addresses import Address
from aioverbs.errors import BrokenResourceError, ClosedResourceError, LibraryNotFoundError, VerbsError
from aioverbs.rdma_cm import Listener as CmListener

__all__ = ["Acceptor", "ServerStatistics"]

logger = logging.getLogger("aioverbs")

_INTERVAL_S = 0.1  # in which the silence of peers in the handshake is counted, while other peers wait
_GRACE_INTERVALS = 20  # for an expired handshake to end, as on a busy worker, before the next is expired


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
        self._tcp = TcpListener(self._has_room, self._expire_when_full, self._on_socket)
        self._tasks: dict[asyncio.Task[None], PendingPeer] = {}
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: Affinity | None = None  # the loop that opened the acceptor
        self._cm: tuple[SharedChannel, CmListener] | None = None
        self._cm_task: asyncio.Task[None] | None = None
        self._room_made = asyncio.Event()  # set when a handshake or a connection ends
        self._expiry: asyncio.TimerHandle | None = None  # while peers wait for room
        self._stopped = False  # `stop` or `close` was called, perhaps during `open`, or is about to be
        self._domain: Domain | None = None
        self._on_useless: Callable[[], object] = lambda: None
        self._grace = 0  # intervals until the next handshake may be expired
        self._on_idle: Callable[[], object] | None = None
        self._spare: SpareEnd | None = None
        self._unused: Connection | None = None  # the spare end, until it is closed
        self._handshakes = self._connections = self._accepted = 0
        self._refused: Counter[str] = Counter()

    def when_useless(self, callback: Callable[[], object]) -> None:
        """Set the function that is called without arguments, on the loop that opened the acceptor, when no connection
        can be made any longer, because the domain was closed or its device is lost. It closes the acceptor.
        """
        self._on_useless = callback

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
        :raises OSError: the name has no address, an address is in use or does not belong to this machine, no file
            descriptor is left, or the process cannot map the memory for the buffers of connections.
        :raises MemoryError: no memory is left for the buffers.
        :raises LibraryNotFoundError: `transport` is ``"rdmacm"`` and librdmacm is not installed.
        :raises VerbsError: the device cannot register the memory for the buffers; or `transport` is ``"rdmacm"``, and
            rdma_cm does not work on this machine, or the address is in use or belongs to no RDMA device.
        :raises ValueError: `transport` is ``"rdmacm"`` and the domain is on a software device; or rdma_cm is used, and
            `backlog` is less than 1.
        :raises ClosedResourceError: the domain is not open, or `stop` or `close` was called in the meantime.
        :raises RuntimeError: no asyncio event loop is running.
        """
        self._loop, self._owner = running_loop(), Affinity.of_running_loop()
        self._domain = domain
        self._stopped = False
        try:
            if domain is not None:
                await prepare(domain, self._accept_settings.settings)
                self._check_not_stopped()
                self._spare = spare_end_of(domain, self._accept_settings.settings)
                self._spare.hold()
            if transport != "rdmacm":
                addresses = await resolve(host, port)
                self._check_not_stopped()
                self._tcp.open(addresses, backlog)
            if domain is not None and uses_rdma_cm(transport, domain, self._accept_settings.context):
                await self._open_rdma_cm(host, self.addresses[0][1] if self._tcp.is_open else port, backlog, transport)
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
        :raises ClosedResourceError: `stop` or `close` was called in the meantime.
        """
        assert self._loop is not None
        channel = SharedChannel()
        try:
            await channel.open()
            listener = await open_part(channel.channel.listener(host, port, backlog=backlog))
            self._check_not_stopped()
        except BaseException as error:
            await channel.release()
            # OSError includes VerbsError
            if transport == "rdmacm" or not isinstance(error, OSError | LibraryNotFoundError):
                raise
            logger.debug("rdma_cm is not available, peers can connect by TCP only: %s", error)
            return
        self._cm = channel, listener
        self._cm_task = self._loop.create_task(self._accept_rdma_cm(channel, listener))

    def _check_not_stopped(self) -> None:
        """Check after each wait of `open` that neither `stop` nor `close` was called meanwhile: nothing may be opened
        after these, because they have already closed what there was.

        :raises ClosedResourceError: one of them was called.
        """
        if self._stopped:
            raise ClosedResourceError("listening was ended while it began")

    @property
    def addresses(self) -> list[Address]:
        """Addresses and ports at which the acceptor listens: those of TCP, or if there is no TCP, that of rdma_cm.

        Empty before `open` and after `stop`.
        """
        addresses = list(self._tcp.addresses)
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

    def _on_socket(self, sock: socket.socket, address: Address) -> None:
        """Start the handshake of a peer that was accepted by TCP, or refuse it if there are too many connections."""
        if self._is_full():
            self._refused["BUSY"] += 1
            self._refuse(sock)
        else:
            self._start_handshake(sock, address)

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
                    while not self._has_room():
                        self._expire_when_full()
                        self._room_made.clear()
                        await self._room_made.wait()
                except BaseException:
                    await wait_uncancelled(_close_refused(control))
                    raise
                if self._is_full():
                    self._refused["BUSY"] += 1
                    await _close_refused(control)
                else:
                    self._start_handshake(control, identifier.peer_address)
        except (BrokenResourceError, VerbsError) as error:
            logger.warning("peers can no longer connect by rdma_cm: %s", error)

    # Connecting and sending nothing costs a peer next to nothing, so there may be very many such peers. While no slot
    # for a handshake is free, peers wait in the kernel's backlog (with rdma_cm, one of them waits here). If no
    # handshake ends in the meantime, the oldest one whose peer owes the next message for half a second is expired;
    # peers that are not known to have sent anything are expired first. So silent peers delay an honest peer by half a
    # second for every `max_handshakes` of them that arrived earlier, but cannot keep it out as long as the backlog has
    # room. The kernel drops the attempts of peers that find it full: their hosts repeat them at growing intervals, and
    # an honest peer among very many silent ones may time out. Peers that answer in time are not expired, however long a
    # busy process takes for all of them. A handshake has three messages, so a peer cannot win more than three times
    # that time by sending them as late as it may.

    def _is_full(self) -> bool:
        """Return whether there are ``max_connections`` connections, so that further peers are refused."""
        max_connections = self._accept_settings.max_connections
        return max_connections is not None and self._connections >= max_connections

    def _has_room(self) -> bool:
        """Return whether another peer may be accepted, to start its handshake or to refuse it."""
        max_connections = self._accept_settings.max_connections
        return self._is_full() or (
            self._handshakes < self._accept_settings.max_handshakes
            and (max_connections is None or self._handshakes + self._connections < max_connections)
        )

    def _expire_when_full(self) -> None:
        """Begin to expire handshakes of silent peers, one after another until there is room: a peer waits for that."""
        if self._expiry is None:
            self._grace = 0
            self._expire_oldest(self._handshaking())
            self._expiry = running_loop().call_later(_INTERVAL_S, self._count_silence)

    def _handshaking(self) -> list[PendingPeer]:
        """Return the peers whose handshakes are in progress and may be expired, in the order of their arrival."""
        return [
            each
            for each in self._tasks.values()
            if each.state is AcceptState.HANDSHAKING and each.timeout is not None and not each.is_expiring
        ]

    def _count_silence(self) -> None:
        """Count one more interval in which peers in the handshake may have been silent, and expire one of them."""
        handshaking = self._handshaking()
        for each in handshaking:
            each.count_silence()
        if self._grace:
            self._grace -= 1
        else:
            self._expire_oldest(handshaking)
        self._expiry = running_loop().call_later(_INTERVAL_S, self._count_silence)

    def _expire_oldest(self, handshaking: list[PendingPeer]) -> None:
        """Expire the handshake of the oldest silent peer, if there is one. Peers that have sent nothing come first."""
        oldest = min((each for each in handshaking if each.is_silent), key=lambda each: each.has_sent, default=None)
        if oldest is not None:
            oldest.expire()
            self._grace = _GRACE_INTERVALS

    def _make_room(self) -> None:
        """Accept the peers that wait, because a handshake or a connection has ended."""
        self._stop_expiring()
        self._tcp.resume()
        self._room_made.set()

    def _stop_expiring(self) -> None:
        """Expire no more handshakes, until there is no room again."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

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
        `on_peer` raised. That exception is logged, unless the domain is closed or its device lost.
        """
        reason = "cancelled"
        try:
            async with asyncio.timeout(self._accept_settings.handshake_timeout_s) as pending.timeout:
                reason = await self._on_peer(pending)
        except TimeoutError:
            reason = "TimeoutError"
        except Exception as error:
            reason = type(error).__name__
            if not self._is_useless():
                logger.exception("the connection with %s could not be handled", pending.peer)
        finally:
            pending.refuse(reason)
        if reason and not self._stopped and self._is_useless():
            self._stopped = True  # other peers may end in the same turn of the loop
            logger.warning("no longer listening: the domain was closed, or its device is lost")
            running_loop().call_soon(self._on_useless)

    def _is_useless(self) -> bool:
        """Return whether the domain is closed or being closed, or its device is lost."""
        domain = self._domain
        if domain is None:
            return False
        try:
            return domain.state is not ResourceState.OPEN or EventPump.of(domain.base.handle.context).is_lost()
        except ClosedResourceError:
            return True

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Remove a task that has ended. The peer of a task that was cancelled before it ran is counted as refused."""
        pending = self._tasks.pop(task)
        pending.timeout = None  # it refers to the task
        pending.refuse("cancelled")  # cancelled before its first step
        self._report_idle()

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
        if previous is AcceptState.OPEN:
            self._connections -= 1
        else:
            self._handshakes -= 1
            if pending.state is AcceptState.OPEN:
                self._accepted += 1
                self._connections += 1
            else:
                self._refused[reason] += 1
                self._close_unopened(pending)
        self._make_room()

    def _close_unopened(self, pending: PendingPeer) -> None:
        """Close the endpoint of a refused peer if its control channel was not opened: it is still owned here then."""
        if isinstance(pending.endpoint, CmControlChannel):
            self._run_to_close(_close_refused(pending.endpoint))
        elif pending.endpoint is not None:
            pending.endpoint.close()

    def _run_to_close(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that closes a part of the acceptor in a task, which `wait` waits for."""
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._closing_tasks.add(task)
        task.add_done_callback(self._on_closing_task_done)

    def _on_closing_task_done(self, task: asyncio.Task[None]) -> None:
        """Remove a task that `_run_to_close` started."""
        self._closing_tasks.discard(task)
        self._report_idle()

    # ---- Closing

    @property
    def is_stopped(self) -> bool:
        """Whether there is nothing left for `stop` to close: no socket, rdma_cm listener or spare end."""
        return not self._tcp.is_open and self._cm is None and (self._unused is None or self._unused.closed)

    async def stop(self) -> None:
        """Stop accepting peers. Handshakes in progress continue unless their loop is closed.

        Stopping twice has no effect.

        :raises VerbsError: the rdma_cm listener cannot be closed. Peers are no longer accepted by TCP nevertheless, and
            this can be called again.
        """
        if self._is_orphaned():
            self._abandon()
        self._stop_accepting()
        try:
            if self._unused is not None:
                await _close_unused(self._unused)
            if self._cm_task is not None:
                await asyncio.wait([self._cm_task])
        finally:  # also if cancelled: the task was cancelled before and no longer uses the listener
            await self._close_cm()

    def _stop_accepting(self) -> None:
        """Close the TCP sockets and cancel the task that accepts by rdma_cm. If `open` is still waiting, it fails.

        The spare end is aborted on the loop of the acceptor; else it is closed together with its domain.
        """
        self._stopped = True
        self._stop_expiring()
        self._tcp.close()
        spare, self._spare = self._spare, None
        if spare is not None:
            self._unused = spare.release()
            if self._unused is not None:
                with contextlib.suppress(VerbsError):  # its domain tries again
                    self._unused.abort()
        if self._cm_task is not None:
            self._cm_task.cancel()

    async def _close_cm(self) -> None:
        """Close the rdma_cm listener and release its event channel. Do nothing if that was done before.

        :raises VerbsError: the listener cannot be closed, and this can be called again; or the channel cannot be
            closed.
        """
        cm = self._cm
        if cm is None:
            return
        channel, listener = cm
        await listener.aclose()
        if self._cm is cm:  # no other task has done this in the meantime
            self._cm = None
            await channel.release()

    async def _close_cm_or_warn(self) -> None:
        """Close the rdma_cm listener as `_close_cm` does. If that fails, log it; `stop` tries again."""
        try:
            await self._close_cm()
        except VerbsError as error:
            logger.warning("the rdma_cm listener could not be closed: %s", error)

    def close(self, on_idle: Callable[[], object]) -> None:
        """Stop accepting peers and end all handshakes and handlers, without waiting. Call on the acceptor's loop, or on
        its thread while the loop does not run, which does the rest if it runs again.

        When this returns, the port is free and the peers have been notified. With TLS, peers in the TLS handshake are
        notified in a later turn of the loop, as are those on a worker of a pool.

        :param on_idle: called without arguments on the loop when all tasks have ended, within this call if there is
            none and the loop runs.
        """
        self._stop_accepting()
        for pending in self._tasks.values():
            pending.abort()
        self._cancel_tasks()
        self._on_idle = on_idle
        assert self._loop is not None
        if self._loop.is_running():
            self._close_rest()
        else:  # it may never run again: it would leave a task with a coroutine that was never awaited
            self._loop.call_soon(self._close_rest)

    def _close_rest(self) -> None:
        """Begin to close the spare end and the rdma_cm listener, each in a task."""
        if self._unused is not None and not self._unused.closed:
            self._run_to_close(_close_unused(self._unused))
        if self._cm is not None:
            self._run_to_close(self._close_cm_or_warn())
            if self._owner is not None and self._owner.owns():
                with contextlib.suppress(VerbsError):  # the task tries again
                    lifecycle_of(self._cm[1]).abort()
        self._report_idle()

    def _report_idle(self) -> None:
        """Call the function that was passed to `close`, if all tasks have ended."""
        if self._on_idle is not None and not self._tasks and not self._closing_tasks:
            on_idle, self._on_idle = self._on_idle, None
            on_idle()

    def destroy(self) -> None:
        """Close the sockets if the loop that opened the acceptor is closed; otherwise leave that to the loop, which
        calls the function that was passed to `when_useless` unless the domain stays open because closing it fails.

        This is called from any thread when the parent domain or pool is closed: its `Lifecycle` calls ``destroy`` on
        each handle that it holds.
        """
        if self._is_orphaned():
            self._abandon()
        elif self._domain is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._end_with, self._domain)

    def _end_with(self, domain: Domain) -> None:
        """Go on if closing the domain has failed, to end when it is closed again; else report that this is useless."""
        if self._stopped:
            return
        try:
            lifecycle_of(domain).attach(self)
        except ClosedResourceError:
            self._on_useless()

    def _is_orphaned(self) -> bool:
        """Return whether the loop that opened the acceptor is closed."""
        return self._owner is not None and self._owner.orphaned

    def _abandon(self) -> None:
        """Close the sockets, and remove the tasks of the closed loop.

        The tasks of a closed loop neither run nor can be cancelled. Connections that they opened are closed together
        with the domain or pool.
        """
        self._tcp.close()
        pending_peers = list(self._tasks.values())
        self._tasks.clear()
        self._closing_tasks.clear()
        self._cm_task = None
        for pending in pending_peers:
            if isinstance(pending.endpoint, socket.socket):  # not opened: still owned here
                pending.endpoint.close()

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
        self._cancel_tasks()
        return await self.wait(timeout_s)

    def _cancel_tasks(self) -> None:
        """Cancel the tasks of all handshakes and handlers, each only once: a second time would cancel its cleanup."""
        for task, pending in self._tasks.items():
            if not pending.is_cancelled:
                pending.is_cancelled = True
                task.cancel()


async def _close_refused(control: CmControlChannel) -> None:
    """Close the control channel of a refused peer. If that fails, log it; the rdma_cm channel then closes the peer's
    identifier when it is closed itself."""
    try:
        await control.aclose()
    except VerbsError as error:
        logger.warning("the rdma_cm identifier of a refused peer could not be closed: %s", error)


async def _close_unused(connection: Connection) -> None:
    """Close a spare end, once its receives are flushed and no other thread is inside a verb. If that fails, its domain
    tries again when it is closed.
    """
    with contextlib.suppress(VerbsError):
        await await_while_busy(connection.aclose)


publish(__name__)
