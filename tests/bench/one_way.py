"""Benchmark of messages one way, awaited one by one, between two processes; beside it Unix streams with the length
before each message.

Run as a script, this is the peer process that receives.
"""

import asyncio
import contextlib
import mmap
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import uvloop

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

from aioverbs import Connection, connect, open_device, serve
from tests.bench.measuring import Contender, Limit, Result, interleaved
from tests.bench.peers import HOST, PeerProcess, peer_process, standard_input

__all__ = ["one_way"]

SIZES = {"64_B": 64, "1_KiB": 1 << 10, "64_KiB": 64 << 10, "1_MiB": 1 << 20, "64_MiB": 64 << 20}
SHORT = 64 << 10  # from this size on, both sides are compared in memory that is there
LIMIT = 1 << 20  # of a stream's buffer, in bytes
WAYS = ("receive", "receive_into", "receive_buffer")  # of a connection


# ---- The peer: it is told how many messages of a length come, and answers the last one


class _IntoMemory(asyncio.BufferedProtocol):
    """Receiver of a stream whose messages go into memory that is there, as in Tornado."""

    def __init__(self) -> None:
        self.left = 0  # number of messages until the answer
        self._head = memoryview(bytearray(4))
        self._memory = self._unfilled = memoryview(b"")
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._unfilled = self._head

    def expect(self, count: int, size: int) -> None:
        """Expect messages of a size."""
        self.left = count
        if len(self._memory) != size:
            self._memory = memoryview(bytearray(size))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._unfilled

    def buffer_updated(self, nbytes: int) -> None:
        is_head = self._unfilled.obj is self._head.obj
        self._unfilled = self._unfilled[nbytes:]
        if self._unfilled:
            return
        if is_head:
            self._unfilled = self._memory[: int.from_bytes(self._head)]
            return
        self._unfilled = self._head
        self.left -= 1
        if not self.left:
            assert self._transport is not None
            self._transport.write(b"x")


async def _be_peer(path: str) -> None:
    """Print the port of the connection, then handle the lines of the standard input, until it ends."""
    control, ended, into = await standard_input(), asyncio.Event(), _IntoMemory()
    streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def receive_stream(count: int, size: int) -> None:
        for _ in range(count):
            await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
        writer.write(b"x")

    async def expect_into(count: int, size: int) -> None:
        into.expect(count, size)

    async def receive(connection: Connection) -> None:
        async def by_receive(count: int, size: int) -> None:
            for _ in range(count):
                await connection.receive()

        async def by_receive_into(count: int, size: int) -> None:
            for _ in range(count):
                await connection.receive_into(buffers[size])

        async def by_receive_buffer(count: int, size: int) -> None:
            for _ in range(count):
                await connection.receive_buffer()

        ways: dict[str, Callable[[int, int], Awaitable[None]]] = {
            "receive": by_receive,
            "receive_into": by_receive_into,
            "receive_buffer": by_receive_buffer,
            "stream": receive_stream,
            "stream_into": expect_into,
        }
        buffers: dict[int, bytearray] = {}
        while line := (await control.readline()).decode():
            name, *numbers = line.split()
            count, size = map(int, numbers)
            if size not in buffers:
                buffers[size] = bytearray(size)
            print(flush=True)
            await ways[name](count, size)
            if name in WAYS:
                await connection.send(b"x")
        ended.set()

    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        await asyncio.start_unix_server(lambda *stream: streams.put_nowait(stream), f"{path}/stream", limit=LIMIT),
        await asyncio.get_running_loop().create_unix_server(lambda: into, f"{path}/into"),
        serve(receive, HOST, domain=domain, drain_timeout_s=0) as server,
    ):
        print(server.port, flush=True)
        reader, writer = await streams.get()
        await ended.wait()
        writer.close()


# ---- The side that sends and measures


def _connection_contender(connection: Connection, peer: PeerProcess, way: str, message: bytes) -> Contender:
    async def send(operations: int) -> float:
        await peer.request(f"{way} {operations} {len(message)}")
        begin = time.perf_counter_ns()
        for _ in range(operations):
            await connection.send(message)
        await connection.receive()
        return time.perf_counter_ns() - begin

    return send


def _stream_contender(
    stream: tuple[asyncio.StreamReader, asyncio.StreamWriter], peer: PeerProcess, way: str, message: bytes
) -> Contender:
    reader, writer = stream
    head = len(message).to_bytes(4)

    async def send(operations: int) -> float:
        await peer.request(f"{way} {operations} {len(message)}")
        begin = time.perf_counter_ns()
        for _ in range(operations):
            writer.write(head)
            writer.write(message)
            await writer.drain()
        await reader.readexactly(1)
        return time.perf_counter_ns() - begin

    return send


def _fresh_copy_contender(message: bytes) -> Contender:
    async def copy(operations: int) -> float:
        took = 0
        for _ in range(operations):
            with mmap.mmap(-1, len(message), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                begin = time.perf_counter_ns()
                memory[:] = message
                took += time.perf_counter_ns() - begin
        return took

    return copy


async def one_way(rounds: int, name: str) -> Result:
    """Measure messages of one size with the default settings, by the receiver's method.

    Short messages are compared with a stream whose reader returns each as new bytes; long ones, which arrive in memory
    that is there, with one that reads into such memory, and those of `receive` with a copy to memory that is touched
    for the first time.

    :param name: name of the size in `SIZES`.
    """
    message = random.randbytes(SIZES[name])  # `bytes(size)` would be the one page of zeros of the kernel, many times
    async with contextlib.AsyncExitStack() as stack:
        opened = stack.enter_async_context
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aioverbs-bench-"))
        device = await opened(open_device("soft0"))
        domain = await opened(device.resource_domain())
        peer = await opened(peer_process(__file__, folder))
        connection = await opened(connect(HOST, int(peer.last_line), domain=domain))
        contenders = {way: _connection_contender(connection, peer, way, message) for way in WAYS}
        for way, path in (("stream", "stream"), ("stream_into", "into")):
            stream = await asyncio.open_unix_connection(f"{folder}/{path}", limit=LIMIT)
            contenders[way] = _stream_contender(stream, peer, way, message)
            stack.callback(stream[1].close)
        contenders["fresh_copy"] = _fresh_copy_contender(message)
        seen = await interleaved(contenders, rounds, 0.02)
    figures: dict[str, object] = {f"{way}_us": seen.ns(way) / 1e3 for way in contenders}
    figures |= {f"{way}_gib_per_s": len(message) / seen.ns(way) * 1e9 / (1 << 30) for way in contenders}
    if len(message) < SHORT:
        beside, compared = "stream", ("receive", "receive_into")
        limits = {"receive_speed_up": Limit(at_least=2)}
    else:
        beside, compared = "stream_into", ("receive_into", "receive_buffer")
        limits = {f"{way}_speed_up": Limit(at_least=2) for way in compared}
        figures["receive_of_fresh_copy"] = seen.ratio("fresh_copy", "receive")
        limits["receive_of_fresh_copy"] = Limit(at_least=0.6)
    figures |= {f"{way}_speed_up": seen.ratio(beside, way) for way in compared}
    return Result(f"connection_one_way_{name}", figures, limits)


if __name__ == "__main__":
    uvloop.run(_be_peer(sys.argv[1]))
