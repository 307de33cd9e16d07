"""State transitions of queue pairs: single steps to INIT, RTR, RTS, SQD, ERR and RESET, and connecting to a peer."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable
from typing import Unpack

from aioverbs._core.handles import handles
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.lifecycle import OPEN
from aioverbs._lifecycle.resource import Resource
from aioverbs._providers.peer_log import log_periodically
from aioverbs._verbs import neighbour_lookup, qp_state_machine
from aioverbs._verbs.async_events import AsyncEventSource
from aioverbs._verbs.endpoint import Endpoint
from aioverbs._verbs.ports import gid_index, limits_of
from aioverbs._verbs.qp_defaults import RETRIES
from aioverbs._verbs.qp_state_machine import Limits, QpAttrs
from aioverbs._verbs.quirks import cap_max_dest_rd_atomic
from aioverbs.attributes import AddressVector, QpAttributes
from aioverbs.errors import BrokenResourceError, BusyResourceError, TransitionError, VerbsError
from aioverbs.types import AccessFlags, LinkLayer, QpState, QpType

__all__ = ["Connectable", "establish_cancellable", "init_new", "is_modify_pending", "limits_for", "move_cancellable"]

_INIT, _RTR, _RTS = QpState.INIT, QpState.RTR, QpState.RTS


class Connectable(AsyncEventSource[handles.QueuePair]):
    """Base class of queue pairs that implements their state transitions.

    Each method that makes a transition first queries the current state and then checks the attributes: missing,
    unexpected and out-of-range ones raise `TransitionError` before anything is changed. ``**attributes`` are those of
    ``ibv_modify_qp``, with the same names (see `QpAttrs`). If a required attribute is not given, a default is used,
    unless only the peer knows the value.
    """

    qp_type: QpType
    _port: int
    _gid_index: int | None

    def __init__(self, *parents: Resource) -> None:
        super().__init__(*parents)
        self._psn = random.getrandbits(24)
        self._qkey = random.getrandbits(31)  # the upper half of the range is for privileged users
        self._qp_state = QpState.RESET
        self._remote: Endpoint | None = None
        self._max_dest_rd_atomic: int | None = None  # max_dest_rd_atomic as last passed to the device
        self._connect_task: asyncio.Task[None] | None = None  # connect task, which outlives a cancelled caller

    def _in_flight(self) -> int:
        """Return the number of posted work requests, in both queues together, that have not completed.

        Subclasses implement this.
        """
        raise NotImplementedError

    def _on_transition(self, state: QpState) -> None:
        """Update the work requests after a transition of the queue pair to `state`. Subclasses override this."""

    def _shared_receive_poll(self) -> Callable[[], None] | None:
        """Return the function that polls the completion queue in which receives of a shared receive queue complete;
        None if the queue pair does not use one. Subclasses override this.
        """
        return None

    def _breaking_error(self) -> BaseException | None:
        """Return the error that has broken the queue pair since its last reset; None if there is none.

        Subclasses implement this.
        """
        raise NotImplementedError

    # ---- Current state

    @property
    def qp_state(self) -> QpState:
        """State after the last transition that this object made, or as last returned by `query`, whichever is later.

        Before the first of these, the state is RESET.
        The device moves the queue pair to ERR by itself when an error occurs; `query` returns the actual state.
        """
        return self._qp_state

    @property
    def remote_endpoint(self) -> Endpoint | None:
        """Endpoint of the peer that the queue pair was last connected to.

        None before a connection, after `to_reset`, or if the queue pair was connected with raw attributes.
        """
        return self._remote

    def query(self) -> QpAttributes:
        """Query the device for the current state and attributes of the queue pair (``ibv_query_qp``).

        :returns: the state and attributes, as a new `QpAttributes`.
        :raises ClosedResourceError: the queue pair is not open.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was done.
        :raises VerbsError: the verb failed.
        """
        found = self.handle.query()
        self._qp_state = found.qp_state
        return found

    @property
    def gid_index(self) -> int:
        """Index of the port's GID that the queue pair sends from, as given when the queue pair was made.

        If no index was given, the first use of this property chooses one: see `QueuePair`.

        :raises ValueError: an index must be chosen, and the port does not exist or has no GID.
        :raises ClosedResourceError: an index must be chosen, and the queue pair is not open.
        :raises VerbsError: an index must be chosen, and the GID table cannot be queried.
        """
        if self._gid_index is None:
            self._gid_index = gid_index(self.handle.context, self._port)
        return self._gid_index

    def local_endpoint(self) -> Endpoint:
        """Return the `Endpoint` of this queue pair, to be sent to the peer. Each `to_reset` changes the endpoint.

        On soft-RoCE, if the queue pair was connected before, the ``max_dest_rd_atomic`` of the endpoint is at most the
        value that the last connection used, to avoid a kernel bug. The exceptions of `gid_index` are raised as well.

        :raises ValueError: the port has no MTU or no GID, or no GID at the index that the queue pair was made with.
        :raises ClosedResourceError: the queue pair is not open.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`.
        :raises VerbsError: the device, the port or the GID cannot be queried.
        """
        context = self.handle.context
        port = context.query_port(self._port)
        gid = context.query_gid(self._port, self.gid_index)
        if port.link_layer is not LinkLayer.INFINIBAND and not any(gid):
            raise ValueError(
                f"port {self._port} of {context.name} has no GID at index {self.gid_index}: give the `gid_index`"
                " of an existing GID, or leave it out to have one chosen"
            )
        if not port.active_mtu:
            raise ValueError(f"port {self._port} of {context.name} has no MTU: bring its network interface up")
        limits = _capped(self, Limits.of(context.attributes, port))
        requests = "max_rd_atomic" in qp_state_machine.transition_rule(self.qp_type, _RTR, _RTS).required
        responds = "max_dest_rd_atomic" in qp_state_machine.transition_rule(self.qp_type, _INIT, _RTR).required
        return Endpoint(
            gid,
            self.handle.qp_num,
            self._psn,
            port.active_mtu,
            qp_type=self.qp_type,
            max_rd_atomic=limits.max_rd_atomic if requests else 0,
            max_dest_rd_atomic=limits.max_dest_rd_atomic if responds else 0,
            qkey=self._qkey if self.qp_type is QpType.UD else 0,
            lid=port.lid if port.link_layer is LinkLayer.INFINIBAND else 0,
        )

    def path_to(self, remote: Endpoint) -> AddressVector:
        """Return the path from this queue pair's port to a peer, as an `AddressVector`.

        To set a traffic class or a service level, change the path with ``dataclasses.replace`` and pass the result to
        `connect` or `to_rtr` as the attribute ``av``.

        :param remote: endpoint of the peer.
        :raises ValueError: no path leads to the peer (see `Endpoint.path_to`), or this queue pair's port has no GID.
        :raises ClosedResourceError: the queue pair is not open.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`.
        :raises VerbsError: the device, the port or the GID cannot be queried.
        """
        return self.local_endpoint().path_to(remote, port_num=self._port, sgid_index=self.gid_index)

    # ---- Transition to RTS

    def connect(self, remote: Endpoint, access: AccessFlags | None = None, **attributes: Unpack[QpAttrs]) -> None:
        """Connect the queue pair to a peer: move it from RESET or INIT to RTS with ``ibv_modify_qp``.

        The peer connects to this queue pair's `local_endpoint` in the same way. On RDMA devices the call may block the
        event loop while the kernel resolves the peer's address; use `establish` to avoid that.

        :param remote: endpoint of the peer.
        :param access: operations that the peer may perform through the connection: ``REMOTE_READ``, ``REMOTE_WRITE``,
            ``REMOTE_ATOMIC``. None for no operations; if the queue pair is already in INIT, None for the flags that
            were set on the transition to INIT.
        :param attributes: attributes such as ``timeout``, ``retry_cnt``, ``rnr_retry``, ``min_rnr_timer`` or ``av``. By
            default, ``av`` is the `path_to` the peer, and as many reads and atomics can be in flight as both devices
            support.
        :raises TransitionError: the queue pair is neither in RESET nor in INIT, or an attribute is out of range or does
            not apply to its type.
        :raises ValueError: the peer's type does not match, no path leads to the peer, the port has no GID, or the queue
            pair is of type UD, which is connectionless.
        :raises TypeError: both `access` and ``qp_access_flags`` are given, or the value of a numeric attribute is not
            an integer.
        :raises ClosedResourceError: the queue pair is not open.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; the queue pair stays
            in the last state that it reached.
        :raises VerbsError: a verb failed, or a receive for `QueuePair.messages` cannot be posted; the queue pair stays
            in the last state that it reached.
        """
        for wanted, changes in self._plan_connect(remote, access, attributes):
            self._transition(wanted, changes, remote)

    async def establish(
        self, remote: Endpoint, access: AccessFlags | None = None, **attributes: Unpack[QpAttrs]
    ) -> None:
        """Connect the queue pair to a peer as `connect` does, without blocking the event loop.

        On RDMA devices the kernel resolves the peer's address when a queue pair moves to RTR, which takes seconds if
        the peer does not answer. A helper thread calls that verb; each loop has at most 256 helper threads. While the
        verb is in progress, every other use of the queue pair raises `BusyResourceError`, except that closing it waits
        for the verb. A cancellation is raised only after the verb has ended; the queue pair then stays in the last
        state that it reached. Messages that arrive in the meantime are received, but no receives are posted: those that
        wait for a slot, or whose memory was released, are posted when the verb has ended.

        :param remote: as for `connect`.
        :param access: as for `connect`.
        :param attributes: as for `connect`.
        :raises TransitionError: as for `connect`.
        :raises ValueError: as for `connect`.
        :raises TypeError: as for `connect`.
        :raises ClosedResourceError: the queue pair is not open, or was closed while it was being connected.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises BusyResourceError: a helper thread is already changing the state; nothing was done.
        :raises ConcurrentAccessError: as for `connect`.
        :raises VerbsError: as for `connect`; with EAGAIN, if no helper thread can be started.
        :raises BrokenResourceError: the completion queue or a receive failed while the queue pair was being connected.
        :raises RuntimeError: on an RDMA device: no asyncio event loop is running.
        """
        await self._run_plan(self._plan_connect(remote, access, attributes), remote)

    def _plan_connect(
        self, remote: Endpoint, access: AccessFlags | None, attributes: QpAttrs
    ) -> list[tuple[QpState, QpAttrs]]:
        """Return the transitions that connect the queue pair to a peer, and the attributes of each; change nothing.

        This raises the exceptions that `connect` lists, except those of ``ibv_modify_qp``.

        :param remote: endpoint of the peer.
        :param access: operations that the peer may perform; None as for `connect`.
        :param attributes: attributes given by the caller; `access` is added to them.
        :returns: pairs of a state to move to and its attributes, in order.
        """
        return self._plan_connect_from(self.query().qp_state, remote, access, attributes)

    def _plan_connect_from(
        self, found: QpState, remote: Endpoint, access: AccessFlags | None, attributes: QpAttrs
    ) -> list[tuple[QpState, QpAttrs]]:
        """Do the work of `_plan_connect` for a queue pair that was found in a state."""
        if access is not None:
            if "qp_access_flags" in attributes:
                raise TypeError("`access` and `qp_access_flags` set the same attribute: give one of them")
            attributes["qp_access_flags"] = access
        states = qp_state_machine.path(self.qp_type, _INIT if found is _INIT else QpState.RESET, _RTS)
        return self._plan(found, states, attributes, remote)

    def activate(self, **attributes: Unpack[QpAttrs]) -> None:
        """Move a queue pair of type UD from RESET or INIT to RTS, to send and receive datagrams: ``ibv_modify_qp``.

        :param attributes: attributes such as ``qkey``, the key that datagrams to this queue pair must carry,
            0..2**32-1. By default, a random key is used, which the `local_endpoint` contains.
        :raises TransitionError: the queue pair is neither in RESET nor in INIT, or an attribute is out of range or does
            not apply to UD.
        :raises ValueError: the queue pair is not of type UD.
        :raises TypeError: the value of a numeric attribute is not an integer.
        :raises ClosedResourceError: the queue pair is not open.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; the queue pair stays
            in the last state that it reached.
        :raises VerbsError: a verb failed, or a receive for `QueuePair.messages` cannot be posted; the queue pair stays
            in the last state that it reached.
        """
        found = self.query().qp_state
        if self.qp_type is not QpType.UD:
            raise ValueError(f"{self!r} is of type {self.qp_type.name}: connect() it with a remote endpoint")
        states = qp_state_machine.path(self.qp_type, _INIT if found is _INIT else QpState.RESET, _RTS)
        self._transition_to(found, states, attributes)

    # ---- Single transitions

    def to_init(self, **attributes: Unpack[QpAttrs]) -> None:
        """Move the queue pair to INIT, in which receives can be posted: ``ibv_modify_qp``.

        If it is already in INIT, only change its attributes.

        :param attributes: attributes to set, named as in `QpAttrs`.
        :raises TransitionError: the transition is not possible from the current state or with these attributes.
        :raises TypeError: the value of a numeric attribute is not an integer.
        :raises ClosedResourceError: the queue pair is not open.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was done, or
            the queue pair is in INIT, and not all receives for `QueuePair.messages` were posted.
        :raises VerbsError: the verb failed, and nothing was changed; or the queue pair is in INIT, but a receive for
            `QueuePair.messages` cannot be posted.
        """
        self._transition_to(self.query().qp_state, (_INIT,), attributes)

    def to_rtr(self, remote: Endpoint | None = None, **attributes: Unpack[QpAttrs]) -> None:
        """Move the queue pair to RTR, in which it receives messages: ``ibv_modify_qp``.

        On RDMA devices the call may block the event loop while the kernel resolves the peer's address.

        :param remote: endpoint of the peer; None if `attributes` contains the peer's attributes or the type is UD.
        :param attributes: attributes to set, named as in `QpAttrs`.
        :raises TransitionError: the transition is not possible from the current state or with these attributes.
        :raises TypeError: the value of a numeric attribute is not an integer.
        :raises ValueError: `remote` is given, and its type does not match, no path leads to it, the port has no GID, or
            the queue pair is of type UD.
        :raises ClosedResourceError: the queue pair is not open.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was done.
        :raises VerbsError: the verb failed; nothing was changed.
        """
        self._transition_to(self.query().qp_state, (_RTR,), attributes, remote)

    def to_rts(self, **attributes: Unpack[QpAttrs]) -> None:
        """Move the queue pair to RTS, in which it also sends messages: ``ibv_modify_qp``.

        If it is already in RTS, only change its attributes. If it is in SQD or SQE, it resumes sending.

        :param attributes: attributes to set, named as in `QpAttrs`.
        :raises TransitionError: the transition is not possible from the current state or with these attributes.
        :raises TypeError: the value of a numeric attribute is not an integer.
        :raises ClosedResourceError: the queue pair is not open.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was done.
        :raises VerbsError: the verb failed; nothing was changed.
        """
        self._transition_to(self.query().qp_state, (_RTS,), attributes)

    def to_sqd(self, **attributes: Unpack[QpAttrs]) -> None:
        """Move the queue pair to SQD, in which sends already started finish and no new ones start: ``ibv_modify_qp``.

        If ``en_sqd_async_notify`` is set, the device raises ``EventType.SQ_DRAINED`` when all sends have finished.
        After that, a further call to this method can change attributes such as the path, timeouts, and the numbers of
        reads and atomics in flight. `to_rts` resumes sending.

        :param attributes: attributes to set, named as in `QpAttrs`.
        :raises TransitionError: the transition is not possible from the current state or with these attributes, or
            the queue pair is already in SQD and its send queue is still draining.
        :raises TypeError: the value of a numeric attribute is not an integer.
        :raises ClosedResourceError: the queue pair is not open.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was done.
        :raises VerbsError: the verb failed; nothing was changed.
        """
        found = self.query()
        self._transition_to(found.qp_state, (QpState.SQD,), attributes, draining=found.sq_draining)

    def to_error(self) -> None:
        """Move the queue pair to ERR: ``ibv_modify_qp``.

        All work requests in flight are flushed: awaiting them raises `WorkCompletionError`. In ERR, the methods that
        post requests raise `BrokenResourceError`.

        :raises TransitionError: the queue pair is in RESET, where there is nothing to flush.
        :raises ClosedResourceError: the queue pair is not open.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was done.
        :raises VerbsError: the verb failed; nothing was changed.
        """
        self._transition_to(self.query().qp_state, (QpState.ERR,), QpAttrs())

    def to_reset(self) -> None:
        """Move the queue pair to RESET, from which it can be connected again: ``ibv_modify_qp``.

        The next connection starts with a new random sequence number (PSN), which `local_endpoint` contains. A queue
        pair with a shared receive queue is moved to ERR first, and its completion queue is polled: messages that have
        arrived end the receives that they took, whose completions a reset would discard.

        :raises BusyResourceError: work requests are in flight, which would never complete, or a helper thread is
            changing the state, as in `establish`; nothing was done.
        :raises ClosedResourceError: the queue pair is not open.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was done, or
            a queue pair with a shared receive queue is in ERR.
        :raises VerbsError: the verb failed; nothing was changed, or a queue pair with a shared receive queue is in ERR.
        """
        found = self.query().qp_state
        if count := self._in_flight():
            raise BusyResourceError(
                f"{self!r} has {count} work requests in flight, which would never complete: call to_error() and wait"
            )
        if (poll := self._shared_receive_poll()) is not None:
            if found not in (QpState.RESET, QpState.ERR):
                self._transition_to(found, (QpState.ERR,), QpAttrs())
                found = QpState.ERR
            poll()
        self._transition_to(found, (QpState.RESET,), QpAttrs())
        self._remote = None
        self._psn = random.getrandbits(24)  # late packets of the old connection are then out of sequence

    # ---- Implementation

    def _check_peer(self, remote: Endpoint) -> None:
        """Check that the types of the queue pair and of a peer's endpoint allow a connection.

        :raises ValueError: the queue pair is of type UD, or the peer's type does not match.
        """
        if self.qp_type is QpType.UD:
            raise ValueError(
                f"{self!r} is of type UD, which is connectionless: activate() it and send to address handles"
            )
        other = qp_state_machine.COUNTERPART[self.qp_type]
        if remote.qp_type != other:
            raise ValueError(
                f"{self!r} is of type {self.qp_type.name} and connects to type {other.name}, not {remote.qp_type.name}"
            )

    def _defaults(self, limits: Limits, remote: Endpoint | None) -> QpAttrs:
        """Return a `QpAttrs` with default values for all transitions; the caller picks those that it needs.

        :param limits: limits of the device port and of this queue pair.
        :param remote: endpoint of the peer that the queue pair is about to connect to or is connected to; None if there
            is no peer: then ``max_rd_atomic`` and ``max_dest_rd_atomic`` are 1, and attributes that only a peer knows
            are left out.
        """
        defaults = QpAttrs(
            pkey_index=0,
            port_num=self._port,
            qp_access_flags=AccessFlags.LOCAL_WRITE,
            qkey=self._qkey,
            sq_psn=self._psn,
            max_rd_atomic=1,
            max_dest_rd_atomic=1,
            **RETRIES,
        )
        if remote is not None:
            # As many as both ends support: a requester that exceeds the limit of its responder breaks the connection.
            defaults["max_rd_atomic"] = min(limits.max_rd_atomic, remote.max_dest_rd_atomic)
            defaults["max_dest_rd_atomic"] = min(limits.max_dest_rd_atomic, remote.max_rd_atomic)
            defaults["dest_qp_num"] = remote.qp_num
            defaults["rq_psn"] = remote.psn
            defaults["path_mtu"] = min(limits.mtu, remote.mtu)
        return defaults

    def _transition_to(
        self,
        found: QpState,
        states: Iterable[QpState],
        attributes: QpAttrs,
        remote: Endpoint | None = None,
        *,
        draining: bool = False,
    ) -> None:
        """Plan transitions and make them in this thread, with the exceptions of `_plan` and `_transition`."""
        for wanted, changes in self._plan(found, states, attributes, remote, draining=draining):
            self._transition(wanted, changes, remote)

    def _plan(
        self,
        found: QpState,
        states: Iterable[QpState],
        attributes: QpAttrs,
        remote: Endpoint | None,
        *,
        draining: bool = False,
    ) -> list[tuple[QpState, QpAttrs]]:
        """Return the attributes for a sequence of transitions, with defaults added and all values checked.

        The queue pair is not changed.

        :param found: current state.
        :param states: states to move to, in order.
        :param attributes: attributes given by the caller.
        :param remote: endpoint of the peer to connect to; None if the transitions do not connect the queue pair, or
            `attributes` contains the peer's attributes.
        :param draining: whether the send queue is in SQD and still has requests in flight.
        :returns: pairs of a state to move to and its attributes, in order.
        :raises TransitionError: a transition is not possible, or an attribute is missing, unexpected or out of range.
        :raises ValueError: the peer's type does not match, no path leads to the peer, or the port has no GID.
        :raises TypeError: the value of a numeric attribute is not an integer.
        :raises ClosedResourceError: the queue pair is not open.
        :raises VerbsError: the device or the port cannot be queried.
        """
        if remote is not None:
            self._check_peer(remote)
        port_limits = limits_of(self.handle.context, self._port)
        limits = _capped(self, port_limits)
        defaults = self._defaults(limits, remote if remote is not None else self._remote)
        if remote is not None and "av" not in attributes:
            defaults["av"] = self.path_to(remote)
        try:
            return qp_state_machine.plan(
                self.qp_type, found, states, attributes, defaults=defaults, limits=limits, draining=draining
            )
        except TransitionError as error:
            error.subject = repr(self)
            if limits != port_limits and "max_dest_rd_atomic" in error.wrong:
                error.wrong["max_dest_rd_atomic"] += "; soft-RoCE cannot exceed the first value: make a new queue pair"
            raise

    async def _run_plan(self, plan: Iterable[tuple[QpState, QpAttrs]], remote: Endpoint | None = None) -> None:
        """Make planned transitions without blocking the event loop, with the exceptions that `establish` lists.

        :param plan: pairs of a state to move to and its attributes, as returned by `_plan`.
        :param remote: endpoint of the peer to connect to, as passed to `_plan`.
        """
        for wanted, changes in plan:
            if wanted is _RTR and neighbour_lookup.may_block(self.handle.context):
                await self._transition_in_helper(wanted, changes, remote)
            else:
                self._transition(wanted, changes, remote)

    async def _run_plan_cancellable(self, plan: list[tuple[QpState, QpAttrs]], remote: Endpoint | None = None) -> None:
        """Make planned transitions as `_run_plan` does, but raise a cancellation immediately.

        If a helper thread is inside a verb when the cancellation is raised, that verb ends later, and
        `is_modify_pending` returns True until it has ended. This raises the exceptions that `establish` lists.
        """
        if not neighbour_lookup.may_block(self.handle.context):
            await self._run_plan(plan, remote)
            return
        self._connect_task = task = running_loop().create_task(self._run_plan(plan, remote))
        task.add_done_callback(_retrieve_exception)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise
        task.result()

    def _transition(self, wanted: QpState, changes: QpAttrs, remote: Endpoint | None) -> None:
        """Make one planned transition in this thread: ``ibv_modify_qp``.

        :param wanted: state to move to.
        :param changes: attributes of the transition.
        :param remote: endpoint of the peer, which becomes the `remote_endpoint` on a transition to RTR; None if the
            queue pair is connected with raw attributes.
        :raises VerbsError: the verb failed, and the state is unchanged; or the state is now INIT, but a receive for
            `QueuePair.messages` cannot be posted.
        :raises ClosedResourceError: the queue pair is not open.
        :raises AffinityError: another event loop owns the queue pair; nothing was done.
        :raises BusyResourceError: another thread is changing the state of the queue pair; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was done, or
            the state is now INIT, and not all receives for `QueuePair.messages` were posted.
        """
        self._max_dest_rd_atomic = changes.get(
            "max_dest_rd_atomic", self._max_dest_rd_atomic
        )  # a verb that fails may have applied it
        self.handle.modify(wanted, **changes)
        self._transition_done(wanted, changes, remote)

    async def _transition_in_helper(self, wanted: QpState, changes: QpAttrs, remote: Endpoint | None) -> None:
        """Make one planned transition in a helper thread, with the parameters and exceptions of `_transition`.

        A cancellation is raised only after the verb has ended; the transition is recorded if the verb succeeded.

        :raises VerbsError: the verb failed; with EAGAIN, if no helper thread can be started.
        :raises ClosedResourceError: the queue pair was closed before the verb had ended.
        :raises BrokenResourceError: the completion queue or a receive failed before the verb had ended.
        """
        self._max_dest_rd_atomic = changes.get("max_dest_rd_atomic", self._max_dest_rd_atomic)
        before, forks_before = self._breaking_error(), forks.count
        change = self.handle.begin_modify(wanted, **changes)
        try:
            await neighbour_lookup.run_in_helper_thread("ibv_modify_qp", change.run)
        except GeneratorExit:  # the loop was closed in between: closing the queue pair ends the change
            raise
        except BaseException:  # a cancellation, or no thread could be started
            if forks.count == forks_before:  # in a forked child, the verb does not end
                with contextlib.suppress(VerbsError):
                    if change.end():
                        self._transition_done(wanted, changes, remote)
            raise
        change.end()
        self._transition_done(wanted, changes, remote)
        self._check_open()
        broken = self._breaking_error()
        if broken is not None and broken is not before:
            raise BrokenResourceError(f"{self!r} failed while connecting: {broken}") from broken

    def _transition_done(self, wanted: QpState, changes: QpAttrs, remote: Endpoint | None) -> None:
        """Record the new state after a successful transition, and the attributes that later calls need.

        This raises the exceptions of `_on_transition`.
        """
        self._qp_state = wanted
        self._on_transition(wanted)
        self._psn = changes.get("sq_psn", self._psn)
        self._qkey = changes.get("qkey", self._qkey)
        if wanted is _RTR:
            self._remote = remote
            if self.state is OPEN:  # otherwise the queue pair is being closed
                log_periodically(self.handle.context)


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a task, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


def init_new(qp: Connectable, access: AccessFlags) -> None:
    """Move a queue pair that has just been opened to INIT, as `Connectable.to_init` does, without querying its state.

    :param qp: queue pair of type RC, in RESET.
    :param access: operations that the peer may perform.
    :raises VerbsError: the verb failed; nothing was changed.
    :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was done.
    """
    qp._transition(_INIT, QpAttrs(pkey_index=0, port_num=qp._port, qp_access_flags=access), None)


def fail_now(qp: Connectable) -> None:
    """Move a queue pair to ERR, as `Connectable.to_error` does, without querying its state.

    :raises Exception: whatever `Connectable.to_error` raises, but `VerbsError` if the queue pair is in RESET.
    """
    qp._transition(QpState.ERR, QpAttrs(), None)


async def establish_cancellable(qp: Connectable, remote: Endpoint, attributes: QpAttrs) -> None:
    """Connect a queue pair as `Connectable.establish` does, but raise a cancellation immediately.

    The queue pair is in the state of its `Connectable.qp_state`, which is not queried. If a helper thread is inside a
    verb when the cancellation is raised, that verb ends later, and `is_modify_pending` returns True for the queue pair
    until it has ended. This raises the exceptions that `Connectable.establish` lists.
    """
    await qp._run_plan_cancellable(qp._plan_connect_from(qp.qp_state, remote, None, attributes), remote)


async def move_cancellable(qp: Connectable, state: QpState, attributes: QpAttrs) -> None:
    """Move a queue pair to another state without blocking the event loop; raise a cancellation immediately.

    If a helper thread is inside a verb when the cancellation is raised, that verb ends later, as for
    `establish_cancellable`. Other exceptions are those that `Connectable.establish` lists.

    :param qp: queue pair.
    :param state: state to move to, by one transition from the current state.
    :param attributes: attributes of the transition, including those of the peer.
    :raises TransitionError: the transition is not possible from the current state or with these attributes.
    """
    await qp._run_plan_cancellable(qp._plan(qp.query().qp_state, (state,), attributes, None))


def is_modify_pending(qp: Connectable) -> bool:
    """Return whether a helper thread may still be inside a verb on a queue pair after a cancelled call.

    This concerns calls to `establish_cancellable` and `move_cancellable`. How long the verb takes is unknown.
    """
    return qp._connect_task is not None and not qp._connect_task.done()


def limits_for(qp: Connectable, port: int) -> Limits:
    """Return the `Limits` of device port `port`, lowered on soft-RoCE if an earlier connection of `qp` requires that.

    :raises ClosedResourceError: the queue pair is not open.
    :raises VerbsError: the device or the port cannot be queried.
    """
    return _capped(qp, limits_of(qp.handle.context, port))


def _capped(qp: Connectable, limits: Limits) -> Limits:
    """Return the limits of a device port, lowered as `limits_for` says."""
    return cap_max_dest_rd_atomic(limits, qp.handle.context, qp._max_dest_rd_atomic)
