"""State machine of identifiers, with events from the test."""

import asyncio
import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from aioverbs import (
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConnectionRejectedError,
    DeviceRemovedError,
    QueuePair,
    QueuePairStateError,
    UnreachableError,
    VerbsError,
)
from aioverbs._core.handles import rdma_cm as core
from aioverbs._lifecycle.affinity import CrossLoopCondition
from aioverbs._verbs.qp_state_machine import Limits, QpAttrs
from aioverbs.rdma_cm.events import CmEventType, Dispatcher
from aioverbs.rdma_cm.negotiation import negotiate
from aioverbs.rdma_cm.state_machine import CmState, CmStateMachine, error_for_event
from aioverbs.types import Mtu


def event(kind: CmEventType, status: int = 0, data: bytes = b"", about: object = None) -> core.Event:
    attributes = SimpleNamespace(
        event_type=int(kind), status=status, private_data=data, identifier=about, listener=about
    )
    return cast(core.Event, attributes)


class FakeIdentifier:
    """An identifier that records calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.device_name = "rxe0"
        self.disconnect_error: VerbsError | None = None

    def disconnect(self) -> None:
        self.calls.append("disconnect")
        if self.disconnect_error is not None:
            raise self.disconnect_error

    def destroy(self) -> None:
        self.calls.append("destroy")


class FakeQueuePair:
    """A queue pair that only has a state."""

    def __init__(self) -> None:
        self.errors = 0

    def query(self) -> SimpleNamespace:
        return SimpleNamespace(qp_state=3)

    def to_error(self) -> None:
        self.errors += 1


class FakeDispatcher:
    """A channel's dispatcher whose events come from the test."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.receivers: dict[object, CmStateMachine] = {}


@pytest.fixture
def identifier() -> FakeIdentifier:
    return FakeIdentifier()


async def new_state_machine(identifier: FakeIdentifier, stage: CmState = CmState.RESOLVED) -> CmStateMachine:
    handle, dispatcher = cast(core.Identifier, identifier), cast(Dispatcher, FakeDispatcher())
    return CmStateMachine(handle, dispatcher, CrossLoopCondition(), stage)


async def connect_step(
    state_machine: CmStateMachine, kind: CmEventType, *, timeout_s: float | None = 5.0
) -> core.Event:
    """Run one step that ends with a connection."""
    async with state_machine.step("connect", CmState.RESOLVED, timeout_s):
        event_received = await state_machine.expect(kind, "rdma_connect")
        state_machine.mark_connected()
    return event_received


RAISES: list[tuple[core.Event, type[Exception], str]] = [
    (event(CmEventType.REJECTED, 8), ConnectionRejectedError, "no program listens at that port"),
    (event(CmEventType.REJECTED, 28), ConnectionRejectedError, "the listening program rejected it"),
    (event(CmEventType.REJECTED, 77), ConnectionRejectedError, "reason 77"),
    (event(CmEventType.ADDR_ERROR, -errno.ENODEV), UnreachableError, "no RDMA device has a route to that address"),
    (event(CmEventType.ADDR_ERROR, -errno.ETIMEDOUT), TimeoutError, "no answer in time"),
    (event(CmEventType.ROUTE_ERROR, -errno.ETIMEDOUT), TimeoutError, "no answer in time"),
    (event(CmEventType.UNREACHABLE, -errno.ETIMEDOUT), UnreachableError, "connection manager did not answer"),
    (event(CmEventType.CONNECT_ERROR), UnreachableError, "EIO"),
    (event(CmEventType.DISCONNECTED), BrokenResourceError, "the peer disconnected"),
    (event(CmEventType.DEVICE_REMOVAL), DeviceRemovedError, "the device was removed"),
    (event(CmEventType.MULTICAST_JOIN), BrokenResourceError, "event 12"),
]


