"""Pools whose workers are processes."""

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio

from aioverbs import (
    AffinityError,
    BrokenResourceError,
    ClosedResourceError,
    Device,
    State,
    WorkerDiedError,
    WorkerPool,
    open_device,
)
from aioverbs._pool.placement import rendezvous
from tests.conftest import ROOT
from tests.core.children import in_child
from tests.pace import patience
from tests.pool import handlers, work
from tests.pool.test_calls import cancelled_before
from tests.running import run
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    async with open_device("soft0") as device:
        yield device


@pytest_asyncio.fixture
async def pool(device: Device, loop_name: str) -> AsyncIterator[WorkerPool]:
    async with WorkerPool(device, 2, processes=True, loop=loop_name) as pool:
        yield pool


def processes(pool: WorkerPool) -> list[int]:
    """Of its workers, those that there are."""
    return [worker.process_id for worker in pool.statistics().workers if worker.process_id is not None]


def replaced(pool: WorkerPool, process_id: int) -> bool:
    return process_id not in processes(pool)


def alive(process_id: int) -> bool:
    return os.path.exists(f"/proc/{process_id}")


async def test_each_worker_is_a_process_with_a_loop_and_a_domain(pool: WorkerPool, loop_name: str) -> None:
    statistics = pool.statistics()
    ids = processes(pool)
    assert len({*ids, os.getpid()}) == 3
    assert [(each.ready, each.native) for each in statistics.workers] == [(True, True)] * 2
    for worker, process_id in enumerate(ids):
        for function in (work.look, work.look_later):
            assert await pool.run(function, worker=worker) == (process_id, worker, loop_name, True)
    assert await pool.map(work.write, [b"hello", b"x" * 4096]) == [b"hello", b"x" * 4096]
    assert [each[1] for each in [await pool.run(work.look) for _ in range(4)]] in ([0, 1] * 2, [1, 0] * 2)
    assert (await pool.run(work.look, key="a"))[1] == rendezvous("a", range(2))
    large = bytes(5_000_000)
    assert await pool.run(bytes, large, worker=1) == large


async def test_memory_that_is_registered_once_serves_all(pool: WorkerPool) -> None:
    assert all(each.shares_pd for each in pool.statistics().workers)
    async with pool.pd.register(4096, work.ACCESS, pool.pd.shared_memory) as region:
        for at, worker in ((0, 0), (8, 1)):
            await pool.run(work.write_there, region.remote()[at : at + 8], b"worker %d" % worker, worker=worker)
        with pytest.raises(WorkerDiedError):
            await pool.run(work.kill_myself, worker=0)
        await pool.run(work.write_there, region.remote()[16:24], b"the next", worker=0)
        assert bytes(region.buffer[:24]) == b"worker 0worker 1the next"


async def test_what_goes_by_pickle_and_what_does_not(pool: WorkerPool) -> None:
    work.VARIABLE.set("here")
    assert await pool.run(work.variable) == "none"
    with pytest.raises(work.Own, match="there") as caught:
        await pool.run(work.fail, "own")
    assert "in the worker process:\nTraceback" in caught.value.__notes__[0]
    assert 'raise Own("there")' in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"Stubborn: 1 and 2 \(which cannot be sent"):
        await pool.run(work.fail, "stubborn")
    with pytest.raises((pickle.PicklingError, AttributeError)) as caught_there:
        await pool.run(work.fail, "lambda")
    assert "what a worker process returns goes by pickle" in caught_there.value.__notes__[0]
    with pytest.raises((pickle.PicklingError, AttributeError)) as caught_here:
        await pool.run(lambda: None)
    assert "what a worker process is to do goes by pickle" in caught_here.value.__notes__[0]
    assert [(each.calls, each.deaths) for each in pool.statistics().workers] == [(0, 0)] * 2


