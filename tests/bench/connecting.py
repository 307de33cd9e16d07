"""Benchmark of connecting between two processes, beside the Unix and TCP streams of uvloop.

Run as a script, this is the peer process, or with a port a process that connects for the first time.
"""

import asyncio
import contextlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import uvloop

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

from aioverbs import BrokenResourceError, Connection, connect, open_device, serve
from tests.bench.measuring import Limit, Result, percentile

__all__ = ["at_once", "in_sequence"]

HOST = "127.0.0.1"
TURN = 50  # connects of a contender before the next one's turn
BACKLOG = 1024
HANDSHAKES = 1024  # as many as connect at once
PATIENCE_S = 600  # a busy machine drops no peer
FIRST = 9  # processes that connect for the first time

Connect = Callable[[], Awaitable[Callable[[], object]]]
"""Contender: connect, and return a function that closes without waiting."""


# ---- The peer


async def _accept(path: str) -> None:
    """Run as the peer: accept connections and streams until the end of the input, and keep each until it is closed."""

    async def keep(connection: Connection) -> None:
        with contextlib.suppress(BrokenResourceError):
            async for _ in connection:
                pass

    async def keep_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    _allow_descriptors()
    async with (
        open_device("soft0") as device,
        device.loop_domain() as domain,
        serve(
            keep,
            HOST,
            domain=domain,
            backlog=BACKLOG,
            max_handshakes=HANDSHAKES,
            handshake_timeout_s=PATIENCE_S,
            drain_timeout_s=0,
        ) as server,
        await asyncio.start_server(keep_stream, HOST, 0, backlog=BACKLOG) as tcp,
        await asyncio.start_unix_server(keep_stream, path, backlog=BACKLOG),
    ):
        print(server.port, tcp.sockets[0].getsockname()[1], flush=True)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await reader.read()


def _allow_descriptors() -> None:
    """Let this process have as many open descriptors as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _connect_first(port: int) -> None:
    """Run as a process that connects for the first time: print the milliseconds, and those of its processor time."""
    async with open_device("soft0") as device, device.loop_domain() as domain:
        begin, cpu = time.perf_counter(), time.process_time()
        connection = await connect(HOST, port, domain=domain)
        print((time.perf_counter() - begin) * 1e3, (time.process_time() - cpu) * 1e3)
        await connection.aclose()


# ---- Contenders


@contextlib.asynccontextmanager
async def _contenders() -> AsyncIterator[tuple[dict[str, Connect], int]]:
    """Start a peer. Gives the contenders that connect to it, and the port of its server."""
    _allow_descriptors()
    pipe = asyncio.subprocess.PIPE
    with tempfile.TemporaryDirectory(prefix="aioverbs-bench-") as folder:
        path = f"{folder}/unix"
        peer = await asyncio.create_subprocess_exec(sys.executable, __file__, path, stdin=pipe, stdout=pipe)
        assert peer.stdin is not None
        assert peer.stdout is not None
        try:
            port, tcp = map(int, (await peer.stdout.readline()).split())
            async with open_device("soft0") as device, device.loop_domain() as domain:

                async def by_connection() -> Callable[[], object]:
                    return (await connect(HOST, port, domain=domain, timeout_s=PATIENCE_S)).abort

                async def by_tcp() -> Callable[[], object]:
                    _, writer = await asyncio.open_connection(HOST, tcp)
                    return writer.transport.abort

                async def by_unix() -> Callable[[], object]:
                    _, writer = await asyncio.open_unix_connection(path)
                    return writer.transport.abort

                yield {"connection": by_connection, "tcp": by_tcp, "unix": by_unix}, port
        finally:
            peer.stdin.close()
            await peer.wait()


async def _first(port: int) -> tuple[float, float]:
    """Return the medians of the milliseconds, and of those of processor time, of first connects."""
    found = []
    for _ in range(FIRST):
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--first", str(port), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        found.append([float(each) for each in output.split()])
    wall, cpu = zip(*found, strict=True)
    return statistics.median(wall), statistics.median(cpu)


async def in_sequence(count: int) -> Result:
    """Connect one after the other, contenders in turns, and close each connection before the next one is made."""
    walls: dict[str, list[float]] = {}
    cpus: dict[str, list[float]] = {}
    async with _contenders() as (contenders, port):
        first_ms, first_cpu_ms = await _first(port)
        for _ in range(max(1, count // TURN)):
            for name, open_one in contenders.items():
                for _ in range(TURN):
                    begin, cpu = time.perf_counter(), time.thread_time()
                    close = await open_one()
                    walls.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
                    cpus.setdefault(name, []).append((time.thread_time() - cpu) * 1e6)
                    close()
                await asyncio.sleep(0.001)  # until those are closed
    figures: dict[str, object] = {"first_ms": first_ms, "first_cpu_ms": first_cpu_ms}
    for name, wall in walls.items():
        figures |= {f"{name}_us": statistics.median(wall), f"{name}_quiet_us": percentile(wall, 0.1)}
        figures[f"{name}_cpu_us"] = statistics.median(cpus[name])
    limits = {"first_ms": Limit(at_most=10), "connection_us": Limit(at_most=1000)}
    return Result(f"connecting_in_sequence_{count}", figures, limits)


async def at_once(count: int, rounds: int) -> Result:
    """Connect many times at once, contenders in turns."""
    walls: dict[str, list[float]] = {}
    async with _contenders() as (contenders, _):
        for _ in range(rounds):
            for name, open_one in contenders.items():
                begin = time.perf_counter()
                closing = await asyncio.gather(*(open_one() for _ in range(count)))
                walls.setdefault(name, []).append((time.perf_counter() - begin) / count * 1e6)
                for close in closing:
                    close()
                await asyncio.sleep(0.5)  # until those are closed
    return Result(f"connecting_at_once_{count}", {f"{name}_us": statistics.median(walls[name]) for name in walls})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--first", port]:
            uvloop.run(_connect_first(int(port)))
        case [path]:
            uvloop.run(_accept(path))
