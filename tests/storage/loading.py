"""Client load on a server process until the server dies, and checks of the data after a restart."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable

import anyio
from storage_server.client import connect
from storage_server.errors import StorageError
from storage_server.remote_volume import RemoteVolume

import aioverbs
from aioverbs import BrokenResourceError, ResourceDomain
from tests.pace import patience
from tests.storage.model import BLOCK, Blocks
from tests.storage.processes import Process

__all__ = ["check_data", "flush", "load", "shares_of_two", "write_some"]

SHARE = 16
SIZE = 2 * SHARE * BLOCK
GROWN = 5 * BLOCK


def shares_of_two(blocks: Callable[[range], Blocks] = Blocks) -> list[Blocks]:
    """Return the models of two writers, each with half of the volume."""
    return [blocks(range(each * SHARE, (each + 1) * SHARE)) for each in range(2)]


async def load(
    server: Process,
    shares: list[Blocks],
    rng: random.Random,
    end: Callable[[], Awaitable[None]],
    *,
    turn: int,
    create: bool,
) -> None:
    """Check the present data, then write, flush, create and delete volumes until the server ends.

    :param end: ends the server; called once each writer has had a flush acknowledged.
    :param turn: number that makes the names of new volumes unique.
    :param create: whether to create the volume first.
    """
    token = (server.root / "owner.token").read_text()
    async with aioverbs.open_device(server.device) as device, device.resource_domain() as domain:
        async with connect(server.host, server.port, token, domain=domain) as storage:
            if create:
                await storage.create("disk", SIZE)
        await check_data(server, shares)
        known = [sum(share.acknowledged.values()) for share in shares]
        async with asyncio.TaskGroup() as tasks:
            for number, share in enumerate(shares):
                tasks.create_task(_write(server, token, domain, share, rng, by_messages=bool(number)))
            tasks.create_task(_manage(server, token, domain, turn))
            begun = time.monotonic()
            while any(sum(share.acknowledged.values()) <= before for share, before in zip(shares, known, strict=True)):
                await asyncio.sleep(0.01)
                assert time.monotonic() - begun < patience(30)
            await end()


async def write_some(volume: RemoteVolume, share: Blocks, rng: random.Random) -> None:
    """Write some random blocks."""
    for block in rng.sample(share.blocks, rng.randrange(1, 6)):
        await volume.write(block * BLOCK, share.write(block))
        share.write_completed(block)


async def flush(volume: RemoteVolume, share: Blocks) -> None:
    """Flush the volume, and record that in the model."""
    about = share.flush()
    await volume.flush()
    share.flush_completed(about)


async def _write(
    server: Process, token: str, domain: ResourceDomain, share: Blocks, rng: random.Random, *, by_messages: bool
) -> None:
    with contextlib.suppress(BrokenResourceError, aioverbs.WorkCompletionError):
        async with (
            connect(server.host, server.port, token, domain=domain) as storage,
            storage.open("disk", write=True, by_messages=by_messages) as volume,
        ):
            while True:
                await write_some(volume, share, rng)
                await flush(volume, share)


async def _manage(server: Process, token: str, domain: ResourceDomain, turn: int) -> None:
    with contextlib.suppress(
        BrokenResourceError, StorageError, ConnectionError, anyio.EndOfStream
    ):  # the server may die before the client is connected
        async with connect(server.host, server.port, token, domain=domain) as storage:
            for number in range(10_000):
                name = f"{turn}-{number}"
                await storage.create(name, BLOCK)
                await storage.snapshot("disk", f"s{name}")
                await storage.resize(name, GROWN)
                await storage.delete(name)
                await storage.delete(f"s{name}")


async def check_data(server: Process, shares: list[Blocks]) -> None:
    """Check that all acknowledged data is there, and that no volume is half made."""
    token = (server.root / "owner.token").read_text()
    async with (
        aioverbs.open_device(server.device) as device,
        device.resource_domain() as domain,
        connect(server.host, server.port, token, domain=domain) as storage,
    ):
        volumes = await storage.volumes()
        assert len(list((server.root / "volumes").iterdir())) == len(volumes)
        for name, size, _ in volumes:
            assert size in ((BLOCK, GROWN) if name[0].isdigit() else (SIZE,))
        async with storage.open("disk") as volume:
            content = await volume.read(0, volume.size, verify=True)
        for share in shares:
            share.check(content)
            share.continue_from(content)
