"""Worker processes that share a protection domain, controlled by the test as a third process."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest_asyncio

from aioverbs import Endpoint, QueuePair, RemoteRegion
from tests.conftest import ROOT
from tests.pace import patience
from tests.sharing.worker import ACCESS, LONG_TIMEOUT

__all__ = ["KEY", "CommandFailed", "Pair", "Worker", "pair", "worker"]

KEY = 0xFEDCBA9876543210
START = (
    f"import sys, runpy; sys.path.append({str(ROOT)!r}); runpy.run_module('tests.sharing.worker', run_name='__main__')"
)


class CommandFailed(Exception):
    """Error that a worker reports for a command."""


@dataclass
class Worker:
    """Running process of `tests.sharing.worker`."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    shared_id: int = 0
    is_killed: bool = False

    def send_command(self, line: str) -> None:
        self.writer.write(f"{line}\n".encode())

    async def read_answer(self) -> str:
        line = (await asyncio.wait_for(self.reader.readline(), patience(20))).decode().strip()
        assert line, "the worker process ended"
        if line.startswith("! "):
            raise CommandFailed(line[2:])
        return line

    async def call(self, line: str) -> str:
        self.send_command(line)
        return await self.read_answer()

    async def read_memory(self, name: str, at: int, length: int) -> bytes:
        return bytes.fromhex(await self.call(f"look {name} {at} {length}"))

    async def write_memory(self, name: str, at: int, data: bytes) -> None:
        await self.call(f"put {name} {at} {data.hex()}")

    async def register(self, name: str, size: int, kind: str = "register") -> RemoteRegion:
        return RemoteRegion.from_bytes(bytes.fromhex(await self.call(f"{kind} {name} {size}")))

    async def connect(self, qp: QueuePair, **attributes: Any) -> None:
        """Connect `qp` with a new queue pair of the worker.

        Retries last long enough for the other process to be stopped, or to have no receive posted yet.
        """
        remote = Endpoint.from_bytes(bytes.fromhex(await self.call(f"connect {bytes(qp.local_endpoint()).hex()}")))
        qp.connect(remote, ACCESS, **{**LONG_TIMEOUT, **attributes})

    async def share_with(self, other: "Worker") -> None:
        """Have `other` import the device of this worker's domain, without opening an instance."""
        other.send_command(f"import {self.shared_id} {KEY}")
        await self.call("send")
        await other.read_answer()
        other.shared_id = self.shared_id

    async def open_instance(self, key: int = KEY) -> None:
        await self.call(f"instance {self.shared_id} {key}")

    async def kill(self) -> None:
        self.is_killed = True
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@contextlib.asynccontextmanager
async def worker(share: socket.socket) -> AsyncIterator[Worker]:
    """Start a worker process; closing the command socket ends the process.

    :param share: socket over which the worker sends or receives its domain.
    """
    # The worker accepts the command socket instead of inheriting it: the thread sanitizer derives happens-before
    # relations between threads only from sockets whose creation it observed.
    ours, theirs = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with theirs, share:
        theirs.bind("")  # autobind to an unused abstract address
        theirs.listen(1)
        ours.connect(theirs.getsockname())
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 22)
        numbers = theirs.fileno(), share.fileno()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", START, *map(str, numbers)), pass_fds=numbers
        )
    try:
        yield Worker(process, reader, writer)
    finally:
        writer.close()
        try:
            status = await asyncio.wait_for(process.wait(), patience(20))
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
    assert status in (0, -signal.SIGKILL)


class Pair:
    """Two worker processes, reused by successive tests; replaced after a test that failed or killed one of them."""

    def __init__(self) -> None:
        self._both: tuple[Worker, Worker] | None = None
        self._ending = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def __call__(self, *, imported: bool = True) -> AsyncIterator[tuple[Worker, Worker]]:
        """Provide the worker that shares a domain and the one with an instance of it; close their resources at the end.

        :param imported: False if the second worker has neither imported the device nor opened an instance.
        """
        if self._both is None:
            one, other = socket.socketpair()
            enter = self._ending.enter_async_context
            self._both = await enter(worker(one)), await enter(worker(other))
        first, second = both = self._both
        try:
            where, how = os.environ["AIOVERBS_SOFT_DIRECTORY"], os.environ.get("AIOVERBS_SOFT_DIRECT", "1")
            for each in both:
                await each.call(f"begin {where} {how}")
            first.shared_id = int(await first.call(f"share {KEY}"))
            if imported:
                await first.share_with(second)
                await second.open_instance()
            yield first, second
            if not any(each.is_killed for each in both):
                for each in both:
                    await each.call("close all")
                assert [await each.call("leftovers") for each in both] == ["nothing"] * 2
        except BaseException:
            await self.end()
            raise
        if any(each.is_killed for each in both):
            await self.end()

    async def end(self) -> None:
        """End both processes."""
        self._both = None
        await self._ending.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    await pair.end()
