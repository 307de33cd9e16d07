"""Benchmarks of connections: rate of connecting, cost of an idle connection, echoes between two processes.

Run as a script, this is the peer process of the echoes.
"""

import asyncio
import contextlib
import gc
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import uvloop

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

from aioverbs import Connection, ConnectionSettings, MessageModel, connect, listen, open_device, serve
from tests.bench.measuring import Contender, Limit, Result, interleaved
from tests.bench.peers import HOST, PeerProcess, peer_process, standard_input
from tests.resident import resident_bytes

__all__ = ["echo", "idle", "setup"]

SIZES = (64, 64 * 1024)
MODELS = (MessageModel.DEFAULT, MessageModel.LOW_LATENCY, MessageModel.FORCE_LOW_LATENCY)
ASLEEP = "DEFAULT_asleep"  # each await sleeps, as if there were a single processor
USUAL = ConnectionSettings()
LEAN = ConnectionSettings(buffer_size=4096, receive_depth=4, send_buffers=2, send_depth=8)


# ---- Rate of connecting


async def setup(count: int) -> Result:
    """Open connections one after the other, with both ends on this loop, and keep all of them open."""
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
            stack.callback(near.abort)
            stack.callback(far.abort)
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


# ---- Cost of an idle connection


async def idle(count: int) -> Result:
    """Measure the memory of idle connections, all in, and what more of them leave that were opened and closed. Both
    ends are in this process.
    """
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        listen(HOST, domain=domain) as listener,
    ):

        async def connect_one() -> tuple[Connection, Connection]:
            return await connect(HOST, listener.port, domain=domain), await listener.accept()

        for each in [await connect_one() for _ in range(8)]:  # allocate what all connections share
            for end in each:
                await end.aclose()
        gc.collect()
        before = resident_bytes()
        kept = [end for _ in range(count) for end in await connect_one()]
        gc.collect()
        idle_bytes = resident_bytes() - before
        for _ in range(10 * count):
            for end in await connect_one():
                await end.aclose()
        gc.collect()
        left_bytes = resident_bytes() - before
        for end in kept:
            end.abort()
        figures = {
            "kib_per_end": idle_bytes / (2 * count) / 1024,
            "mib": idle_bytes / (1 << 20),
            "mib_after_10_times_more": left_bytes / (1 << 20),
        }
        return Result(f"connections_idle_{count}", figures, {"kib_per_end": Limit(at_most=16)})


# ---- Echoes
#
# Each contender has its own peer process, which sleeps while another contender is measured: a peer that polls for a
# message would disturb the others.


async def _answer_connection(name: str) -> None:
    """Run as the peer: print the port, then for each input line echo that many messages, until the end of the input."""
    settings, ended = _settings(_model(name)), asyncio.Event()
    control = await standard_input()

    async def echo(connection: Connection) -> None:
        send, receive = connection.send, connection.receive
        while line := await control.readline():
            print(flush=True)
            for _ in range(int(line)):
                await send(await receive())
        ended.set()

    async with (
        open_device("soft0") as device,
        device.resource_domain(message_model=_model(name)) as domain,
        serve(echo, HOST, domain=domain, settings=settings, drain_timeout_s=0) as server,
    ):
        print(server.port, flush=True)
        await ended.wait()


async def _answer_unix(path: str) -> None:
    """Run as the peer over a Unix stream, where the end of the stream ends the echo."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readexactly(4)
                writer.write(head + await reader.readexactly(int.from_bytes(head)))

    async with await asyncio.start_unix_server(echo, path, limit=1 << 20):
        print(flush=True)
        await (await standard_input()).read()


def _model(name: str) -> MessageModel:
    return MessageModel.DEFAULT if name == ASLEEP else MessageModel[name]


def _usable_processors(name: str) -> AbstractContextManager[object]:
    """Let the completion queues that are opened in the block never poll, for the contender that sleeps."""
    replaced = "aioverbs._verbs.completion_queue.usable_processors"
    return patch(replaced, lambda: 1) if name == ASLEEP else contextlib.nullcontext()


def _settings(model: MessageModel) -> ConnectionSettings:
    # With this model, an application polls until the answer arrives.
    return replace(USUAL, spin_ns=1_000_000) if model is MessageModel.FORCE_LOW_LATENCY else USUAL


def _connection_contender(connection: Connection, peer: PeerProcess, message: bytes) -> Contender:
    async def round_trips(operations: int) -> float:
        await peer.request(str(operations))
        send, receive = connection.send, connection.receive
        begin = time.perf_counter_ns()
        for _ in range(operations):
            await send(message)
            await receive()
        return time.perf_counter_ns() - begin

    return round_trips


def _stream_contender(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes) -> Contender:
    framed = len(message).to_bytes(4) + message

    async def round_trips(operations: int) -> float:
        begin = time.perf_counter_ns()
        for _ in range(operations):
            writer.write(framed)
            head = await reader.readexactly(4)
            await reader.readexactly(int.from_bytes(head))
        return time.perf_counter_ns() - begin

    return round_trips


async def echo(rounds: int) -> Result:
    """Measure echoes between two processes for each message model, compared with a Unix stream of uvloop.

    With DEFAULT, both ends poll while they are busy. The same is measured with ends that sleep at each message.
    """
    figures: dict[str, object] = {}
    limits = {}
    async with contextlib.AsyncExitStack() as stack:
        opened = stack.enter_async_context
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aioverbs-bench-"))
        device = await opened(open_device("soft0"))
        ends = {}
        for name in (*(model.name for model in MODELS), ASLEEP):
            peer = await opened(peer_process(__file__, "--connection", name))
            domain = await opened(device.resource_domain(message_model=_model(name)))
            connection = connect(HOST, int(peer.last_line), domain=domain, settings=_settings(_model(name)))
            with _usable_processors(name):
                ends[name] = await opened(connection), peer
        await opened(peer_process(__file__, "--unix", f"{folder}/unix"))
        reader, writer = await asyncio.open_unix_connection(f"{folder}/unix", limit=1 << 20)
        for size in SIZES:
            message = bytes(size)
            contenders = {name: _connection_contender(*each, message) for name, each in ends.items()}
            seen = await interleaved(contenders | {"unix": _stream_contender(reader, writer, message)}, rounds, 0.005)
            figures |= {f"{name}_{size}_us": seen.ns(name) / 1e3 for name in seen.times}
            figures |= {f"{name}_{size}_speed_up": seen.ratio("unix", name) for name in ends}
            limits[f"FORCE_LOW_LATENCY_{size}_speed_up"] = Limit(at_least=1.5)
        limits |= {"DEFAULT_64_speed_up": Limit(at_least=2), f"{ASLEEP}_64_speed_up": Limit(at_least=1)}
        writer.close()
    return Result("connection_echo", figures, limits)


if __name__ == "__main__":
    answers = {"--connection": _answer_connection, "--unix": _answer_unix}
    with _usable_processors(sys.argv[2]):
        uvloop.run(answers[sys.argv[1]](sys.argv[2]))
