"""Connections of a domain share the memory of their buffers."""

import asyncio

import pytest

from aioverbs import BufferPool, ConnectionSettings, Device
from aioverbs._connection.shared_queues import lease_block
from aioverbs._lifecycle.turns import OPENING, spend

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
