"""Runs the contenders of `aioverbs bench` against each other, each between this process and another one."""

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
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.device import devices
from aioverbs.cli.bench_device import HERE, device_client
from aioverbs.cli.bench_memory import Memory, expected
from aioverbs.cli.bench_stream import LIMIT, StreamClient
from aioverbs.cli.common import tell
from aioverbs.cli.measuring import (
    Cell,
    Figure,
    Operation,
    Samples,
    figures,
    fitting_count,
    median,
    next_count,
    turn_s,
    turns,
)
from aioverbs.errors import DeviceNotFoundError, QueuePairStateError, WorkCompletionError

__all__ = ["BASE", "STREAMS", "PeerGoneError", "Report", "chosen_devices", "loop_name", "measure"]

BASE = "tcp"
STREAMS = ("tcp", "unix")
_STUCK_S = 10.0  # a turn that takes longer does not end
_START_S = 60.0
_WARM_UP = 0.05  # of the time
_LONGEST = 3  # times as long as it is told
_END_S = 10.0

# What a contender ends with that cannot go on. The others do.
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
    """Whose event loop is used."""
    return "uvloop" if find_spec("uvloop") is not None else "asyncio"


def chosen_devices(named: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The devices that are measured, those with an active port or those that are named; and why some cannot be.

    :raises DeviceNotFoundError: one that is named is not there.
    """
    there = {each.name: each for each in devices()}
    for name in named:
        if name not in there:
            raise DeviceNotFoundError(name, list(there))
    able = [name for name, each in there.items() if each.problem is None and each.active]
    if not named:
        return able, {}
    problems = {name: there[name].problem or "none of its ports is active" for name in named if name not in able}
    return [name for name in dict.fromkeys(named) if name in able], problems


@dataclass
class Report:
    """What came out.

    :param contenders: those that began.
    :param problems: why some of them did not begin, or go on to the end.
    :param seconds: how long all took.
    """

    contenders: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    seconds: float = 0.0


class PeerGoneError(ConnectionError):
    """The other process has ended."""


class Client(Protocol):
    """How a contender asks."""

    async def one(self, operation: Operation, size: int) -> None:
        """Do it once."""

    async def many(self, operation: Operation, size: int, window: int, count: int) -> None:
        """Do it so often, with a window of them under way."""


class _Peer:
    """The other process, as it is talked to."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._asked = 0

    async def ask(self, **told: object) -> dict[str, Any]:
        """Tell it something; what it answers.

        :raises PeerGoneError: it has ended.
        """
        self._asked += 1
        tell(self._stdin, json.dumps({"number": self._asked, **told}))
        while line := await self._stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            if answer["number"] == self._asked:  # and not what somebody asked who did not wait for it
                return answer
        raise PeerGoneError(f"the other process ended with status {await self._process.wait()}")

    async def aclose(self) -> None:
        """End it: by its input, and where that does not help by force."""
        self._stdin.close()
        try:
            with anyio.fail_after(_END_S, shield=True):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            with anyio.CancelScope(shield=True):
                await self._process.wait()


@asynccontextmanager
async def _within(seconds: float, otherwise: str) -> AsyncIterator[None]:
    """A block that takes so long at most.

    :param otherwise: what the `TimeoutError` says.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(otherwise) from error
        raise


@asynccontextmanager
async def _other_process() -> AsyncIterator[_Peer]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # it is to find what this finds
    command = (sys.executable, "-P", "-m", "aioverbs.cli.bench_peer")
    # Ctrl-C is for this process: by its end the other one ends.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
    )
    peer = _Peer(process)
    try:
        yield peer
    finally:
        await peer.aclose()


@asynccontextmanager
async def _stream(place: int | str, secret: bytes) -> AsyncIterator[tuple[Client, Memory]]:
    opened = (
        asyncio.open_unix_connection(place, limit=LIMIT)
        if isinstance(place, str)
        else asyncio.open_connection(HERE, place, limit=LIMIT)
    )
    reader, writer = await opened
    memory = Memory()
    client = StreamClient(reader, writer, memory)
    try:
        await client.prove(secret)
        yield client, memory
    finally:
        with suppress(ConnectionError):  # one that broke is told of where it did
            await client.aclose()


class _Run:
    """Everybody who is still in."""

    def __init__(self, peer: _Peer, report: Report) -> None:
        self._peer = peer
        self._report = report
        self._turn = 0
        self.clients: dict[str, tuple[Client, Memory]] = {}

    async def cell(self, cell: Cell, wanted_s: float) -> None:
        """Measure a cell, all in turns.

        :raises ConnectionError: none of them is left.
        """
        counts: dict[str, int] = {}
        for name in tuple(self.clients):
            async with self._dropping(name):
                counts[name] = await self._calibrate(name, cell, wanted_s)
        samples = {name: Samples() for name in self.clients}
        for _, name in turns(tuple(self.clients)):
            if name in self.clients:
                async with self._dropping(name):
                    await self._take_turn(name, cell, counts[name], samples[name])
        if not self.clients:
            reasons = "; ".join(f"{name}: {problem}" for name, problem in self._report.problems.items())
            raise ConnectionError(f"nobody is left who could be measured: {reasons}")
        self._report.figures += figures(cell, {name: samples[name] for name in self.clients}, BASE)

    @asynccontextmanager
    async def _dropping(self, name: str) -> AsyncIterator[None]:
        """A block that leaves out the contender that fails in it, and nobody else."""
        try:
            yield
        except PeerGoneError:
            raise
        except _FAILURES as error:
            del self.clients[name]
            self._report.problems[name] = str(error) or type(error).__name__
            async with _within(_STUCK_S, "the other process does not answer"):
                await self._peer.ask(what="end", name=name, size=0, places=0)  # it is to wait for nothing any more

    async def _calibrate(self, name: str, cell: Cell, wanted_s: float) -> int:
        count = cell.window
        while True:
            samples = Samples()
            await self._take_turn(name, cell, count, samples)
            more = next_count(count, samples.rounds[0] * count, wanted_s)
            if more is None:
                return max(cell.window, fitting_count(samples.rounds[0], wanted_s))
            count = max(cell.window, more)

    async def _take_turn(self, name: str, cell: Cell, count: int, samples: Samples) -> None:
        client, memory = self.clients[name]
        self._turn += 1
        about = {"name": name, "operation": cell.operation, "size": cell.size, "places": cell.window}
        async with _within(_STUCK_S, f"it is stuck: a turn took more than {duration(_STUCK_S)}"):
            memory.begin(cell.size, cell.window, self._turn)
            await self._peer.ask(what="begin", turn=self._turn, **about)
            if cell.window == 1:
                times = await _one_by_one(client, cell, count)
                samples.single += times
                samples.rounds.append(median(times))
            else:
                begin = time.perf_counter_ns()
                await client.many(cell.operation, cell.size, cell.window, count)
                samples.rounds.append((time.perf_counter_ns() - begin) / count)
            theirs = (await self._peer.ask(what="end", **about))["checksum"]
        arrived = memory.checksum(cell.size, cell.window) if cell.operation == "read" else theirs
        if arrived != expected(cell.operation, cell.size, cell.window, self._turn):
            raise ValueError(f"what arrived in turn {self._turn} ({cell}) are not the bytes that were sent")


async def _one_by_one(client: Client, cell: Cell, count: int) -> list[int]:
    one, operation, size, clock = client.one, cell.operation, cell.size, time.perf_counter_ns
    times = []
    for _ in range(count):
        begin = clock()
        await one(operation, size)
        times.append(clock() - begin)
    return times


async def measure(
    cells: Sequence[Cell],
    names: Sequence[str],
    model: MessageModel,
    seconds: float,
    advance: Callable[[], object] = lambda: None,
) -> Report:
    """Measure, for about so many seconds, and three times as many and a minute at most.

    :param names: of devices; streams are measured beside them.
    :param advance: called after each cell.
    :raises ConnectionError: the other process ended, or none of the contenders is left.
    :raises TimeoutError: it took longer than that.
    """
    longest_s = _LONGEST * seconds + _START_S
    advice = "this machine is too busy, or has too few processors for the message model: measure less, or for longer"
    async with _within(longest_s, f"it took more than {duration(longest_s)}; {advice}"):
        return await _measure(cells, names, model, seconds, advance)


async def _measure(
    cells: Sequence[Cell], names: Sequence[str], model: MessageModel, seconds: float, advance: Callable[[], object]
) -> Report:
    began = time.monotonic()
    report = Report()
    secret = secrets.token_bytes(32)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aioverbs-bench-"))
        peer = await stack.enter_async_context(_other_process())
        run = _Run(peer, report)
        async with _within(_START_S, f"the other process did not answer within {duration(_START_S)}"):
            told = {"devices": list(names), "model": model.name, "secret": secret.hex(), "path": f"{folder}/stream"}
            served = await peer.ask(**told)
            report.problems |= served["problems"]
            for name, place in served["places"].items():
                try:
                    if name in STREAMS:
                        run.clients[name] = await stack.enter_async_context(_stream(place, secret))
                    else:
                        client = await stack.enter_async_context(device_client(name, model, place, secret))
                        run.clients[name] = client, client.memory
                except PeerGoneError:
                    raise
                except (*_FAILURES, DeviceNotFoundError) as error:
                    report.problems[name] = str(error) or type(error).__name__
        report.contenders = list(run.clients)
        wanted_s = turn_s(seconds, len(cells), len(run.clients))
        end = time.monotonic() + seconds * _WARM_UP
        while time.monotonic() < end:  # caches, clocks, and the ways between the two processes
            await run.cell(cells[0], wanted_s)
        report.figures.clear()
        for cell in cells:
            await run.cell(cell, wanted_s)
            advance()
    report.seconds = time.monotonic() - began
    return report
