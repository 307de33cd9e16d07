"""A proxy between two devices that find each other through it: it fragments, slows, stalls and cuts streams."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Proxy", "proxy"]


@dataclass
class Proxy:
    """How a proxy treats each connection, one after the other.

    :param piece: most bytes passed on at once; each piece has a random length from 1 to `piece`.
    :param pause_s: pause after each piece, in seconds.
    :param cut_after: for the next connections, the number of bytes in both directions after which each is cut; later
        connections are not cut.
    :param stall_after: number of bytes of a connection after which nothing passes until `go_on` is set.
    """

    piece: int = 1 << 16
    pause_s: float = 0
    cut_after: list[int] = field(default_factory=list)
    stall_after: int | None = None
    connections: int = 0
    passed: int = 0
    seed: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)


@contextlib.asynccontextmanager
async def proxy(at: Path, to: Path | tuple[str, int], behaviour: Proxy) -> AsyncIterator[None]:
    """Accept connections at a Unix socket, and connect each of them to the device at `to`."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):  # a cut ends both directions
            await _serve(reader, writer, to, behaviour)
        writer.close()
        tasks.discard(task)

    server = await asyncio.start_unix_server(handle_connection, at)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: Path | tuple[str, int], behaviour: Proxy
) -> None:
    cut_at = behaviour.cut_after.pop(0) if behaviour.cut_after else None
    behaviour.connections += 1
    rng = random.Random(behaviour.seed)
    passed = 0
    if isinstance(to, Path):
        there_reader, there_writer = await asyncio.open_unix_connection(to)
    else:
        there_reader, there_writer = await asyncio.open_connection(*to)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal passed
        while data := await reader.read(1 << 16):
            at = 0
            while at < len(data):
                piece = data[at : at + rng.randint(1, behaviour.piece)]
                if cut_at is not None:
                    piece = piece[: max(cut_at - passed, 0)]
                if behaviour.stall_after is not None and passed >= behaviour.stall_after:
                    await behaviour.go_on.wait()
                writer.write(piece)
                await writer.drain()
                if behaviour.piece < 1 << 16:
                    await asyncio.sleep(behaviour.pause_s)
                at += len(piece)
                passed += len(piece)
                behaviour.passed += len(piece)
                if cut_at is not None and passed >= cut_at:
                    return

    directions = [
        asyncio.ensure_future(forward(reader, there_writer)),
        asyncio.ensure_future(forward(there_reader, writer)),
    ]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        for end in (there_writer, writer):
            end.transport.abort()
