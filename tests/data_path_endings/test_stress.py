"""Random cancellation under load: see `tests.data_path_endings.stress`."""

import pytest

from aioverbs import MessageModel, open_device
from tests.data_path_endings.stress import stress_on
from tests.devices import MODES, name_of
from tests.pace import fewer
from tests.ways import ONLY_RDMA

every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)
every_mode = pytest.mark.parametrize("mode", MODES if ONLY_RDMA else [*MODES, "delayed"])


async def run_stress(model: MessageModel, mode: str, operations: int, seed: int) -> None:
    delay_ns = 20_000 if mode == "delayed" else 0
    async with open_device(
        name_of(mode), execution="thread" if mode in ("thread", "delayed") else "inline", delay_ns=delay_ns
    ) as device:
        if delay_ns:
            device.faults.seed(seed)
            device.faults.jitter(100_000)
        async with (
            device.resource_domain(message_model=model) as domain,
            stress_on(domain, seed=seed, tasks=24, spin_ns=5_000) as stress,
        ):
            await stress.run(24, operations)
            assert all(stress.ended[outcome] for outcome in ("done", "forgotten", "cancelled", "timed out", "batch")), (
                stress.ended
            )
            assert all(connection.arrived for connection in stress.connections)


@every_mode
@every_model
async def test_random_cancellations_lose_nothing(model: MessageModel, mode: str) -> None:
    await run_stress(model, mode, fewer(3000, least=600), seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@every_mode
@every_model
async def test_many_random_cancellations_lose_nothing(model: MessageModel, mode: str) -> None:
    await run_stress(model, mode, fewer(1_000_000), seed=2)
