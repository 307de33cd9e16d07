"""Run the contenders of `aioverbs bench` in turns, each between this process and a peer process."""

import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

import anyio

from aioverbs._durations import duration
from aioverbs._lifecycle.affinity import wait_uncancelled
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.device import devices
from aioverbs.cli.bench_device import LOOPBACK, device_client
from aioverbs.cli.bench_memory import Memory, expected_checksum
from aioverbs.cli.bench_stream import READ_LIMIT, StreamClient
from aioverbs.cli.common import write_line
from aioverbs.cli.measuring import (
    Cell,
    Figure,
    Operation,
    Samples,
    count_for_turn,
    figures,
    median,
    next_count,
    turn_order,
    turn_seconds,
)
from aioverbs.errors import DeviceNotFoundError, QueuePairStateError, WorkCompletionError

__all__ = ["BASE", "STREAMS", "PeerExitedError", "Report", "loop_name", "measure", "select_devices"]

BASE = "tcp"
STREAMS = ("tcp", "unix")
_TURN_LIMIT_S = 10.0  # a contender whose turn takes longer is dropped
_START_LIMIT_S = 60.0
_WARM_UP_FRACTION = 0.05  # part of the requested time
_TIME_LIMIT_FACTOR = 3  # multiple of the requested time
_EXIT_LIMIT_S = 10.0

# Exceptions that drop one contender; the other contenders continue.
_FAILURES = (
    OSError,
    EOFError,
    ValueError,
    QueuePairStateError,
    WorkCompletionError,
    anyio.EndOfStream,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
)


def loop_name() -> str:
    """Return the name of the event loop library that commands use, ``"uvloop"`` or ``"asyncio"``."""
    return "uvloop" if find_spec("uvloop") is not None else "asyncio"


