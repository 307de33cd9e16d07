"""In a trio task, resources without an owner work; those that need an asyncio event loop raise an error."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from aioverbs import (
    Device,
    ProtectionDomain,
    ResourceDomain,
    ResourceState,
    ThreadModel,
    import_device,
    open_device,
)
from aioverbs._lifecycle.affinity import Affinity, run_on_owner, wait_uncancelled
from tests.data_path_endings.pair import pair_on

Attempt = Callable[[Device, ProtectionDomain, ResourceDomain], Awaitable[object]]


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Device, ProtectionDomain, ResourceDomain]]:
    async with (
        open_device("soft0") as device,
        device.protection_domain() as pd,
        device.resource_domain(pd, thread_model=ThreadModel.SAFE) as domain,
    ):
        yield device, pd, domain


def test_shared_resources_work_from_trio() -> None:
    async def main() -> None:
        async with (
            opened() as (device, pd, domain),
            device.resource_domain(thread_model=ThreadModel.UNSAFE) as unsafe,
            device.xrc_domain() as xrc,
            domain.shared_receive_queue(4) as srq,
            pd.register(64) as region,
            pd.share(1) as shared,
        ):
            assert await domain.run(region.remote) == region.remote()
            assert srq.query().max_wr >= 4
            assert [each.state for each in (unsafe, xrc, shared)] == [ResourceState.OPEN] * 3
        with pytest.warns(ResourceWarning, match="ProtectionDomain"):
            async with open_device("soft0") as device:
                forgotten = await device.protection_domain().open()
        assert forgotten.closed

    trio.run(main)


async def loop_domain(device: Device, *_: object) -> None:
    async with device.loop_domain():
        raise AssertionError("opened")


async def open_imported_device(*_: object) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        await import_device(near, 1, 1).open()


ATTEMPTS: dict[str, Attempt] = {
    "thread domain": lambda device, pd, domain: device.thread_domain().open(),
    "resource domain": lambda device, pd, domain: device.resource_domain().open(),
    "loop domain": loop_domain,
    "completion queue": lambda device, pd, domain: domain.completion_queue(4).open(),
    "large region": lambda device, pd, domain: pd.register(16 << 20).open(),
    "imported device": open_imported_device,
    "events": lambda device, pd, domain: anext(device.events()),
}


def test_resources_of_a_loop_raise_from_trio() -> None:
    async def main() -> None:
        async with opened() as (device, pd, domain):
            before = device.statistics().objects
            for attempt in ATTEMPTS.values():
                with pytest.raises(RuntimeError, match="needs an asyncio event loop, and this is a trio task"):
                    await attempt(device, pd, domain)
                assert device.statistics().objects == before

    trio.run(main)


@pytest.mark.parametrize("model", [ThreadModel.SAFE, ThreadModel.UNSAFE])
async def test_a_queue_pair_with_work_in_flight_stays_as_it_is_from_trio(device: Device, model: ThreadModel) -> None:
    async with pair_on(device, thread_model=model, sends=1) as pair:
        receive = pair.near.receive(pair.target[8:16])
        pair.hold()
        writes = [pair.write(), pair.write(16)]  # the second one waits for a slot
        held = pair.near.query().qp_state
        with pytest.raises(RuntimeError, match="needs an asyncio event loop, and this is a trio task"):
            await asyncio.to_thread(trio.run, pair.near.aclose)
        assert (pair.near.state, pair.near.query().qp_state) == (ResourceState.OPEN, held)
        pair.unhold()
        await asyncio.gather(*writes)
        assert not receive.done()


def test_cross_loop_calls_raise_from_trio() -> None:
    async def make() -> Affinity:
        return Affinity.of_running_loop()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="needs an asyncio event loop, and this is a trio task"):
            await run_on_owner(owner, print)

    loop = asyncio.new_event_loop()
    owner = loop.run_until_complete(make())
    trio.run(main)
    loop.close()


def test_wait_uncancelled_raises_from_trio_and_closes_its_coroutine() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="needs an asyncio event loop, and this is a trio task"):
            await wait_uncancelled(asyncio.sleep(0))

    trio.run(main)
