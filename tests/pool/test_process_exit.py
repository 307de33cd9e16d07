"""Detection of the exit of a worker process: in programs that fork, and on systems without pidfds."""

import asyncio
import errno
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioverbs import Device, WorkerDiedError, WorkerPool
from aioverbs._pool.process_exit import ExitWatch
from tests.conftest import ROOT
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.pool import work
from tests.pool.processes import descriptors, processes
from tests.running import run

pytestmark = pytest.mark.timeout(120)

# A main module that forks a child in each worker that imports it. The child keeps the worker's sockets, and outlives
# the worker.
LEAVES_A_CHILD = """
import asyncio, os, signal, sys, threading, time, warnings
from pathlib import Path
import psutil, uvloop
from aioverbs import WorkerDiedError, WorkerPool, open_device
from tests.pool.processes import descriptors

FACTORIES = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}

def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the software device's threads
        return os.fork()

if __name__ == "__mp_main__":
    child = fork()
    if not child:
        signal.alarm(60)
        signal.pause()

def child_id():
    return child

def leave():
    os.kill(os.getpid(), signal.SIGKILL)

def wait_for_exit(process_id):
    while psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)

async def main():
    async with open_device("soft0") as device:
        before = descriptors()
        pool = await WorkerPool(device, 1, processes=True, on_worker_death="fail").open()
        process_id = await pool.run(os.getpid)
        child = await pool.run(child_id)
        try:
            async with asyncio.timeout(20):
                await scene(pool, process_id)
            async with asyncio.timeout(20):
                await pool.aclose()
        finally:
            os.kill(child, signal.SIGKILL)
        print(descriptors() - before, "more descriptors")
"""

RUN_MAIN = """
if __name__ == "__main__":
    with asyncio.Runner(loop_factory=FACTORIES[sys.argv[1]]) as runner:
        runner.run(main())
"""

DIES = """
async def scene(pool, process_id):
    if sys.argv[2] == "forks":
        if not (child := fork()):
            os._exit(0)
        os.waitpid(child, 0)
    if sys.argv[2] == "forks in a signal handler":  # while the loop sleeps; then the worker is killed
        signal.signal(signal.SIGUSR1, lambda number, frame: os.waitpid(fork() or os._exit(0), 0))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        threading.Timer(0.6, os.kill, (process_id, signal.SIGKILL)).start()
    try:
        await (pool.run(leave) if sys.argv[2] != "forks in a signal handler" else pool.run(time.sleep, 60))
    except WorkerDiedError as error:
        print(error)
"""

# The loop of the program reads small pieces, and finds unread results and the exit at the same time.
HAS_ANSWERED = """
asyncio.selector_events._SelectorSocketTransport.max_size = 512

async def scene(pool, process_id):
    results = [pool.start_soon(bytes, 1000) for _ in range(50)]
    died = pool.start_soon(leave)
    wait_for_exit(process_id)
    print(sum([len(await each.wait()) for each in results]))
    try:
        await died.wait()
    except WorkerDiedError as error:
        print(error)
"""

# The worker is busy, and dies before it has read all calls that were sent to it.
HAS_MORE_TO_READ = """
async def scene(pool, process_id):
    busy = pool.start_soon(time.sleep, 60)
    await asyncio.sleep(0)
    unread = [pool.start_soon(len, bytes(1 << 20)) for _ in range(8)]
    await asyncio.sleep(0)
    os.kill(process_id, signal.SIGKILL)
    for call in [busy, *unread]:
        try:
            await call.wait()
        except WorkerDiedError as error:
            last = error
    print(last)
"""

DIED = "worker 0 of the pool died: its process was killed by SIGKILL; it is not replaced"

