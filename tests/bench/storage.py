"""Benchmarks of the storage server example: reads compared with a uvloop protocol over TCP, and the cost of a flush.

Run as a script, this is one of the client processes.
"""

import asyncio
import contextlib
import os
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from storage_server.client import connect

from aioverbs import ConnectionSettings, MessageModel, open_device
from tests.bench.measuring import Limit, Result
from tests.bench.storage_peer import TcpVolume, start

__all__ = ["flushes", "reads"]

SERVER = Path(__file__).resolve().parents[2] / "examples" / "storage_server"
HOST = "127.0.0.1"
SIZE = 64 << 20
CLIENTS = 2
TURN_S = 0.5
FLUSHES = 16  # in a round
SPIN_US = 20000  # both ends poll for this time before they sleep
WRITTEN = (4 << 10, 64 << 10, 1 << 20)


@dataclass(frozen=True)
class Pattern:
    """Reads of a client: blocks of some size, `window` at a time, at random or sequential offsets."""

    block: int
    window: int
    at_random: bool


PATTERNS = {"random_4k": Pattern(4096, 32, True), "sequential_1m": Pattern(1 << 20, 4, False)}
LEAST = {"random_4k": 3.0, "sequential_1m": 2.0}


# ---- A client process


async def read_for(
    read: Callable[[int, int], Awaitable[None]], pattern: Pattern, seconds: float, rng: random.Random
) -> float:
    """Read for some seconds; return reads per second. `read(task, offset)` is a task's read."""
    blocks, end = SIZE // pattern.block, time.perf_counter() + seconds
    following, done = rng.randrange(blocks), 0

    async def work(task: int) -> None:
        nonlocal following, done
        while time.perf_counter() < end:
            if pattern.at_random:
                block = int(rng.random() * blocks)
            else:
                block = following = (following + 1) % blocks
            await read(task, block * pattern.block)
            done += 1

    begin = time.perf_counter()
    await asyncio.gather(*map(work, range(pattern.window)))
    return done / (time.perf_counter() - begin)


@contextlib.asynccontextmanager
async def rdma(port: int, pattern: Pattern) -> AsyncIterator[Callable[[int, int], Awaitable[None]]]:
    """Connect for one-sided reads into registered memory."""
    settings = ConnectionSettings(send_depth=max(64, 2 * pattern.window))
    async with (
        open_device("soft0") as device,
        device.resource_domain(message_model=MessageModel.HIGH_BANDWIDTH) as domain,
        domain.register(pattern.block * pattern.window) as region,
        connect(HOST, port, os.environ["STORAGE_TOKEN"], domain=domain, settings=settings) as storage,
        storage.open("disk") as volume,
    ):
        memory = [region[at : at + pattern.block] for at in range(0, len(region), pattern.block)]
        yield lambda task, offset: volume.read_into(memory[task], offset)


@contextlib.asynccontextmanager
async def tcp(port: int, pattern: Pattern) -> AsyncIterator[Callable[[int, int], Awaitable[None]]]:
    """Connect for reads from the TCP peer."""
    _, volume = await asyncio.get_running_loop().create_connection(TcpVolume, HOST, port)
    every = memoryview(bytearray(pattern.block * pattern.window))
    memory = [every[at : at + pattern.block] for at in range(0, len(every), pattern.block)]
    yield lambda task, offset: volume.read_into(memory[task], offset)


async def client(transport: str, port: int, name: str) -> None:
    """For each input line, read for as many seconds as it says, and print the reads per second."""
    rng = random.Random(os.getpid())
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with {"rdma": rdma, "tcp": tcp}[transport](port, PATTERNS[name]) as read:
        print(flush=True)
        while line := await lines.readline():
            print(await read_for(read, PATTERNS[name], float(line), rng), flush=True)


# ---- Processes together


class Process:
    """Another process, controlled by lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def send_line(self, line: object) -> None:
        """Send a line to its input."""
        self._stdin.write(f"{line}\n".encode())

    async def receive_line(self) -> str:
        """Return the next line of its output.

        :raises EOFError: the process ended.
        """
        line = await self._stdout.readline()
        if not line:
            raise EOFError("a process of the benchmark ended")
        return line.decode().strip()


@contextlib.asynccontextmanager
async def running(*command: str, terminate: bool = False, **environment: str) -> AsyncIterator[Process]:
    """Run a process. At the end of the block, end it by closing its input or by SIGTERM."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=os.environ | environment)
    try:
        yield Process(process)
    finally:
        if terminate and process.returncode is None:
            process.terminate()
        elif process.stdin is not None:
            process.stdin.close()
        await process.wait()


@dataclass(frozen=True)
class Server:
    """A storage server with a volume."""

    port: int
    metrics: str
    token: str
    file: Path


def _only_volume(folder: Path) -> Path:
    (file,) = (each for each in folder.rglob("*") if each.is_file() and each.stat().st_size == SIZE)
    return file


