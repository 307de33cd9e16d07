"""What was sent goes, whoever is cancelled afterwards; who waits is told, whatever is in the way of that."""

import asyncio
import gc

import anyio
import pytest

from aioverbs import (
    AccessFlags,
    Connection,
    Device,
    Granted,
    MemoryRegion,
)
from aioverbs._core.work import Operation
from tests.capabilities import Capability, needs
from tests.connections.ends import SMALL, cancel_by_its_task, deeper, pair
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import until

TARGET = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
NARROW = deeper(SMALL, send_depth=6, receive_depth=8, close_timeout_s=2)
"""Two buffers, and a send queue that is soon full."""


async def granted(giver: Connection, taker: Connection, memory: MemoryRegion) -> Granted:
    await giver.grant(memory, AccessFlags.REMOTE_WRITE)
    return await taker.receive_grant()


def fill(connection: Connection, source: MemoryRegion, target: Granted) -> list[Operation[None]]:
    """Take all places of a send queue that is held, and wait for one more."""
    writes: list[Operation[None]] = []
    while not connection.qp.statistics().sends.queued:
        assert len(writes) < 20
        writes.append(connection.write(source[8:16], target[8:16]))
    return writes


@needs(Capability.FAULT_PLAN)
@pytest.mark.once
async def test_a_message_that_was_sent_is_not_withdrawn_with_the_next(device: Device) -> None:
    async with (
        pair(device, NARROW) as ends,
        ends.domain.register(64) as source,
        ends.domain.register(64, TARGET) as target,
    ):
        there = await granted(ends.far, ends.near, target)
        hold(device, ends.near.qp)
        writes = fill(ends.near, source, there)
        await ends.near.send(b"one")
        await ends.near.send(b"two")
        waits = ends.near.traffic().waits
        await cancel_by_its_task(ends.near.send(b"three"), lambda: ends.near.traffic().waits > waits)
        gc.collect()
        waits = ends.near.traffic().waits
        sending = asyncio.create_task(ends.near.send(b"four"))
        await until(lambda: ends.near.traffic().waits > waits)
        unhold(device, ends.near.qp)
        with anyio.fail_after(patience(20)):
            for write in writes:
                await write
            await sending
            assert [await ends.far.receive() for _ in range(3)] == [b"one", b"two", b"four"]


@needs(Capability.FAULT_PLAN)
@pytest.mark.once
async def test_a_write_is_not_withdrawn_where_the_message_goes_that_tells_of_it(device: Device) -> None:
    async with (
        pair(device, NARROW) as ends,
        ends.domain.register(64) as source,
        ends.domain.register(64, TARGET) as target,
    ):
        source.buffer[:8] = b"the data"
        there = await granted(ends.far, ends.near, target)
        hold(device, ends.near.qp)
        writes = fill(ends.near, source, there)
        sent = ends.near.traffic().messages_sent
        await cancel_by_its_task(
            ends.near.write_with_immediate(source[:8], there[:8], 7), lambda: ends.near.traffic().messages_sent > sent
        )
        gc.collect()
        unhold(device, ends.near.qp)
        with anyio.fail_after(patience(20)):
            for write in writes:
                await write
            assert await ends.far.receive_with_immediate() == (b"", 7)
        assert bytes(target.buffer[:8]) == b"the data"
