"""Load generator: client processes that read and write blocks concurrently, and check what they read.

Each written block contains its own number and a checksum, so that a reader can detect a torn or misplaced block. Each
process has its own part of the volume, and each task a block that no other task uses: no block is read while it is
written.
"""

import array
import asyncio
import itertools
import random
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import aioverbs
from aioverbs import ConnectionSettings, MessageModel, RegionSlice, WorkerPool, current_worker
from storage_server.client import connect
from storage_server.errors import InvalidError
from storage_server.protocol import MAX_DATA
from storage_server.remote_volume import RemoteVolume

__all__ = ["Plan", "run"]

_HEAD = struct.Struct("<QQI")  # number of the block, number of the write, checksum of both and of the rest of the block
_MAX_DEPTH = 1 << 10


@dataclass(frozen=True)
class Plan:
    """Parameters of a run.

    :param host: the server's address.
    :param port: the server's TCP port.
    :param token: token for the server.
    :param volume: name of the volume.
    :param clients: number of client processes.
    :param seconds: duration of the load, after the fill.
    :param block: bytes of each read or write.
    :param window: operations in flight for each process.
    :param pattern: order of the blocks.
    :param reads: percentage of reads; the others are writes.
    :param flush_every: writes of a process between two flushes; 0 to flush at the end only.
    :param by_messages: whether to use messages instead of one-sided RDMA.
    :param check: whether to check the blocks that are read.
    :param fill: whether to write all blocks first.
    :param spin_us: microseconds for which a client polls before it sleeps.
    :param seed: seed of the blocks' contents and of the random order.
    :raises InvalidError: `block` is too small, or too large for a message.
    """

    host: str
    port: int
    token: str
    volume: str
    clients: int = 2
    seconds: float = 5.0
    block: int = 4096
    window: int = 32
    pattern: Literal["random", "sequential"] = "random"
    reads: int = 100
    flush_every: int = 0
    by_messages: bool = False
    check: bool = True
    fill: bool = True
    spin_us: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.block < _HEAD.size or (self.by_messages and self.block > MAX_DATA):
            raise InvalidError(f"`block` must be from {_HEAD.size} to {MAX_DATA:,} bytes, got {self.block:,}")


@dataclass
class Share:
    """Results of one process. Made by `run_client`.

    :param seconds: duration of the load.
    :param latencies_ns: duration of each read, write and flush, in nanoseconds.
    :param wrong: descriptions of the blocks that were read with wrong contents.
    """

    seconds: float
    latencies_ns: dict[str, "array.array[int]"]
    wrong: list[str]


def make_block(number: int, writing: int, filler: bytes) -> bytes:
    """Return the bytes of a block: a head with both numbers and a checksum, followed by the filler.

    :param number: number of the block in the volume.
    :param writing: number of the write.
    :param filler: as many bytes as a block has; the head replaces the first of them.
    """
    rest = filler[_HEAD.size :]
    checksum = zlib.crc32(rest, zlib.crc32(struct.pack("<QQ", number, writing)))
    return _HEAD.pack(number, writing, checksum) + rest


def find_block_error(block: memoryview, number: int) -> str:
    """Return a description of what is wrong with block `number`; an empty text if it is intact or was never written."""
    found, writing, checksum = _HEAD.unpack_from(block)
    expected = zlib.crc32(block[_HEAD.size :], zlib.crc32(struct.pack("<QQ", found, writing)))
    if checksum == expected:
        return "" if found == number else f"block {number} contains block {found}"
    return "" if not any(block) else f"block {number} is torn"


