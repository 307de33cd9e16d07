"""Traffic of all kinds between two processes, whose results are checked."""

import asyncio
import random

from aioverbs import Endpoint, QueuePair
from aioverbs._core.data_path.data_path import Operation
from tests.fabric.two import End, PeerProcess
from tests.pace import patience

__all__ = ["exchange", "gid_name"]


def gid_name(endpoint: Endpoint) -> str:
    """Return the name of the socket by which a device of this host is found."""
    return endpoint.gid.hex()


async def exchange(here: End, there: PeerProcess, qp: QueuePair, *, seed: int = 0, most: int = 300_000) -> None:
    """Post several requests of each kind at once, and check memory, messages and numbers afterwards.

    :param seed: of the data.
    :param most: size of the largest request, in bytes.
    :raises WorkCompletionError: a request failed.
    """
    rng = random.Random(seed)
    local, remote = here.region, there.region
    half = len(local.buffer) // 2
    sizes = [8, 1, min(4096, most), most, 8]
    data = rng.randbytes(sum(sizes))
    local.buffer[: len(data)] = data
    await qp.read(local[half : half + 8], remote[half : half + 8])  # the last value of the counter
    counter = int.from_bytes(local.buffer[half : half + 8], "little")
    writes: list[Operation[None]] = []
    at = 0
    for size in sizes:
        writes.append(qp.write(local[at : at + size], remote[at : at + size]))
        at += size
    adds = [qp.fetch_and_add(remote[half : half + 8], 1) for _ in range(4)]
    echoes = [qp.receive(local[half + 64 * n : half + 64 * n + 8]) for n in range(1, 5)]
    sends = [qp.send(local[n : n + 8]) for n in range(4)]
    read_back = qp.read(local[half + 4096 : half + 4096 + at], remote[:at])
    async with asyncio.timeout(patience(40)):
        for write in writes:  # in the order of posting: the first failure that is raised is the cause
            await write
        assert [await each for each in adds] == [(counter + n) % 2**64 for n in range(4)], (
            "each atomic is executed once"
        )
        for each in (*sends, read_back):
            await each
        assert bytes(local.buffer[half + 4096 : half + 4096 + at]) == data
        while not all(echo.done() for echo in echoes):  # a receiver alone does not notice a silent peer
            await qp.read(local[half : half + 8], remote[half : half + 8])
        for number, echo in enumerate(echoes):
            assert bytes((await echo).data) == data[number : number + 8]
    assert await there.read_memory(0, min(at, 2000)) == data[:2000]
