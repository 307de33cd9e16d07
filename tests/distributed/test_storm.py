"""Clusters whose processes are killed or stopped, and many clusters in one process. The long storms are marked slow."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import dask.array as da
import dask.config
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
import pytest
from distributed import Client, LocalCluster

from tests.descriptors import descriptors, files
from tests.garbage import collect_garbage
from tests.pace import fewer, patience
from tests.resident import resident_bytes
from tests.running import wait_for_ends
from tests.waiting import until

NODE = Path(__file__).with_name("node.py")
ROWS = 200_000
KEYS = 97
VICTIMS = ("worker", "scheduler", "nanny")
CLEAR = {"FutureCancelledError", "KilledWorker", "P2PConsistencyError", "RuntimeError", "CommClosedError", "OSError"}
"""Errors that say what happened to a shuffle."""
LIMIT_S = patience(240)  # for a start of processes, or for a shuffle that is repeated after a kill, on a busy machine
GROWTH_BYTES = 64 << 20

# Dask leaves sockets and loops of its threads to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(1200),
]


class Nodes:
    """Processes of a cluster: a scheduler and two nannies, each with a worker. Closing kills those that are left."""

    def __init__(self) -> None:
        self.address = ""
        self.scheduler: subprocess.Popen[str]
        self.nannies: list[subprocess.Popen[str]] = []
        self._started: list[subprocess.Popen[str]] = []

    async def start(self) -> None:
        """Start all processes, and wait until they are ready."""
        self.scheduler, self.address = await asyncio.to_thread(self._start, "scheduler")
        await asyncio.gather(self.add_nanny(), self.add_nanny())

    async def add_nanny(self) -> None:
        """Start a nanny and its worker."""
        self.nannies.append((await asyncio.to_thread(self._start, "nanny", self.address))[0])

    def _start(self, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        """Start a process in a group of its own; return it and its address when it is ready."""
        process = subprocess.Popen(
            [sys.executable, "-P", str(NODE), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,
        )
        self._started.append(process)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("aioverbs://"), f"{arguments[0]} did not start"
        return process, address

    async def wait_for_end(self) -> None:
        """Wait until all processes of this cluster have ended by themselves."""
        await until(lambda: all(process.poll() is not None for process in self._started), 60)

    def close(self) -> None:
        """Kill all processes that are left."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):  # with the group, its workers
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextlib.asynccontextmanager
async def nodes() -> AsyncIterator[Nodes]:
    """Start a cluster."""
    made = Nodes()
    try:
        async with asyncio.timeout(LIMIT_S):
            await made.start()
        yield made
    finally:
        made.close()


@contextlib.asynccontextmanager
async def client_of(cluster: Nodes, workers: int = 2) -> AsyncIterator[Client]:
    """Connect a client to a cluster, and wait for its workers."""
    with dask.config.set({"distributed.comm.timeouts.connect": "5s"}):
        async with asyncio.timeout(LIMIT_S):
            client = await Client(cluster.address, asynchronous=True, set_as_default=True)
            await client.wait_for_workers(workers)
        try:
            yield client
        finally:
            async with asyncio.timeout(patience(60)):
                await client.close()


