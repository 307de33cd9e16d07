"""One of two processes connected by the software fabric; it starts the other one.

    python fabric_end.py WHAT MODEL LENGTH WINDOW OPERATIONS

WHAT is `write` or `read`, of LENGTH bytes, with WINDOW operations in flight; or `answer` for the peer process. The
program prints the nanoseconds for an operation, the number of wake-ups by the completion queue's event for an
operation, and whether the peer moves data directly (1) or not (0).
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

from aioverbs import (
    AccessFlags,
    CompletionQueue,
    Device,
    Endpoint,
    MemoryRegion,
    MessageModel,
    QpCapabilities,
    QueuePair,
    RemoteRegion,
    open_device,
)
from tests.bench.ends import Place, windowed, writes
from tests.bench.turns import line_of

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ


@dataclass(frozen=True)
class End:
    """A queue pair that is not yet connected, and memory for `window` messages."""

    device: Device
    cq: CompletionQueue
    qp: QueuePair
    region: MemoryRegion

    def line(self) -> str:
        """Return the line that the peer needs to connect."""
        remote = self.region.remote()
        description = {
            "endpoint": bytes(self.qp.local_endpoint()).hex(),
            "address": remote.address,
            "rkey": remote.rkey,
        }
        return json.dumps(description)

    def connect(self, line: str) -> RemoteRegion:
        """Connect to the peer that sent `line`. The peer's memory has the same size as ours."""
        description = json.loads(line)
        self.qp.connect(Endpoint.from_bytes(bytes.fromhex(description["endpoint"])), ACCESS)
        return RemoteRegion(description["address"], len(self.region), description["rkey"])


@asynccontextmanager
async def end(model: str, length: int, window: int) -> AsyncIterator[End]:
    async with (
        open_device("soft0") as device,
        device.resource_domain(message_model=MessageModel[model]) as domain,
        domain.register(length * window, ACCESS) as region,
        domain.completion_queue(window + 1) as cq,
        domain.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=window, max_recv_wr=1)) as qp,
    ):
        region.buffer[:] = bytes(len(region))
        yield End(device, cq, qp, region)


async def answer(model: str, length: int, window: int) -> None:
    """Offer memory to the peer until the end of the input."""
    async with end(model, length, window) as here:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print(here.line(), flush=True)
        here.connect((await reader.readline()).decode())
        print("connected", flush=True)
        await reader.read()


def work(what: str, here: End, places: list[Place]) -> Callable[[int], Awaitable[float]]:
    """Return the function to measure; it takes the number of operations."""
    if what == "write" and len(places) == 1:
        return partial(writes, here.qp, places[0])
    return partial(windowed, {"write": here.qp.write, "read": here.qp.read}[what], places)


async def ask(what: str, model: str, length: int, window: int, operations: int) -> None:
    command = (sys.executable, "-P", __file__, "answer", model, str(length), str(window), "0")
    async with end(model, length, window) as here:
        other = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        assert other.stdin is not None
        remote = here.connect((await line_of(other)).decode())
        other.stdin.write(f"{here.line()}\n".encode())
        await line_of(other)
        places = [(here.region[at : at + length], remote[at : at + length]) for at in range(0, length * window, length)]
        measured = work(what, here, places)
        await measured(operations // 10 + 1)
        woken = here.cq.statistics().wakeups
        took = await measured(operations)
        woken = here.cq.statistics().wakeups - woken
        (peer,) = here.device.peers()
        print(took / operations, woken / operations, int(peer.direct), flush=True)
        other.stdin.close()
        await other.wait()


def main() -> None:
    what, model, *numbers = sys.argv[1:]
    length, window, operations = map(int, numbers)
    uvloop.run(answer(model, length, window) if what == "answer" else ask(what, model, length, window, operations))


if __name__ == "__main__":
    main()
