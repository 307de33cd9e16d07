"""Storms of cancellations: see `storm`."""

import pytest

from aioverbs import MessageModel, open_device
from tests.data_path_endings.storm import storm_on
from tests.pace import fewer
from tests.rdma.seam import rdma_devices

WAYS = {"inline": (False, 0), "engine": (True, 0), "delayed": (True, 20_000), "rdma": (False, 0)}
every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)
every_way = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.rdma if way == "rdma" else ()) for way in WAYS]
)


async def blow(model: MessageModel, way: str, operations: int, seed: int) -> None:
    engine_mode, delay_ns = WAYS[way]
    name = rdma_devices()[0] if way == "rdma" else "soft0"
    async with open_device(name, engine_mode=engine_mode, delay_ns=delay_ns) as device:
        if delay_ns:
            device.faults.seed(seed)
            device.faults.jitter(100_000)
        async with (
            device.resource_domain(message_model=model) as domain,
            storm_on(domain, seed=seed, tasks=24, spin_ns=5_000) as storm,
        ):
            await storm.run(24, operations)
            assert all(storm.ended[how] for how in ("done", "forgotten", "cancelled", "timed out", "batch")), (
                storm.ended
            )
            assert all(line.arrived for line in storm.lines)


@every_way
@every_model
async def test_a_short_storm(model: MessageModel, way: str) -> None:
    await blow(model, way, fewer(3000, least=600), seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@every_way
@every_model
async def test_a_long_storm(model: MessageModel, way: str) -> None:
    await blow(model, way, fewer(1_000_000), seed=2)
