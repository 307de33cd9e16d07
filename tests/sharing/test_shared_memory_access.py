"""Memory registered by one process is accessible through queue pairs of another: for peers and for local requests."""

import asyncio
import random
import sys
from collections.abc import Callable

import pytest

from aioverbs import QueuePair, RemoteRegion, WcStatus, WorkCompletionError
from tests.fabric.two import End, end
from tests.pace import fewer
from tests.sharing.processes import CommandFailed, Pair, Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIZES = (1, 8, 4096, 131073, 1 << 20)


async def check_remote_access(here: End, qp: QueuePair, owner: Worker, name: str, remote: RemoteRegion) -> None:
    """Write, read and update `remote` atomically through `qp`, and compare with the memory in the owner's process."""
    local = here.region
    for size in (each for each in SIZES if each <= remote.length):
        written = random.Random(size).randbytes(size)
        local.buffer[:size] = written
        await qp.write(local[:size], remote[:size])
        assert await owner.read_memory(name, 0, min(size, 500)) == written[:500]
        assert await owner.read_memory(name, size - 1, 1) == written[-1:]
        local.buffer[:size] = bytes(size)
        await qp.read(local[:size], remote[:size])
        assert bytes(local.buffer[:size]) == written
    before = int.from_bytes(await owner.read_memory(name, 0, 8), sys.byteorder)
    assert await qp.fetch_and_add(remote[:8], 5) == before
    assert await qp.compare_and_swap(remote[:8], (before + 5) % 2**64, 7) == (before + 5) % 2**64
    assert await owner.read_memory(name, 0, 8) == (7).to_bytes(8, sys.byteorder)


async def check_access_denied(qp: QueuePair, here: End, remote: RemoteRegion) -> None:
    with pytest.raises(WorkCompletionError) as caught:
        await qp.write(here.region[: remote.length], remote)
    assert caught.value.status is WcStatus.REM_ACCESS_ERR


async def test_access_through_queue_pairs_of_either_process(pair: Pair, direct: bool) -> None:
    async with pair() as (first, second), end(queue_pairs=2) as here:
        one = await first.register("a", 1 << 20)
        other = await second.register("b", 1 << 20)
        await first.connect(here.qps[0])
        await second.connect(here.qps[1])
        for qp in here.qps:
            await check_remote_access(here, qp, first, "a", one)
            await check_remote_access(here, qp, second, "b", other)


async def test_memory_registered_before_the_other_process_joined(pair: Pair, direct: bool) -> None:
    async with pair(imported=False) as (first, second), end() as here:
        remote = await first.register("a", 100_000)
        await first.share_with(second)
        await second.open_instance()
        await second.connect(here.qps[0])
        await check_remote_access(here, here.qps[0], first, "a", remote)


async def test_keys_are_unique_across_processes(pair: Pair) -> None:
    async with pair() as (first, second), end(queue_pairs=2) as here:
        await first.connect(here.qps[0])
        await second.connect(here.qps[1])
        regions = {
            f"{count}{name}": (owner, await owner.register(f"{count}{name}", 64))
            for count in range(5)
            for name, owner in (("first", first), ("second", second))
        }
        private = [await each.register("private", 64, "private") for each in (first, second) for _ in range(5)]
        keys = [remote.rkey for _, remote in regions.values()] + [remote.rkey for remote in private]
        assert len({key >> 8 for key in keys}) == len(keys)
        for qp in here.qps:
            for name, (owner, remote) in regions.items():
                here.region.buffer[:64] = name.encode().ljust(64)
                await qp.write(here.region[:64], remote)
                assert (await owner.read_memory(name, 0, 64)).decode().strip() == name


async def test_private_memory_is_not_accessible_to_others(pair: Pair) -> None:
    """Only queue pairs of the registering process accept the key."""
    async with pair() as (first, second), end(queue_pairs=2) as here:
        remote = await first.register("a", 4096, "private")
        await first.connect(here.qps[0])
        await second.connect(here.qps[1])
        await check_remote_access(here, here.qps[0], first, "a", remote)
        await check_access_denied(here.qps[1], here, remote)
        with pytest.raises(CommandFailed, match=r"ibv_import_mr failed: EFAULT"):
            await second.call(f"borrow a {remote.rkey}")