# A child runs its copy of the program's loop after the worker has exited, while the program's loop does not run or the
# program has exited. The child prints whether its loop slept.
COPY = """
import asyncio, os, signal, sys, time, warnings
import psutil, uvloop
from aioverbs import WorkerPool, open_device

FACTORIES = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}

async def open_pool():
    device = await open_device("soft0").open()
    return device, await WorkerPool(device, 1, processes=True).open()

async def go_on(device, pool, before):
    async with asyncio.timeout(20):
        while pool.statistics().deaths == 0:
            await asyncio.sleep(0.01)
        print(await pool.run(os.getpid) != before)
        await pool.aclose()
        await device.aclose()

with asyncio.Runner(loop_factory=FACTORIES[sys.argv[1]]) as runner:
    device, pool = runner.run(open_pool())
    process_id = pool.statistics().workers[0].process_id
    worker = psutil.Process(process_id)
    parent = os.getpid()
    child = os.fork()
    if not child:
        signal.alarm(60)
        if sys.argv[2] == "is gone":
            while os.getppid() == parent:
                time.sleep(0.001)
        worker.kill()
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)
        before = time.process_time()
        runner.run(asyncio.sleep(1))
        spent = time.process_time() - before
        print("slept" if spent < 0.05 else f"was busy for {spent} s", flush=True)
        os._exit(0)
    if sys.argv[2] == "is gone":
        os._exit(0)
    os.waitpid(child, 0)
    runner.run(go_on(device, pool, process_id))
"""


def run_module(folder: Path, text: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    module = folder / "module.py"
    module.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    return run([sys.executable, "-W", "error", str(module), *arguments], patience(60), env=environment)


@pytest.mark.parametrize("forks", ["forks", "forks in a signal handler", "does not fork"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_death_is_detected_although_a_child_of_the_worker_keeps_its_sockets(
    tmp_path: Path, loop: str, forks: str
) -> None:
    done = run_module(tmp_path, LEAVES_A_CHILD + DIES + RUN_MAIN, loop, forks)
    assert (done.stdout.splitlines(), done.returncode) == ([DIED, "0 more descriptors"], 0)


def test_results_that_a_dead_worker_has_sent_are_received(tmp_path: Path) -> None:
    done = run_module(tmp_path, LEAVES_A_CHILD + HAS_ANSWERED + RUN_MAIN, "asyncio")
    assert (done.stdout.splitlines(), done.returncode) == (["50000", DIED, "0 more descriptors"], 0)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_calls_that_a_dead_worker_has_not_read_fail(tmp_path: Path, loop: str) -> None:
    done = run_module(tmp_path, LEAVES_A_CHILD + HAS_MORE_TO_READ + RUN_MAIN, loop)
    assert (done.stdout.splitlines(), done.returncode) == ([DIED, "0 more descriptors"], 0)
    assert "ResourceWarning" not in done.stderr


@pytest.mark.parametrize("parent", ["waits", "is gone"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_forked_copy_of_the_loop_does_not_spin_when_a_worker_exits(loop: str, parent: str) -> None:
    done = run([sys.executable, "-P", "-W", "ignore", "-c", COPY, loop, parent], patience(60))
    expected = ["slept", "True"] if parent == "waits" else ["slept"]
    assert (done.stdout.splitlines(), done.returncode) == (expected, 0), done.stderr


async def use(device: Device) -> None:
    """Check that a worker that dies is replaced, and that no descriptor of either is left."""
    before = descriptors()
    async with WorkerPool(device, 1, processes=True) as pool:
        (first,) = processes(pool)
        with pytest.raises(WorkerDiedError, match="its process was killed by SIGKILL"):
            await pool.run(work.kill_own_process)
        assert await pool.run(os.getpid) != first
    assert descriptors() == before


@pytest.mark.every_way
async def test_watches_of_exits_leak_no_descriptors(device: Device) -> None:
    await use(device)


async def test_deaths_are_detected_without_pidfds_in_python(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    await use(device)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
async def test_deaths_are_detected_without_pidfds_in_the_kernel(
    device: Device, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    await use(device)


def test_a_watch_that_was_never_started_is_collected_silently() -> None:
    process: Any = None
    loop = asyncio.new_event_loop()
    ExitWatch(loop, process, lambda: None)
    collect_garbage()
    loop.close()


async def test_deaths_are_detected_without_another_epoll_instance(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> select.epoll:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("aioverbs._pool.process_exit.select.epoll", refuse)
    await use(device)
