"""A pool is asked for something while the same thread asks it for something else."""

from collections.abc import Sequence

import pytest

from aioverbs import Device, WorkerPool
from tests.pool.test_calls import number

pytestmark = pytest.mark.timeout(60)


class Busiest:
    """A policy that looks at its pool's statistics."""

    pool: WorkerPool

    def choose(self, workers: Sequence[int], loads: Sequence[int]) -> int:
        assert [worker.calls for worker in self.pool.statistics().workers] == loads
        return max(self.pool.statistics().workers, key=lambda worker: (worker.completed, worker.number)).number


async def test_by_its_policy(device: Device) -> None:
    policy = Busiest()
    async with WorkerPool(device, 2, placement=policy) as pool:
        policy.pool = pool
        assert [await pool.run(number) for _ in range(3)] == [1] * 3


async def test_by_what_comes_into_the_middle(device: Device) -> None:
    """A handler of signals, or a finalizer."""
    async with WorkerPool(device, 2) as pool:
        with pool._crew.lock:
            call = pool.start_soon(number)
            assert sum(worker.calls for worker in pool.statistics().workers) == 1
        assert await call.wait() == 0
