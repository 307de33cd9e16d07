"""A storm: many tasks on several queue pairs move data, and are cancelled, timed out or forgotten at random.

Each task has memory of its own at both ends, cut in pieces. What is in a piece tells which one it is and how often it
was written, with a checksum: a byte in the wrong place, or of another time, is found.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import anyio

from aioverbs import (
    CompletionQueue,
    MemoryRegion,
    QpCapabilities,
    QueuePair,
    RegionSlice,
    RemoteRegion,
    ResourceDomain,
)
from aioverbs._core.data_path.data_path import Operation
from aioverbs._memory.region import WaitableInFlightCount
from tests.data_path_endings.pair import ACCESS

PIECE = 64
PIECES = 6  # of a task, at each end
SENDS = 8  # places: fewer than what is asked for, so that requests wait for each other
DRAIN_S = 50.0
_HEAD = 16


def seal(task: int, piece: int, time: int) -> bytes:
    """What belongs into a piece at a time."""
    head = task.to_bytes(4, "big") + piece.to_bytes(4, "big") + time.to_bytes(8, "big")
    return head + blake2b(head, digest_size=PIECE - _HEAD).digest()


def time_of(data: bytes, task: int, piece: int) -> int:
    """When it was written, which is 0 before the first time; nothing else may be there."""
    time = int.from_bytes(data[8:_HEAD], "big")
    assert data == (seal(task, piece, time) if time else bytes(PIECE)), f"{data.hex()} is in {task}, {piece}"
    return time


@dataclass
class ControlChannel:
    """Two connected queue pairs, and what came of what was sent."""

    near: QueuePair
    far: QueuePair
    asked: int = 0  # sends, which bear their number
    sent: set[int] = field(default_factory=set)  # of these: known to have arrived
    arrived: list[int] = field(default_factory=list)


class Piece:
    """A piece of a task's memory: here, there, and what is known of both."""

    def __init__(self, storm: "Storm", task: int, number: int) -> None:
        start = (task * PIECES + number) * PIECE
        self.part = slice(start, start + PIECE)
        self.task, self.number = task, number
        self.local = RegionSlice(storm.near, start, PIECE, WaitableInFlightCount(storm.near.pins))
        self.back = RegionSlice(storm.back, start, PIECE, WaitableInFlightCount(storm.back.pins))
        self.remote: RemoteRegion = storm.far.remote()[self.part]
        self.there = storm.far
        self.time = 0  # of the last write that was asked for
        self.known = 0  # of the last one that is known to be done

    @property
    def free(self) -> bool:
        """Whether nothing is under way with it."""
        return not self.local.pins and not self.back.pins

    def fill(self) -> None:
        """The next thing to write."""
        self.time += 1
        self.local.buffer[:] = seal(self.task, self.number, self.time)

    def check(self, data: memoryview) -> None:
        """What was read, or is there: a write may be left undone, and never be forgotten."""
        assert self.known <= time_of(bytes(data), self.task, self.number) <= self.time

    def check_there(self) -> None:
        self.check(self.there.buffer[self.part])


