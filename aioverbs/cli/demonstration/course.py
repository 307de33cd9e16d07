"""The demonstration, from its beginning to its end."""

import asyncio
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from aioverbs._verbs.device import open_device
from aioverbs.cli.demonstration.children import ChildEndedError, unless_ended
from aioverbs.cli.demonstration.client import Assignment
from aioverbs.cli.demonstration.data_set import data_files
from aioverbs.cli.demonstration.misuse import Misuse
from aioverbs.cli.demonstration.outcome import Outcome, Plan, Transfer, Tree
from aioverbs.cli.demonstration.staff import Staff, staff
from aioverbs.cli.demonstration.storage import Storage, serving
from aioverbs.cli.histogram import Histogram
from aioverbs.cli.inventory import DeviceReport, look_at
from aioverbs.cli.rates import report
from aioverbs.cli.watching import open_watch

__all__ = ["Show", "demonstrate"]

_SPARE = 64 << 20  # bytes of the disk for all that is no data
_CACHE = 1 << 30
_WATCH_S = 0.5
_WATCHED_S = 10.0  # for a process to say what it has


class Show(Protocol):
    """Who shows how it goes."""

    def device(self, device: DeviceReport, reason: str) -> None:
        """That is what it is on."""

    def phase(self, name: str, totals: list[int], unit: str) -> None:
        """Something begins, of which each client has so much to do. Before it does, this returns."""

    def progress(self, client: int, done: int) -> None:
        """A client has done so much of it."""

    def ended(self) -> None:
        """It is done by all."""


async def demonstrate(plan: Plan, show: Show) -> Outcome:
    """Do it. All processes and files are gone when this returns, or raises.

    :raises ChildEndedError: one of the processes ended before it was done.
    :raises DeviceNotFoundError: there is no such device.
    :raises OSError: the device cannot be used, or there is no room for the files.
    """
    began = time.monotonic()
    device, reason = await _choose(plan.device)
    show.device(device, reason)
    with tempfile.TemporaryDirectory(prefix="aioverbs-demo-") as name:
        folder = Path(name)
        _check_room(folder, plan)
        monitor = folder / "monitor"
        monitor.mkdir(0o700)
        loop = "uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio"
        memory = max(_CACHE, 2 * plan.total)
        async with serving(folder, device.name, monitor, workers=plan.workers, loop=loop, memory=memory) as storage:
            course = _Course(plan, device, reason, loop, folder, storage, show)
            return await unless_ended(storage.child, course.run(began))


async def _choose(name: str | None) -> tuple[DeviceReport, str]:
    """The device, and why it is that one."""
    reason = "it was named" if name is not None else "AIOVERBS_DEVICE names it"
    logger, listener = logging.getLogger("aioverbs"), _Listener()
    logger.addHandler(listener)
    try:
        async with open_device(name) as device:
            chosen = device.name
    finally:
        logger.removeHandler(listener)
    if name is None and not os.environ.get("AIOVERBS_DEVICE"):
        reason = listener.heard or "the first RDMA device with an active port"
    found = await look_at(chosen)
    if found.problem is not None:
        raise OSError(f"{found.name} cannot be used: {found.problem}; `aioverbs doctor` helps")
    return found, reason


