"""What two processes say to each other while something happens between them."""

import asyncio
import random

from aioverbs import Endpoint, QueuePair
from aioverbs._core.data_path.data_path import Operation
from tests.fabric.two import End, Other
from tests.pace import patience

__all__ = ["exchange", "gid_name"]


def gid_name(endpoint: Endpoint) -> str:
    """Of the socket by which a device of this host is found."""
    return endpoint.gid.hex()


async def exchange(here: End, there: Other, qp: QueuePair, *, seed: int = 0, most: int = 300_000) -> None:
    """Of each kind of request several at once; then all memory, messages and numbers are what they should be.

    :param most: bytes of one request.
    :raises WorkCompletionError: one of them failed.
    """
    chance = random.Random(seed)
    local, remote = here.region, there.region
    half = len(local.buffer) // 2
    sizes = [8, 1, min(4096, most), most, 8]
    data = chance.randbytes(sum(sizes))
    local.buffer[: len(data)] = data
    await qp.read(local[half : half + 8], remote[half : half + 8])  # the last value of the counter
    counter = int.from_bytes(local.buffer[half : half + 8], "little")
    asked: list[Operation[None]] = []
    at = 0
    for size in sizes:
        asked.append(qp.write(local[at : at + size], remote[at : at + size]))
        at += size
    adding = [qp.fetch_and_add(remote[half : half + 8], 1) for _ in range(4)]
    echoes = [qp.receive(local[half + 64 * n : half + 64 * n + 8]) for n in range(1, 5)]
    said = [qp.send(local[n : n + 8]) for n in range(4)]
    back = qp.read(local[half + 4096 : half + 4096 + at], remote[:at])
    async with asyncio.timeout(patience(40)):
        for write in asked:  # in the order in which all were posted: the first failure that is seen is the cause
            await write
        assert [await each for each in adding] == [(counter + n) % 2**64 for n in range(4)], "each is done once"
        for each in (*said, back):
            await each
        assert bytes(local.buffer[half + 4096 : half + 4096 + at]) == data
        while not all(echo.done() for echo in echoes):  # who only receives does not notice that a peer is silent
            await qp.read(local[half : half + 8], remote[half : half + 8])
        for number, echo in enumerate(echoes):
            assert bytes((await echo).data) == data[number : number + 8]
    assert await there.look(0, min(at, 2000)) == data[:2000]
