"""Processes that share a protection domain, as a test that is a third one has them."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aioverbs import Endpoint, QueuePair, RemoteRegion
from tests.conftest import ROOT
from tests.pace import patience
from tests.sharing.worker import ACCESS, PATIENT

__all__ = ["KEY", "Refused", "Worker", "pair", "worker"]

KEY = 0xFEDCBA9876543210
START = (
    f"import sys, runpy; sys.path.append({str(ROOT)!r}); runpy.run_module('tests.sharing.worker', run_name='__main__')"
)


class Refused(Exception):
    """What a worker says went wrong."""


@dataclass
class Worker:
    """`tests.sharing.worker`, running."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    shared_id: int = 0

    def tell(self, line: str) -> None:
        self.writer.write(f"{line}\n".encode())

    async def answer(self) -> str:
        line = (await asyncio.wait_for(self.reader.readline(), patience(20))).decode().strip()
        assert line, "it ended"
        if line.startswith("! "):
            raise Refused(line[2:])
        return line

    async def ask(self, line: str) -> str:
        self.tell(line)
        return await self.answer()

    async def look(self, name: str, at: int, length: int) -> bytes:
        return bytes.fromhex(await self.ask(f"look {name} {at} {length}"))

    async def put(self, name: str, at: int, data: bytes) -> None:
        await self.ask(f"put {name} {at} {data.hex()}")

    async def register(self, name: str, size: int, kind: str = "register") -> RemoteRegion:
        return RemoteRegion.from_bytes(bytes.fromhex(await self.ask(f"{kind} {name} {size}")))

    async def connect(self, qp: QueuePair, **attributes: Any) -> None:
        """Either waits for the other's process, which may stand still or have no receive yet."""
        there = Endpoint.from_bytes(bytes.fromhex(await self.ask(f"connect {bytes(qp.local_endpoint()).hex()}")))
        qp.connect(there, ACCESS, **{**PATIENT, **attributes})

    async def give(self, other: "Worker") -> None:
        """The other one imports its domain."""
        other.tell(f"import {self.shared_id} {KEY}")
        await self.ask("send")
        await other.answer()
        other.shared_id = self.shared_id

    async def instance(self, key: int = KEY) -> None:
        await self.ask(f"instance {self.shared_id} {key}")

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@contextlib.asynccontextmanager
async def worker(share: socket.socket) -> AsyncIterator[Worker]:
    """It ends when its socket does."""
    # That is one that it accepts, and none that it inherits: the thread sanitizer knows what comes before what where
    # threads hear of it by sockets which it saw made.
    ours, theirs = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with theirs, share:
        theirs.bind("")  # to a name that nobody has
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


@contextlib.asynccontextmanager
async def pair(*, imported: bool = True) -> AsyncIterator[tuple[Worker, Worker]]:
    """One that shares a domain, and one that has an instance of it."""
    one, other = socket.socketpair()
    async with worker(one) as first, worker(other) as second:
        first.shared_id = int(await first.ask(f"share {KEY}"))
        if imported:
            await first.give(second)
            await second.instance()
        yield first, second
