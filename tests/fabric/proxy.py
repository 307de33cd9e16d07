"""Somebody between two devices, who finds each other through him: he tears, slows, stops and cuts what passes."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Proxy", "proxy"]


@dataclass
class Proxy:
    """What he does with each connection, one after the other.

    :param piece: bytes that he passes on at once, at most; drawn from 1 to that.
    :param pause_s: how long he waits after each piece.
    :param cut_after: for the connections to come, after how many bytes of both directions each is cut; those that
        follow are not.
    :param stall_after: after how many bytes of a connection nothing passes until `go_on`.
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
async def proxy(at: Path, to: Path | tuple[str, int], how: Proxy) -> AsyncIterator[None]:
    """Takes connections at a Unix socket, and connects each to the device that is there."""
    tasks: set[asyncio.Task[None]] = set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):  # whoever cuts it ends it
            await _serve(reader, writer, to, how)
        writer.close()
        tasks.discard(task)

    server = await asyncio.start_unix_server(take, at)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: Path | tuple[str, int], how: Proxy
) -> None:
    left = how.cut_after.pop(0) if how.cut_after else None
    how.connections += 1
    chance = random.Random(how.seed)
    passed = 0
    if isinstance(to, Path):
        there_reader, there_writer = await asyncio.open_unix_connection(to)
    else:
        there_reader, there_writer = await asyncio.open_connection(*to)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal passed
        while data := await reader.read(1 << 16):
            at = 0
            while at < len(data):
                piece = data[at : at + chance.randint(1, how.piece)]
                if left is not None:
                    piece = piece[: max(left - passed, 0)]
                if how.stall_after is not None and passed >= how.stall_after:
                    await how.go_on.wait()
                writer.write(piece)
                await writer.drain()
                if how.piece < 1 << 16:
                    await asyncio.sleep(how.pause_s)
                at += len(piece)
                passed += len(piece)
                how.passed += len(piece)
                if left is not None and passed >= left:
                    return

    ways = [asyncio.ensure_future(pass_on(reader, there_writer)), asyncio.ensure_future(pass_on(there_reader, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (there_writer, writer):
            end.transport.abort()
