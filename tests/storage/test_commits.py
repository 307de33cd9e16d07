"""Group commit: which sync a flush waits for, which thread runs the sync, and the effect of failures."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from storage_server.commits import Commits
from storage_server.errors import DiskError

from tests.waiting import until


class Disk:
    """Simulated disk, which checks that syncs do not overlap."""

    def __init__(self) -> None:
        self.started = 0
        self.running = 0
        self.fails: Callable[[], bool] = lambda: False
        self.may_end = threading.Event()
        self.may_end.set()
        self._lock = threading.Lock()

    def sync(self) -> None:
        with self._lock:
            self.started += 1
            self.running += 1
            assert self.running == 1
        assert self.may_end.wait(20)
        with self._lock:
            self.running -= 1
        if self.fails():
            raise OSError(5, "broken")


async def test_a_flush_never_joins_a_sync_that_runs() -> None:
    disk, synced = Disk(), list[int]()
    with ThreadPoolExecutor(2) as threads:
        commits = Commits(disk.sync, threads, lambda _, count: synced.append(count), clock=lambda: 0.0)
        disk.may_end.clear()
        first = asyncio.create_task(commits.flush())
        await until(lambda: disk.started)
        others = [asyncio.create_task(commits.flush()) for _ in range(5)]
        await asyncio.sleep(0.02)
        assert not commits.flush_here()
        assert disk.started == 1
        others[2].cancel()
        disk.may_end.set()
        await first
        done = await asyncio.gather(*others, return_exceptions=True)
        assert [type(each) for each in done] == [type(None)] * 2 + [asyncio.CancelledError] + [type(None)] * 2
        assert (disk.started, synced) == (2, [1, 5])
        assert commits.flush_here()
        assert synced == [1, 5, 1]


async def test_flush_here_works_right_after_a_flush() -> None:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as threads:
            commits = Commits(lambda: None, threads, clock=lambda: 0.0)
            for _ in range(1000):
                await commits.flush()
                assert commits.flush_here()
    finally:
        sys.setswitchinterval(interval_s)


async def test_a_flush_during_flush_here_gets_the_next_sync() -> None:
    disk = Disk()
    with ThreadPoolExecutor(3) as threads:
        commits = Commits(disk.sync, threads)
        disk.may_end.clear()
        executing = asyncio.get_running_loop().run_in_executor(threads, commits.flush_here)
        await until(lambda: disk.started)
        other = asyncio.create_task(commits.flush())
        await asyncio.sleep(0.02)
        disk.may_end.set()
        assert await executing
        await other
        assert disk.started == 2


async def test_flush_here_declines_on_a_slow_disk() -> None:
    now_s, takes_s = 0.0, iter((0.0, 0.03, 0.0, 0.03, 0.03))

    def sync() -> None:
        nonlocal now_s
        now_s += next(takes_s)

    with ThreadPoolExecutor(1) as threads:
        commits = Commits(sync, threads, clock=lambda: now_s)
        assert [commits.flush_here() for _ in range(6)] == [True] * 5 + [False], "one slow sync is not enough"


async def test_flushes_of_many_loops_share_syncs() -> None:
    """Syncs do not overlap, and there are fewer syncs than flushes."""
    disk = Disk()

    def sync() -> None:
        disk.sync()
        time.sleep(0.001)

    with ThreadPoolExecutor(2) as threads:
        commits = Commits(sync, threads)

        async def flush_many() -> None:
            for number in range(20):
                if not (number % 2 and commits.flush_here()):
                    await asyncio.gather(*(commits.flush() for _ in range(4)))

        with ThreadPoolExecutor(3) as loops:
            executing = asyncio.get_running_loop()
            await asyncio.gather(*(executing.run_in_executor(loops, asyncio.run, flush_many()) for _ in range(3)))
        assert 20 < disk.started <= 120


async def test_no_flush_succeeds_after_a_failed_sync() -> None:
    disk = Disk()
    with ThreadPoolExecutor(2) as threads:
        commits = Commits(disk.sync, threads)
        await commits.flush()
        disk.fails = lambda: disk.started == 2
        with pytest.raises(DiskError, match="broken"):
            await commits.flush()
        with pytest.raises(DiskError, match="restart the server"):
            await commits.flush()
        with pytest.raises(DiskError, match="restart the server"):
            commits.flush_here()
        with pytest.raises(DiskError):
            commits.exclusively(disk.sync)
        assert disk.started == 2
