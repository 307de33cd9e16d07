"""Pools in a forked child, and in the parent of a child that ends by an exception."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from aioverbs import ClosedResourceError, Device, ForkedProcessError, WorkerPool
from tests.core.children import in_child
from tests.pace import patience
from tests.pool.test_calls import number
from tests.running import run
from tests.waiting import wait_until

LIMIT_S = int(patience(20))

# A task forks a child that ends by an exception: asyncio cancels the copies of the parent's tasks in the child, and
# waits for them. The parent exits by os._exit: when asyncio ends the child's copy of the loop, it takes the wake-ups
# from other threads that the parent's loop needs to end.
PROCESSES = """
import asyncio, os, sys
from pathlib import Path
from aioverbs import WorkerPool, open_device

async def main():
    fifo = Path(sys.argv[1])
    async with open_device("soft0") as device, WorkerPool(device, 1, processes=True) as pool:
        before = pool.statistics().workers[0].process_id
        waiting = asyncio.create_task(pool.run(Path.read_text, fifo))
        while not pool.statistics().workers[0].calls:
            await asyncio.sleep(0)
        child = os.fork()
        if not child:
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        fifo.write_text("as ever")      # blocks until the worker has opened it
        print(await waiting, await pool.run(os.getpid) == before, pool.statistics().deaths)
    print("closed", flush=True)
    os._exit(0)

asyncio.run(main())
"""

THREADS = """
import asyncio, os, sys, threading
from aioverbs import WorkerPool, current_worker, open_device
from aioverbs._lifecycle.affinity import wait_uncancelled

async def next_event(device):
    await anext(device.events())

async def wait_for_a_thread(go_on):
    await wait_uncancelled(asyncio.get_running_loop().run_in_executor(None, go_on.wait))

async def main():
    go_on = threading.Event()
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        domain.register(64) as region,
        WorkerPool(device, 1) as pool,
    ):
        there = (await pool.run(current_worker)).domain
        started = pool.start_soon(go_on.wait)
        region.pins.add()
        here = pool.run(int), started.wait(), region.pins.wait(), next_event(device), wait_for_a_thread(go_on)
        waiting = [asyncio.create_task(each) for each in (*here, there.run(int))]
        while pool.statistics().workers[0].calls < 2:
            await asyncio.sleep(0)
        withdrawn = asyncio.create_task(pool.run(int))
        await asyncio.sleep(0)
        withdrawn.cancel()
        await asyncio.sleep(0)
        child = os.fork()
        if not child:
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        os._exit(0)

asyncio.run(main())
"""


def test_worker_processes_stay_with_the_parent_after_a_fork(tmp_path: Path) -> None:
    """The child neither ends nor replaces the workers, and the parent still communicates with them."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    done = run([sys.executable, "-P", "-W", "ignore", "-c", PROCESSES, str(fifo)], patience(50))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["3", "as ever True 0", "closed"]


# A child of a killed process lives on; the output says which processes are the worker and the child.
KILLED = """
import asyncio, os, signal
from aioverbs import WorkerPool, open_device

async def main():
    async with open_device("soft0") as device, WorkerPool(device, 1, processes=True) as pool:
        worker = await pool.run(os.getpid)
        child = os.fork()
        if not child:
            os.close(1)
            signal.pause()
        print(worker, child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_workers_end_with_the_pools_process_although_a_forked_child_lives_on() -> None:
    command = [sys.executable, "-P", "-W", "ignore", "-c", KILLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as pool_process:
        try:
            assert pool_process.stdout is not None
            worker, child = map(int, pool_process.stdout.readline().split())
            pool_process.wait(patience(50))
            wait_until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)
            assert psutil.pid_exists(child)
        finally:
            os.killpg(pool_process.pid, signal.SIGKILL)


def test_a_forked_child_does_not_wait_for_the_end_of_the_parents_calls() -> None:
    done = run([sys.executable, "-P", "-W", "ignore", "-c", THREADS], patience(50))
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


async def test_worker_threads_stay_with_the_parent_after_a_fork(pool: WorkerPool) -> None:
    calls: list[Callable[[], object]] = [
        lambda: asyncio.run(pool.run(number)),
        lambda: pool.start_soon(number),
        lambda: asyncio.run(pool.drain()),
    ]

    def child() -> list[str]:
        raised = []
        for call in calls:
            with pytest.raises(ClosedResourceError) as caught:
                call()
            raised.append(type(caught.value).__name__)
        asyncio.run(pool.aclose())
        return raised

    assert in_child(child) == ["ForkedProcessError"] * 3
    assert await pool.run(number, worker=1) == 1


async def test_calls_in_flight_at_a_fork_raise_in_the_child(device: Device) -> None:
    go_on = threading.Event()
    async with WorkerPool(device, 1) as pool:
        over = pool.start_soon(number)
        assert await over.wait() == 0
        in_flight = pool.start_soon(go_on.wait, patience(30))

        async def ask() -> tuple[bool, bool, int]:
            for ask_for in (in_flight.result, in_flight.exception):
                with pytest.raises(ForkedProcessError, match="CallFuture was opened before the fork"):
                    ask_for(patience(5))
            async with asyncio.timeout(patience(5)):
                with pytest.raises(ForkedProcessError):
                    await in_flight.wait()
                return in_flight.cancel(), in_flight.done(), await over.wait()

        with in_flight._condition:  # held at the fork, as by a worker that is setting the result
            seen = await asyncio.to_thread(in_child, lambda: asyncio.run(ask()), LIMIT_S)
        assert seen == (False, False, 0)
        go_on.set()
        assert await in_flight.wait()


async def test_a_lock_held_at_a_fork_is_free_in_the_child(device: Device) -> None:
    async with WorkerPool(device, 1) as pool:
        before = pool.statistics()
        with pool._supervisor.lock:
            assert await asyncio.to_thread(in_child, pool.statistics, LIMIT_S) == before