def start_shuffle(client: Client) -> Any:
    """Start to shuffle a dataframe by a column; return a future of the number of keys in each partition, and of the sum
    of its values.
    """
    values = da.arange(ROWS, chunks=ROWS // 8)
    frame = dd.from_dask_array(da.stack([values % KEYS, values], axis=1), columns=["key", "value"])
    shuffled = frame.shuffle("key", shuffle_method="p2p")
    sums = shuffled.map_partitions(
        lambda part: pd.DataFrame({"keys": [part["key"].nunique()], "sum": [part["value"].sum()]}),
        meta={"keys": "int64", "sum": "int64"},
    )
    return client.compute(sums)


def check_sums(sums: pd.DataFrame) -> None:
    """Check the result of a shuffle: each key is in one partition, and no value is lost."""
    assert int(sums["keys"].sum()) == KEYS
    assert int(sums["sum"].sum()) == ROWS * (ROWS - 1) // 2


async def workers_of(client: Client) -> list[int]:
    """Return the process identifiers of both workers, once both answer: the scheduler may not have noticed yet that an
    earlier one was killed.
    """
    async with asyncio.timeout(LIMIT_S):
        while True:
            answers = list((await client.run(os.getpid, on_error="return")).values())
            if len(answers) == 2 and all(isinstance(answer, int) for answer in answers):
                return answers
            await asyncio.sleep(0.05)


async def check_kill(cluster: Nodes, victim: str, chance: random.Random) -> str:
    """Kill a process during a shuffle, and check that the result is right, or that there is an error of Dask.

    :param cluster: the cluster. If its scheduler is killed, all of its processes have ended afterwards.
    :param victim: one of `VICTIMS`.
    :param chance: source of the moment.
    :returns: name of the class of the result, or of the error.
    """
    async with client_of(cluster) as client:
        pids = await workers_of(client)
        future = start_shuffle(client)
        await asyncio.sleep(chance.random())
        if victim == "worker":
            ending = [chance.choice(pids)]
            os.kill(ending[0], signal.SIGKILL)
        elif victim == "scheduler":
            ending = pids
            cluster.scheduler.kill()
        else:
            nanny = cluster.nannies.pop(chance.randrange(2))
            ending = [child.pid for child in psutil.Process(nanny.pid).children(recursive=True)]
            nanny.kill()
            nanny.wait()
        result: Any
        async with asyncio.timeout(LIMIT_S):
            (result,) = await asyncio.gather(future.result(), return_exceptions=True)
        outcome = type(result).__name__
        if isinstance(result, BaseException):
            assert outcome in CLEAR, repr(result)
            assert str(result)
        else:
            check_sums(result)
    if victim == "scheduler":
        await cluster.wait_for_end()
    wait_for_ends(ending)
    if victim == "nanny":
        async with asyncio.timeout(LIMIT_S):
            await cluster.add_nanny()
    return outcome


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(3, id="short"),
        pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(7200)], id="long"),
    ],
)
async def test_processes_are_killed_during_shuffles(rounds: int) -> None:
    """Results are right, or there is a clear error. Nothing hangs, and no process of the cluster is left."""
    chance = random.Random(rounds)
    outcomes: dict[str, list[str]] = {victim: [] for victim in VICTIMS}
    left = [VICTIMS[(number + 2) % 3] for number in range(fewer(rounds, least=3))]  # the scheduler comes last
    while left:
        async with nodes() as cluster:
            while left:
                victim = left.pop(0)
                outcomes[victim].append(await check_kill(cluster, victim, chance))
                if victim == "scheduler":
                    break
    print(outcomes)
    assert all(outcomes.values())


@pytest.mark.stops_processes
async def test_a_worker_that_is_stopped_for_a_while_goes_on() -> None:
    async with nodes() as cluster, client_of(cluster) as client:
        pids = await workers_of(client)
        future = start_shuffle(client)
        await asyncio.sleep(0.1)
        os.kill(pids[0], signal.SIGSTOP)
        try:
            await asyncio.sleep(5)
            assert not future.done()
        finally:
            os.kill(pids[0], signal.SIGCONT)
        async with asyncio.timeout(LIMIT_S):
            check_sums(await future)
        assert set(await workers_of(client)) == set(pids)


def shared_memory() -> list[str]:
    """Return the names of the files of shared memory that this process has mapped, one for each mapping."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(fields[5] for fields in (line.split(maxsplit=5) for line in lines) if fields[1].endswith("s"))


def use_cluster() -> None:
    """Start a cluster in this process, move arrays between its workers, and close it."""
    with (
        LocalCluster(
            protocol="aioverbs://", n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        one, other = client.scheduler_info()["workers"]
        arrays = [client.submit(np.arange, 100_000, workers=[each]) for each in (one, other)]
        sums = client.map(lambda a, b: int(a.sum() + b.sum()), arrays, arrays[::-1], workers=[one])
        assert client.gather(sums) == [2 * (100_000 * 99_999 // 2)] * 2


@pytest.mark.parametrize(
    "clusters",
    [
        pytest.param(5, id="short"),
        pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="long"),
    ],
)
def test_clusters_of_one_process_leave_nothing(clusters: int) -> None:
    for _ in range(2):
        use_cluster()
    collect_garbage()
    before, mapped, memory = len(descriptors()), shared_memory(), resident_bytes()
    for _ in range(clusters):
        use_cluster()
    collect_garbage()
    after = descriptors()
    assert len(after) <= before, files(after)
    assert len(shared_memory()) <= len(mapped), (mapped, shared_memory())
    assert resident_bytes() < memory + GROWTH_BYTES
