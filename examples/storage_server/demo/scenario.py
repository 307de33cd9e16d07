"""The demonstration's sequence of steps."""

import asyncio
import functools
import importlib.util
import shutil
import signal
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.filesize import decimal

import aioverbs
from aioverbs import ResourceInfo, WorkerPool
from storage_server.demo.client import Assignment, client, done, is_native, step
from storage_server.demo.files import data_files
from storage_server.load import percentiles
from storage_server.server import Serving, Settings, serving
from storage_server.transfer import bars

__all__ = ["Outcome", "Plan", "demonstrate"]

_SPARE = 64 << 20  # bytes of the disk for everything but data
_PROGRESS_INTERVAL_S = 0.1
_LOOP: Literal["asyncio", "uvloop"] = "uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio"


@dataclass(frozen=True)
class Plan:
    """Parameters of the demonstration.

    :param device: name of the device; None for the best one.
    :param size: bytes of all files together.
    :param clients: number of client processes.
    :param workers: number of worker loops of the server.
    :param seconds: duration of reading single blocks.
    :param seed: seed of the files' contents.
    """

    device: str | None
    size: int
    clients: int
    workers: int
    seconds: float
    seed: int

    def check(self, folder: Path) -> None:
        """Check that the disk has space for all files, their copies and the volumes.

        :param folder: folder on that disk.
        :raises OSError: the disk lacks space.
        """
        needed, free = 3 * self.size + _SPARE, shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(
                f"{folder.parent} has {free >> 20:,} MiB free, but {needed >> 20:,} MiB are needed: set TMPDIR to "
                "another folder, or reduce --size"
            )


@dataclass
class Outcome:
    """Results of the demonstration. Made by `demonstrate`.

    :param device: name of the device.
    :param native: whether the clients' loops have native thread domains, so that their queues take no locks.
    :param files: number of files of all clients.
    :param bytes: bytes of all files.
    :param seconds: duration of each phase by name.
    :param wrong: files and blocks that were read back with other contents.
    :param blocks: number of single blocks that were read.
    :param read_us: percentiles of reads of single blocks, in microseconds.
    :param flushes: number of flushes that the server answered.
    :param syncs: number of syncs of the disk.
    :param message_bytes: data that moved by messages instead of one-sided RDMA.
    :param affinity_error: the error that stopped a call from the wrong loop; None if nothing stopped it.
    :param tree: the server's resources while all clients were connected.
    """

    device: str = ""
    native: bool = False
    files: int = 0
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    blocks: int = 0
    read_us: dict[str, float] = field(default_factory=dict)
    flushes: int = 0
    syncs: int = 0
    message_bytes: int = 0
    affinity_error: str | None = None
    tree: ResourceInfo | None = None

    @property
    def verified(self) -> bool:
        """True if all checks passed: nothing was wrong, blocks were read, and the call from the wrong loop failed."""
        return not self.wrong and self.blocks > 0 and self.affinity_error is not None


async def demonstrate(plan: Plan, console: Console) -> Outcome:
    """Run the demonstration. When this returns or raises an error, all its processes have ended and its files are
    deleted.

    :param plan: the parameters.
    :param console: console that shows the progress.
    :returns: the results, which include descriptions of wrong contents.
    :raises asyncio.CancelledError: SIGINT or SIGTERM arrived.
    :raises InvalidError: the files of a client are too small.
    :raises OSError: the disk lacks space, or the device is unusable.
    :raises DeviceNotFoundError: no device has the name in `plan`.
    """
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="storage-demo-")))
        plan.check(folder)
        device = await stack.enter_async_context(aioverbs.open_device(plan.device))
        settings = Settings(plan.workers, _LOOP, memory=max(1 << 30, 2 * plan.size))
        server = await stack.enter_async_context(serving(folder / "server", device=device, settings=settings))
        token, share = server.token_file.read_text(), plan.size // plan.clients
        assignments = [
            Assignment(data_files(share, f"{plan.seed}/{number}"), folder / f"files-{number}", server.port, token)
            for number in range(plan.clients)
        ]
        pool = WorkerPool(
            device,
            plan.clients,
            processes=True,
            loop=_LOOP,
            setup=functools.partial(client, assignments),
            on_worker_death="fail",
        )
        await stack.enter_async_context(pool)
        return await _Scenario(plan, console, device, server, pool).run(
            share, [len(each.files) for each in assignments]
        )


class _Scenario:
    """The steps that need a running server and running clients."""

    def __init__(
        self, plan: Plan, console: Console, device: aioverbs.Device, server: Serving, pool: WorkerPool
    ) -> None:
        self._plan = plan
        self._console = console
        self._device = device
        self._server = server
        self._pool = pool
        self._outcome = Outcome(device.name)

    async def run(self, share: int, files: list[int]) -> Outcome:
        """Run all steps of the demonstration; return the results.

        :param share: number of bytes of each client's files.
        :param files: number of files of each client.
        """
        outcome = self._outcome
        outcome.files, outcome.bytes = sum(files), share * len(files)
        await self._phase("making files", share, "make")
        await self._phase("writing", share, "write")
        for wrong in await self._phase("reading and comparing", share, "read"):
            outcome.wrong += wrong
        samples = await self._phase("reading blocks", None, "sample", self._plan.seconds)
        for number, (_, wrong) in enumerate(samples, 1):
            outcome.wrong += [f"{wrong:,} blocks of client-{number}"] if wrong else []
        took = [each for times, _ in samples for each in times]
        outcome.blocks, outcome.read_us = len(took), percentiles(took)
        outcome.affinity_error = await self._pool.run(step, "call_from_wrong_loop", worker=0)
        self._count()
        outcome.native = await self._pool.run(is_native, worker=0)
        outcome.tree = self._device.resources()
        return outcome

    async def _all(self, name: str, *args: object) -> list[Any]:
        """Run a step on all clients concurrently; return a list of the results, in the order of the clients."""
        calls = (self._pool.run(step, name, *args, worker=number) for number in range(self._plan.clients))
        return await asyncio.gather(*calls)

    async def _phase(self, title: str, total: int | None, name: str, *args: object) -> list[Any]:
        """Run a step on all clients concurrently, show their progress, and record the duration.

        :param title: name of the phase.
        :param total: number of bytes that each client is to move; None if unknown.
        :param name: name of the step, a method of the client.
        :param args: arguments of the step.
        :returns: a list of the results, in the order of the clients.
        """
        began = time.perf_counter()
        with bars(self._console) as progress:
            tasks = [progress.add_task(f"{title}: client {at + 1}", total=total) for at in range(self._plan.clients)]

            async def follow() -> None:
                while True:
                    for number, task in enumerate(tasks):
                        progress.update(task, completed=await self._pool.run(done, worker=number))
                    await asyncio.sleep(_PROGRESS_INTERVAL_S)

            following = asyncio.create_task(follow())
            try:
                results = await self._all(name, *args)
            finally:
                following.cancel()
                await asyncio.wait([following])
        moved = sum([await self._pool.run(done, worker=number) for number in range(self._plan.clients)])
        seconds = self._outcome.seconds[title] = time.perf_counter() - began
        self._console.print(f"{title}: {decimal(moved)} in {seconds:.1f} s, {decimal(round(moved / seconds))}/s")
        return results

    def _count(self) -> None:
        """Copy the server's counters to the results."""
        value = self._server.metrics.value
        self._outcome.flushes = round(value("requests_total", kind="flush", outcome="done"))
        self._outcome.syncs = round(value("sync_seconds_count"))
        self._outcome.message_bytes = round(value("message_read_bytes_total") + value("message_written_bytes_total"))