class Storm:
    """All of it.

    :param seed: of everything that is drawn.
    """

    def __init__(self, cq: CompletionQueue, lines: list[ControlChannel], memory: list[MemoryRegion], seed: int) -> None:
        self.cq = cq
        self.lines = lines
        self.near, self.far, self.back = memory
        self.random = random.Random(seed)
        self.left = 0
        self.ended: Counter[str] = Counter()
        self.pieces: dict[int, list[Piece]] = {}

    async def run(self, tasks: int, operations: int) -> None:
        """Ask for so many operations; when it returns nothing is under way, and all is as it must be."""
        self.left = operations
        for number in range(tasks):
            if number not in self.pieces:
                self.pieces[number] = [Piece(self, number, each) for each in range(PIECES)]
        readers = [asyncio.create_task(self._read(line)) for line in self.lines]
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(tasks):
                    group.create_task(self._work(number, self.lines[number % len(self.lines)]))
            async with asyncio.timeout(DRAIN_S):
                while not self._is_quiet():  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        finally:
            for reader in readers:
                reader.cancel()
                with suppress(asyncio.CancelledError):
                    await reader
        self.check()

    def _is_quiet(self) -> bool:
        sends = [line.near.statistics().sends for line in self.lines]
        full = (each.in_flight == each.depth for each in (line.far.statistics().receives for line in self.lines))
        return not any(each.in_flight or each.queued for each in sends) and all(full)

    def check(self) -> None:
        """Data, counts and pins are as they must be where nothing is under way."""
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.check_there()
                assert piece.free
        for line in self.lines:
            sends = line.near.statistics().sends
            assert sends.posted == sends.completed
            assert not sends.failed
            assert line.arrived == sorted(set(line.arrived)), "messages came twice or overtook each other"
            assert line.sent <= set(line.arrived), "messages were lost"
        assert len(self.near.pins) == len(self.far.pins) == len(self.back.pins) == 0
        assert self.cq.statistics().late == 0

    async def _read(self, line: ControlChannel) -> None:
        # By requests that are cancelled now and then, too.
        messages = line.far.messages()
        while True:
            try:
                if self.random.random() < 0.1:
                    message = await asyncio.wait_for(anext(messages), self.random.random() * 1e-4)
                else:
                    message = await anext(messages)
            except TimeoutError:
                continue
            with message:
                number = int.from_bytes(message.data[8:_HEAD], "big")
                assert bytes(message.data) == seal(0xFFFFFFFF, 0, number)
                line.arrived.append(number)

    async def _work(self, task: int, line: ControlChannel) -> None:
        while self.left > 0:
            piece = self.random.choice(self.pieces[task])
            if not piece.free:
                await asyncio.sleep(0)
                continue
            self.left -= 1
            match self.random.random():
                case kind if kind < 0.4:
                    piece.fill()
                    time = piece.time
                    if await self._leave(line.near.write(piece.local, piece.remote)):
                        piece.known = time
                        piece.check_there()
                case kind if kind < 0.7:
                    if await self._leave(line.near.read(piece.back, piece.remote)):
                        piece.check(piece.back.buffer)
                case kind if kind < 0.8:
                    await self._batch(task, line)
                case _:
                    await self._send(line, piece)

    async def _batch(self, task: int, line: ControlChannel) -> None:
        pieces = [piece for piece in self.pieces[task] if piece.free][: self.random.randint(1, 4)]
        self.left -= len(pieces)
        batch = line.near.batch()
        for piece in pieces:
            piece.fill()
            batch.write(piece.local, piece.remote)
        times = [piece.time for piece in pieces]
        posted = batch.post()
        del batch
        if await self._leave(posted):
            self.ended["batch"] += 1
            for piece, time in zip(pieces, times, strict=True):
                piece.known = max(piece.known, time)
                piece.check_there()

    async def _send(self, line: ControlChannel, piece: Piece) -> None:
        # By memory that is no message of the task's own: what is written next does not hang on it.
        line.asked += 1
        number = line.asked
        piece.back.buffer[:] = seal(0xFFFFFFFF, 0, number)
        if await self._leave(line.near.send(piece.back)):
            line.sent.add(number)

    async def _leave(self, operation: Operation[Any]) -> bool:
        """Await it, or not to the end; whether it is known to be done."""
        how = self.random.random()
        if how < 0.5:
            await operation
            self.ended["done"] += 1
            return True
        if how < 0.6:
            self.ended["forgotten"] += 1
            return False
        if how < 0.75:
            task = asyncio.ensure_future(operation)
            del operation
            for _ in range(self.random.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                self.ended["cancelled"] += 1
                return False
            self.ended["done"] += 1
            return True
        patience = max(0.0, self.random.random() - 0.3) * 3e-4
        try:
            if how < 0.85:
                await asyncio.wait_for(operation, patience)
            else:
                with anyio.fail_after(patience):
                    await operation
        except TimeoutError:
            self.ended["timed out"] += 1
            return False
        self.ended["done"] += 1
        return True


@asynccontextmanager
async def storm_on(
    domain: ResourceDomain, *, seed: int, tasks: int, lines: int = 4, spin_ns: int | None = None
) -> AsyncIterator[Storm]:
    """A storm's queues and memory, for so many tasks."""
    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        memory = [await opened(domain.register(tasks * PIECES * PIECE, ACCESS)) for _ in range(3)]
        spins = "LATENCY" in domain.message_model.name
        cq = await opened(domain.completion_queue(4096, spin_ns=spin_ns if spins else None))
        made = []
        for _ in range(lines):
            near = await opened(domain.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=SENDS)))
            far = await opened(domain.queue_pair(cq, receive_depth=32, receive_size=PIECE))
            near.connect(far.local_endpoint(), ACCESS)
            far.connect(near.local_endpoint(), ACCESS)
            made.append(ControlChannel(near, far))
        yield Storm(cq, made, memory, seed)
