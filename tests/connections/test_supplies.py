"""Connections of a domain share the memory of their buffers."""

import asyncio
import contextlib

import pytest

from aioverbs import BufferPool, ConnectionSettings, Device, connect, listen
from aioverbs._connection.shared_queues import lease_block
from aioverbs._lifecycle.turns import OPENING, spend
from tests.connections.ends import HOST
from tests.core.children import SANITIZED
from tests.garbage import collect_garbage
from tests.resident import resident_bytes

SMALL = ConnectionSettings(buffer_size=4096)
LARGE = ConnectionSettings(buffer_size=1 << 20)
"""With a block that is registered beside the loop."""


@pytest.mark.parametrize("settings", [SMALL, LARGE], ids=["small", "large"])
async def test_concurrent_connections_share_one_pool(device: Device, settings: ConnectionSettings) -> None:
    """Also if the loop iterates before the first of them has the pool."""
    async with device.resource_domain() as domain:
        while not spend(OPENING):
            pass
        blocks = await asyncio.gather(*(lease_block(domain, settings) for _ in range(4)))
        made = [lifecycle.user() for lifecycle in domain.base._lifecycle.subtree() if lifecycle.kind == "BufferPool"]
        assert len(made) == 1
        (pool,) = made
        assert isinstance(pool, BufferPool)
        assert pool.statistics().leased == 4
        for block in blocks:
            block.release()


def resident_now() -> int:
    collect_garbage()
    return resident_bytes()


@pytest.mark.skipif(SANITIZED, reason="the address sanitizer keeps freed memory")
async def test_idle_connections_need_little_memory(device: Device) -> None:
    """With buffers of the usual size, also if they have short messages, and after others were used and closed."""
    count = 40
    async with (
        device.resource_domain() as domain,
        listen(HOST, domain=domain) as listener,
    ):

        async def open_all(stack: contextlib.AsyncExitStack, messages: int, length: int = 60_000) -> None:
            for _ in range(count):
                near = await stack.enter_async_context(connect(HOST, listener.port, domain=domain))
                far = await stack.enter_async_context(await listener.accept())
                for _ in range(messages):
                    await near.send(bytes(length))
                    assert len(await far.receive()) == length

        new = resident_now()
        async with contextlib.AsyncExitStack() as stack:  # what all connections share is made first
            await open_all(stack, 32, 100)
            assert (resident_now() - new) / (2 * count) < 192 << 10, "a page of each buffer, and no huge page"
        at_first = resident_now()
        async with contextlib.AsyncExitStack() as stack:
            await open_all(stack, 0)
            assert (resident_now() - at_first) / (2 * count) < 24 << 10, "not one buffer of 64 KiB"
        async with contextlib.AsyncExitStack() as stack:
            await open_all(stack, 32)
            assert resident_now() - at_first > count << 19, "each receive buffer was used"
        assert resident_now() - at_first < 2 * count << 17, "what is left is the heap's, and does not grow"
