"""A stress test: many tasks move data on several queue pairs; awaits are cancelled, timed out or dropped at random.

Each task has memory of its own at both ends, cut into pieces. The content of a piece has the numbers of its task and
piece, the count of writes to it, and a checksum: a byte in the wrong place, or of an earlier write, is detected.
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
PIECES = 6  # pieces of each task, at each end
SENDS = 8  # slots: fewer than the requests, so that requests wait for each other
DRAIN_S = 50.0
_HEAD = 16


def content_of(task: int, piece: int, write_number: int) -> bytes:
    """Return the content of a piece after its write number `write_number`."""
    head = task.to_bytes(4, "big") + piece.to_bytes(4, "big") + write_number.to_bytes(8, "big")
    return head + blake2b(head, digest_size=PIECE - _HEAD).digest()


def write_number_of(data: bytes, task: int, piece: int) -> int:
    """Return the number of the write that produced `data`, 0 if none, after checking the rest of the content."""
    write_number = int.from_bytes(data[8:_HEAD], "big")
    expected = content_of(task, piece, write_number) if write_number else bytes(PIECE)
    assert data == expected, f"{data.hex()} is in {task}, {piece}"
    return write_number


@dataclass
class Connection:
    """Two connected queue pairs, and the messages sent and received on them."""

    near: QueuePair
    far: QueuePair
    sent_count: int = 0  # number of sends, each of which carries its number
    delivered: set[int] = field(default_factory=set)  # numbers of the sends that are known to have arrived
    arrived: list[int] = field(default_factory=list)


class Piece:
    """A piece of a task's memory at both ends, and the state of its writes."""

    def __init__(self, stress: "Stress", task: int, number: int) -> None:
        start = (task * PIECES + number) * PIECE
        self.part = slice(start, start + PIECE)
        self.task, self.number = task, number
        self.local = RegionSlice(stress.near, start, PIECE, WaitableInFlightCount(stress.near.pins))
        self.back = RegionSlice(stress.back, start, PIECE, WaitableInFlightCount(stress.back.pins))
        self.remote: RemoteRegion = stress.far.remote()[self.part]
        self.there = stress.far
        self.write_number = 0  # number of the last write that was posted
        self.known = 0  # number of the last write known to be complete

    @property
    def free(self) -> bool:
        """Return whether no request uses the piece."""
        return not self.local.pins and not self.back.pins

    def fill(self) -> None:
        """Fill the piece with the content of its next write."""
        self.write_number += 1
        self.local.buffer[:] = content_of(self.task, self.number, self.write_number)

    def check(self, data: memoryview) -> None:
        """Check data that was read: a write may be missing if it was not awaited to its end, but is never undone."""
        assert self.known <= write_number_of(bytes(data), self.task, self.number) <= self.write_number

    def check_there(self) -> None:
        self.check(self.there.buffer[self.part])


