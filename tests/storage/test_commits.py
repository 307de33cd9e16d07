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
        self.asked = 0
        self.at_once = 0
        self.fails: Callable[[], bool] = lambda: False
        self.go = threading.Event()
        self.go.set()
        self._lock = threading.Lock()

    def sync(self) -> None:
        with self._lock:
            self.asked += 1
            self.at_once += 1
            assert self.at_once == 1
        assert self.go.wait(20)
        with self._lock:
            self.at_once -= 1
        if self.fails():
            raise OSError(5, "broken")


async def test_a_flush_never_joins_a_sync_that_runs() -> None:
    disk, told = Disk(), list[int]()
    with ThreadPoolExecutor(2) as threads:
        commits = Commits(disk.sync, threads, lambda _, count: told.append(count), clock=lambda: 0.0)
        disk.go.clear()
        first = asyncio.create_task(commits.flush())
        await until(lambda: disk.asked)
        others = [asyncio.create_task(commits.flush()) for _ in range(5)]
        await asyncio.sleep(0.02)
        assert not commits.flush_here()
        assert disk.asked == 1
        others[2].cancel()
        disk.go.set()
        await first
        done = await asyncio.gather(*others, return_exceptions=True)
        assert [type(each) for each in done] == [type(None)] * 2 + [asyncio.CancelledError] + [type(None)] * 2
        assert (disk.asked, told) == (2, [1, 5])
        assert commits.flush_here()
        assert told == [1, 5, 1]


async def test_who_was_told_of_a_flush_may_flush_here() -> None:
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


async def test_who_comes_during_a_flush_of_a_loop_gets_the_next() -> None:
    disk = Disk()
    with ThreadPoolExecutor(3) as threads:
        commits = Commits(disk.sync, threads)
        disk.go.clear()
        here = asyncio.get_running_loop().run_in_executor(threads, commits.flush_here)
        await until(lambda: disk.asked)
        other = asyncio.create_task(commits.flush())
        await asyncio.sleep(0.02)
        disk.go.set()
        assert await here
        await other
        assert disk.asked == 2


async def test_a_slow_disk_is_not_waited_for_by_a_loop() -> None:
    now_s, takes_s = 0.0, iter((0.0, 0.03, 0.0, 0.03, 0.03))

    def sync() -> None:
        nonlocal now_s
        now_s += next(takes_s)

    with ThreadPoolExecutor(1) as threads:
        commits = Commits(sync, threads, clock=lambda: now_s)
        assert [commits.flush_here() for _ in range(6)] == [True] * 5 + [False], "once is not enough"


async def test_flushes_of_many_loops() -> None:
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
            here = asyncio.get_running_loop()
            await asyncio.gather(*(here.run_in_executor(loops, asyncio.run, flush_many()) for _ in range(3)))
        assert 20 < disk.asked <= 120


async def test_after_a_failure_nothing_is_durable() -> None:
    disk = Disk()
    with ThreadPoolExecutor(2) as threads:
        commits = Commits(disk.sync, threads)
        await commits.flush()
        disk.fails = lambda: disk.asked == 2
        with pytest.raises(DiskError, match="broken"):
            await commits.flush()
        with pytest.raises(DiskError, match="Start the server again"):
            await commits.flush()
        with pytest.raises(DiskError, match="Start the server again"):
            commits.flush_here()
        with pytest.raises(DiskError):
            commits.exclusively(disk.sync)
        assert disk.asked == 2