@pytest.mark.parametrize("kind", ["native", "anyio", "started"])
async def test_a_cancellation_goes_there_and_waits_for_its_end(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    if kind == "anyio":
        async with anyio.create_task_group() as group:
            group.start_soon(pool.run, work.stay, str(tmp_path))
            await until(begun.exists)
            group.cancel_scope.cancel()
    elif kind == "native":
        task = asyncio.create_task(pool.run(work.stay, str(tmp_path)))
        await until(begun.exists)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        started = pool.start_soon(work.stay, str(tmp_path))
        await until(begun.exists)
        assert started.cancel()
        await until(started.cancelled)
    assert ended.exists()
    assert sum(each.cancelled for each in pool.statistics().workers) == 1


async def test_cancelled_before_it_began_or_by_itself(pool: WorkerPool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    blocking = pool.start_soon(handlers.block, folder, worker=0)
    await until((tmp_path / "blocking").exists)
    stay = partial(pool.run, work.stay, folder, worker=0)
    assert await cancelled_before(partial(work.mark, folder, "go on"), pool, stay)
    await blocking.wait()
    assert not (tmp_path / "begun").exists()
    with pytest.raises(BrokenResourceError, match="cancelled what was called there"):
        await pool.run(work.cancel_myself)


async def test_calls_from_other_loops_and_threads(pool: WorkerPool, tmp_path: Path) -> None:
    def elsewhere() -> tuple[int, int]:
        started = pool.start_soon(work.look_later, worker=1)
        here = asyncio.run(pool.run(work.look, worker=0))[1]
        cancelled = pool.start_soon(work.stay, str(tmp_path))
        cancelled.cancel()
        return here, started.result(patience(10))[1]

    assert await asyncio.to_thread(elsewhere) == (0, 1)
    for end in (pool.aclose, pool.stop, lambda: pool.stop(0)):
        with pytest.raises(AffinityError, match="aclose on <WorkerPool"):
            await asyncio.to_thread(lambda end: asyncio.run(end()), end)
    assert (await pool.run(work.look, worker=0))[1] == 0, "the pool that refused goes on"


async def test_a_block_that_another_loop_leaves_by_an_error_still_drains(device: Device, tmp_path: Path) -> None:
    pool = await WorkerPool(device, 1, processes=True).open()
    error = ValueError("of the block")
    await asyncio.to_thread(lambda: asyncio.run(pool.__aexit__(ValueError, error, None)))
    assert "AffinityError: aclose on <WorkerPool" in error.__notes__[0]
    call = pool.start_soon(work.stay_until, str(tmp_path), "go on")
    await until((tmp_path / "begun").exists)
    closing = asyncio.create_task(pool.aclose())
    await until(lambda: not pool._crew.takes_calls())
    work.mark(str(tmp_path), "go on")
    assert await call.wait() == "go on"
    await closing


DEATHS: dict[str, tuple[Callable[..., Any], str]] = {
    "kill -9 by itself": (work.kill_myself, "its process ended by SIGKILL"),
    "exit": (work.leave, "its process ended with status 3"),
    "exit of a coroutine": (work.leave_later, "its process ended with status 3"),
    "its loop is stopped": (work.stop_the_loop, "its process ended with status 1"),
    "its child lives on": (work.fork_and_die, "its process ended by SIGKILL"),
}


@pytest.mark.parametrize("way", DEATHS)
async def test_one_that_dies_is_told_of_and_replaced(
    device: Device, way: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    function, how = DEATHS[way]
    arguments = [str(tmp_path)] if function is work.fork_and_die else []
    async with WorkerPool(device, 2, processes=True) as pool:
        before = processes(pool)
        others = [asyncio.create_task(pool.run(asyncio.sleep, 30, worker=1)) for _ in range(3)]
        elsewhere = asyncio.create_task(pool.run(asyncio.sleep, 0.5, worker=0))
        assert (await pool.run(work.look_later, worker=1))[0] == before[1]
        begin = time.monotonic()
        with pytest.raises(WorkerDiedError, match=f"worker 1 of the pool died: {how}"):
            await pool.run(function, *arguments, worker=1)
        assert time.monotonic() - begin < patience(8)
        (tmp_path / "child").unlink(missing_ok=True)
        for each in others:
            with pytest.raises(WorkerDiedError):
                await each
        assert not alive(before[1])
        found = await pool.run(work.look, worker=1)
        assert (found[0] in before, found[1]) == (False, 1)
        await elsewhere
        assert processes(pool)[0] == before[0]
        assert [each.deaths for each in pool.statistics().workers] == [0, 1]
        assert "and is replaced" in caplog.text
    assert "Traceback" not in capfd.readouterr().err or way == "its loop is stopped"


async def test_kill_9_under_load(device: Device) -> None:
    """Every call ends, by its result or by the death; what runs elsewhere goes on."""
    async with WorkerPool(device, 2, processes=True) as pool:
        results: list[str] = []

        async def ask() -> None:
            for _ in range(200):
                try:
                    await pool.run(work.look_later)
                except WorkerDiedError:
                    results.append("died")
                else:
                    results.append("done")

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(ask())
            for _ in range(3):
                await asyncio.sleep(0.1)
                victim = processes(pool)[0]
                os.kill(victim, signal.SIGKILL)
                await until(partial(replaced, pool, victim))
        assert (len(results), "done" in results) == (1600, True)
        assert pool.statistics().deaths == 3
        assert (await pool.run(work.look, worker=0))[1] == 0


async def test_a_pool_that_is_to_fail_fails(device: Device) -> None:
    async def use() -> None:
        async with WorkerPool(device, 2, processes=True, on_worker_death="fail") as pool:
            with pytest.raises(WorkerDiedError):
                await pool.run(work.kill_myself, worker=0)
            with pytest.raises(BrokenResourceError, match="is broken: worker 0 of the pool died"):
                await pool.run(work.look, worker=1)

    with pytest.raises(BrokenResourceError, match="is broken: worker 0 of the pool died"):
        await use()


async def test_a_deadline_cancels_and_then_kills(device: Device, tmp_path: Path) -> None:
    pool = await WorkerPool(device, 2, processes=True, grace_s=1.0).open()
    ids = processes(pool)
    staying = pool.start_soon(work.stay, str(tmp_path), worker=0)
    blocking = pool.start_soon(work.block, 60.0, str(tmp_path), worker=1)
    await until(lambda: (tmp_path / "begun").exists() and (tmp_path / "blocking").exists())
    begin = time.monotonic()
    await pool.stop(0.1)
    assert time.monotonic() - begin < patience(5)
    assert (tmp_path / "ended").exists()
    assert isinstance(staying.exception(), ClosedResourceError)
    assert isinstance(blocking.exception(), WorkerDiedError)
    assert (pool.state, [alive(each) for each in ids]) == (State.CLOSED, [False] * 2)


async def test_a_block_waits_for_what_was_started(device: Device) -> None:
    async with WorkerPool(device, 2, processes=True) as pool:
        started = [pool.start_soon(work.block, 0.05) for _ in range(4)]
        ids = processes(pool)
    assert [each.result() for each in started] == [None] * 4
    assert [alive(each) for each in ids] == [False] * 2


async def test_setup_and_one_that_cannot_be_made(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    async with WorkerPool(device, 2, processes=True, setup=work.setup) as pool:
        assert [await pool.run(work.state, worker=each) for each in (0, 1)] == ["of 0", "of 1"]
    pool = WorkerPool(device, 2, processes=True, setup=work.refuse)
    with pytest.raises(work.Own, match="not this one"):
        await pool.open()
    assert (pool.state, caplog.text) == (State.CLOSED, "")
    with pytest.raises((pickle.PicklingError, AttributeError)):
        await WorkerPool(device, 1, processes=True, setup=lambda _: work.setup(_)).open()


async def test_ctrl_c_does_not_end_one_that_starts(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    make = subprocess.Popen

    def interrupted(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        process = make(*args, **kwargs)
        process.send_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    async with WorkerPool(device, 1, processes=True) as pool:
        assert [await pool.run(os.getpid)] == processes(pool)
        assert signal.SIGINT not in await pool.run(partial(signal.pthread_sigmask, signal.SIG_BLOCK, []))


async def test_opening_that_is_cancelled_leaves_nothing(device: Device) -> None:
    pool = WorkerPool(device, 2, processes=True)
    with anyio.move_on_after(0.01) as scope:
        await pool.open()
    assert scope.cancelled_caught
    assert (pool.state, [alive(each) for each in processes(pool)]) == (State.CLOSED, [False] * 2)


async def test_a_device_that_is_closed_closes_it() -> None:
    device = await open_device("soft0").open()
    pool = await WorkerPool(device, 1, processes=True).open()
    (process_id,) = processes(pool)
    with pytest.warns(ResourceWarning, match="WorkerPool .* was still open"):
        await device.aclose()
    assert (alive(process_id), pool.state) == (False, State.CLOSED)


async def test_what_is_forgotten_is_warned_of_and_ends(device: Device) -> None:
    pool = await WorkerPool(device, 1, processes=True).open()
    (process_id,) = processes(pool)
    pd = pool.pd
    held = [pool]
    del pool
    with pytest.warns(ResourceWarning, match="was still open: it was forgotten"):
        held.clear()
    gc.collect()
    await until(lambda: not alive(process_id))
    await pd.aclose()


async def test_a_pool_in_a_pool(pool: WorkerPool) -> None:
    assert await pool.run(work.inner, 2) == [0, 1]


async def test_the_child_of_a_fork_has_no_workers(pool: WorkerPool) -> None:
    def child() -> str:
        with pytest.raises(ClosedResourceError) as caught:
            asyncio.run(pool.run(work.look))
        asyncio.run(pool.aclose())
        return type(caught.value).__name__

    assert in_child(child) == "ForkedProcessError"
    assert (await pool.run(work.look, worker=1))[1] == 1


def run_script(folder: Path, body: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "script.py"
    script.write_text(
        f"import asyncio, os, sys\nsys.path.append({str(ROOT)!r})\nfrom aioverbs import *\n" + textwrap.dedent(body)
    )
    command = [sys.executable, "-W", "error", str(script)]
    environment = {**os.environ, "AIOVERBS_DEVICE": "soft0", "PYTHONPATH": os.pathsep.join(sys.path)}
    return run(command, patience(50), env=environment)


def test_functions_of_the_main_module(tmp_path: Path) -> None:
    body = """
        def square(number):
            return number * number

        async def main():
            async with open_device() as device, WorkerPool(device, 2, processes=True) as pool:
                print(await pool.map(square, range(5)))

        if __name__ == "__main__":
            asyncio.run(main())
    """
    done = run_script(tmp_path, body)
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 1, 4, 9, 16]\n", "", 0)


def test_a_main_module_that_opens_a_pool_whoever_imports_it(tmp_path: Path) -> None:
    body = """
        async def main():
            async with open_device() as device, WorkerPool(device, 1, processes=True) as pool:
                await pool.run(os.getpid)

        asyncio.run(main())
    """
    done = run_script(tmp_path, body)
    assert done.returncode == 1
    assert "before the" in done.stderr
    assert "has finished its bootstrapping phase" in done.stderr


def test_a_main_module_that_cannot_be_imported(tmp_path: Path) -> None:
    body = """
        if __name__ != "__main__":
            raise ZeroDivisionError("in a worker")

        async def main():
            async with open_device() as device:
                try:
                    await WorkerPool(device, 1, processes=True).open()
                except WorkerDiedError as error:
                    print(error)

        if __name__ == "__main__":
            asyncio.run(main())
    """
    done = run_script(tmp_path, body)
    assert done.returncode == 0
    assert "worker 0 of the pool died: its process ended with status 1" in done.stdout
    assert "ZeroDivisionError: in a worker" in done.stderr


def test_functions_of_a_main_module_that_is_run_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        textwrap.dedent(
            """
            import asyncio, sys
            from aioverbs import *

            def arguments():
                return __name__, sys.argv[1:]

            async def main():
                async with open_device("soft0") as device, WorkerPool(device, 1, processes=True) as pool:
                    print(*await pool.run(arguments))

            if __name__ == "__main__":
                asyncio.run(main())
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = run([sys.executable, "-P", "-W", "error", "-m", "named", "1", "2"], patience(50), env=environment)
    assert (done.stdout, done.stderr, done.returncode) == ("__mp_main__ ['1', '2']\n", "", 0)


def test_a_pool_whose_process_is_killed_leaves_no_workers(tmp_path: Path) -> None:
    body = """
        async def main():
            async with open_device() as device, WorkerPool(device, 2, processes=True) as pool:
                print(*(worker.process_id for worker in pool.statistics().workers), flush=True)
                os.kill(os.getpid(), 9)

        if __name__ == "__main__":
            asyncio.run(main())
    """
    done = run_script(tmp_path, body)
    assert (done.stderr, done.returncode) == ("", -signal.SIGKILL)
    left = [int(each) for each in done.stdout.split()]
    end = time.monotonic() + patience(10)
    while any(map(alive, left)) and time.monotonic() < end:
        time.sleep(0.01)
    assert [alive(each) for each in left] == [False] * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_many_pools_leave_nothing() -> None:
    before = 0, 0
    async with open_device("soft0") as device:
        for round_ in range(60):
            async with WorkerPool(device, 2, processes=True, loop=("asyncio", "uvloop")[round_ % 2]) as pool:
                assert [each[1] for each in await pool.map(_look, range(2))] == [0, 1]
                if not round_ % 10:
                    with pytest.raises(WorkerDiedError):
                        await pool.run(work.kill_myself)
            if round_ == 10:
                before = len(os.listdir("/proc/self/fd")), threading.active_count()
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def _look(_: int) -> tuple[int, int, str, bool]:
    return work.look()