class Stress:
    """State of a stress test.

    :param seed: of the random number generator.
    """

    def __init__(
        self, cq: CompletionQueue, connections: list[Connection], memory: list[MemoryRegion], seed: int
    ) -> None:
        self.cq = cq
        self.connections = connections
        self.near, self.far, self.back = memory
        self.random = random.Random(seed)
        self.remaining = 0
        self.ended: Counter[str] = Counter()
        self.pieces: dict[int, list[Piece]] = {}

    async def run(self, tasks: int, operations: int) -> None:
        """Post `operations` requests from `tasks` tasks, wait until none is in flight, and check the result."""
        self.remaining = operations
        for number in range(tasks):
            if number not in self.pieces:
                self.pieces[number] = [Piece(self, number, each) for each in range(PIECES)]
        readers = [asyncio.create_task(self._read(connection)) for connection in self.connections]
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(tasks):
                    group.create_task(self._run_task(number, self.connections[number % len(self.connections)]))
            async with asyncio.timeout(DRAIN_S):
                while not self._is_idle():  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        finally:
            for reader in readers:
                reader.cancel()
                with suppress(asyncio.CancelledError):
                    await reader
        self.check()

    def _is_idle(self) -> bool:
        sends = [connection.near.statistics().sends for connection in self.connections]
        receives = (connection.far.statistics().receives for connection in self.connections)
        full = (each.in_flight == each.depth for each in receives)
        return not any(each.in_flight or each.queued for each in sends) and all(full)

    def check(self) -> None:
        """Check data, counts and pins, with no request in flight."""
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.check_there()
                assert piece.free
        for connection in self.connections:
            sends = connection.near.statistics().sends
            assert sends.posted == sends.completed
            assert not sends.failed
            assert connection.arrived == sorted(set(connection.arrived)), "messages arrived twice or out of order"
            assert connection.delivered <= set(connection.arrived), "messages were lost"
        assert len(self.near.pins) == len(self.far.pins) == len(self.back.pins) == 0
        assert self.cq.statistics().late == 0

    async def _read(self, connection: Connection) -> None:
        # Some of the awaits are cancelled.
        messages = connection.far.messages()
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
                assert bytes(message.data) == content_of(0xFFFFFFFF, 0, number)
                connection.arrived.append(number)

    async def _run_task(self, task: int, connection: Connection) -> None:
        while self.remaining > 0:
            piece = self.random.choice(self.pieces[task])
            if not piece.free:
                await asyncio.sleep(0)
                continue
            self.remaining -= 1
            match self.random.random():
                case kind if kind < 0.4:
                    piece.fill()
                    write_number = piece.write_number
                    if await self._await_or_abandon(connection.near.write(piece.local, piece.remote)):
                        piece.known = write_number
                        piece.check_there()
                case kind if kind < 0.7:
                    if await self._await_or_abandon(connection.near.read(piece.back, piece.remote)):
                        piece.check(piece.back.buffer)
                case kind if kind < 0.8:
                    await self._batch(task, connection)
                case _:
                    await self._send(connection, piece)

    async def _batch(self, task: int, connection: Connection) -> None:
        pieces = [piece for piece in self.pieces[task] if piece.free][: self.random.randint(1, 4)]
        self.remaining -= len(pieces)
        batch = connection.near.batch()
        for piece in pieces:
            piece.fill()
            batch.write(piece.local, piece.remote)
        times = [piece.write_number for piece in pieces]
        posted = batch.post()
        del batch
        if await self._await_or_abandon(posted):
            self.ended["batch"] += 1
            for piece, write_number in zip(pieces, times, strict=True):
                piece.known = max(piece.known, write_number)
                piece.check_there()

    async def _send(self, connection: Connection, piece: Piece) -> None:
        # Send from the memory of reads, so that the next write to the piece does not depend on this send.
        connection.sent_count += 1
        number = connection.sent_count
        piece.back.buffer[:] = content_of(0xFFFFFFFF, 0, number)
        if await self._await_or_abandon(connection.near.send(piece.back)):
            connection.delivered.add(number)

    async def _await_or_abandon(self, operation: Operation[Any]) -> bool:
        """Await the operation, or abandon it in a random way; return whether it is known to be complete."""
        choice = self.random.random()
        if choice < 0.5:
            await operation
            self.ended["done"] += 1
            return True
        if choice < 0.6:
            self.ended["forgotten"] += 1
            return False
        if choice < 0.75:
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
        delay = max(0.0, self.random.random() - 0.3) * 3e-4
        try:
            if choice < 0.85:
                await asyncio.wait_for(operation, delay)
            else:
                with anyio.fail_after(delay):
                    await operation
        except TimeoutError:
            self.ended["timed out"] += 1
            return False
        self.ended["done"] += 1
        return True


@asynccontextmanager
async def stress_on(
    domain: ResourceDomain, *, seed: int, tasks: int, connections: int = 4, spin_ns: int | None = None
) -> AsyncIterator[Stress]:
    """Open the queues and the memory of a stress test for `tasks` tasks."""
    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        memory = [await opened(domain.register(tasks * PIECES * PIECE, ACCESS)) for _ in range(3)]
        spins = "LATENCY" in domain.message_model.name
        cq = await opened(domain.completion_queue(4096, spin_ns=spin_ns if spins else None))
        opened_pairs = []
        for _ in range(connections):
            near = await opened(domain.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=SENDS)))
            far = await opened(domain.queue_pair(cq, receive_depth=32, receive_size=PIECE))
            near.connect(far.local_endpoint(), ACCESS)
            far.connect(near.local_endpoint(), ACCESS)
            opened_pairs.append(Connection(near, far))
        yield Stress(cq, opened_pairs, memory, seed)
