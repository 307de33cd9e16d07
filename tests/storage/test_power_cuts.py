"""Cut the power under load at some step of the disk, and check that all acknowledged data is there afterwards."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable
from pathlib import Path

import pytest
from storage_server.client import Storage
from storage_server.errors import StorageError

import aioverbs
from aioverbs import BrokenResourceError
from aioverbs.attributes import Execution
from tests.conftest import LOOP_FACTORIES
from tests.pace import patience
from tests.storage.loading import flush, write_some
from tests.storage.model import BLOCK, Blocks
from tests.storage.parts import Server, serve_here
from tests.storage.power import Power, PowerCutError

pytestmark = pytest.mark.timeout(120)

SEEDS = 50  # `nox -s power_cuts` has all of them
COMBINATIONS = 8  # all combinations of event loop, backing and execution
SHARE = 12  # blocks of each writer
WRITERS = 3
SIZE = WRITERS * SHARE * BLOCK
SERVER_GONE = (StorageError, BrokenResourceError, aioverbs.ClosedResourceError)


class Load:
    """Load on a server until the power is cut, and a model of the allowed results."""

    def __init__(self, server: Server, power: Power, seed: int) -> None:
        self.server = server
        self.power = power
        self.random = random.Random(seed)
        self.shares = [Blocks(range(each * SHARE, (each + 1) * SHARE)) for each in range(WRITERS)]
        # acknowledged snapshots, with the writes that each must contain
        self.snapshots: dict[str, list[dict[int, int]]] = {}
        self.there: dict[str, set[int | None]] = {}  # sizes that each other volume may have; None: it does not exist

    async def run(self, storage: Storage) -> None:
        await storage.create("disk", SIZE)
        async with asyncio.TaskGroup() as tasks:
            for number, share in enumerate(self.shares):
                tasks.create_task(self.write(share, by_messages=number == 1))
            tasks.create_task(self.manage(storage))

    async def write(self, share: Blocks, *, by_messages: bool) -> None:
        with contextlib.suppress(*SERVER_GONE):
            async with (
                self.server.client() as storage,
                storage.open("disk", write=True, by_messages=by_messages) as volume,
            ):
                while self.power.image is None:
                    await write_some(volume, share, self.random)
                    if self.random.random() < 0.6:
                        await flush(volume, share)

    async def done(self, asked: Awaitable[None]) -> None:
        """Wait for an answer. Ignore an answer that was sent after the power was cut."""
        await asked
        if not self.power.on():
            raise PowerCutError

    async def manage(self, storage: Storage) -> None:
        """Create, resize, copy and delete volumes."""
        with contextlib.suppress(*SERVER_GONE, PowerCutError):
            for number in range(1000):
                await asyncio.sleep(self.random.random() * 0.01)
                self.there[name := f"v{number}"] = {None, BLOCK}
                await self.done(storage.create(name, BLOCK))
                self.there[name] = {BLOCK, 3 * BLOCK}
                await self.done(storage.resize(name, 3 * BLOCK))
                self.there[name] = {3 * BLOCK}
                before = [dict(share.acknowledged) for share in self.shares]
                self.there[f"s{number}"] = {None, SIZE}
                await self.done(storage.snapshot("disk", f"s{number}"))
                self.there[f"s{number}"] = {SIZE}
                self.snapshots[f"s{number}"] = before
                if number % 2:
                    self.there[name] = {None, 3 * BLOCK}
                    await self.done(storage.delete(name))
                    self.there[name] = {None}

    async def check(self, storage: Storage) -> None:
        """Check what is there after the restart."""
        sizes: dict[str, int | None] = {each.name: each.size for each in await storage.volumes()}
        if sizes.pop("disk", None) is None:
            assert not any(any(share.acknowledged.values()) for share in self.shares)
            return
        async with storage.open("disk") as volume:
            content = await volume.read(0, SIZE, verify=True)
            for share in self.shares:
                share.check(content)
        assert set(sizes) <= set(self.there)
        for name, possible in self.there.items():
            assert sizes.get(name) in possible, name
        for name, before in self.snapshots.items():
            async with storage.open(name) as volume:
                content = await volume.read(0, SIZE)
                for share, at_least in zip(self.shares, before, strict=True):
                    share.check(content, at_least)


ONCE = range(COMBINATIONS)
MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(COMBINATIONS, SEEDS)]


@pytest.mark.parametrize("seed", [*ONCE, *MORE])
def test_acknowledged_data_survives_a_power_cut(seed: int, tmp_path: Path) -> None:
    factories = list(LOOP_FACTORIES.values())
    with asyncio.Runner(loop_factory=factories[seed % len(factories)]) as runner:
        runner.run(
            cut_and_check(
                tmp_path,
                seed,
                "cached" if seed // 2 % 2 else "mapped",
                execution="thread" if seed // 4 % 2 else "inline",
            )
        )


async def cut_and_check(path: Path, seed: int, backing: str, *, execution: Execution) -> None:
    before_cut, there = path / "here", path / "there"
    power = Power(before_cut, random.Random(seed).choice([20, 80, 250]) * (seed % 10 + 1) // 10 + 1, seed, sync_s=0.003)
    async with aioverbs.open_device("soft0", execution=execution) as device:
        async with serve_here(device, before_cut, backing, power) as server, server.client() as storage:
            load = Load(server, power, seed)
            with contextlib.suppress(*SERVER_GONE):
                async with asyncio.timeout(patience(60)):
                    await load.run(storage)
            assert power.image is not None, "the load ended before the power cut"
        power.restore(there)
        async with serve_here(device, there, backing) as server, server.client() as storage:
            await load.check(storage)
        async with serve_here(device, there, backing) as server, server.client() as storage:
            await load.check(storage)
