"""Identifiers: each one is one end of a connection that rdma_cm makes."""

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
from aioverbs.addresses import Address, check_socket_port, format_address
from aioverbs.errors import QueuePairStateError, UnreachableError, VerbsError
from aioverbs.rdma_cm.events import CmEventType, EventChannel
from aioverbs.rdma_cm.negotiation import check_queue_pair
from aioverbs.rdma_cm.state_machine import CmState, CmStateMachine
from aioverbs.types import AccessFlags

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Identifier", "cm_state_machine_of", "look_up"]

# Maximum lengths of private data, in bytes: the length of the field in the messages of the InfiniBand connection
# manager, minus the header that librdmacm adds to requests.
_MAX_REQUEST_DATA, _MAX_REPLY_DATA, _MAX_REJECT_DATA = 56, 196, 148
_ROUTE_TIMEOUT_MS = 60_000  # limit inside the kernel; callers have their own `timeout_s`


async def look_up(host: str, port: int) -> Address:
    """Return the first socket address of a host, which includes the port.

    A numeric address is parsed; for a host name, the resolver is called in a thread.

    :param host: IPv4 address, IPv6 address or host name.
    :param port: port, 0..65535, which the caller has checked.
    :returns: the address, as a tuple that `socket.getaddrinfo` returned.
    :raises OSError: the name cannot be resolved.
    :raises ValueError: `host` cannot be a host name, for example because a label of it is too long.
    """
    try:  # a numeric address needs no resolver
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # from the encoding of names, which tells neither the name nor what is wrong with it
        raise ValueError(f"{host!r} cannot be a host name: a part of it is empty or too long") from error
    return found[0][4]  # type: ignore[return-value]  # an IPv4 or IPv6 address


@contextlib.contextmanager
def _as_unreachable() -> Iterator[None]:
    """Return a context manager that replaces a `VerbsError` raised in its block with an `UnreachableError`.

    :raises UnreachableError: the block raised a `VerbsError`; with the same verb and errno.
    """
    try:
        yield
    except VerbsError as error:
        raise UnreachableError(error.verb, error.errno) from None


def _check_private_data(data: "Buffer", limit: int) -> bytes:
    """Check that private data is at most `limit` bytes long, and return a copy of the data as bytes.

    :raises ValueError: the data is longer than `limit` bytes.
    """
    copied = bytes(data)
    if len(copied) > limit:
        raise ValueError(f"`private_data` must have at most {limit} bytes, got {len(copied)}")
    return copied


