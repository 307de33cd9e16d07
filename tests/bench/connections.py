"""Benchmarks of connections: how many can be made, what an idle one costs, echoes between two processes.

python tests/bench/connections.py [--scale 0.1] [setup idle echo]
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

sys.path.append(str(Path(__file__).resolve().parents[2]))  # this is run as a script

from aioverbs import Connection, ConnectionSettings, MessageModel, connect, listen, open_device, serve
from tests.bench.measuring import Contender, Limit, Result, interleaved

__all__ = ["echo", "idle", "setup"]

HOST = "127.0.0.1"
SIZES = (64, 64 * 1024)
USUAL = ConnectionSettings()
LEAN = ConnectionSettings(buffer_size=4096, receive_depth=4, send_buffers=2, send_depth=8)


# ---- How many can be made


async def setup(count: int) -> Result:
    """Connections one after the other, both ends on this loop, all of them kept open."""
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        listen(HOST, domain=domain, settings=LEAN) as listener,
        contextlib.AsyncExitStack() as stack,
    ):
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            near = await connect(HOST, listener.port, domain=domain, settings=LEAN)
            far = await listener.accept()
            times.append(time.perf_counter() - begin)
            stack.push_async_callback(near.abort)
            stack.push_async_callback(far.abort)
        tenth = max(1, count // 10)
        first, last = sum(times[:tenth]) / tenth, sum(times[-tenth:]) / tenth
        begin = time.perf_counter()
        await stack.aclose()
        closing = time.perf_counter() - begin
    figures = {
        "per_s": count / sum(times),
        "last_over_first": last / first,
        "close_us": closing / count / 2 * 1e6,
    }
    limits = {"per_s": Limit(at_least=500), "last_over_first": Limit(at_most=1.5)}
    return Result(f"connection_setup_{count}", figures, limits)


# ---- What one costs that does nothing


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def idle(count: int) -> Result:
    """Both ends of so many connections in this process, beyond their buffers, for each end."""
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        listen(HOST, domain=domain, settings=LEAN) as listener,
        contextlib.AsyncExitStack() as stack,
    ):

        async def one() -> None:
            near = await connect(HOST, listener.port, domain=domain, settings=LEAN)
            stack.push_async_callback(near.abort)
            stack.push_async_callback((await listener.accept()).abort)

        for _ in range(8):  # what is made once for many
            await one()
        gc.collect()
        before = _resident()
        for _ in range(count):
            await one()
        gc.collect()
        each = (_resident() - before) / (2 * count)
        figures = {"kib_per_end": each / 1024, "buffers_kib": LEAN.block_size / 1024}
        return Result(f"connections_idle_{count}", figures, {"kib_per_end": Limit(at_most=64)})


# ---- Echoes


async def _answer(model: str) -> None:
    """The other process: both echoes; it tells the port, and ends when its input does."""
    folder = sys.argv[-1]

    async def unix(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readexactly(4)
                writer.write(head + await reader.readexactly(int.from_bytes(head)))

    async def echo(connection: Connection) -> None:
        send, receive = connection.send, connection.receive
        while True:
            await send(await receive())

    async with (
        open_device("soft0") as device,
        device.resource_domain(message_model=MessageModel[model]) as domain,
        serve(echo, HOST, domain=domain, settings=USUAL, drain_timeout_s=0) as server,
        await asyncio.start_unix_server(unix, f"{folder}/unix", limit=1 << 20),
    ):
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


@contextlib.asynccontextmanager
async def _other(model: str, folder: str) -> AsyncIterator[int]:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, __file__, "--answer", model, folder]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.stdin.close()
        await process.wait()


def _over(connection: Connection, message: bytes) -> Contender:
    async def round_trips(operations: int) -> float:
        send, receive = connection.send, connection.receive
        begin = time.perf_counter_ns()
        for _ in range(operations):
            await send(message)
            await receive()
        return time.perf_counter_ns() - begin

    return round_trips


def _through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes) -> Contender:
    framed = len(message).to_bytes(4) + message

    async def round_trips(operations: int) -> float:
        begin = time.perf_counter_ns()
        for _ in range(operations):
            writer.write(framed)
            head = await reader.readexactly(4)
            await reader.readexactly(int.from_bytes(head))
        return time.perf_counter_ns() - begin

    return round_trips


async def echo(rounds: int, model: MessageModel) -> Result:
    """Messages there and back between two processes, beside a Unix stream of uvloop's that carries the same."""
    figures: dict[str, object] = {}
    limits = {}
    with tempfile.TemporaryDirectory(prefix="aioverbs-bench-") as folder:
        async with (
            _other(model.name, folder) as port,
            open_device("soft0") as device,
            device.resource_domain(message_model=model) as domain,
            connect(HOST, port, domain=domain, settings=USUAL) as connection,
        ):
            reader, writer = await asyncio.open_unix_connection(f"{folder}/unix", limit=1 << 20)
            for size in SIZES:
                message = bytes(size)
                contenders: dict[str, Contender] = {
                    "connection": _over(connection, message),
                    "unix": _through(reader, writer, message),
                }
                seen = await interleaved(contenders, rounds, 0.005)
                figures |= {
                    f"connection_{size}_us": seen.ns("connection") / 1e3,
                    f"unix_{size}_us": seen.ns("unix") / 1e3,
                    f"speed_up_{size}": seen.ratio("unix", "connection"),
                }
                limits[f"speed_up_{size}"] = Limit(at_least=1.5)
            writer.close()
    return Result(f"connection_echo_{model.name}", figures, limits)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["setup", "idle", "echo"])
    parser.add_argument("--scale", type=float, default=1.0, help="0.1 for a tenth of everything")
    options = parser.parse_args()
    scale = options.scale
    parts: dict[str, list[Callable[[], Coroutine[Any, Any, Result]]]] = {
        "setup": [lambda: setup(max(20, int(1000 * scale)))],
        "idle": [lambda: idle(max(20, int(1000 * scale)))],
        "echo": [
            lambda model=model: echo(max(5, int(201 * scale)), model)  # type: ignore[misc]
            for model in (MessageModel.DEFAULT, MessageModel.LOW_LATENCY, MessageModel.FORCE_LOW_LATENCY)
        ],
    }
    for part in options.parts:
        for measure in parts[part]:
            result = uvloop.run(measure())
            print(json.dumps(result.as_json()), flush=True)


if __name__ == "__main__":
    if "--answer" in sys.argv:
        uvloop.run(_answer(sys.argv[2]))
    else:
        main()
