"""Servers that fork workers after import: devices opened after the fork work, beside inherited ones."""

import asyncio
import gc
import os
import warnings

from aioverbs import AccessFlags, Device, open_device
from tests.core.children import in_child

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


async def use_own_device() -> bytes:
    """Open a device, domain and queues in a worker, and write once."""
    async with (
        open_device("soft0", execution="thread") as device,
        device.resource_domain() as domain,
        domain.register(64, ACCESS) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        region.buffer[:4] = os.getpid().to_bytes(4, "big")
        await near.write(region[:4], region.remote()[32:36])
        return bytes(region.buffer[32:36])


def test_workers_open_devices_after_the_fork() -> None:
    for _ in range(4):
        pid, moved = in_child(lambda: (os.getpid(), asyncio.run(use_own_device())))
        assert moved == pid.to_bytes(4, "big")


def test_a_worker_forked_beside_an_open_device() -> None:
    async def parent() -> bytes:
        async with open_device("soft0", execution="thread") as device, device.resource_domain():
            return in_child(in_the_child)

    def in_the_child() -> bytes:
        # The parent's loop does not run in the child, which makes its own.
        asyncio.events._set_running_loop(None)
        return asyncio.run(use_own_device())

    assert len(asyncio.run(parent())) == 4


def test_a_child_that_drops_inherited_resources_prints_nothing() -> None:
    opened: list[Device] = []

    def in_the_child() -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opened.clear()
            gc.collect()
        return len(caught)

    async def parent() -> int:
        device = open_device("soft0")
        await device.open()
        opened.append(device)
        try:
            return in_child(in_the_child)
        finally:
            await device.aclose()

    assert asyncio.run(parent()) == 0
