"""Messages: the iterator ends with its queue pair, and begins again with it; no memory is lost on the way."""

import asyncio

import pytest

from aioverbs import AccessFlags, BrokenResourceError, QpCapabilities, QueuePair, WorkCompletionError
from aioverbs._verbs.device import Device
from tests.pace import patience

ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


def connect(near: QueuePair, far: QueuePair) -> None:
    near.connect(far.local_endpoint(), ALL)
    far.connect(near.local_endpoint(), ALL)


async def next_of(qp: QueuePair) -> bytes:
    async for message in qp.messages():
        with message:
            return bytes(message.data)
    return b"end"


@pytest.mark.every_way
async def test_messages_end_where_none_is_posted(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, ALL) as memory,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq, receive_depth=1, receive_size=8) as far,
    ):
        connect(near, far)
        memory.buffer[:3] = b"one"
        await near.send(memory[:3])
        kept = await anext(far.messages())
        waiting = asyncio.create_task(next_of(far))
        await asyncio.sleep(0)
        await far.aclose()
        async with asyncio.timeout(patience(3)):
            assert await waiting == b"end"
        kept.release()


@pytest.mark.every_way
async def test_messages_begin_again_after_a_reset(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, ALL) as memory,
        domain.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=4)) as near,
        domain.queue_pair(cq, receive_depth=2, receive_size=8) as far,
    ):
        memory.buffer[:3] = b"one"
        for _ in range(3):
            connect(near, far)
            for _ in range(3):
                await near.send(memory[:3])
                async with asyncio.timeout(patience(3)):
                    assert await next_of(far) == b"one"
            far.to_error()
            with pytest.raises((WorkCompletionError, BrokenResourceError)):
                async with asyncio.timeout(patience(3)):
                    await next_of(far)
            for _ in range(1000):
                if not far.statistics().under_way:
                    break
                await asyncio.sleep(0.001)
            far.to_reset()
            near.to_reset()
