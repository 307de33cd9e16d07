"""State machine of one identifier: waits for events of the connection manager and moves the queue pair accordingly.

active   NEW --resolve--> RESOLVED --connect--> CONNECTED
         RESOLVED --peer rejects--> REJECTED --resolve or connect--> NEW (with a new rdma_cm_id)
passive  REQUESTED --accept--> CONNECTED
         REQUESTED --reject--> ENDED
both     CONNECTED --disconnect--> DISCONNECTING --peer answers--> ENDED
         CONNECTED --peer disconnects--> ENDED
         any --error, timeout, cancellation, device removed--> FAILED
"""

import asyncio
import contextlib
import enum
import errno
import functools
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import cast

import anyio

from aioverbs._core.handles import rdma_cm as core
from aioverbs._durations import duration
from aioverbs._lifecycle.affinity import CrossLoopCondition
from aioverbs._verbs import qp_state_machine
from aioverbs._verbs.qp_modify import limits_for, move_cancellable
from aioverbs._verbs.qp_state_machine import QpAttrs
from aioverbs._verbs.queue_pair import QueuePair, qp_work_state_of
from aioverbs.errors import (
    AffinityError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    ConnectionRejectedError,
    DeviceRemovedError,
    QueuePairStateError,
    UnreachableError,
    VerbsError,
)
from aioverbs.rdma_cm.events import CmEventType, Dispatcher
from aioverbs.rdma_cm.negotiation import negotiate
from aioverbs.types import AccessFlags, QpState, QpType

__all__ = ["CmState", "CmStateMachine", "error_for_event"]

_NO_ANSWER = "the peer did not answer"
_DISCONNECT_TIMEOUT_S = 1.0  # limit of waiting for the peer's answer when closing


class CmState(enum.Enum):
    """States of an identifier."""

    NEW = "new"
    RESOLVED = "resolved"
    REQUESTED = "requested by a peer"
    REJECTED = "rejected"
    """The peer rejected the request. The rdma_cm_id is used up; a new one may connect."""
    CONNECTED = "connected"
    DISCONNECTING = "disconnecting"
    ENDED = "ended"
    FAILED = "failed"


# Events that need no action: the address of a bonded interface moved, or the queue pair's number may be used again.
_IGNORED_EVENTS = {CmEventType.ADDR_CHANGE, CmEventType.TIMEWAIT_EXIT}


def error_for_event(verb: str, event: core.Event) -> Exception:
    """Return the exception that describes an event that was received instead of the expected one.

    :param verb: name of the verb, for the error message.
    :param event: the event that was received.
    :returns: `ConnectionRejectedError`, `TimeoutError`, `UnreachableError`, `DeviceRemovedError` or
        `BrokenResourceError`, depending on the type of the event.
    """
    kind, number = event.event_type, abs(event.status)
    if kind == CmEventType.REJECTED:
        return ConnectionRejectedError(event.status, event.private_data)
    if kind in (CmEventType.ADDR_ERROR, CmEventType.ROUTE_ERROR) and number == errno.ETIMEDOUT:
        return TimeoutError(f"{verb}: no answer in time")
    if kind in (CmEventType.ADDR_ERROR, CmEventType.ROUTE_ERROR, CmEventType.UNREACHABLE, CmEventType.CONNECT_ERROR):
        return UnreachableError(verb, number or errno.EIO)
    if kind == CmEventType.DEVICE_REMOVAL:
        return DeviceRemovedError(f"{verb}: the device was removed")
    if kind == CmEventType.DISCONNECTED:
        return BrokenResourceError(f"{verb}: the peer disconnected")
    return BrokenResourceError(f"{verb}: unexpected event {kind} of librdmacm, status {event.status}")


