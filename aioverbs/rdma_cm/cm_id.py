"""Identifiers: the two ends of a connection that rdma_cm makes."""

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

# Bytes of private data: the field in the messages of the InfiniBand connection manager, less the header that librdmacm
# puts into the request.
_MAX_REQUEST_DATA, _MAX_REPLY_DATA, _MAX_REJECT_DATA = 56, 196, 148
_ROUTE_TIMEOUT_MS = 60_000  # limit inside the kernel; callers have their own `timeout_s`


async def look_up(host: str, port: int) -> Address:
    """Return the first address of a host. Numeric addresses are parsed without a resolver.

    :param host: address or name.
    :param port: port, 0..65535, which becomes part of the result.
    :raises OSError: the name has no address.
    :raises ValueError: the port is not in 0..65535.
    """
    if not 0 <= port <= 0xFFFF:
        raise ValueError(f"`port` must be from 0 to 65535, got {port}")
    try:  # a numeric address needs no resolver
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found[0][4]  # type: ignore[return-value]  # an IPv4 or IPv6 address


@contextlib.contextmanager
def _as_unreachable() -> Iterator[None]:
    """Context manager that raises `UnreachableError` in place of a `VerbsError` of its block."""
    try:
        yield
    except VerbsError as error:
        raise UnreachableError(error.verb, error.errno) from None


def _check_private_data(data: "Buffer", limit: int) -> bytes:
    """Return a copy of private data of at most `limit` bytes.

    :raises ValueError: the data is longer.
    """
    copied = bytes(data)
    if len(copied) > limit:
        raise ValueError(f"`private_data` must have at most {limit} bytes, got {len(copied)}")
    return copied


