"""Storms of cancellations: see `storm`."""

import pytest

from aioverbs import MessageModel, open_device
from tests.data_path_endings.storm import storm_on
from tests.devices import MODES, name_of
from tests.pace import fewer
from tests.ways import ONLY_RDMA

every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)
every_mode = pytest.mark.parametrize("mode", MODES if ONLY_RDMA else [*MODES, "delayed"])


async def blow(model: MessageModel, mode: str, operations: int, seed: int) -> None:
    delay_ns = 20_000 if mode == "delayed" else 0
    async with open_device(
        name_of(mode), execution="inline" if mode == "inline" else "thread", delay_ns=delay_ns
    ) as device:
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


@every_mode
@every_model
async def test_a_storm_of_cancellations_loses_nothing(model: MessageModel, mode: str) -> None:
    await blow(model, mode, fewer(3000, least=600), seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@every_mode
@every_model
async def test_a_long_storm_of_cancellations_loses_nothing(model: MessageModel, mode: str) -> None:
    await blow(model, mode, fewer(1_000_000), seed=2)
