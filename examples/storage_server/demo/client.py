"""Client side of the demonstration: functions that run in the worker processes of its pool.

Each worker connects to the server when it starts, and has a folder of its own for its files.
"""

import array
import asyncio
import contextlib
import filecmp
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aioverbs import AffinityError, MemoryRegion, Worker, current_worker
from storage_server import transfer
from storage_server.catalog import BLOCK
from storage_server.client import Storage, connect
from storage_server.demo.files import DataFile, end_of

__all__ = ["Assignment", "client", "done", "is_native", "step"]

_MAX_SAMPLES = 500_000


@dataclass(frozen=True)
class Assignment:
    """Input of one client.

    :param files: the files to make.
    :param folder: folder for its files, which the client creates.
    :param port: the server's TCP port on this host.
    :param token: token for the server.
    """

    files: list[DataFile]
    folder: Path
    port: int
    token: str


@contextlib.asynccontextmanager
async def client(assignments: list[Assignment], worker: Worker) -> "AsyncIterator[Client]":
    """Connect the client of a worker for the lifetime of the worker; yield a `Client`, which becomes the worker's
    state.

    :param assignments: inputs of all clients, by worker number.
    :param worker: the worker.
    """
    assignment = assignments[worker.number]
    async with (
        connect("127.0.0.1", assignment.port, assignment.token, domain=worker.domain) as storage,
        worker.domain.register(BLOCK) as local,
    ):
        yield Client(assignment, storage, local, f"client-{worker.number + 1}")


async def step(name: str, *args: object) -> Any:
    """Run a step on the client of the current worker; return the result of the step.

    :param name: name of a method of `Client`.
    :param args: arguments of the method.
    """
    own: Client = current_worker().state
    own.done = 0
    return await getattr(own, name)(*args)


def is_native() -> bool:
    """Return whether the thread domain of the current worker is native, so that its queues take no locks."""
    return current_worker().domain.native


def done() -> int:
    """Return how many bytes the client of the current worker has moved in the present step."""
    own: Client = current_worker().state
    return own.done


class Client:
    """A client of the demonstration. `done` is the number of bytes that it has moved in the present step.

    :param assignment: the client's input.
    :param storage: connection to the server.
    :param local: one block of registered memory.
    :param volume: name of the client's volume.
    """

    def __init__(self, assignment: Assignment, storage: Storage, local: MemoryRegion, volume: str) -> None:
        self.done = 0
        self._files = assignment.files
        self._folder = assignment.folder
        self._storage = storage
        self._local = local
        self._volume = volume

    def _progress(self, more: int) -> None:
        """Add bytes that were moved to the count of the present step."""
        self.done += more

    def _path(self, file: DataFile) -> Path:
        """Return the path of a file in the client's folder."""
        return self._folder / file.name

    async def make(self) -> None:
        """Create the client's folder and the files in it."""
        self._folder.mkdir()
        for file in self._files:
            await asyncio.to_thread(self._path(file).write_bytes, file.contents())
            self._progress(file.size)

    async def write(self) -> None:
        """Create a volume and write all files to it; flush the volume after each file."""
        await self._storage.create(self._volume, end_of(self._files))
        async with self._storage.open(self._volume, write=True) as volume:
            for file in self._files:
                await transfer.put(self._path(file), volume, self._progress, offset=file.offset)

    async def read(self) -> list[str]:
        """Read all files back from the volume and compare every byte; return the names of the files that differ."""
        wrong, copy = [], self._folder / "copy"
        async with self._storage.open(self._volume) as volume:
            for file in self._files:
                await transfer.get(volume, copy, self._progress, offset=file.offset, size=file.size)
                if not await asyncio.to_thread(filecmp.cmp, self._path(file), copy, shallow=False):
                    wrong.append(f"{self._volume}/{file.name}")
        return wrong

    async def sample(self, seconds: float) -> tuple["array.array[int]", int]:
        """Read single blocks into registered memory for some time, and compare them with the file.

        :param seconds: duration of the reading.
        :returns: the duration of each read in nanoseconds, and the number of blocks with wrong contents.
        """
        file = max(self._files, key=lambda each: each.size)
        made = self._path(file).read_bytes()
        took, wrong = array.array("Q"), 0
        async with self._storage.open(self._volume) as volume:
            end = time.perf_counter() + seconds
            while not took or (time.perf_counter() < end and len(took) < _MAX_SAMPLES):
                at = random.randrange(file.size // BLOCK) * BLOCK
                self._local.buffer[:] = bytes(BLOCK)
                began = time.perf_counter_ns()
                await volume.read_into(self._local[:], file.offset + at)
                took.append(time.perf_counter_ns() - began)
                wrong += self._local.buffer != made[at : at + BLOCK]
                self._progress(BLOCK)
        return took, wrong

    async def call_from_wrong_loop(self) -> str | None:
        """Read from an event loop in another thread, which aioverbs must prevent.

        :returns: the message of the AffinityError; None if the read was not prevented, or if it changed memory.
        """

        async def read(volume: Any) -> None:
            await volume.read_into(self._local[:], 0)

        self._local.buffer[:] = bytes(BLOCK)
        async with self._storage.open(self._volume) as volume:
            try:
                await asyncio.to_thread(lambda: asyncio.run(read(volume)))
            except AffinityError as error:
                return str(error) if not any(self._local.buffer) else None
        return None