@pytest.mark.parametrize(
    "change",
    [
        lambda remote: RemoteRegion(remote.address, 8, remote.rkey ^ 1),
        lambda remote: RemoteRegion(remote.address, 8, remote.rkey + 0x100),
        lambda remote: RemoteRegion(remote.address, 8, remote.rkey + (1 << 24)),
        lambda remote: RemoteRegion(remote.address, 8, 0xFFFFFFFF),
        lambda remote: RemoteRegion(remote.address - 1, 8, remote.rkey),
        lambda remote: RemoteRegion(remote.address + remote.length - 7, 8, remote.rkey),
    ],
    ids=["other key tag", "next index", "other process", "highest index", "before the region", "beyond the region"],
)
async def test_invalid_keys_and_addresses(pair: Pair, change: Callable[[RemoteRegion], RemoteRegion]) -> None:
    async with pair() as (first, second), end() as here:
        remote = await first.register("a", 4096)
        await second.connect(here.qps[0])
        await check_access_denied(here.qps[0], here, change(remote))
        assert await first.read_memory("a", 0, 4096) == b"a" * 4096


@pytest.mark.parametrize("size", [8, 200, 100_000])
async def test_local_keys_of_the_other_process_in_work_requests(pair: Pair, direct: bool, size: int) -> None:
    """Send, write, read and receive with an imported region as local memory; small sizes are sent inline."""
    async with pair() as (first, second), end() as here:
        (qp,) = here.qps
        remote = await first.register("a", size)
        await second.connect(qp)
        await second.call(f"borrow a {remote.rkey}")
        content = random.Random(size).randbytes(size)
        await first.write_memory("a", 0, content)
        assert await second.read_memory("a", 0, size) == content

        receive = qp.receive(here.region[:size])
        await second.call(f"send_from a 0 {size}")
        assert bytes((await receive).data) == content

        target = here.region[size : 2 * size]
        await second.call(f"write_from a 0 {size} {bytes(target.remote()).hex()}")
        assert bytes(target.buffer) == content

        content = random.Random(-size).randbytes(size)
        target.buffer[:] = content
        await second.call(f"read_to a 0 {size} {bytes(target.remote()).hex()}")
        assert await first.read_memory("a", 0, size) == content

        await first.write_memory("a", 0, bytes(size))
        second.send_command(f"receive_to a 0 {size}")
        await qp.send(target)
        assert await second.read_answer() == str(size)
        assert await first.read_memory("a", 0, size) == content

        await first.call("close a")
        with pytest.raises(CommandFailed, match="LOC_PROT_ERR"):
            await second.call(f"send_from a 0 {size}")
        with pytest.raises(CommandFailed, match="ibv_import_mr failed: ENOENT"):
            await second.call(f"borrow another {remote.rkey}")


@pytest.mark.every_way
async def test_deregistration_waits_for_accesses_of_others(pair: Pair, direct: bool) -> None:
    """After deregistration, no access in flight writes to the region that reuses the memory."""
    async with pair() as (first, second), end(queue_pairs=2 * fewer(10)) as here:
        here.region.buffer[:] = b"\xff" * len(here.region)
        size = 1 << 20
        qps = iter(here.qps)
        for _ in range(fewer(10)):
            qp, second_qp = next(qps), next(qps)
            await second.connect(qp)
            await second.connect(second_qp)
            remote = await first.register("a", size)
            writes = [asyncio.ensure_future(qp.write(here.region[:size], remote)) for _ in range(20)]
            await writes[0]
            await first.call("close a")
            await first.register("next", size)
            await check_access_denied(second_qp, here, remote[:8])
            results = await asyncio.gather(*writes, return_exceptions=True)
            failed = [each.status for each in results if isinstance(each, WorkCompletionError)]
            assert failed[:1] in ([], [WcStatus.REM_ACCESS_ERR])
            assert await first.read_memory("next", 0, size) == b"n" * size
            await first.call("close next")