@contextlib.asynccontextmanager
async def serving(*options: str) -> AsyncIterator[Server]:
    """Run a storage server in a process of its own, with a volume of random bytes."""
    command = [sys.executable, str(SERVER), "serve", *options, "--loop", "uvloop", "--metrics-port", "0"]
    with tempfile.TemporaryDirectory(prefix="aioverbs-bench-", dir=os.environ.get("AIOVERBS_BENCH_FOLDER")) as folder:
        async with running(*command, folder, terminate=True) as process:
            metrics = (await process.receive_line()).rpartition(" ")[2]
            port = int((await process.receive_line()).rpartition(":")[2])
            token = (Path(folder) / "owner.token").read_text()
            async with (
                open_device("soft0") as device,
                device.resource_domain() as domain,
                connect(HOST, port, token, domain=domain) as storage,
            ):
                await storage.create("disk", SIZE)
                async with storage.open("disk", write=True) as volume:
                    await volume.write(0, random.Random(1).randbytes(SIZE))
                    await volume.flush()
            yield Server(port, metrics, token, _only_volume(Path(folder)))


async def reads(rounds: int, name: str) -> Result:
    """Compare two client processes of each kind, in turns: those of the other kind sleep meanwhile."""
    pattern = PATTERNS[name]
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving())
        peer = await stack.enter_async_context(running(*start(server.file)))
        ports = {"rdma": server.port, "tcp": int(await peer.receive_line())}
        clients: dict[str, list[Process]] = {}
        for transport, port in ports.items():
            command = (sys.executable, __file__, transport, str(port), name)
            clients[transport] = [
                await stack.enter_async_context(running(*command, STORAGE_TOKEN=server.token)) for _ in range(CLIENTS)
            ]
            for each in clients[transport]:
                await each.receive_line()
        seen: dict[str, list[float]] = {transport: [] for transport in clients}
        for number in range(rounds + 1):
            for transport, processes in clients.items():
                for each in processes:
                    each.send_line(TURN_S)
                per_s = sum([float(await each.receive_line()) for each in processes])
                if number:  # the first round is a warm-up
                    seen[transport].append(per_s)
    speed_up = statistics.median(ours / theirs for ours, theirs in zip(*seen.values(), strict=True))
    unit, scale = ("mib_per_s", pattern.block / (1 << 20)) if pattern.block >= 1 << 20 else ("per_s", 1)
    figures: dict[str, object] = {
        f"{transport}_{unit}": statistics.median(seen[transport]) * scale for transport in seen
    }
    figures["speed_up"] = speed_up
    return Result(f"storage_{name}", figures, {"speed_up": Limit(at_least=LEAST[name])})


# ---- Flushes


def _synced(metrics: str) -> tuple[float, int]:
    """Return the total time of the server's disk syncs in seconds, and their number."""
    with urllib.request.urlopen(metrics, timeout=10) as answer:
        text = answer.read().decode()
    found = {name: re.search(rf"^storage_sync_seconds_{name} (\S+)$", text, re.MULTILINE) for name in ("sum", "count")}
    total, count = found["sum"], found["count"]
    assert total is not None
    assert count is not None
    return float(total[1]), int(float(count[1]))


async def flushes(rounds: int, written: int) -> Result:
    """Compare a client's flush after writes to random blocks with the fdatasync beneath it."""
    rng, block = random.Random(7), 4096
    over, took, beneath = [], [], []
    settings = ConnectionSettings(spin_ns=SPIN_US * 1000)
    async with (
        serving("--spin-us", str(SPIN_US)) as server,
        open_device("soft0") as device,
        device.resource_domain(message_model=MessageModel.LOW_LATENCY) as domain,
        connect(HOST, server.port, server.token, domain=domain, settings=settings) as storage,
        storage.open("disk", write=True) as volume,
    ):
        for _ in range(rounds):
            before, count = await asyncio.to_thread(_synced, server.metrics)
            seconds = 0.0
            for _ in range(FLUSHES):
                for _ in range(written // block):
                    await volume.write(rng.randrange(SIZE // block) * block, rng.randbytes(block))
                begin = time.perf_counter()
                await volume.flush()
                seconds += time.perf_counter() - begin
            after, again = await asyncio.to_thread(_synced, server.metrics)
            assert again - count == FLUSHES
            over.append(seconds / (after - before))
            took.append(seconds / FLUSHES)
            beneath.append((after - before) / FLUSHES)
    figures = {
        "flush_us": statistics.median(took) * 1e6,
        "fdatasync_us": statistics.median(beneath) * 1e6,
        "over_fdatasync": statistics.median(over),
    }
    return Result(f"storage_flush_{written >> 10}_kib", figures, {"over_fdatasync": Limit(at_most=1.2)})


if __name__ == "__main__":
    uvloop.run(client(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