class Identifier(HandleResource[core.Identifier]):
    """One end of a connection that is established or being established: ``rdma_create_id``.

    Made by `Channel.identifier` or a `Listener`.

    Methods that wait, except `wait_disconnected`, take `timeout_s`, which is None if there is no limit. If `resolve`,
    `connect` or `accept` has begun and fails, times out or is cancelled, the identifier can only be closed. The queue
    pair stays in INIT if it was not moved beyond that state; otherwise it is moved to ERR. This move happens
    immediately, or, if a helper thread is still inside a verb on the queue pair (see `QueuePair.establish`), as soon as
    the verb ends, which is not awaited. When the peer disconnects or the device is removed, the queue pair is moved to
    ERR, so that tasks waiting on the queue pair are notified.

    This does not apply if the peer rejects the connection during `connect`: the queue pair is then in INIT, and
    `connect` may be called again, which resolves the address again; or call `resolve` first to connect to another
    address.
    """

    _state_machine: CmStateMachine | None = None
    _destination: tuple[Address, Address | None] | None = None  # resolved peer address, and source address or None

    def __init__(self, channel: EventChannel, request: core.Event | None = None) -> None:
        super().__init__(channel)
        self._channel = channel
        self._request = request
        self._from_listener = request is not None

    def _owner(self) -> Affinity | None:
        """Return the owner of the channel, the `Affinity` of the event loop that opened the channel."""
        return self._channel.owner

    async def open(self) -> Self:
        """Open the identifier: ``rdma_create_id``.

        An identifier that a listener returned is already open. For such an identifier, the first call does nothing, so
        that the caller can use ``async with`` to have it closed at the end of the block.

        :returns: the identifier itself, to be closed by the caller.
        :raises VerbsError: ``rdma_create_id`` failed.
        :raises ClosedResourceError: the channel is closed, or the identifier was closed or opened before.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        """
        if not self._from_listener:
            return await super().open()
        self._owned_state_machine("open")
        self._from_listener = False
        return self

    def _open(self) -> None:
        """Create the rdma_cm_id, or take over that of a connection request, and make a state machine for it.

        :raises VerbsError: ``rdma_create_id`` failed.
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
        """Return the `CmStateMachine` of this identifier, after checking that the identifier is open.

        :raises ClosedResourceError: the identifier is not open.
        """
        self._check_open()
        assert self._state_machine is not None
        return self._state_machine

    def _owned_state_machine(self, verb: str) -> CmStateMachine:
        """Check that the identifier is open and the running loop owns the channel, and return the `CmStateMachine`.

        :param verb: name of the verb, for the error message.
        :raises ClosedResourceError: the identifier is not open.
        :raises AffinityError: another event loop owns the channel.
        """
        state_machine = self._open_state_machine()
        assert self.owner is not None
        self.owner.check(self, verb)
        return state_machine

    def _restart(self, state_machine: CmStateMachine) -> CmStateMachine:
        """Return a `CmStateMachine` that can connect: the given one, or after a rejection a new one.

        A rejected rdma_cm_id cannot connect again. So after a rejection, a new rdma_cm_id is created, and it and its
        state machine replace the old ones.

        :raises VerbsError: a verb failed; the identifier is unchanged.
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
        """Whether the identifier is connected.

        True from a successful `connect` or `accept` until either end disconnects, the connection fails, or the
        identifier is closed.
        """
        return self._state_machine is not None and self._state_machine.state is CmState.CONNECTED and not self.closed

    @property
    def device_name(self) -> str | None:
        """Name of the device through which the peer is reached; None for an outgoing connection before `resolve`.

        The queue pair to connect must belong to this device.

        :raises ClosedResourceError: the identifier is not open.
        """
        return self.handle.device_name

    @property
    def port_num(self) -> int:
        """Number of the device port through which the peer is reached; 0 for an outgoing connection before `resolve`.

        :raises ClosedResourceError: the identifier is not open.
        """
        return self.handle.port_num

    @property
    def local_address(self) -> Address | None:
        """Address of this end: a tuple that begins with host and port.

        None for an outgoing connection before `resolve`.

        :raises ClosedResourceError: the identifier is not open.
        """
        return self.handle.local_address

    @property
    def peer_address(self) -> Address | None:
        """Address of the peer: a tuple that begins with host and port.

        None for an outgoing connection before `resolve`.

        :raises ClosedResourceError: the identifier is not open.
        """
        return self.handle.peer_address

    @property
    def private_data(self) -> bytes:
        """Private data that the peer sent, padded with zeros to the length of the field in the message.

        For an identifier from a listener, this is the data in the peer's request. Otherwise it is the data in the
        peer's reply, and it is empty until `connect` returns.

        :raises ClosedResourceError: the identifier is not open.
        """
        return self._open_state_machine().private_data

    # ---- Active side

    async def resolve(self, host: str, port: int, *, source: str | None = None, timeout_s: float | None = 5.0) -> None:
        """Resolve the address of a peer and the route to it: ``rdma_resolve_addr`` and ``rdma_resolve_route``.

        After `connect` was rejected, this may be called again, and first replaces the rdma_cm_id with a new one. Unless
        an exception below says otherwise, the identifier can only be closed after this fails, times out or is
        cancelled.

        :param host: address or host name of the peer; the first address of a name is used.
        :param port: port of the peer, 0..65535.
        :param source: local address or host name to connect from; None to let the kernel choose.
        :param timeout_s: time limit in seconds; None if there is no limit.
        :raises UnreachableError: there is no route to the address, or no RDMA device for the route.
        :raises TimeoutError: the address or route was not resolved within `timeout_s`.
        :raises OSError: a host name cannot be resolved.
        :raises ValueError: `port` is out of range; nothing was done. Also if `host` or `source` cannot be a host name,
            for example because a label of it is too long.
        :raises VerbsError: reading events from the channel failed. Also if replacing the rdma_cm_id failed after a
            rejection: the identifier is then unchanged, and this may be called again.
        :raises QueuePairStateError: the identifier is already resolved or connected, or came from a listener; nothing
            was done.
        :raises BrokenResourceError: an earlier call failed; or an unexpected event arrived, or the device was removed
            during the call.
        :raises BusyResourceError: another call on the identifier is in flight; nothing was done.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        :raises ClosedResourceError: the identifier is not open, or was closed during the call.
        """
        state_machine = self._owned_state_machine("rdma_resolve_addr")
        check_socket_port(port)
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
        """Resolve the peer's address and the route to it, and set the state to RESOLVED.

        The caller must limit the time, because an address is resolved without a time limit.

        :raises UnreachableError: there is no route to the address, or no RDMA device for the route.
        :raises TimeoutError: the kernel found no route within a minute.
        :raises Exception: other exceptions are those of `CmStateMachine.expect`.
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

        If there is no answer, this is repeated forever, so the caller must limit the time.

        :raises UnreachableError: there is no route to the address, or no RDMA device for the route.
        :raises Exception: other exceptions are those of `CmStateMachine.expect`, except TimeoutError.
        """
        # A neighbour's answer may arrive before the kernel begins to wait for it, for example on a veth interface. The
        # kernel then looks for it only when the timeout has passed, so the first timeouts are short, and each one is
        # longer than the last.
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

        This moves the queue pair from RESET or INIT to RTS. Receives may be posted in INIT before this call. Unless
        the peer rejects the connection or nothing was done, the identifier can only be closed after this fails, times
        out or is cancelled.

        :param qp: queue pair of type RC on the device `device_name`.
        :param access: operations that the peer may perform, as for `QueuePair.connect`; None for none, or in INIT for
            those that were allowed on the transition to INIT.
        :param private_data: data that the peer can read before it answers, at most 56 bytes.
        :param timeout_s: time limit in seconds; None if there is no limit.
        :param attributes: values that replace the negotiated ones: ``timeout``, ``retry_cnt``, ``rnr_retry``,
            ``min_rnr_timer``, ``max_rd_atomic``, ``max_dest_rd_atomic``. A negotiated ``retry_cnt`` or ``rnr_retry`` is
            limited to 6; a value given here is not. ``max_rd_atomic`` can only lower the negotiated value.
        :returns: private data in the peer's reply, padded with zeros. The property `private_data` then has the same
            value.
        :raises ConnectionRejectedError: the peer rejected the connection, or does not listen on the port. `connect` may
            be called again.
        :raises UnreachableError: the peer's connection manager does not answer, or, when connecting again, the address
            cannot be resolved.
        :raises TimeoutError: the peer did not answer, or its link-layer address was not resolved, within `timeout_s`.
        :raises TransitionError: the queue pair is neither in RESET nor in INIT, or an attribute is invalid; nothing was
            done.
        :raises ValueError: the queue pair is not of type RC or belongs to another device, or `private_data` is too
            long; nothing was done. When connecting again, also if the new route uses another device: the identifier can
            then only be closed.
        :raises TypeError: the value of a numeric attribute is not an integer; nothing was done.
        :raises VerbsError: a verb failed; with EOPNOTSUPP if the queue pair belongs to the software device;
            nothing was done in this case.
        :raises QueuePairStateError: the identifier is not resolved, or was already connected; nothing was done.
        :raises BrokenResourceError: an earlier call failed for a reason other than a rejection, so that the identifier
            can only be closed; or the peer disconnected, the device was removed, or the queue pair failed during the
            call.
        :raises BusyResourceError: another call on the identifier is in flight, or a helper thread is changing the state
            of the queue pair, as in `QueuePair.establish`; nothing was done.
        :raises AffinityError: another event loop owns the channel or the queue pair; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain.
        :raises ClosedResourceError: the identifier or the queue pair is not open, or was closed during the call.
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

        This moves the queue pair from RESET or INIT to RTS and waits for the peer's confirmation. Receives that the
        peer needs immediately must be posted in INIT before this call. Unless nothing was done, the identifier can only
        be closed after this fails, times out or is cancelled.

        :param qp: queue pair of type RC on the device `device_name`.
        :param access: operations that the peer may perform, as for `QueuePair.connect`; None for none, or in INIT for
            those that were allowed on the transition to INIT.
        :param private_data: data to send to the peer, at most 196 bytes.
        :param timeout_s: time limit in seconds; None if there is no limit.
        :param attributes: values that replace the negotiated ones, as for `connect`.
        :raises UnreachableError: the peer no longer answers.
        :raises TimeoutError: the peer did not confirm the connection, or its link-layer address was not resolved,
            within `timeout_s`.
        :raises ConnectionRejectedError: the peer gave up connecting.
        :raises TransitionError: the queue pair is neither in RESET nor in INIT, or an attribute is invalid; nothing was
            done.
        :raises ValueError: the queue pair is not of type RC or belongs to another device, or `private_data` is too
            long; nothing was done.
        :raises TypeError: the value of a numeric attribute is not an integer; nothing was done.
        :raises VerbsError: a verb failed; with EOPNOTSUPP if the queue pair belongs to the software device;
            nothing was done in this case.
        :raises QueuePairStateError: the identifier is not a pending request of a listener; nothing was done.
        :raises BrokenResourceError: an earlier call failed; or the peer disconnected, the device was removed, or the
            queue pair failed during the call.
        :raises BusyResourceError: another call on the identifier is in flight, or a helper thread is changing the state
            of the queue pair, as in `QueuePair.establish`; nothing was done.
        :raises AffinityError: another event loop owns the channel or the queue pair; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain.
        :raises ClosedResourceError: the identifier or the queue pair is not open, or was closed during the call.
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

        The identifier can then only be closed. Closing an identifier whose request was neither accepted nor rejected
        also rejects the connection.

        :param private_data: data to send to the peer, at most 148 bytes.
        :raises ValueError: `private_data` is too long; nothing was done.
        :raises VerbsError: ``rdma_reject`` failed; the request is still pending.
        :raises QueuePairStateError: the identifier is not a pending request of a listener; nothing was done.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        :raises BrokenResourceError: the peer gave up connecting, the device was removed, or an earlier call failed.
        :raises BusyResourceError: another call on the identifier is in flight; nothing was done.
        :raises ClosedResourceError: the identifier is not open.
        """
        state_machine = self._owned_state_machine("rdma_reject")
        state_machine.check("reject", CmState.REQUESTED)
        self.handle.reject(_check_private_data(private_data, _MAX_REJECT_DATA))
        state_machine.state = CmState.ENDED

    # ---- Disconnecting

    async def disconnect(self, *, timeout_s: float | None = 5.0) -> None:
        """Move the queue pair to ERR, notify the peer and wait for its answer: ``rdma_disconnect``.

        If the peer has already disconnected, or the connection has failed, return immediately. If the wait is cancelled
        or times out, disconnecting is not undone.

        :param timeout_s: time limit in seconds; None if there is no limit.
        :raises QueuePairStateError: the identifier has not been connected yet.
        :raises TimeoutError: the peer did not answer within `timeout_s`; the identifier can only be closed.
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
        """Wait until either end has disconnected, the connection has failed, or the identifier is closed.

        :raises DeviceRemovedError: the device was removed.
        :raises QueuePairStateError: the identifier has not been connected yet.
        :raises AffinityError: another event loop owns the channel; nothing was done.
        :raises ClosedResourceError: the identifier is not open.
        """
        await self._connected_state_machine("rdma_get_cm_event").wait_disconnected()

    def _connected_state_machine(self, verb: str) -> CmStateMachine:
        """Return the `CmStateMachine`, after checking that the identifier is connected, or was, or has failed.

        :param verb: name of the verb, for the error message.
        :raises QueuePairStateError: the identifier has not been connected yet.
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
        :param qp: queue pair to connect.
        :param attributes: values that replace the negotiated ones.
        :param private_data: data to send to the peer.
        :param limit: maximum length of the private data, in bytes.
        :returns: a tuple of the `CmStateMachine` and a copy of the private data.
        :raises Exception: the exceptions that `connect` and `accept` list for invalid arguments and states.
        """
        state_machine = self._owned_state_machine(f"rdma_{operation}")
        state_machine.check(operation, state)
        check_queue_pair(qp, attributes)
        state_machine.check_device(qp)
        return state_machine, _check_private_data(private_data, limit)


def cm_state_machine_of(identifier: Identifier) -> CmStateMachine | None:
    """Return the `CmStateMachine` of an identifier; None if the identifier was never opened."""
    return identifier._state_machine
