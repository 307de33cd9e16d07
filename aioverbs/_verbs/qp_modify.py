"""The states of a queue pair, by hand and all the way: to INIT, RTR and RTS, to a peer, and back."""

import asyncio
import contextlib
import random
from collections.abc import Iterable
from typing import Unpack

from aioverbs._core.handles import handles
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.lifecycle import OPEN
from aioverbs._lifecycle.resource import Resource
from aioverbs._providers.peer_log import attend
from aioverbs._verbs import neighbour_lookup, qp_state_machine
from aioverbs._verbs.async_events import AsyncEventSource
from aioverbs._verbs.endpoint import Endpoint
from aioverbs._verbs.ports import gid_index, limits_of
from aioverbs._verbs.qp_defaults import RETRIES
from aioverbs._verbs.qp_state_machine import Limits, QpAttrs
from aioverbs._verbs.quirks import without_growth
from aioverbs.attributes import AddressVector, QpAttributes
from aioverbs.errors import BrokenResourceError, BusyResourceError, TransitionError, VerbsError
from aioverbs.types import AccessFlags, LinkLayer, QpState, QpType

__all__ = ["Connectable", "establish_in_time", "is_held_up", "limits_for", "move_in_time"]

_INIT, _RTR, _RTS = QpState.INIT, QpState.RTR, QpState.RTS