class Identifier(HandleResource[core.Identifier]):
    """One end of a connection, established or in progress: ``rdma_create_id``.

    Made by `Channel.identifier` or a `Listener`.

    Methods that wait take `timeout_s`, None for no limit. After a failure, a cancellation or a timeout the identifier
    can only be closed. The queue pair is then in INIT, if it came no further, else in ERR: at once, or as soon as a
    modify in a thread is done (see `QueuePair.establish`), which is not awaited. When the peer disconnects or the
    device is removed, the queue pair goes to ERR, so that tasks waiting on the queue pair are notified.

    If the peer rejects the connection, the queue pair is in INIT. `connect` may then be called again and resolves the
    address anew, or `resolve` before it.
    """

    _state_machine: CmStateMachine | None = None
    _destination: tuple[Address, Address | None] | None = None  # resolved peer address, and source address or None

    def __init__(self, channel: EventChannel, request: core.Event | None = None) -> None:
        super().__init__(channel)
        self._channel = channel
        self._request = request
        self._from_listener = request is not None

    def _owner(self) -> Affinity | None:
        """Return the owner of the channel: the event loop that opened it."""
        return self._channel.owner

    async def open(self) -> Self:
        """Open the identifier.

        An identifier from a listener is open already; entering its block only has it closed at the end.

        :returns: the identifier itself.
        :raises VerbsError: rdma_create_id failed.
        :raises ClosedResourceError: the channel is closed, or the identifier was opened before.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        """
        if not self._from_listener:
            return await super().open()
        self._owned_state_machine("open")
        self._from_listener = False
        return self

    def _open(self) -> None:
        """Create the rdma_cm_id and its state machine, or take over the rdma_cm_id of a request.

        :raises VerbsError: rdma_create_id failed.
        """
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
        """Return the state machine.

        :raises ClosedResourceError: the identifier is not open.
        """
        self._check_open()
        assert self._state_machine is not None
        return self._state_machine

    def _owned_state_machine(self, verb: str) -> CmStateMachine:
        """Return the state machine, after checking that the owner's loop is running; on failure nothing was changed.

        :param verb: the verb named in the error.
        :raises ClosedResourceError: the identifier is not open.
        :raises AffinityError: another event loop owns the channel.
        """
        state_machine = self._open_state_machine()
        assert self.owner is not None
        self.owner.check(self, verb)
        return state_machine

    def _restart(self, state_machine: CmStateMachine) -> CmStateMachine:
        """Return a state machine that can connect: this one, or after a rejection a new one with a new rdma_cm_id.

        :raises VerbsError: rdma_create_id failed; nothing was done.
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

    # ---- Properties

    @property
    def connected(self) -> bool:
        """True from a successful `connect` or `accept` until either end disconnects."""
        return self._state_machine is not None and self._state_machine.state is CmState.CONNECTED and not self.closed

    @property
    def device_name(self) -> str | None:
        """Name of the device that reaches the peer, to which the queue pair must belong. None before `resolve`.

        :raises ClosedResourceError: the identifier is not open.
        """
        return self.handle.device_name

    @property
    def port_num(self) -> int:
        """Port number of the device that reaches the peer; 0 before `resolve`.

        :raises ClosedResourceError: the identifier is not open.
        """
        return self.handle.port_num

    @property
    def local_address(self) -> Address | None:
        """Host and port of this end; None before `resolve`.

        :raises ClosedResourceError: the identifier is not open.
        """
        return self.handle.local_address

    @property
    def peer_address(self) -> Address | None:
        """Host and port of the peer; None before `resolve`.

        :raises ClosedResourceError: the identifier is not open.
        """
        return self.handle.peer_address

    @property
    def private_data(self) -> bytes:
        """Private data of the peer's request or reply, padded with zeros to the length of the message's field.

        Empty before `connect` has returned, unless the identifier is from a listener.

        :raises ClosedResourceError: the identifier is not open.
        """
        return self._open_state_machine().private_data

    # ---- Active side

    async def resolve(self, host: str, port: int, *, source: str | None = None, timeout_s: float | None = 5.0) -> None:
        """Resolve the address of a peer and the route to it: ``rdma_resolve_addr`` and ``rdma_resolve_route``.

        :param host: address or name of the peer; the first address of a name is used.
        :param port: port of the peer, 0..65535.
        :param source: local address to connect from; None: the kernel chooses.
        :param timeout_s: limit in seconds; None: no limit.
        :raises UnreachableError: no route, or no RDMA device for it.
        :raises TimeoutError: the address or route was not resolved within `timeout_s`.
        :raises OSError: the name has no address.
        :raises ValueError: `port` is out of range.
        :raises QueuePairStateError: the identifier is resolved or connected already, or came from a listener.
        :raises BrokenResourceError: an earlier call failed: close the identifier.
        :raises BusyResourceError: another call on the identifier is in flight.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        :raises ClosedResourceError: the identifier is not open, or was closed meanwhile.
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
        """Resolve the address and the route, and enter RESOLVED.

        :raises UnreachableError: no route, or no RDMA device for it.
        :raises TimeoutError: the kernel found no route within a minute.
        :raises Exception: as `CmStateMachine.expect`.
        """
        await self._resolve_address(state_machine, address, source_address)
        with _as_unreachable():
            self.handle.resolve_route(_ROUTE_TIMEOUT_MS)
        await state_machine.expect(CmEventType.ROUTE_RESOLVED, "rdma_resolve_route")
        state_machine.state = CmState.RESOLVED

    async def _resolve_address(
        self, state_machine: CmStateMachine, address: Address, source_address: Address | None
    ) -> None:
        """Resolve the address: ``rdma_resolve_addr``, repeated until the peer's neighbour entry is found.

        Without an answer this goes on for ever: the caller limits the time.

        :raises UnreachableError: no route, or no RDMA device for it.
        :raises Exception: as `CmStateMachine.expect`.
        """
        # A neighbour's answer may arrive before the kernel begins to wait for it, as on a veth interface. The kernel
        # then looks again only when its timeout is over, so the first timeouts are short and each is longer than the
        # last.
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
        """Connect a queue pair to the peer: ``rdma_connect``, ``rdma_init_qp_attr``, ``rdma_establish``.

        Moves the queue pair to RTS, from RESET or from INIT. Receives may be posted in INIT before this call.

        :param qp: queue pair of type RC, of the device `device_name`.
        :param access: access that the peer gets, as in `QueuePair.connect`; None: unchanged.
        :param private_data: data that the peer sees before it answers, at most 56 bytes.
        :param timeout_s: limit in seconds; None: no limit.
        :param attributes: values that replace the negotiated ones: ``timeout``, ``retry_cnt``, ``rnr_retry``,
            ``min_rnr_timer``, ``max_rd_atomic``, ``max_dest_rd_atomic``. A negotiated ``retry_cnt`` or ``rnr_retry`` is
            limited to 6; a value given here is not. ``max_rd_atomic`` can only lower the negotiated value.
        :returns: private data of the peer's reply, padded with zeros. The property `private_data` returns the same from
            then on.
        :raises ConnectionRejectedError: the peer rejected the connection, or has no listener at the port. `connect` may
            be called again.
        :raises UnreachableError: the peer's connection manager does not answer.
        :raises TimeoutError: no answer within `timeout_s`.
        :raises TransitionError: the queue pair is in another state, or an attribute is not valid; nothing was done.
        :raises ValueError: the queue pair is not of type RC or belongs to another device, or `private_data` is too
            long; nothing was done.
        :raises VerbsError: a verb failed; EOPNOTSUPP if the queue pair belongs to the software device.
        :raises QueuePairStateError: the identifier is not resolved.
        :raises BrokenResourceError: an earlier call failed, other than by a rejection: close the identifier.
        :raises BusyResourceError: another call on the identifier is in flight.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        :raises ClosedResourceError: the identifier or queue pair is not open, or was closed meanwhile.
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

    # ---- Passive side

    async def accept(
        self,
        qp: QueuePair,
        access: AccessFlags | None = None,
        *,
        private_data: "Buffer" = b"",
        timeout_s: float | None = 10.0,
        **attributes: Unpack[QpAttrs],
    ) -> None:
        """Accept the connection that the peer requested: ``rdma_init_qp_attr``, ``rdma_accept``.

        Moves the queue pair to RTS, from RESET or from INIT, and waits for the peer's confirmation. Receives that the
        peer needs at once must be posted in INIT before this call.

        :param qp: queue pair of type RC, of the device `device_name`.
        :param access: access that the peer gets, as in `QueuePair.connect`; None: unchanged.
        :param private_data: data for the peer, at most 196 bytes.
        :param timeout_s: limit in seconds; None: no limit.
        :param attributes: values that replace the negotiated ones, as for `connect`.
        :raises UnreachableError: the peer does not answer any more.
        :raises TimeoutError: no confirmation within `timeout_s`.
        :raises ConnectionRejectedError: the peer gave up.
        :raises TransitionError: the queue pair is in another state, or an attribute is not valid; nothing was done.
        :raises ValueError: the queue pair is not of type RC or belongs to another device, or `private_data` is too
            long; nothing was done.
        :raises VerbsError: a verb failed; EOPNOTSUPP if the queue pair belongs to the software device.
        :raises QueuePairStateError: the identifier is not a pending request of a listener.
        :raises BrokenResourceError: the peer or the device went away.
        :raises BusyResourceError: another call on the identifier is in flight.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        :raises ClosedResourceError: the identifier or queue pair is not open, or was closed meanwhile.
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
        """Reject the connection that the peer requested: ``rdma_reject``.

        Closing the identifier without an answer does the same.

        :param private_data: data for the peer, at most 148 bytes.
        :raises ValueError: `private_data` is too long.
        :raises VerbsError: rdma_reject failed.
        :raises QueuePairStateError: the identifier is not a pending request of a listener.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        :raises BrokenResourceError: the peer or the device went away.
        :raises BusyResourceError: another call on the identifier is in flight.
        :raises ClosedResourceError: the identifier is not open.
        """
        state_machine = self._owned_state_machine("rdma_reject")
        state_machine.check("reject", CmState.REQUESTED)
        self.handle.reject(_check_private_data(private_data, _MAX_REJECT_DATA))
        state_machine.state = CmState.ENDED

    # ---- Disconnecting

    async def disconnect(self, *, timeout_s: float | None = 5.0) -> None:
        """Move the queue pair to ERR, notify the peer and wait for its answer: ``rdma_disconnect``.

        Returns at once if the peer has disconnected before.

        :param timeout_s: limit in seconds; None: no limit.
        :raises QueuePairStateError: the identifier was not connected.
        :raises TimeoutError: no answer within `timeout_s`; the identifier can only be closed.
        :raises DeviceRemovedError: the device was removed.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        :raises ClosedResourceError: the identifier is not open.
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
        """Wait until either end has disconnected, or the identifier is closed.

        :raises DeviceRemovedError: the device was removed.
        :raises QueuePairStateError: the identifier was not connected.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        :raises ClosedResourceError: the identifier is not open.
        """
        await self._connected_state_machine("rdma_get_cm_event").wait_disconnected()

    def _connected_state_machine(self, verb: str) -> CmStateMachine:
        """Return the state machine of an identifier that is connected, or was.

        :param verb: the verb named in the error.
        :raises QueuePairStateError: the identifier was not connected.
        :raises ClosedResourceError: the identifier is not open.
        :raises AffinityError: another event loop owns the channel.
        """
        state_machine = self._owned_state_machine(verb)
        if state_machine.state in (CmState.NEW, CmState.RESOLVED, CmState.REQUESTED, CmState.REJECTED):
            raise QueuePairStateError(f"{self!r} is not connected")
        return state_machine

    def _validate(
        self, operation: str, state: CmState, qp: QueuePair, attributes: QpAttrs, private_data: "Buffer", limit: int
    ) -> tuple[CmStateMachine, bytes]:
        """Check the arguments of `connect` and `accept` before the peer is contacted.

        :param operation: ``"connect"`` or ``"accept"``.
        :param state: state that the identifier must be in.
        :param limit: maximum length of the private data in bytes.
        :returns: the state machine, and a copy of the private data.
        :raises Exception: as `connect` and `accept`; nothing was done.
        """
        state_machine = self._owned_state_machine(f"rdma_{operation}")
        state_machine.check(operation, state)
        check_queue_pair(qp, attributes)
        state_machine.check_device(qp)
        return state_machine, _check_private_data(private_data, limit)


def cm_state_machine_of(identifier: Identifier) -> CmStateMachine | None:
    """Return the state machine of an identifier; None if the identifier was not opened."""
    return identifier._state_machine
