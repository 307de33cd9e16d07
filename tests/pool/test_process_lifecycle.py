"""Opening and closing of process pools."""

import asyncio
import contextlib
import errno
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from aioverbs import (
    BrokenResourceError,
    ClosedResourceError,
    Device,
    ResourceState,
    VerbsError,
    WorkerDiedError,
    WorkerPool,
    open_device,
)
from aioverbs._pool.backends import ProcessBackend
from aioverbs._sharing import shared_pd
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.pool import work
from tests.pool.processes import alive, processes
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)


@pytest.mark.every_way
async def test_a_process_pool_drains_after_another_loop_failed_to_close_it(device: Device, tmp_path: Path) -> None:
    pool = await WorkerPool(device, 1, processes=True).open()
    error = ValueError("of the block")
    await asyncio.to_thread(lambda: asyncio.run(pool.__aexit__(ValueError, error, None)))
    assert "AffinityError: aclose on <WorkerPool" in error.__notes__[0]
    call = pool.start_soon(work.wait_for_mark, str(tmp_path), "go on")
    await until((tmp_path / "begun").exists)
    closing = asyncio.create_task(pool.aclose())
    await until(lambda: not pool._supervisor.accepts_calls())
    work.mark(str(tmp_path), "go on")
    assert await call.wait() == "go on"
    await closing


async def test_a_worker_without_free_descriptors_leaves_no_socket_open(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[socket.socket, socket.socket]] = []
    socketpair = socket.socketpair

    def limited(**arguments: Any) -> tuple[socket.socket, socket.socket]:
        if len(made) == 2:
            raise OSError(errno.EMFILE, "no free descriptors")
        made.append(socketpair(**arguments))
        return made[-1]

    monkeypatch.setattr(socket, "socketpair", limited)
    pool = WorkerPool(device, 1, processes=True)
    with pytest.raises(OSError, match="no free descriptors"):
        await pool.open()
    assert [end.fileno() for pair in made for end in pair] == [-1] * 4


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("is_process", [False, True], ids=["threads", "processes"])
async def test_a_caller_that_is_cancelled_while_the_pool_is_closed_raises_its_cancellation(
    device: Device, is_process: bool, is_first: bool, tmp_path: Path
) -> None:
    pool = await WorkerPool(device, 1, processes=is_process).open()
    calling = asyncio.create_task(pool.run(work.end_on_mark, str(tmp_path)))
    await until((tmp_path / "begun").exists)
    if is_first:
        calling.cancel()
        await asyncio.sleep(0)
    stopping = asyncio.create_task(pool.stop(0))
    await until((tmp_path / "ending").exists)
    if not is_first:
        calling.cancel()
        await asyncio.sleep(0)
    work.mark(str(tmp_path), "end")
    with pytest.raises(asyncio.CancelledError):
        await calling
    await stopping


