"""Opening an address handle does not block the loop while the verb resolves the peer's address."""

import asyncio

import pytest

from aioverbs import Device, QpType, VerbsError
from aioverbs._lifecycle.lifecycle import ResourceState
from tests.capabilities import Capability, needs
from tests.manager.held_verbs import Helpers
from tests.waiting import until


async def test_the_loop_runs_during_the_verb(device: Device, helpers: Helpers) -> None:
    async with (
        device.resource_domain() as domain,
        domain.register(64) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq, qp_type=QpType.UD) as qp,
    ):
        qp.activate()
        handle = domain.address_handle(qp.local_endpoint())
        opening = asyncio.create_task(handle.open())
        await until(lambda: helpers.waiting)
        assert not opening.done()
        helpers.release()
        assert await opening is handle
        await qp.send(region[:8], to=handle.to())
        await handle.aclose()


async def test_a_cancelled_open_closes_the_address_handle(device: Device, helpers: Helpers) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq:
        async with domain.queue_pair(cq, qp_type=QpType.UD) as qp:
            handle = domain.address_handle(qp.local_endpoint())
        opening = asyncio.create_task(handle.open())
        await until(lambda: helpers.waiting)
        opening.cancel()
        await asyncio.sleep(0)
        assert not opening.done()
        helpers.release()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert handle.closed


async def test_a_cancelled_open_leaves_what_another_task_opened(device: Device, helpers: Helpers) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq:
        async with domain.queue_pair(cq, qp_type=QpType.UD) as qp:
            handle = domain.address_handle(qp.local_endpoint())
        opening, cancelled = [asyncio.create_task(handle.open()) for _ in range(2)]
        await until(lambda: len(helpers.waiting) == 2)
        cancelled.cancel()
        helpers.release_first()
        await opening
        helpers.release()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert handle.state is ResourceState.OPEN
        await handle.aclose()


@needs(Capability.FAULT_PLAN)
async def test_an_error_of_the_device_is_raised(device: Device, helpers: Helpers) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq:
        async with domain.queue_pair(cq, qp_type=QpType.UD) as qp:
            handle = domain.address_handle(qp.local_endpoint())
        device.faults.fail("create_ah", 110)
        opening = asyncio.create_task(handle.open())
        await until(lambda: helpers.waiting)
        helpers.release()
        with pytest.raises(VerbsError, match="ibv_create_ah failed: ETIMEDOUT"):
            await opening
        assert handle.state is ResourceState.NEW
