"""Identifiers of connections: what is awaited on them."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self, Unpack

from aioverbs._core.handles import rdma_cm as core
from aioverbs._durations import duration
from aioverbs._lifecycle.affinity import Affinity, running_loop
from aioverbs._lifecycle.resource import HandleResource
from aioverbs._verbs.qp_defaults import RETRIES
from aioverbs._verbs.qp_modify import limits_for
from aioverbs._verbs.qp_state_machine import QpAttrs
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs.addresses import Address, format_address
from aioverbs.errors import QueuePairStateError, UnreachableError, VerbsError
from aioverbs.rdma_cm.events import CmEventType, EventChannel
from aioverbs.rdma_cm.negotiation import check_queue_pair
from aioverbs.rdma_cm.state_machine import CmState, CmStateMachine
from aioverbs.types import AccessFlags

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Identifier", "cm_state_machine_of", "look_up"]

# What the InfiniBand architecture leaves of its messages, after librdmacm's own header in the first.
_MAX_REQUEST_DATA, _MAX_REPLY_DATA, _MAX_REJECT_DATA = 56, 196, 148
_ROUTE_TIMEOUT_MS = 60_000  # for the kernel; who waits has a limit of its own


async def look_up(host: str, port: int) -> Address:
    """The first address of a host.

    :raises OSError: it has none.
    """
    if not 0 <= port <= 0xFFFF:
        raise ValueError(f"a port is from 0 to 65535, not {port}")
    try:  # what is a number waits for no resolver
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found[0][4]  # type: ignore[return-value]  # of IPv4 or IPv6


@contextlib.contextmanager
def _as_unreachable() -> Iterator[None]:
    try:
        yield
    except VerbsError as error:
        raise UnreachableError(error.verb, error.errno) from None


def _check_private_data(data: "Buffer", limit: int) -> bytes:
    copied = bytes(data)
    if len(copied) > limit:
        raise ValueError(f"private data is {limit} bytes at most here, not {len(copied)}")
    return copied


class Identifier(HandleResource[core.Identifier]):
    """One end of a connection, or of one to be: ``rdma_create_id``. Made by `Channel.identifier`, or by a `Listener`.

    Each method that waits takes `timeout_s`, None for no limit. One that fails, is cancelled or takes too long leaves
    it with no other use than to be closed; the queue pair is then in INIT, where that is as far as it came, else in
    ERR: at once, or when a verb is over that a thread calls for it, as for `QueuePair.establish`; that is not awaited.
    When the peer disconnects or the device is removed the queue pair goes to ERR, so that who waits there is told.

    Where the peer rejects the connection, the queue pair is in INIT, and `connect` may be called again, which finds
    the way there anew, or `resolve` before it.
    """

    _state_machine: CmStateMachine | None = None
    _destination: tuple[Address, Address | None] | None = None  # whom it was resolved to, and from where

    def __init__(self, channel: EventChannel, request: core.Event | None = None) -> None:
        super().__init__(channel)
        self._channel = channel
        self._request = request
        self._from_listener = request is not None

    def _owner(self) -> Affinity | None:
        return self._channel.owner

    async def open(self) -> Self:
        """Open it; one that a listener gave is open already, and its block closes it."""
        if not self._from_listener:
            return await super().open()
        self._owned_state_machine("open")
        self._from_listener = False
        return self

    def _open(self) -> None:
        request, self._request = self._request, None
        if request is not None and request.identifier is not None:
            self._handle = request.identifier
        else:
            self._handle = core.Identifier(self._channel.handle)
        self._lifecycle.hold(self._handle)
        state = CmState.REQUESTED if request is not None else CmState.NEW
        self._state_machine = CmStateMachine(
            self._handle, self._channel._dispatcher, self._lifecycle.condition(), state
        )
        self._lifecycle.hold(self._state_machine)
        self._lifecycle.drain = self._state_machine.drain
        if request is not None:
            self._state_machine.private_data = request.private_data
            self._lifecycle.label = f"with {format_address(self._handle.peer_address)}"

    def _open_state_machine(self) -> CmStateMachine:
        self._check_open()
        assert self._state_machine is not None
        return self._state_machine

    def _owned_state_machine(self, verb: str) -> CmStateMachine:
        """The conversation, for the owner to go on with it by `verb`; who is refused has changed nothing."""
        state_machine = self._open_state_machine()
        assert self.owner is not None
        self.owner.check(self, verb)
        return state_machine

    def _restart(self, state_machine: CmStateMachine) -> CmStateMachine:
        """One that may begin: the same, or where that was rejected another one, with an identifier of its own.

        :raises VerbsError: there cannot be another one; nothing was done.
        """
        if state_machine.state is not CmState.REJECTED:
            return state_machine
        lifecycle, handle, used_up = self._lifecycle, core.Identifier(self._channel.handle), self.handle
        try:
            used_up.destroy()
        except BaseException:
            handle.destroy()
            raise
        state_machine.destroy()
        lifecycle.detach(state_machine)
        lifecycle.detach(used_up)
        self._handle = handle
        lifecycle.attach(handle)
        self._state_machine = CmStateMachine(handle, self._channel._dispatcher, lifecycle.condition())
        lifecycle.attach(self._state_machine)
        lifecycle.drain = self._state_machine.drain
        return self._state_machine

    # ---- What is known

    @property
    def connected(self) -> bool:
        """Whether it is."""
        return self._state_machine is not None and self._state_machine.state is CmState.CONNECTED and not self.closed

    @property
    def device_name(self) -> str | None:
        """The device that leads to the peer, of which the queue pair is to be; None before `resolve`."""
        return self.handle.device_name

    @property
    def port_num(self) -> int:
        """The port of that device; 0 before `resolve`."""
        return self.handle.port_num

    @property
    def local_address(self) -> Address | None:
        """Its own address; None before `resolve`."""
        return self.handle.local_address

    @property
    def peer_address(self) -> Address | None:
        """The peer's; None before `resolve`."""
        return self.handle.peer_address

    @property
    def private_data(self) -> bytes:
        """What the peer said in asking or answering: as many bytes as its message has, filled up with zeros."""
        return self._open_state_machine().private_data

    # ---- The side that asks

    async def resolve(self, host: str, port: int, *, source: str | None = None, timeout_s: float | None = 5.0) -> None:
        """Find the device and the route to an address: ``rdma_resolve_addr`` and ``rdma_resolve_route``.

        :param host: an address, or a name, of which the first address is taken.
        :param source: the address of this machine to come from.
        :raises UnreachableError: there is no way.
        :raises TimeoutError: that was not known in time.
        :raises OSError: the name has no address.
        """
        state_machine = self._owned_state_machine("rdma_resolve_addr")
        state_machine.check("resolve", CmState.NEW)
        state_machine = self._restart(state_machine)
        async with state_machine.step("resolve", CmState.NEW, timeout_s):
            address = await look_up(host, port)
            source_address = await look_up(source, 0) if source is not None else None
            await self._resolve_destination(state_machine, address, source_address)
        self._destination = address, source_address
        self._lifecycle.label = f"with {format_address(self.peer_address)}"

    async def _resolve_destination(
        self, state_machine: CmStateMachine, address: Address, source_address: Address | None
    ) -> None:
        await self._resolve_address(state_machine, address, source_address)
        with _as_unreachable():
            self.handle.resolve_route(_ROUTE_TIMEOUT_MS)
        await state_machine.expect(CmEventType.ROUTE_RESOLVED, "rdma_resolve_route")
        state_machine.state = CmState.RESOLVED

    async def _resolve_address(
        self, state_machine: CmStateMachine, address: Address, source_address: Address | None
    ) -> None:
        # A neighbour may answer before the kernel has begun to wait for that, as over a veth interface. Then it looks
        # again only when the time is over, and therefore is given little, and more each time.
        for wait_ms in itertools.chain((100, 200, 400, 800, 1600), itertools.repeat(3200)):
            with _as_unreachable():
                self.handle.resolve_addr(address, wait_ms, source_address)
            try:
                await state_machine.expect(CmEventType.ADDR_RESOLVED, "rdma_resolve_addr")
            except TimeoutError:
                continue
            return

    async def connect(
        self,
        qp: QueuePair,
        access: AccessFlags | None = None,
        *,
        private_data: "Buffer" = b"",
        timeout_s: float | None = 10.0,
        **attributes: Unpack[QpAttrs],
    ) -> bytes:
        """Connect a queue pair with the peer: ``rdma_connect``, ``rdma_init_qp_attr``, ``rdma_establish``.

        It comes from RESET, or from INIT with receives that were posted there, to RTS.

        :param qp: of type RC, of the device that `device_name` names.
        :param access: what the peer may do through it, as in `QueuePair.connect`.
        :param private_data: for the peer to see before it answers, 56 bytes at most.
        :param attributes: instead of what the connection managers agree on, as ``timeout``, ``retry_cnt``,
            ``rnr_retry`` (both 6 at most without it), ``min_rnr_timer``, ``max_rd_atomic``, ``max_dest_rd_atomic``.
        :returns: what the peer said with its answer, filled up with zeros; it is `private_data` from then on.
        :raises ConnectionRejectedError: the peer refused; nobody listens there; or its program said so. This may be
            called again.
        :raises UnreachableError: its connection manager does not answer.
        :raises TimeoutError: nor did it within `timeout_s`.
        :raises TransitionError: the queue pair is in another state, or an attribute cannot be; nothing was done.
        """
        state_machine, data = self._validate(
            "connect", CmState.RESOLVED, qp, attributes, private_data, _MAX_REQUEST_DATA
        )
        limits = limits_for(qp, self.handle.port_num)
        state_machine = self._restart(state_machine)
        async with state_machine.step("connect", state_machine.state, timeout_s):
            if state_machine.state is CmState.NEW:
                assert self._destination is not None
                await self._resolve_destination(state_machine, *self._destination)
                state_machine.check_device(qp)
            state_machine.to_init(qp, access)
            self.handle.connect(
                qp_num=qp.qp_num,
                private_data=data,
                responder_resources=attributes.get("max_dest_rd_atomic", limits.max_dest_rd_atomic),
                initiator_depth=attributes.get("max_rd_atomic", limits.max_rd_atomic),
                retry_count=attributes.get("retry_cnt", RETRIES["retry_cnt"]),
                rnr_retry_count=attributes.get("rnr_retry", RETRIES["rnr_retry"]),
                srq=qp.handle.srq is not None,
            )
            answer = await state_machine.expect(CmEventType.CONNECT_RESPONSE, "rdma_connect")
            await state_machine.to_rts(qp, attributes)
            self.handle.establish()
            state_machine.private_data = answer.private_data
            state_machine.mark_connected()
        return answer.private_data

    # ---- The side that answers

    async def accept(
        self,
        qp: QueuePair,
        access: AccessFlags | None = None,
        *,
        private_data: "Buffer" = b"",
        timeout_s: float | None = 10.0,
        **attributes: Unpack[QpAttrs],
    ) -> None:
        """Give the peer the connection that it asked for: ``rdma_init_qp_attr``, ``rdma_accept``.

        :param qp: as for `connect`; receives that the peer needs at once are posted in INIT, before this.
        :param private_data: for the peer, 196 bytes at most.
        :raises UnreachableError: the peer does not answer any more.
        :raises TimeoutError: nor did it within `timeout_s`.
        :raises ConnectionRejectedError: it gave up.
        :raises TransitionError: the queue pair is in another state, or an attribute cannot be; nothing was done.
        """
        state_machine, data = self._validate("accept", CmState.REQUESTED, qp, attributes, private_data, _MAX_REPLY_DATA)
        async with state_machine.step("accept", CmState.REQUESTED, timeout_s):
            state_machine.to_init(qp, access)
            applied = await state_machine.to_rts(qp, attributes)
            self.handle.accept(
                qp_num=qp.qp_num,
                private_data=data,
                responder_resources=applied["max_dest_rd_atomic"],
                initiator_depth=applied["max_rd_atomic"],
                rnr_retry_count=attributes.get("rnr_retry", RETRIES["rnr_retry"]),
                srq=qp.handle.srq is not None,
            )
            await state_machine.expect(CmEventType.ESTABLISHED, "rdma_accept")
            state_machine.mark_connected()

    async def reject(self, private_data: "Buffer" = b"") -> None:
        """Refuse it: ``rdma_reject``. So does closing it unanswered.

        :param private_data: for the peer, 148 bytes at most.
        """
        state_machine = self._owned_state_machine("rdma_reject")
        state_machine.check("reject", CmState.REQUESTED)
        self.handle.reject(_check_private_data(private_data, _MAX_REJECT_DATA))
        state_machine.state = CmState.ENDED

    # ---- The end

    async def disconnect(self, *, timeout_s: float | None = 5.0) -> None:
        """Send the queue pair to ERR, tell the peer, and wait until it heard: ``rdma_disconnect``.

        Nothing happens where the peer was first.

        :raises QueuePairStateError: it was not connected.
        :raises TimeoutError: the peer does not answer; it can only be closed.
        """
        state_machine = self._connected_state_machine("rdma_disconnect")
        state_machine.disconnect()
        try:
            async with asyncio.timeout(timeout_s):
                await state_machine.wait_disconnected()
        except TimeoutError:
            assert timeout_s is not None
            raise TimeoutError(f"disconnect: the peer did not answer within {duration(timeout_s)}") from None

    async def wait_disconnected(self) -> None:
        """Wait until the peer or this side has disconnected, or it is closed.

        :raises DeviceRemovedError: the device was removed.
        :raises QueuePairStateError: it was not connected.
        """
        await self._connected_state_machine("rdma_get_cm_event").wait_disconnected()

    def _connected_state_machine(self, verb: str) -> CmStateMachine:
        state_machine = self._owned_state_machine(verb)
        if state_machine.state in (CmState.NEW, CmState.RESOLVED, CmState.REQUESTED, CmState.REJECTED):
            raise QueuePairStateError(f"{self!r} is not connected")
        return state_machine

    def _validate(
        self, operation: str, state: CmState, qp: QueuePair, attributes: QpAttrs, private_data: "Buffer", limit: int
    ) -> tuple[CmStateMachine, bytes]:
        """What can be seen before the peer is told anything."""
        state_machine = self._owned_state_machine(f"rdma_{operation}")
        state_machine.check(operation, state)
        check_queue_pair(qp, attributes)
        state_machine.check_device(qp)
        return state_machine, _check_private_data(private_data, limit)


def cm_state_machine_of(identifier: Identifier) -> CmStateMachine | None:
    """What an identifier says and hears; None before it was opened."""
    return identifier._state_machine