@pytest.mark.parametrize("by", ["another pool", "a closed pool", "the user"])
async def test_pools_share_a_domain_that_is_shared_already(device: Device, by: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pd = await stack.enter_async_context(device.protection_domain())
        if by == "the user":
            await stack.enter_async_context(pd.share(5))
        else:
            other = await stack.enter_async_context(WorkerPool(device, 1, pd=pd, processes=True))
            if by == "a closed pool":
                await other.aclose()
        pool = await stack.enter_async_context(WorkerPool(device, 1, pd=pd, processes=True))
        region = await stack.enter_async_context(pd.register(64, work.ACCESS, pd.shared_memory))
        await pool.run(work.write_to_remote, region.remote(), b"hello")
        assert bytes(region.buffer[:5]) == b"hello"
        assert pool.statistics().workers[0].shares_pd
        if by == "the user":
            await stack.enter_async_context(pd.share(5))
        else:
            with pytest.raises(VerbsError, match=r"EEXIST .*open share\(\) before the pool"):
                await pd.share(5).open()


async def test_two_loops_open_pools_on_one_domain_at_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = threading.Barrier(2)
    open_backend, share = ProcessBackend.open, shared_pd.share

    def open_together(backend: ProcessBackend) -> None:
        opening.wait(patience(10))
        open_backend(backend)

    def share_slowly(*arguments: Any) -> Any:
        time.sleep(0.05)  # the other pool begins meanwhile
        return share(*arguments)

    async def use_pool() -> bool:
        async with WorkerPool(device, 1, pd=pd, processes=True) as pool:
            return pool.statistics().workers[0].shares_pd

    monkeypatch.setattr(ProcessBackend, "open", open_together)
    monkeypatch.setattr(shared_pd, "share", share_slowly)
    async with device.protection_domain() as pd:
        threads = [asyncio.to_thread(lambda: asyncio.run(use_pool())) for _ in range(2)]
        assert await asyncio.gather(*threads) == [True, True]


async def test_workers_keep_no_socket_for_sharing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise VerbsError("ibv_import_device", errno.EOPNOTSUPP)

    counts = []
    for shares_pd in (True, False):
        if not shares_pd:
            monkeypatch.setattr("aioverbs._pool.backends.share_domain", fail)
        async with WorkerPool(device, 1, processes=True) as pool:
            assert pool.statistics().workers[0].shares_pd == shares_pd
            counts.append(await pool.run(work.count_sockets))
    assert counts[0] == counts[1]


async def test_a_pool_whose_opening_failed_shares_its_new_domain(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "no free descriptors")

    pool = WorkerPool(device, 1, processes=True)
    with monkeypatch.context() as patched:
        patched.setattr(pool._supervisor, "spawn", fail)
        with pytest.raises(OSError, match="no free descriptors"):
            await pool.open()
    async with pool:
        assert pool.statistics().workers[0].shares_pd


async def test_a_death_breaks_a_pool_that_does_not_replace_workers(
    device: Device, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker that exits prints no traceback."""

    async def use() -> None:
        async with WorkerPool(device, 1, processes=True, on_worker_death="fail") as pool:
            with pytest.raises(WorkerDiedError):
                await pool.run(work.exit_worker)
            with pytest.raises(BrokenResourceError, match="is broken: worker 0 of the pool died"):
                await pool.run(work.describe_worker)

    with pytest.raises(BrokenResourceError, match="is broken: worker 0 of the pool died"):
        await use()
    assert "Traceback" not in capfd.readouterr().err


async def test_stop_cancels_calls_and_then_kills_processes(device: Device, tmp_path: Path) -> None:
    pool = await WorkerPool(device, 2, processes=True, grace_s=1.0).open()
    ids = processes(pool)
    staying = pool.start_soon(work.sleep_until_cancelled, str(tmp_path), worker=0)
    blocking = pool.start_soon(work.block, 60.0, str(tmp_path), worker=1)
    await until(lambda: (tmp_path / "begun").exists() and (tmp_path / "blocking").exists())
    async with asyncio.timeout(patience(20)):
        await pool.stop(0)
    assert isinstance(staying.exception(), ClosedResourceError)
    assert isinstance(blocking.exception(), WorkerDiedError)
    assert (pool.state, [alive(each) for each in ids]) == (ResourceState.CLOSED, [False] * 2)


async def test_the_end_of_the_block_waits_for_started_calls(device: Device) -> None:
    async with WorkerPool(device, 1, processes=True) as pool:
        started = [pool.start_soon(work.block, 0.05) for _ in range(2)]
        (process_id,) = processes(pool)
    assert [each.result() for each in started] == [None] * 2
    assert not alive(process_id)


async def test_setup_in_processes_and_its_errors(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    async with WorkerPool(device, 1, processes=True, setup=work.setup) as pool:
        assert await pool.run(work.state) == "of 0"
    pool = WorkerPool(device, 2, processes=True, setup=work.failing_setup)
    with pytest.raises(work.PicklableError, match="not this one"):
        await pool.open()
    assert (pool.state, caplog.text) == (ResourceState.CLOSED, "")
    with pytest.raises((pickle.PicklingError, AttributeError)):
        await WorkerPool(device, 1, processes=True, setup=lambda _: work.setup(_)).open()


async def test_ctrl_c_does_not_end_a_starting_worker(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    make = subprocess.Popen

    def interrupted(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        process = make(*args, **kwargs)
        process.send_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    async with WorkerPool(device, 1, processes=True) as pool:
        assert [await pool.run(os.getpid)] == processes(pool)
        assert signal.SIGINT not in await pool.run(partial(signal.pthread_sigmask, signal.SIG_BLOCK, []))


@pytest.mark.every_way
async def test_cancelled_opening_leaves_no_workers(device: Device) -> None:
    pool = WorkerPool(device, 2, processes=True)
    with anyio.move_on_after(0.01) as scope:
        await pool.open()
    assert scope.cancelled_caught
    assert (pool.state, [alive(each) for each in processes(pool)]) == (ResourceState.CLOSED, [False] * 2)


async def test_open_raises_that_another_task_closed_the_pool(device: Device) -> None:
    pool = WorkerPool(device, 2, processes=True)
    opening = asyncio.create_task(pool.open())
    await until(lambda: len(processes(pool)) == 2)
    await pool.stop(0)
    with pytest.raises(ClosedResourceError, match="was closed while it was being opened"):
        await opening
    assert (pool.state, [alive(each) for each in processes(pool)]) == (ResourceState.CLOSED, [False] * 2)


async def test_a_worker_watches_its_pool_after_a_forked_child_has_exited(device: Device) -> None:
    pool = await WorkerPool(device, 1, processes=True, loop="asyncio").open()  # whose epoll set is in /proc
    assert await pool.run(work.watches_its_pool)
    await pool.run(work.fork_a_child_that_exits)
    assert await pool.run(work.watches_its_pool)
    await pool.stop(0)


async def test_closing_the_device_closes_a_process_pool() -> None:
    device = await open_device("soft0").open()
    pool = await WorkerPool(device, 1, processes=True).open()
    (process_id,) = processes(pool)
    with pytest.warns(ResourceWarning, match="WorkerPool .* was still open"):
        await device.aclose()
    assert (alive(process_id), pool.state) == (False, ResourceState.CLOSED)


async def test_a_garbage_collected_pool_warns_and_ends_its_workers(device: Device) -> None:
    pool = await WorkerPool(device, 1, processes=True).open()
    (process_id,) = processes(pool)
    pd = pool.pd
    held = [pool]
    del pool
    with pytest.warns(ResourceWarning, match="was still open: it was forgotten"):
        held.clear()
    collect_garbage()
    await until(lambda: not alive(process_id))
    await pd.aclose()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_many_process_pools_leak_no_descriptors_or_threads() -> None:
    before = 0, 0
    async with open_device("soft0") as device:
        for round_ in range(60):
            async with WorkerPool(device, 2, processes=True, loop=("asyncio", "uvloop")[round_ % 2]) as pool:
                assert [each[1] for each in await pool.map(work.describe_worker_for_item, range(2))] == [0, 1]
                if not round_ % 10:
                    with pytest.raises(WorkerDiedError):
                        await pool.run(work.kill_own_process)
            if round_ == 10:
                before = len(os.listdir("/proc/self/fd")), threading.active_count()
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