class Connectable(AsyncEventSource[handles.QueuePair]):
    """The part of a queue pair that takes it from state to state.

    Each method asks for its state first, and then for what is missing, wrong or too much, before anything is changed.
    ``**attributes`` are those of ``ibv_modify_qp``, named as there (see `QpAttrs`); what a transition requires and is
    not given has defaults, but for what only the peer knows.
    """

    qp_type: QpType
    _port: int
    _gid_index: int | None

    def __init__(self, *parents: Resource) -> None:
        super().__init__(*parents)
        self._psn = random.getrandbits(24)
        self._qkey = random.getrandbits(31)  # the upper half of the keys is for privileged users
        self._qp_state = QpState.RESET
        self._remote: Endpoint | None = None
        self._served: int | None = None  # the last max_dest_rd_atomic that the device was told
        self._follows: asyncio.Task[None] | None = None  # a way, also when who wanted that was cancelled

    def _in_flight(self) -> int:
        """How many work requests were posted and are not done."""
        raise NotImplementedError

    def _moved(self, state: QpState) -> None:
        """It was moved to that state."""

    def _broken_by(self) -> BaseException | None:
        """What it broke by since it was last as new."""
        raise NotImplementedError

    # ---- What is so

    @property
    def qp_state(self) -> QpState:
        """The state that it was last moved to, or found in by `query`: an error takes it to ERR by itself."""
        return self._qp_state

    @property
    def remote_endpoint(self) -> Endpoint | None:
        """Whom it was connected to; None where it was not, or path and number were given one by one."""
        return self._remote

    def query(self) -> QpAttributes:
        """Its state and attributes: ``ibv_query_qp``."""
        found = self.handle.query()
        self._qp_state = found.qp_state
        return found

    @property
    def gid_index(self) -> int:
        """Which of its port's GIDs it sends from.

        :raises ValueError: it was made without a choice, and the port has none.
        """
        if self._gid_index is None:
            self._gid_index = gid_index(self.handle.context, self._port)
        return self._gid_index

    def local_endpoint(self) -> Endpoint:
        """What a peer needs to know of it. `to_reset` makes that another one.

        With soft-RoCE, whose kernel breaks otherwise, a queue pair that was connected before has no larger
        ``max_dest_rd_atomic`` than it was connected with.

        :raises ValueError: the port has no GID, or none at the index that it was made with.
        """
        context = self.handle.context
        port = context.query_port(self._port)
        gid = context.query_gid(self._port, self.gid_index)
        if port.link_layer is not LinkLayer.INFINIBAND and not any(gid):
            raise ValueError(
                f"port {self._port} of {context.name} has no GID at index {self.gid_index}: give its queue pairs the"
                " gid_index of one that it has, or none, to have it chosen"
            )
        limits = limits_for(self, self._port)
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
        """The way from its port to a peer; ``dataclasses.replace`` gives that a traffic class or a service level.

        :raises ValueError: there is none: see `Endpoint.path_to`.
        """
        return self.local_endpoint().path_to(remote, port_num=self._port, sgid_index=self.gid_index)

    # ---- All the way

    def connect(self, remote: Endpoint, access: AccessFlags | None = None, **attributes: Unpack[QpAttrs]) -> None:
        """Connect it, from RESET or INIT to RTS: ``ibv_modify_qp``. The peer does the same with its `local_endpoint`.

        :param access: what the peer may do through it: ``REMOTE_READ``, ``REMOTE_WRITE``, ``REMOTE_ATOMIC``. None for
            nothing; where it is in INIT already, for what was said there.
        :param attributes: as ``timeout``, ``retry_cnt``, ``rnr_retry``, ``min_rnr_timer`` or ``av``; where one is not
            given, the path is `path_to` the peer, and reads and atomics are as many as both devices can.
        :raises TransitionError: it is in another state, or an attribute is out of range or none of its type's.
        :raises ValueError: the peer is of a type that it does not talk to, or there is no path to it; it is of type UD,
            which is not connected.
        :raises VerbsError: the device refuses; it is in the state that it came to.
        """
        for wanted, changes in self._way_to(remote, access, attributes):
            self._step(wanted, changes, remote)

    async def establish(
        self, remote: Endpoint, access: AccessFlags | None = None, **attributes: Unpack[QpAttrs]
    ) -> None:
        """Connect it as `connect` does, without keeping the event loop waiting.

        On RDMA devices the kernel looks for the peer's neighbour when a queue pair goes to RTR, which takes seconds
        where nobody answers. A helper thread calls that verb; a loop has 256 of those at most. Until it is over every
        other use of the queue pair raises `BusyResourceError`, but closing it and a cancellation wait. What arrives
        meanwhile is received; receives that wait for a place, or whose messages are released, are posted after it.

        What it takes and raises is described at `connect`.

        :raises BrokenResourceError: its completion queue broke meanwhile, or a receive failed.
        """
        await self._follow(self._way_to(remote, access, attributes), remote)

    def _way_to(
        self, remote: Endpoint, access: AccessFlags | None, attributes: QpAttrs
    ) -> list[tuple[QpState, QpAttrs]]:
        found = self.query().qp_state
        if access is not None:
            if "qp_access_flags" in attributes:
                raise TypeError("access and qp_access_flags are the same: give one of them")
            attributes["qp_access_flags"] = access
        states = qp_state_machine.path(self.qp_type, _INIT if found is _INIT else QpState.RESET, _RTS)
        return self._plan(found, states, attributes, remote)

    def activate(self, **attributes: Unpack[QpAttrs]) -> None:
        """Have one of type UD send and receive, from RESET or INIT to RTS: ``ibv_modify_qp``.

        :param attributes: as ``qkey``, what datagrams to it must bear: without one, a random one, which is in its
            `local_endpoint`.
        :raises TransitionError: it is in another state, or an attribute is out of range or none of its type's.
        :raises ValueError: it is of another type.
        :raises VerbsError: the device refuses; it is in the state that it came to.
        """
        found = self.query().qp_state
        if self.qp_type is not QpType.UD:
            raise ValueError(f"{self!r} is of type {self.qp_type.name}: connect() it with a remote endpoint")
        states = qp_state_machine.path(self.qp_type, _INIT if found is _INIT else QpState.RESET, _RTS)
        self._move(found, states, attributes)

    # ---- Step by step

    def to_init(self, **attributes: Unpack[QpAttrs]) -> None:
        """To INIT, where receives can be posted; in INIT, change what is given: ``ibv_modify_qp``.

        :raises TransitionError: it cannot, from its state or with these attributes.
        :raises VerbsError: the device refuses; nothing was changed.
        """
        self._move(self.query().qp_state, (_INIT,), attributes)

    def to_rtr(self, remote: Endpoint | None = None, **attributes: Unpack[QpAttrs]) -> None:
        """To RTR, where it receives: ``ibv_modify_qp``.

        :param remote: the peer; without it, what is of the peer is among the attributes. None of type UD.
        :raises TransitionError: it cannot, from its state or with these attributes.
        :raises ValueError: the peer is of a type that it does not talk to, or there is no path to it.
        :raises VerbsError: the device refuses; nothing was changed.
        """
        self._move(self.query().qp_state, (_RTR,), attributes, remote)

    def to_rts(self, **attributes: Unpack[QpAttrs]) -> None:
        """To RTS, where it sends, too; in RTS, change what is given; from SQD or SQE, go on: ``ibv_modify_qp``.

        :raises TransitionError: it cannot, from its state or with these attributes.
        :raises VerbsError: the device refuses; nothing was changed.
        """
        self._move(self.query().qp_state, (_RTS,), attributes)

    def to_sqd(self, **attributes: Unpack[QpAttrs]) -> None:
        """To SQD, where what was begun is finished and nothing more is begun: ``ibv_modify_qp``.

        With ``en_sqd_async_notify`` the device tells by ``EventType.SQ_DRAINED`` when that is so. From then on path,
        times and depths can be changed, by this method, and `to_rts` goes on.

        :raises TransitionError: it cannot, from its state or with these attributes; or it still drains.
        :raises VerbsError: the device refuses; nothing was changed.
        """
        found = self.query()
        self._move(found.qp_state, (QpState.SQD,), attributes, draining=found.sq_draining)

    def to_error(self) -> None:
        """To ERR, where all that is and will be posted is flushed with an error: ``ibv_modify_qp``.

        :raises TransitionError: it is in RESET, and has nothing to flush.
        :raises VerbsError: the device refuses; nothing was changed.
        """
        self._move(self.query().qp_state, (QpState.ERR,), QpAttrs())

    def to_reset(self) -> None:
        """To RESET, as new, to be connected once more: ``ibv_modify_qp``. Its first sequence number is another one.

        :raises BusyResourceError: work is under way, which would complete no more.
        :raises VerbsError: the device refuses; nothing was changed.
        """
        found = self.query().qp_state
        if count := self._in_flight():
            raise BusyResourceError(
                f"{self!r} has {count} work requests under way, which would be forgotten: to_error() and wait for them"
            )
        self._move(found, (QpState.RESET,), QpAttrs())
        self._remote = None
        self._psn = random.getrandbits(24)  # what is still on its way from the last connection fits no more

    # ---- How

    def _check_peer(self, remote: Endpoint) -> None:
        if self.qp_type is QpType.UD:
            raise ValueError(f"{self!r} is of type UD: its datagrams go by address handles; activate() it")
        other = qp_state_machine.COUNTERPART[self.qp_type]
        if remote.qp_type != other:
            raise ValueError(
                f"{self!r} is of type {self.qp_type.name} and talks to type {other.name}, not {remote.qp_type.name}"
            )

    def _defaults(self, limits: Limits, remote: Endpoint | None) -> QpAttrs:
        """For what is required and not given; `remote` is whom it is to be, or was, connected to."""
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
            # As many as both can: who sends more than the other serves breaks the connection.
            defaults["max_rd_atomic"] = min(limits.max_rd_atomic, remote.max_dest_rd_atomic)
            defaults["max_dest_rd_atomic"] = min(limits.max_dest_rd_atomic, remote.max_rd_atomic)
            defaults["dest_qp_num"] = remote.qp_num
            defaults["rq_psn"] = remote.psn
            defaults["path_mtu"] = min(limits.mtu, remote.mtu)
        return defaults

    def _move(
        self,
        found: QpState,
        states: Iterable[QpState],
        attributes: QpAttrs,
        remote: Endpoint | None = None,
        *,
        draining: bool = False,
    ) -> None:
        for wanted, changes in self._plan(found, states, attributes, remote, draining=draining):
            self._step(wanted, changes, remote)

    def _plan(
        self,
        found: QpState,
        states: Iterable[QpState],
        attributes: QpAttrs,
        remote: Endpoint | None,
        *,
        draining: bool = False,
    ) -> list[tuple[QpState, QpAttrs]]:
        if remote is not None:
            self._check_peer(remote)
        context = self.handle.context
        of_device = limits_of(context, self._port)
        limits = without_growth(of_device, context, self._served)
        defaults = self._defaults(limits, remote if remote is not None else self._remote)
        if remote is not None and "av" not in attributes:
            defaults["av"] = self.path_to(remote)
        try:
            return qp_state_machine.plan(
                self.qp_type, found, states, attributes, defaults=defaults, limits=limits, draining=draining
            )
        except TransitionError as error:
            error.subject = repr(self)
            if limits != of_device and "max_dest_rd_atomic" in error.wrong:
                error.wrong["max_dest_rd_atomic"] += ": with soft-RoCE never more than at first, make a new queue pair"
            raise

    async def _follow(self, plan: Iterable[tuple[QpState, QpAttrs]], remote: Endpoint | None = None) -> None:
        """Go that way without keeping the event loop waiting."""
        for wanted, changes in plan:
            if wanted is _RTR and neighbour_lookup.may_block(self.handle.context):
                await self._step_elsewhere(wanted, changes, remote)
            else:
                self._step(wanted, changes, remote)

    async def _follow_in_time(self, plan: list[tuple[QpState, QpAttrs]], remote: Endpoint | None = None) -> None:
        """`_follow`, for who has a limit of time: a cancellation is raised at once.

        A verb that is under way then ends by itself, later. Until then it `is_held_up`.
        """
        if not neighbour_lookup.may_block(self.handle.context):
            await self._follow(plan, remote)
            return
        self._follows = task = running_loop().create_task(self._follow(plan, remote))
        task.add_done_callback(_look_at)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise
        task.result()

    def _step(self, wanted: QpState, changes: QpAttrs, remote: Endpoint | None) -> None:
        self._served = changes.get("max_dest_rd_atomic", self._served)  # refused or not: it may be done by then
        self.handle.modify(wanted, **changes)
        self._stepped(wanted, changes, remote)

    async def _step_elsewhere(self, wanted: QpState, changes: QpAttrs, remote: Endpoint | None) -> None:
        self._served = changes.get("max_dest_rd_atomic", self._served)
        before = self._broken_by()
        change = self.handle.begin_modify(wanted, **changes)
        try:
            await neighbour_lookup.in_helper("ibv_modify_qp", change.run)
        except GeneratorExit:  # the loop was closed in the middle: who closes this ends the change
            raise
        except BaseException:  # a cancellation, or there are no threads
            with contextlib.suppress(VerbsError):
                if change.end():
                    self._stepped(wanted, changes, remote)
            raise
        change.end()
        self._stepped(wanted, changes, remote)
        self._check_open()
        broken = self._broken_by()
        if broken is not None and broken is not before:
            raise BrokenResourceError(f"{self!r} broke while it was connected: {broken}") from broken

    def _stepped(self, wanted: QpState, changes: QpAttrs, remote: Endpoint | None) -> None:
        self._qp_state = wanted
        self._moved(wanted)
        self._psn = changes.get("sq_psn", self._psn)
        self._qkey = changes.get("qkey", self._qkey)
        if wanted is _RTR:
            self._remote = remote
            if self.state is OPEN:  # else it is being closed
                attend(self.handle.context)


def _look_at(task: asyncio.Task[None]) -> None:
    """What it ended by is known: nobody need await it."""
    if not task.cancelled():
        task.exception()


async def establish_in_time(qp: Connectable, remote: Endpoint, attributes: QpAttrs) -> None:
    """`Connectable.establish`, for who has a limit of time: a cancellation is raised at once.

    A verb that is under way then ends by itself, later. Until then the queue pair `is_held_up`.
    """
    await qp._follow_in_time(qp._way_to(remote, None, attributes), remote)


async def move_in_time(qp: Connectable, state: QpState, attributes: QpAttrs) -> None:
    """Take a queue pair one state further, likewise."""
    await qp._follow_in_time(qp._plan(qp.query().qp_state, (state,), attributes, None))


def is_held_up(qp: Connectable) -> bool:
    """Whether another thread may be in a verb for a queue pair, and nobody knows for how long."""
    return qp._follows is not None and not qp._follows.done()


def limits_for(qp: Connectable, port: int) -> Limits:
    """What its device, a port there, and what it was told before allow a queue pair."""
    context = qp.handle.context
    return without_growth(limits_of(context, port), context, qp._served)
