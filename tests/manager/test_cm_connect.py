"""Connecting by rdma_cm while a thread moves the queue pair to RTR."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import cast

import pytest

from aioverbs import BusyResourceError, ClosedResourceError, Device, DeviceRemovedError, QpState, QueuePair
from aioverbs._core.handles import rdma_cm as core
from aioverbs._lifecycle.affinity import CrossLoopCondition
from aioverbs._verbs.qp_state_machine import QpAttrs
from aioverbs.rdma_cm.events import CmEventType, Dispatcher
from aioverbs.rdma_cm.state_machine import CmState, CmStateMachine
from tests.manager.held_verbs import Helpers
from tests.waiting import until


class FakeIdentifier:
    """An identifier whose peer is the queue pair itself."""

    port_num = 1

    def __init__(self, qp: QueuePair) -> None:
        here = qp.local_endpoint()
        self._attributes = {
            QpState.INIT: QpAttrs(pkey_index=0, port_num=1),
            QpState.RTR: QpAttrs(
                av=qp.path_to(here),
                path_mtu=here.mtu,
                dest_qp_num=here.qp_num,
                rq_psn=here.psn,
                max_dest_rd_atomic=1,
                min_rnr_timer=1,
            ),
            QpState.RTS: QpAttrs(sq_psn=here.psn, max_rd_atomic=1, timeout=14, retry_cnt=6, rnr_retry=6),
        }

    def init_qp_attr(self, state: QpState) -> QpAttrs:
        return self._attributes[state].copy()


def deliver(state_machine: CmStateMachine, kind: CmEventType) -> None:
    event = SimpleNamespace(event_type=int(kind), status=0, private_data=b"", identifier=None, listener=None)
    state_machine.on_event(cast(core.Event, event))


def state(qp: QueuePair) -> QpState:
    return qp.query().qp_state


@contextlib.asynccontextmanager
async def state_machine_in_init(device: Device) -> AsyncIterator[tuple[QueuePair, CmStateMachine]]:
    """A queue pair in INIT, and the state machine that connects it."""
    dispatcher = cast(Dispatcher, SimpleNamespace(loop=asyncio.get_running_loop(), receivers={}))
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq, domain.queue_pair(cq) as qp:
        handle = cast(core.Identifier, FakeIdentifier(qp))
        state_machine = CmStateMachine(handle, dispatcher, CrossLoopCondition(), CmState.RESOLVED)
        state_machine.to_init(qp, None)
        yield qp, state_machine


async def connect(state_machine: CmStateMachine, qp: QueuePair, timeout_s: float | None = None) -> None:
    async with state_machine.step("connect", CmState.RESOLVED, timeout_s):
        await state_machine.to_rts(qp, QpAttrs(timeout=12))
        state_machine.mark_connected()


async def test_the_loop_runs_during_modify(device: Device, helpers: Helpers) -> None:
    async with state_machine_in_init(device) as (qp, state_machine):
        connecting = asyncio.create_task(connect(state_machine, qp))
        await until(lambda: helpers.waiting)
        assert not connecting.done()
        helpers.release()
        await connecting
        assert state(qp) is QpState.RTS
        assert qp.query().timeout == 12


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda state_machine: deliver(state_machine, CmEventType.DEVICE_REMOVAL), DeviceRemovedError),
        (CmStateMachine.destroy, ClosedResourceError),
    ],
    ids=["removed", "closed"],
)
async def test_the_identifier_ends_during_modify(
    device: Device, helpers: Helpers, end: Callable[[CmStateMachine], None], error: type[Exception]
) -> None:
    """The caller is notified, and the queue pair goes to ERR as soon as the modify is done."""
    async with state_machine_in_init(device) as (qp, state_machine):
        connecting = asyncio.create_task(connect(state_machine, qp))
        await until(lambda: helpers.waiting)
        end(state_machine)
        helpers.release()
        with pytest.raises(error):
            await connecting
        await until(lambda: state(qp) is QpState.ERR)
        assert state_machine.state is CmState.FAILED


@pytest.mark.parametrize("timeout_s", [0.01, None], ids=["time is over", "cancelled"])
async def test_timeout_and_cancellation_do_not_wait_for_modify(
    device: Device, helpers: Helpers, timeout_s: float | None
) -> None:
    async with state_machine_in_init(device) as (qp, state_machine):
        connecting = asyncio.create_task(connect(state_machine, qp, timeout_s))
        await until(lambda: helpers.waiting)
        if timeout_s is None:
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting
        else:
            with pytest.raises(
                TimeoutError, match=r"connect: the device did not resolve the peer's link-layer address within 10 ms"
            ):
                await connecting
        with pytest.raises(BusyResourceError):
            qp.query()
        helpers.release()
        await until(lambda: qp.handle.state is QpState.ERR)
        assert state(qp) is QpState.ERR