class Client:
    """Part of one process in the load.

    :param plan: parameters of the run.
    :param number: number of the process, which selects its part of the volume.
    :param volume: the open volume.
    :raises InvalidError: the part has fewer blocks than operations are in flight.
    """

    def __init__(self, plan: Plan, number: int, volume: RemoteVolume) -> None:
        share = volume.size // plan.block // plan.clients
        if share < plan.window:
            raise InvalidError(
                f"volume {volume.name!r} has {share} blocks of {plan.block:,} bytes for each client, fewer than "
                f"--window {plan.window}: resize the volume, or reduce --window"
            )
        self._plan = plan
        self._volume = volume
        self._blocks = range(number * share, (number + 1) * share)
        self._random = random.Random(plan.seed + number)
        self._writings = itertools.count(1)
        self._busy: set[int] = set()
        self._filler = self._random.randbytes(plan.block)
        self.latencies_ns = {name: array.array("Q") for name in ("read", "write", "flush")}
        self.wrong: list[str] = []

    async def fill(self, memory: list[RegionSlice]) -> None:
        """Write all blocks of this process's part of the volume, and flush them.

        :param memory: one block of registered memory for each operation in flight.
        """
        rest = iter(self._blocks)

        async def fill_some(local: RegionSlice) -> None:
            for block in rest:
                await self._write(block, local)

        await asyncio.gather(*map(fill_some, memory))
        await self._volume.flush()

    async def load(self, memory: list[RegionSlice]) -> float:
        """Read and write blocks for the planned time, then flush if there were writes.

        :param memory: one block of registered memory for each operation in flight.
        :returns: the seconds that the reads, writes and flushes took.
        """
        free_blocks = self._free_blocks()
        began = time.perf_counter()
        end = began + self._plan.seconds
        writes = itertools.count(1)

        async def work(local: RegionSlice) -> None:
            while time.perf_counter() < end:
                block = next(free_blocks)
                self._busy.add(block)
                start = time.perf_counter_ns()
                if self._random.randrange(100) < self._plan.reads:
                    await self._read(block, local)
                    self.latencies_ns["read"].append(time.perf_counter_ns() - start)
                    if self._plan.check and (wrong := find_block_error(local.buffer, block)):
                        self.wrong.append(wrong)
                else:
                    await self._write(block, local)
                    self.latencies_ns["write"].append(time.perf_counter_ns() - start)
                    if self._plan.flush_every and next(writes) % self._plan.flush_every == 0:
                        await self._flush()
                self._busy.discard(block)

        await asyncio.gather(*map(work, memory))
        if self._plan.reads < 100:
            await self._flush()
        return time.perf_counter() - began

    def _free_blocks(self) -> Iterator[int]:
        """Yield blocks that no task is using. There is always one, since each task uses at most one block."""
        in_order = itertools.cycle(self._blocks)
        while True:
            block = next(in_order) if self._plan.pattern == "sequential" else self._random.choice(self._blocks)
            if block not in self._busy:
                yield block

    async def _read(self, block: int, local: RegionSlice) -> None:
        """Read a block into registered memory."""
        if self._plan.by_messages:
            local.buffer[:] = await self._volume.read(block * self._plan.block, self._plan.block)
        else:
            await self._volume.read_into(local, block * self._plan.block)

    async def _write(self, block: int, local: RegionSlice) -> None:
        """Write a block that contains the number of this write, from registered memory."""
        data = make_block(block, next(self._writings), self._filler)
        if self._plan.by_messages:
            await self._volume.write(block * self._plan.block, data)
        else:
            local.buffer[:] = data
            await self._volume.write_from(local, block * self._plan.block)

    async def _flush(self) -> None:
        """Flush the volume and record how long that took."""
        start = time.perf_counter_ns()
        await self._volume.flush()
        self.latencies_ns["flush"].append(time.perf_counter_ns() - start)


async def run_client(plan: Plan) -> Share:
    """Run one process's part of the load, in that process: fill the volume if the plan says so, otherwise put it under
    load.

    :returns: the results; empty after filling.
    :raises InvalidError: the volume is too small for the plan.
    """
    worker = current_worker()
    settings = ConnectionSettings(
        send_depth=max(32, min(plan.window, _MAX_DEPTH)), spin_ns=plan.spin_us * 1000 if plan.spin_us else None
    )
    async with (
        connect(plan.host, plan.port, plan.token, domain=worker.domain, settings=settings) as storage,
        worker.domain.register(plan.window * plan.block) as region,
        storage.open(plan.volume, write=plan.fill or plan.reads < 100, by_messages=plan.by_messages) as volume,
    ):
        client = Client(plan, worker.number, volume)
        memory = [region[at : at + plan.block] for at in range(0, len(region), plan.block)]
        if plan.fill:
            await client.fill(memory)
            return Share(0.0, {}, [])
        return Share(await client.load(memory), client.latencies_ns, client.wrong)


async def run(plan: Plan) -> dict[str, Any]:
    """Put a server under load with several client processes.

    :returns: the results as JSON-compatible values: plan, rates, percentiles of latencies in microseconds, wrong
        blocks.
    :raises StorageError: the server reported an error, or the volume is too small.
    :raises OSError: the server cannot be reached.
    """
    model = MessageModel.LOW_LATENCY if plan.spin_us else MessageModel.DEFAULT
    async with (
        aioverbs.open_device() as device,
        WorkerPool(device, plan.clients, processes=True, message_model=model, on_worker_death="fail") as processes,
    ):

        async def run_clients(plan: Plan) -> list[Share]:
            return await asyncio.gather(
                *(processes.run(run_client, plan, worker=number) for number in range(plan.clients))
            )

        if plan.fill:
            await run_clients(plan)
        shares = await run_clients(replace(plan, fill=False))
    done = sum(len(share.latencies_ns[kind]) for share in shares for kind in ("read", "write"))
    seconds = max(share.seconds for share in shares)
    wrong = [each for share in shares for each in share.wrong]
    shown = {name: value for name, value in asdict(plan).items() if name != "token"}
    return {
        "plan": shown,
        "operations": done,
        "operations_per_s": round(done / seconds, 1),
        "mib_per_s": round(done * plan.block / seconds / (1 << 20), 1),
        "latency_us": {
            kind: percentiles([took for share in shares for took in share.latencies_ns[kind]])
            for kind in ("read", "write", "flush")
        },
        "wrong_blocks": len(wrong),
        "wrong": wrong[:10],
    }


def percentiles(latencies_ns: list[int]) -> dict[str, float]:
    """Return percentiles of durations, by name and in microseconds; an empty dict if there are no durations.

    :param latencies_ns: the durations in nanoseconds.
    """
    if not latencies_ns:
        return {}
    latencies_ns.sort()
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {
        name: latencies_ns[min(int(len(latencies_ns) * part), len(latencies_ns) - 1)] / 1000
        for name, part in at.items()
    }