class _Listener(logging.Handler):
    """Hears why it is the software device: that is said where that is opened for want of another one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard = ""

    def emit(self, record: logging.LogRecord) -> None:
        what, _, why = record.getMessage().partition(": ")
        if what.startswith("opening the software device"):
            self.heard = why


def _check_room(folder: Path, plan: Plan) -> None:
    needed, free = 2 * plan.total + _SPARE, shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder.parent} has {free >> 20:,} MiB free, and {needed >> 20:,} are needed: have TMPDIR name another"
            " folder, or say a smaller --size"
        )


class _Course:
    """With a server that runs."""

    def __init__(
        self, plan: Plan, device: DeviceReport, reason: str, loop: str, folder: Path, storage: Storage, show: Show
    ) -> None:
        self._plan = plan
        self._device = device
        self._reason = reason
        self._loop = loop
        self._folder = folder
        self._monitor = folder / "monitor"
        self._storage = storage
        self._show = show
        shares = [plan.total // plan.clients] * plan.clients
        shares[0] += plan.total - sum(shares)
        self._assignments = [self._assignment(number, share) for number, share in enumerate(shares, 1)]
        self._files = [data_files(each.total, each.seed) for each in self._assignments]

    def _assignment(self, number: int, share: int) -> Assignment:
        files = self._folder / f"files-{number}"
        files.mkdir()
        storage = self._storage
        seed = f"{self._plan.seed}/{number}"
        return Assignment(number, share, seed, str(files), storage.host, storage.port, str(storage.token_file))

    async def run(self, began: float) -> Outcome:
        """All of it."""
        async with staff(self._assignments, self._folder, self._device.name, self._monitor) as clients:
            await self._phase(clients, "make", "making files")
            written, writes = await self._phase(clients, "write", "writing")
            read, reads = await self._phase(clients, "read", "reading and comparing")
            samples, trees = await self._sample(clients)
            counts = await self._storage.counts()
            misused = Misuse(**await clients.one(0, "misuse"))
            await clients.end()
        return Outcome(
            plan=self._plan,
            device=self._device,
            reason=self._reason,
            loop=self._loop,
            files=sum(map(len, self._files)),
            bytes=self._plan.total,
            written=_transfer(written, writes),
            read=_transfer(read, reads),
            verified_files=sum(each["verified_files"] for each in reads),
            verified_bytes=sum(each["verified_bytes"] for each in reads),
            faults=tuple(fault for each in (*reads, *samples) for fault in each["faults"]),
            block_reads=_histogram(each["took_ns"] for each in samples),
            flushes=_histogram(each["flush_ns"] for each in writes),
            counts=counts,
            misuse=misused,
            trees=trees,
            seconds=time.monotonic() - began,
        )

    async def _phase(self, clients: Staff, order: str, name: str) -> tuple[float, list[Any]]:
        """Have all clients go through their files; the seconds that it took, and what came of it for each."""
        self._show.phase(name, [each.total for each in self._assignments], "bytes")
        began = time.monotonic()
        results = await clients.all(order, self._show.progress)
        seconds = time.monotonic() - began
        for number, each in enumerate(self._assignments):
            self._show.progress(number, each.total)
        self._show.ended()
        return seconds, results

    async def _sample(self, clients: Staff) -> tuple[list[Any], tuple[Tree, ...]]:
        """Have clients read single blocks, and look at what the processes are at meanwhile."""
        self._show.phase("reading blocks of 4 KiB", [0] * len(self._assignments), "blocks")
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(clients.all(f"sample {self._plan.seconds}", self._show.progress))
            looking = [
                tasks.create_task(self._look(name, pid))
                for name, pid in (
                    ("the storage server", self._storage.child.pid),
                    ("client 1", clients.clients[0].pid),
                )
            ]
        for number, each in enumerate(sampling.result()):
            self._show.progress(number, len(each["took_ns"]))
        self._show.ended()
        return sampling.result(), tuple(each.result() for each in looking)

    async def _look(self, name: str, pid: int) -> Tree:
        """What a process has open, as `aioverbs top` has it."""
        async with await open_watch(pid, self._monitor) as watch:
            interval_s = min(_WATCH_S, self._plan.seconds / 3)
            watch.begin(interval_s)
            before, now = [await watch.sample(_WATCHED_S) for _ in range(2)]
        if before is None or now is None:
            raise ChildEndedError(f"{name} (process {pid}) ended before it said what it has open")
        return Tree(name, pid, report(now, before))


def _transfer(seconds: float, results: list[Any]) -> Transfer:
    requests_s = tuple(each["requests_s"] for each in results)
    rate = sum(each["bytes"] / each["requests_s"] for each in results)
    return Transfer(sum(each["bytes"] for each in results), seconds, requests_s, rate)


def _histogram(times: Iterable[list[int]]) -> Histogram:
    histogram = Histogram()
    for some in times:
        for took in some:
            histogram.record(took)
    return histogram