def test_unexpected_events_raise() -> None:
    for attributes, expected, message in RAISES:
        error = error_for_event("rdma_connect", attributes)
        assert type(error) is expected
        assert message in str(error)


LIMITS = Limits(mtu=Mtu.MTU_1024, max_rd_atomic=16, max_dest_rd_atomic=8)


# Proposed attributes, overrides, and the expected result.
SETTLED = [
    (QpAttrs(retry_cnt=7, rnr_retry=7), QpAttrs(), QpAttrs(retry_cnt=6, rnr_retry=6)),
    (QpAttrs(retry_cnt=2, rnr_retry=0), QpAttrs(), QpAttrs(retry_cnt=2, rnr_retry=0)),
    (QpAttrs(rnr_retry=7), QpAttrs(rnr_retry=7), QpAttrs(rnr_retry=7)),
    (QpAttrs(min_rnr_timer=0), QpAttrs(), QpAttrs(min_rnr_timer=18)),
    (QpAttrs(min_rnr_timer=0), QpAttrs(min_rnr_timer=3), QpAttrs(min_rnr_timer=3)),
    (QpAttrs(path_mtu=Mtu.MTU_4096), QpAttrs(), QpAttrs(path_mtu=Mtu.MTU_1024)),
    (QpAttrs(max_rd_atomic=128), QpAttrs(), QpAttrs(max_rd_atomic=16)),
    (QpAttrs(max_rd_atomic=1), QpAttrs(max_rd_atomic=4), QpAttrs(max_rd_atomic=1)),
    (QpAttrs(max_rd_atomic=8), QpAttrs(max_rd_atomic=4), QpAttrs(max_rd_atomic=4)),
    (QpAttrs(max_dest_rd_atomic=128), QpAttrs(), QpAttrs(max_dest_rd_atomic=8)),
    (QpAttrs(max_dest_rd_atomic=1), QpAttrs(max_dest_rd_atomic=4), QpAttrs(max_dest_rd_atomic=4)),
    (QpAttrs(sq_psn=9, timeout=17), QpAttrs(timeout=12), QpAttrs(sq_psn=9, timeout=12)),
]


def test_negotiated_attributes() -> None:
    for attributes, given, settled in SETTLED:
        before = attributes.copy()
        assert negotiate(attributes, given, LIMITS) == settled
        assert attributes == before


async def test_a_rejection_carries_its_private_data(identifier: FakeIdentifier) -> None:
    state_machine = await new_state_machine(identifier)
    task = asyncio.create_task(connect_step(state_machine, CmEventType.CONNECT_RESPONSE))
    await asyncio.sleep(0)
    state_machine.on_event(event(CmEventType.REJECTED, 28, b"busy"))
    with pytest.raises(ConnectionRejectedError) as caught:
        await task
    assert caught.value.private_data == b"busy"
    for what, stage in (("resolve", CmState.NEW), ("connect", CmState.RESOLVED)):  # another identifier may ask again
        state_machine.check(what, stage)
    with pytest.raises(QueuePairStateError, match="must be requested by a peer, but is rejected"):
        state_machine.check("accept", CmState.REQUESTED)
    state_machine.on_event(event(CmEventType.DEVICE_REMOVAL))
    with pytest.raises(
        BrokenResourceError, match=r"connect: the identifier failed before and can only be closed: .*device was removed"
    ):
        state_machine.check("connect", CmState.RESOLVED)