class CmStateMachine:
    """State machine of one identifier.

    The lifecycle refers to this object instead of the user's `Identifier`, so that an unused identifier can be garbage
    collected.

    :param handle: handle of the rdma_cm_id.
    :param dispatcher: dispatcher of the channel, which passes events here.
    :param condition: notified when the state changes or an event arrives.
    :param state: initial state.
    """

    def __init__(
        self,
        handle: core.Identifier,
        dispatcher: Dispatcher,
        condition: CrossLoopCondition,
        state: CmState = CmState.NEW,
    ) -> None:
        self.handle = handle
        self.state = state
        self.private_data = b""
        self._dispatcher = dispatcher
        self._condition = condition
        self._busy = False
        self._timeout_cause = _NO_ANSWER
        self._closed = False
        self._events: deque[core.Event] = deque()  # events not yet expected by a step
        self._failure: Exception | None = None
        self._qp: QueuePair | None = None  # queue pair that this connection moved beyond INIT
        self._on_end: Callable[[Exception], object] | None = None
        self._disconnect_deadline = 0.0
        dispatcher.receivers[handle] = self

    def destroy(self) -> None:
        """Stop receiving events and move the queue pair to ERR, if it was moved beyond INIT.

        The lifecycle calls this before it destroys the rdma_cm_id.
        """
        self._closed = True
        self._dispatcher.receivers.pop(self.handle, None)
        self._flush()
        self._condition.notify()

    # ---- Events

    def on_event(self, event: core.Event) -> None:
        """Handle an event of this identifier. This is called on the channel's event loop.

        The removal of the device is handled immediately. If a step is in progress, other events are queued for that
        step's calls to `expect`; otherwise they are handled immediately. ADDR_CHANGE and TIMEWAIT_EXIT are ignored.
        """
        if event.event_type == CmEventType.DEVICE_REMOVAL:
            self.fail(error_for_event("the connection", event))
        elif event.event_type not in _IGNORED_EVENTS:
            self._events.append(event)
            if not self._busy:
                self._handle_unexpected_events()
        self._condition.notify()

    def fail(self, error: Exception) -> None:
        """Set the state to FAILED, because the device was removed or the channel failed; end the connection.

        If the state is already ENDED or FAILED, it is not changed.

        :param error: exception that waiting calls raise, and that later calls report as the cause.
        """
        self._end(CmState.FAILED, error)

    def _handle_unexpected_events(self) -> None:
        """Handle queued events that no step has consumed.

        DISCONNECTED sets the state to ENDED if connected, and is ignored otherwise. ESTABLISHED is ignored. Any other
        event sets the state to FAILED.
        """
        while self._events:
            event = self._events.popleft()
            was_connected = self.state in (CmState.CONNECTED, CmState.DISCONNECTING)
            if was_connected and event.event_type == CmEventType.DISCONNECTED:
                if self.state is CmState.CONNECTED:
                    with contextlib.suppress(VerbsError):  # the peer may have stopped waiting for the answer
                        self.handle.disconnect()
                self._end(CmState.ENDED)
            elif event.event_type not in (CmEventType.ESTABLISHED, CmEventType.DISCONNECTED):
                self._end(CmState.FAILED, error_for_event("the connection", event))

    def _end(self, state: CmState, failure: Exception | None = None) -> None:
        """Set the state to ENDED, FAILED or REJECTED and call the callback of `watch` with the result of `_end_cause`.

        If there is no callback, move the queue pair to ERR. A state of ENDED or FAILED is not changed.

        :param state: the new state.
        :param failure: exception that later calls report as the cause; None if the connection ended without an error.
        """
        if self.state not in (CmState.ENDED, CmState.FAILED):
            self.state, self._failure = state, failure
        if self._on_end is not None:
            self._on_end(self._end_cause())
        else:
            self._flush()
        self._condition.notify()

    def watch(self, on_end: Callable[[Exception], object] | None) -> None:
        """Set a callback for the end of the connection: the peer disconnects, the device is removed or a step fails.

        The callback is called with the exception that describes the cause. If the connection has already ended, it is
        called immediately. The callback must move the queue pair to ERR, because the state machine then does not.

        :param on_end: the callback; None to remove it, so that the state machine moves the queue pair to ERR.
        """
        self._on_end = on_end
        if on_end is not None and self.state in (CmState.ENDED, CmState.FAILED):
            on_end(self._end_cause())

    def _end_cause(self) -> Exception:
        """Return the failure that ended the connection, or else an exception that says that the peer disconnected."""
        return self._failure or BrokenResourceError("the peer disconnected")

    def _flush(self) -> None:
        """Move the queue pair to ERR, so that its work requests end; do nothing if it was not moved beyond INIT."""
        qp, self._qp = self._qp, None
        if qp is not None:
            self._to_error(qp)

    def _to_error(self, qp: QueuePair) -> None:
        """Move a queue pair to ERR; if another thread is inside a verb on it, schedule another attempt.

        Do nothing if the queue pair is already in RESET or ERR. No exception is raised if the queue pair is closed, its
        device is lost, or another event loop has taken it over.
        """
        try:
            if qp.query().qp_state not in (QpState.RESET, QpState.ERR):
                qp.to_error()
        except ConcurrentAccessError:  # another thread is inside a verb on the unlocked domain: retry soon
            self._dispatcher.loop.call_soon(self._to_error, qp)
        except BusyResourceError:  # a helper thread is inside ibv_modify_qp: retry when it has ended
            work = qp_work_state_of(qp)
            assert work is not None
            assert work.send_queue is not None
            work.send_queue.when_resumed(self._dispatcher.loop, functools.partial(self._to_error, qp))
        except (ClosedResourceError, VerbsError, AffinityError):
            return  # closed, or the device is lost, or another loop took over because this one was closed

    # ---- Steps

    @contextlib.asynccontextmanager
    async def step(self, operation: str, needed: CmState, timeout_s: float | None) -> AsyncIterator[None]:
        """Return an async context manager that executes its block as one step of the state machine.

        An exception, a cancellation or a timeout in the block sets the state to FAILED; a rejection by the peer in the
        state RESOLVED sets it to REJECTED. The block sets the state that follows a successful step. Other exceptions of
        the block propagate unchanged.

        :param operation: name of the step, for error messages.
        :param needed: state that the identifier must be in.
        :param timeout_s: time limit for the block, in seconds; None if there is no limit.
        :returns: the context manager, whose value is None.
        :raises TimeoutError: the time limit has passed.
        :raises QueuePairStateError: as for `check`.
        :raises BrokenResourceError: as for `check`.
        :raises BusyResourceError: as for `check`.
        """
        self.check(operation, needed)
        self._busy = True
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                yield
        except BaseException as error:
            is_rejected = isinstance(error, ConnectionRejectedError) and self.state is CmState.RESOLVED
            state = CmState.REJECTED if is_rejected else CmState.FAILED
            self._end(state, error if isinstance(error, Exception) else None)
            if isinstance(error, TimeoutError) and limit.expired():
                assert timeout_s is not None
                raise TimeoutError(f"{operation}: {self._timeout_cause} within {duration(timeout_s)}") from None
            raise
        finally:
            self._busy = False
            self._handle_unexpected_events()

    def check(self, operation: str, needed: CmState) -> None:
        """Check that a step can begin: the state is `needed`, and no other step is in progress.

        The state REJECTED is accepted in place of NEW and RESOLVED, because a rejected identifier can resolve or
        connect again.

        :param operation: name of the step, for error messages.
        :param needed: state that the identifier must be in.
        :raises QueuePairStateError: the identifier is in another state.
        :raises BrokenResourceError: an earlier step failed.
        :raises BusyResourceError: another step is in progress.
        """
        if self._busy:
            raise BusyResourceError(f"{operation}: another call is in flight on this identifier")
        if self.state is needed or (self.state is CmState.REJECTED and needed in (CmState.NEW, CmState.RESOLVED)):
            return
        if self._failure is not None and self.state is not CmState.REJECTED:
            raise BrokenResourceError(
                f"{operation}: the identifier failed before and can only be closed: {self._failure}"
            ) from self._failure
        raise QueuePairStateError(f"{operation}: the identifier must be {needed.value}, but is {self.state.value}")

    async def expect(self, kind: CmEventType, verb: str) -> core.Event:
        """Wait for the next event of this identifier and return it, after checking that its type is `kind`.

        :param kind: type of the expected event.
        :param verb: name of the verb, for error messages.
        :raises ClosedResourceError: the identifier was closed while this call was waiting.
        :raises Exception: if an event of another type arrives, the exception that `error_for_event` returns for it; if
            the identifier fails, the exception that describes the failure.
        """
        await self._condition.wait_while(lambda: not (self._events or self._failure or self._closed))
        self._check_usable(verb)
        event = self._events.popleft()
        if event.event_type != kind:
            raise error_for_event(verb, event)
        return event

    def _check_usable(self, verb: str) -> None:
        """Check that the identifier was not closed and has not failed.

        :param verb: name of the verb, for the error message.
        :raises ClosedResourceError: the identifier was closed.
        :raises Exception: if the identifier has failed, the exception that describes the failure.
        """
        if self._closed:
            raise ClosedResourceError(f"{verb}: the identifier was closed during the call")
        if self._failure is not None:
            raise self._failure

    def check_device(self, qp: QueuePair) -> None:
        """Check that a queue pair belongs to the device through which the peer is reached.

        :raises ValueError: the queue pair belongs to another device.
        :raises ClosedResourceError: the queue pair or the identifier is not open.
        """
        name = self.handle.device_name
        if name != qp.handle.context.name:
            raise ValueError(f"{qp!r} is on device {qp.handle.context.name}, but the route to the peer uses {name}")

    def to_init(self, qp: QueuePair, access: AccessFlags | None) -> None:
        """Move a queue pair to INIT, with the P_Key index and the port that librdmacm supplies.

        :param qp: the queue pair.
        :param access: operations that the peer may perform; None for none, or if the queue pair is already in INIT, for
            those that were allowed before.
        :raises VerbsError: a verb failed.
        :raises TransitionError: the queue pair is neither in RESET nor in INIT.
        :raises ClosedResourceError: the queue pair is not open.
        :raises Exception: other exceptions are those of `QueuePair.to_init`.
        """
        proposed = self.handle.init_qp_attr(QpState.INIT)
        changes = QpAttrs(pkey_index=proposed.get("pkey_index", 0), port_num=proposed.get("port_num", 1))
        if access is not None:
            changes["qp_access_flags"] = access
        qp.to_init(**changes)

    async def to_rts(self, qp: QueuePair, overrides: QpAttrs) -> QpAttrs:
        """Move a queue pair from INIT to RTS with the negotiated attributes.

        As with `QueuePair.establish`, the event loop is not blocked. A cancellation is raised immediately, even if a
        verb is in progress.

        :param qp: the queue pair.
        :param overrides: attributes that replace negotiated ones.
        :returns: the attributes that were applied.
        :raises ClosedResourceError: the queue pair is not open, or the identifier was closed during the call.
        :raises Exception: if the identifier failed during the call, the exception that describes the failure; other
            exceptions are those of `QueuePair.establish`.
        :raises VerbsError: a verb failed.
        """
        limits = limits_for(qp, self.handle.port_num)
        self._qp = qp
        applied = QpAttrs()
        for before, after in itertools.pairwise((QpState.INIT, QpState.RTR, QpState.RTS)):
            rule = qp_state_machine.transition_rule(QpType.RC, before, after)
            names = rule.required | rule.optional
            proposed = self.handle.init_qp_attr(after)
            applicable = cast(QpAttrs, {name: value for name, value in overrides.items() if name in names})
            changes = negotiate(proposed, applicable, limits)
            self._timeout_cause = "the device did not resolve the peer's link-layer address"
            await move_cancellable(qp, after, changes)
            self._timeout_cause = _NO_ANSWER
            self._check_usable("ibv_modify_qp")
            applied.update(changes)
        return applied

    def mark_connected(self) -> None:
        """Set the state to CONNECTED. Events that arrived during the current step are handled when the step ends."""
        self.state = CmState.CONNECTED

    # ---- Disconnecting

    def disconnect(self) -> None:
        """If connected, move the queue pair to ERR and notify the peer, without waiting for its answer.

        Call `wait_disconnected` to wait for the answer. If the verb fails, the state becomes ENDED. Do nothing if not
        connected.
        """
        if self.state is not CmState.CONNECTED:
            return
        self.state = CmState.DISCONNECTING
        self._disconnect_deadline = time.monotonic() + _DISCONNECT_TIMEOUT_S
        self._flush()
        try:
            self.handle.disconnect()
        except VerbsError:  # the peer disconnected before, or the device is gone; an event reports which
            self._end(CmState.ENDED)

    async def wait_disconnected(self) -> None:
        """Wait until the identifier is no longer connected or is closed; return immediately if it is not connected.

        :raises DeviceRemovedError: the device was removed.
        """
        await self._condition.wait_while(
            lambda: self.state in (CmState.CONNECTED, CmState.DISCONNECTING) and not self._closed
        )
        if isinstance(self._failure, DeviceRemovedError):
            raise self._failure

    async def drain(self) -> None:
        """Disconnect and wait at most `_DISCONNECT_TIMEOUT_S`, from the start of disconnecting, for the peer's answer.

        `_DISCONNECT_TIMEOUT_S` is 1 s. Closing the identifier awaits this first. No exception is raised if the peer
        does not answer.
        """
        self.disconnect()
        with anyio.move_on_after(max(0.0, self._disconnect_deadline - time.monotonic())):
            await self._condition.wait_while(lambda: self.state is CmState.DISCONNECTING)
