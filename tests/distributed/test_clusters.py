"""Clusters whose processes talk through the backend."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, LocalCluster, Nanny, Scheduler, Worker, get_worker, wait

EXAMPLE = Path(__file__).parents[2] / "examples" / "dask_shuffle.py"

# Dask leaves sockets and loops of its threads to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(240),
]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Two workers in processes of their own, with nannies."""
    with LocalCluster(
        protocol="aioverbs://", n_workers=2, threads_per_worker=1, dashboard_address=":0", worker_dashboard_address=None
    ) as made:
        yield made


def test_an_array_and_a_dataframe_are_shuffled_between_processes() -> None:
    done = subprocess.run([sys.executable, "-P", EXAMPLE], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "aioverbs://127.0.0.1:" in lines[0]
    assert [line.rpartition(": ")[2] for line in lines[1:]] == ["correct"] * 2


def test_a_killed_worker_is_replaced_and_its_results_are_computed_again(cluster: LocalCluster) -> None:
    with Client(cluster) as client:
        arrays = client.map(lambda seed: np.full(100_000, seed), range(8))
        wait(arrays)
        process = next(iter(client.run(os.getpid).values()))
        os.kill(process, signal.SIGKILL)
        totals = client.gather(client.map(lambda array: int(array.sum()), arrays))
        assert totals == [seed * 100_000 for seed in range(8)]
        client.wait_for_workers(2, timeout=100)


async def test_a_large_array_goes_from_worker_to_worker_and_to_the_client() -> None:
    async with (
        Scheduler(protocol="aioverbs://", port=0, dashboard_address=":0") as scheduler,
        Worker(scheduler.address, name="a", dashboard_address=":0"),
        Worker(scheduler.address, name="b", dashboard_address=":0"),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        array = client.submit(np.arange, 2_000_000, workers="a")
        moved = client.submit(lambda source: (get_worker().name, source + 1), array, workers="b")
        name, result = await moved
        assert name == "b"
        np.testing.assert_array_equal(result, np.arange(1, 2_000_001))
        result[0] = 7  # the memory is the client's own


async def test_a_nanny_starts_a_worker_that_is_restarted() -> None:
    async with (
        Scheduler(protocol="aioverbs://", port=0, dashboard_address=":0") as scheduler,
        Nanny(scheduler.address, nthreads=1, dashboard_address=":0") as nanny,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        assert nanny.worker_address.startswith("aioverbs://")
        before = await client.submit(os.getpid)
        await client.restart()
        assert await client.submit(os.getpid, pure=False) != before


def test_clients_of_several_threads_share_a_process() -> None:
    for _ in range(2):  # the loop of the first cluster is closed when the second one begins
        with (
            LocalCluster(
                protocol="aioverbs://", n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
            ) as cluster,
            Client(cluster) as first,
            Client(cluster.scheduler_address) as second,
        ):
            future = first.scatter(np.arange(100_000))
            assert first.submit(lambda array: int(array[-1]), future).result() == 99_999
            assert second.submit(sum, range(10)).result() == 45