def select_devices(named: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Select the devices to measure.

    :param named: names of devices; if empty, select every usable device with an active port.
    :returns: the names of the selected devices, and a dict of the devices in `named` that are not selected: names and
        error messages.
    :raises DeviceNotFoundError: a name in `named` is unknown.
    :raises VerbsError: a device can be opened but not queried.
    """
    known = {each.name: each for each in devices()}
    for name in named:
        if name not in known:
            raise DeviceNotFoundError(name, list(known))
    usable = [name for name, each in known.items() if each.problem is None and each.active]
    if not named:
        return usable, {}
    problems = {name: known[name].problem or "none of its ports is active" for name in named if name not in usable}
    return [name for name in dict.fromkeys(named) if name in usable], problems


@dataclass
class Report:
    """Result of a benchmark. Made by `measure`.

    :param contenders: names of the contenders (devices and streams) that started.
    :param problems: contenders that failed to start or to finish, with the reasons.
    :param figures: the measurements.
    :param seconds: duration of the whole benchmark.
    """

    contenders: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    seconds: float = 0.0


class NothingMeasuredError(OSError):
    """All devices and streams failed."""


class PeerExitedError(ConnectionError):
    """The peer process ended during the benchmark; all contenders are lost."""


class Client(Protocol):
    """Client side of a contender: a `DeviceClient` or a `StreamClient`."""

    async def run_one(self, operation: Operation, size: int) -> None:
        """Run one operation of `size` bytes and wait until it completes.

        :raises Exception: the operation failed; one of `_FAILURES`.
        """

    async def run_many(self, operation: Operation, size: int, window: int, count: int) -> None:
        """Run `count` operations of `size` bytes, at most `window` of them in flight; wait until all complete.

        :raises Exception: an operation failed; one of `_FAILURES`.
        """


class _Peer:
    """Control of the peer process through its standard input and output. Made by `_peer_process`, which closes it."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._request_number = 0

    async def request(self, **fields: object) -> dict[str, Any]:
        """Send a request to the peer process and wait for its answer, without a time limit.

        :param fields: the request's fields, which become a JSON object.
        :returns: the fields of the answer.
        :raises PeerExitedError: the peer process ended.
        :raises ValueError: the peer process printed a line that is not JSON.
        """
        self._request_number += 1
        write_line(self._stdin, json.dumps({"number": self._request_number, **fields}))
        while line := await self._stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            if answer["number"] == self._request_number:  # an earlier request that timed out may be answered first
                return answer
        raise PeerExitedError(f"the peer process ended with status {await self._process.wait()}")

    async def aclose(self) -> None:
        """Close the peer process's standard input and wait until the process ends. If that takes more than 10 s, kill
        it.

        A cancellation does not interrupt this call, and is raised afterwards.
        """
        self._stdin.close()
        await wait_uncancelled(self._wait_or_kill())

    async def _wait_or_kill(self) -> None:
        """Wait until the process ends. If that takes more than 10 s, kill it."""
        try:
            async with asyncio.timeout(_EXIT_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def _time_limit(seconds: float, message: str) -> AsyncIterator[None]:
    """Cancel the block if it takes too long.

    :param seconds: maximum duration of the block.
    :param message: text of the `TimeoutError`.
    :raises TimeoutError: the block took longer than `seconds` and was cancelled.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(message) from error
        raise


@asynccontextmanager
async def _peer_process() -> AsyncIterator[_Peer]:
    """Start the peer process and yield a `_Peer` that controls it; end the process when the block ends.

    :raises OSError: the process cannot be started.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the same import path as here
    command = (sys.executable, "-P", "-m", "aioverbs.cli.bench_peer")
    # In a session of its own, the peer process does not receive Ctrl-C. It ends when this process closes its input.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
    )
    peer = _Peer(process)
    try:
        yield peer
    finally:
        await peer.aclose()


@asynccontextmanager
async def _stream_client(address: int | str, secret: bytes) -> AsyncIterator[tuple[Client, Memory]]:
    """Connect a stream to the peer process; yield the client side of the stream and its memory. Close the stream when
    the block ends.

    :param address: path of a Unix stream, or port of a TCP stream on the loopback address.
    :param secret: shared secret of both processes.
    :raises OSError: the connection failed.
    :raises EOFError: the peer process closed the stream.
    """
    opened = (
        asyncio.open_unix_connection(address, limit=READ_LIMIT)
        if isinstance(address, str)
        else asyncio.open_connection(LOOPBACK, address, limit=READ_LIMIT)
    )
    reader, writer = await opened
    memory = Memory()
    client = StreamClient(reader, writer, memory)
    try:
        await client.prove(secret)
        yield client, memory
    finally:
        with suppress(ConnectionError):  # the operation that broke the stream has reported it
            await client.aclose()


class _Benchmark:
    """The contenders that have not failed, and the measurements of cells.

    :param peer: the peer process.
    :param report: receives the figures and the problems of dropped contenders.
    """

    def __init__(self, peer: _Peer, report: Report) -> None:
        self._peer = peer
        self._report = report
        self._turn = 0
        self.clients: dict[str, tuple[Client, Memory]] = {}

    async def measure_cell(self, cell: Cell, target_s: float) -> None:
        """Measure a cell (an operation, a size and a window) and add the figures to the report.

        First find out how many operations of each contender fit into a turn, then let the contenders take turns. A
        contender that fails is dropped, and the report contains the reason.

        :param cell: the cell.
        :param target_s: target duration of a turn, in seconds.
        :raises NothingMeasuredError: no contender is left.
        :raises PeerExitedError: the peer process ended.
        :raises TimeoutError: the peer process did not answer.
        """
        counts: dict[str, int] = {}
        for name in tuple(self.clients):
            async with self._drop_on_failure(name):
                counts[name] = await self._calibrate(name, cell, target_s)
        samples = {name: Samples() for name in self.clients}
        for _, name in turn_order(tuple(self.clients)):
            if name in self.clients:
                async with self._drop_on_failure(name):
                    await self._run_turn(name, cell, counts[name], samples[name])
        if not self.clients:
            reasons = "; ".join(f"{name}: {problem}" for name, problem in self._report.problems.items())
            raise NothingMeasuredError(f"no contender is left to measure: {reasons}")
        self._report.figures += figures(cell, {name: samples[name] for name in self.clients}, BASE)

    @asynccontextmanager
    async def _drop_on_failure(self, name: str) -> AsyncIterator[None]:
        """Drop the contender ``name`` if the block raises an exception of `_FAILURES`, and add the reason to the
        report.

        The exception is then suppressed; any other one propagates unchanged.

        :raises PeerExitedError: the peer process ended.
        :raises TimeoutError: the peer process did not confirm the end of the contender's turn.
        """
        try:
            yield
        except PeerExitedError:
            raise
        except _FAILURES as error:
            del self.clients[name]
            self._report.problems[name] = str(error) or type(error).__name__
            async with _time_limit(_TURN_LIMIT_S, "the peer process does not answer"):
                await self._peer.request(
                    action="end", name=name, size=0, slots=0
                )  # so that the peer stops waiting for messages

    async def _calibrate(self, name: str, cell: Cell, target_s: float) -> int:
        """Return how many operations the contender ``name`` can run in about ``target_s`` seconds: at least
        ``cell.window`` and at most 200,000.

        This raises the same exceptions as `_run_turn`.
        """
        count = cell.window
        while True:
            samples = Samples()
            await self._run_turn(name, cell, count, samples)
            next_number = next_count(count, samples.rounds[0] * count, target_s)
            if next_number is None:
                return max(cell.window, count_for_turn(samples.rounds[0], target_s))
            count = max(cell.window, next_number)

    async def _run_turn(self, name: str, cell: Cell, count: int, samples: Samples) -> None:
        """Let the contender ``name`` run ``count`` operations, then verify the bytes that arrived.

        If an operation fails, its exception propagates unchanged.

        :param samples: the measured times are appended to it, even if the bytes that arrived are wrong.
        :raises TimeoutError: the turn took more than 10 s.
        :raises ValueError: the bytes that arrived are wrong.
        :raises PeerExitedError: the peer process ended.
        """
        client, memory = self.clients[name]
        self._turn += 1
        fields = {"name": name, "operation": cell.operation, "size": cell.size, "slots": cell.window}
        async with _time_limit(_TURN_LIMIT_S, f"stuck: a turn took more than {duration(_TURN_LIMIT_S)}"):
            memory.prepare(cell.size, cell.window, self._turn)
            await self._peer.request(action="begin", turn=self._turn, **fields)
            if cell.window == 1:
                times = await _run_sequentially(client, cell, count)
                samples.single += times
                samples.rounds.append(median(times))
            else:
                begin = time.perf_counter_ns()
                await client.run_many(cell.operation, cell.size, cell.window, count)
                samples.rounds.append((time.perf_counter_ns() - begin) / count)
            peer_checksum = (await self._peer.request(action="end", **fields))["checksum"]
        arrived = memory.checksum(cell.size, cell.window) if cell.operation == "read" else peer_checksum
        if arrived != expected_checksum(cell.size, cell.window, self._turn):
            raise ValueError(f"turn {self._turn} ({cell}): the bytes that arrived differ from those that were sent")


async def _run_sequentially(client: Client, cell: Cell, count: int) -> list[int]:
    """Run ``count`` operations, one at a time; return the duration of each in nanoseconds.

    This raises the same exceptions as `Client.run_one`.
    """
    run_one, operation, size, clock = client.run_one, cell.operation, cell.size, time.perf_counter_ns
    times = []
    for _ in range(count):
        begin = clock()
        await run_one(operation, size)
        times.append(clock() - begin)
    return times


async def measure(
    cells: Sequence[Cell],
    device_names: Sequence[str],
    model: MessageModel,
    seconds: float,
    advance: Callable[[], object] = lambda: None,
) -> Report:
    """Measure all cells in about `seconds` seconds. The time limit is one minute plus three times `seconds`.

    :param cells: the cells to measure, each with all devices and streams.
    :param device_names: names of the devices to measure; a TCP and a Unix stream are measured as well.
    :param model: message model of the devices, in both processes.
    :param seconds: target duration of the whole benchmark.
    :param advance: called without arguments after each cell.
    :returns: the report; its problems contain the devices and streams that failed while others continued.
    :raises PeerExitedError: the peer process ended.
    :raises NothingMeasuredError: all devices and streams failed.
    :raises OSError: the peer process cannot be started.
    :raises TimeoutError: the benchmark exceeded the time limit, or the peer process did not answer.
    """
    limit_s = _TIME_LIMIT_FACTOR * seconds + _START_LIMIT_S
    advice = (
        "the machine is too busy, or has too few processors for the message model; select fewer operations or devices, "
        "or raise --seconds"
    )
    async with _time_limit(limit_s, f"the benchmark took more than {duration(limit_s)}: {advice}"):
        return await _measure(cells, device_names, model, seconds, advance)


async def _measure(
    cells: Sequence[Cell],
    device_names: Sequence[str],
    model: MessageModel,
    seconds: float,
    advance: Callable[[], object],
) -> Report:
    """Do the work of `measure` without a limit on the whole duration: start the peer process, connect to it, warm up
    and measure all cells; return the report.

    This raises the same exceptions as `measure`, with `TimeoutError` only if the peer process did not answer.
    """
    began = time.monotonic()
    report = Report()
    secret = secrets.token_bytes(32)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aioverbs-bench-"))
        peer = await stack.enter_async_context(_peer_process())
        benchmark = _Benchmark(peer, report)
        async with _time_limit(_START_LIMIT_S, f"the peer process did not answer within {duration(_START_LIMIT_S)}"):
            served = await peer.request(
                devices=list(device_names), model=model.name, secret=secret.hex(), path=f"{folder}/stream"
            )
            report.problems |= served["problems"]
            for name, address in served["addresses"].items():
                try:
                    if name in STREAMS:
                        benchmark.clients[name] = await stack.enter_async_context(_stream_client(address, secret))
                    else:
                        client = await stack.enter_async_context(device_client(name, model, address, secret))
                        benchmark.clients[name] = client, client.memory
                except PeerExitedError:
                    raise
                except (*_FAILURES, DeviceNotFoundError) as error:
                    report.problems[name] = str(error) or type(error).__name__
        report.contenders = list(benchmark.clients)
        target_s = turn_seconds(seconds, len(cells), len(benchmark.clients))
        end = time.monotonic() + seconds * _WARM_UP_FRACTION
        while time.monotonic() < end:  # warms caches, CPU clocks and connections
            await benchmark.measure_cell(cells[0], target_s)
        report.figures.clear()
        for cell in cells:
            await benchmark.measure_cell(cell, target_s)
            advance()
    report.seconds = time.monotonic() - began
    return report