@pytest.mark.parametrize(
    ("after", "stage"),
    [
        (CmEventType.DISCONNECTED, CmState.ENDED),
        (CmEventType.REJECTED, CmState.FAILED),
        (CmEventType.DEVICE_REMOVAL, CmState.FAILED),
        (CmEventType.TIMEWAIT_EXIT, CmState.CONNECTED),
        (CmEventType.ADDR_CHANGE, CmState.CONNECTED),
    ],
    ids=lambda value: value.name,
)
@pytest.mark.parametrize("late", [False, True], ids=["together", "late"])
async def test_events_after_the_connection(
    identifier: FakeIdentifier, after: CmEventType, stage: CmState, late: bool
) -> None:
    """Also in one batch with the connection, before the waiting task runs."""
    state_machine = await new_state_machine(identifier)
    pair = FakeQueuePair()
    state_machine._qp = cast(QueuePair, pair)
    task = asyncio.create_task(connect_step(state_machine, CmEventType.ESTABLISHED))
    await asyncio.sleep(0)
    state_machine.on_event(event(CmEventType.ESTABLISHED))
    if late:
        await task
    state_machine.on_event(event(after))
    if after is CmEventType.DEVICE_REMOVAL and not late:
        with pytest.raises(DeviceRemovedError):
            await task
    else:
        await task
    assert state_machine.state is stage
    assert pair.errors == (stage is not CmState.CONNECTED)
    assert identifier.calls == (["disconnect"] if after is CmEventType.DISCONNECTED else [])
    if stage is CmState.CONNECTED:
        return
    if after is CmEventType.DEVICE_REMOVAL:
        with pytest.raises(DeviceRemovedError):
            await state_machine.wait_disconnected()
    else:
        await state_machine.wait_disconnected()
    await state_machine.drain()


async def test_a_step_times_out(identifier: FakeIdentifier) -> None:
    state_machine = await new_state_machine(identifier)
    with pytest.raises(TimeoutError, match=r"connect: the peer did not answer within 10 ms"):
        await connect_step(state_machine, CmEventType.CONNECT_RESPONSE, timeout_s=0.01)
    assert state_machine.state is CmState.FAILED
    state_machine.on_event(event(CmEventType.CONNECT_RESPONSE))
    assert state_machine.state is CmState.FAILED


async def test_a_cancelled_step_fails_the_identifier(identifier: FakeIdentifier) -> None:
    state_machine = await new_state_machine(identifier)
    task = asyncio.create_task(connect_step(state_machine, CmEventType.CONNECT_RESPONSE, timeout_s=None))
    await asyncio.sleep(0)
    with pytest.raises(BusyResourceError):
        state_machine.check("connect", CmState.RESOLVED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(QueuePairStateError, match="the identifier must be resolved, but is failed"):
        state_machine.check("connect", CmState.RESOLVED)


@pytest.mark.parametrize(
    "end",
    [CmStateMachine.destroy, lambda state_machine: state_machine.fail(VerbsError("rdma_get_cm_event", errno.EIO))],
)
async def test_waiters_end_when_the_identifier_ends(
    identifier: FakeIdentifier, end: Callable[[CmStateMachine], None]
) -> None:
    state_machine = await new_state_machine(identifier)
    task = asyncio.create_task(connect_step(state_machine, CmEventType.CONNECT_RESPONSE))
    await asyncio.sleep(0)
    end(state_machine)
    with pytest.raises((ClosedResourceError, VerbsError)):
        await task


async def test_drain_disconnects_and_waits(identifier: FakeIdentifier) -> None:
    state_machine = await new_state_machine(identifier, CmState.CONNECTED)
    pair = FakeQueuePair()
    state_machine._qp = cast(QueuePair, pair)
    draining = asyncio.create_task(state_machine.drain())
    await asyncio.sleep(0)
    assert (identifier.calls, pair.errors, state_machine.state) == (["disconnect"], 1, CmState.DISCONNECTING)
    state_machine.on_event(event(CmEventType.DISCONNECTED))
    await draining
    assert (identifier.calls, state_machine.state) == (["disconnect"], CmState.ENDED)


async def test_drain_without_an_answering_peer(identifier: FakeIdentifier) -> None:
    identifier.disconnect_error = VerbsError("rdma_disconnect", errno.EINVAL)
    state_machine = await new_state_machine(identifier, CmState.CONNECTED)
    await state_machine.drain()
    assert state_machine.state is CmState.ENDED
