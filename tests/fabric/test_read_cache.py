"""Reads of another process's memory by a remembered permission, until that permission is revoked."""

import asyncio
import contextlib
import errno
import os
import random
import resource
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    AffinityError,
    ClosedResourceError,
    Device,
    MemoryRegion,
    MessageModel,
    QpState,
    QueuePair,
    RemoteRegion,
    VerbsError,
    WcStatus,
    WorkCompletionError,
)
from aioverbs._core.software.software import FileRegion, read_mapped, read_mapped_bytes
from aioverbs._lifecycle.resource import lifecycle_of
from aioverbs._memory.region import register_file
from tests.data_path.ends import ACCESS, LONG_TIMEOUT, PEERS
from tests.devices import remote_device
from tests.fabric.test_frames import QUICK, SIZE, Scene, pattern, scene
from tests.fabric.two import end, peer_process
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.resident import mapped_copies

PAGE = 4096
MAX_CACHED_READ = 16 * 1024  # longest read that uses a remembered permission, in bytes
# Permissions that a queue pair remembers, and words that record revocations; the number of a key selects both.
SLOTS, WORDS = 16, 251

direct_only = pytest.mark.parametrize("device", ["direct-inline"], indirect=True)
models = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


def requests_sent(device: Device) -> int:
    """Return the number of requests sent to the other device."""
    return sum(peer.frames_out for peer in device.peers() if peer.connected_by_us)


async def is_cached(here: Scene, remote: RemoteRegion | None = None) -> bool:
    """Return whether the second of two reads sends no request."""
    remote = here.remote.remote() if remote is None else remote
    await here.pair.near.read(here.local[:8], remote[:8])
    before = requests_sent(here.pair.device)
    await here.pair.near.read(here.local[:8], remote[:8])
    return requests_sent(here.pair.device) == before


@direct_only
@pytest.mark.parametrize("size", [1, 8, PAGE, PAGE + 1, MAX_CACHED_READ])
async def test_cached_permissions_allow_reads_without_requests(device: Device, size: int) -> None:
    async with scene(device) as here:
        here.remote.buffer[:] = pattern(1, 2 * SIZE)
        expected = bytes(here.remote.buffer)
        assert await is_cached(here)
        before = requests_sent(device)
        for at in (0, 5, PAGE - 1, 2 * SIZE - size):
            here.local.buffer[:size] = bytes(size)
            await here.pair.near.read(here.local[:size], here.remote.remote()[at : at + size])
            assert bytes(here.local.buffer[:size]) == expected[at : at + size]
        assert requests_sent(device) == before


@direct_only
async def test_larger_reads_send_requests(device: Device) -> None:
    async with scene(device) as here:
        assert await is_cached(here)
        before = requests_sent(device)
        await here.pair.near.read(here.local[: MAX_CACHED_READ + 1], here.remote.remote()[: MAX_CACHED_READ + 1])
        assert requests_sent(device) > before


@direct_only
@pytest.mark.parametrize("model", ["one by one", "batch", "at once"])
async def test_many_cached_reads_are_combined(device: Device, model: str) -> None:
    """Post more reads than one system call takes, into pieces of all sizes."""
    chance = random.Random(7)
    async with scene(device) as here:
        near = here.pair.near
        here.remote.buffer[:] = chance.randbytes(2 * SIZE)
        expected = bytearray(here.local.buffer)
        assert await is_cached(here)
        expected[:8] = here.remote.buffer[:8]
        before, at = requests_sent(device), 64
        parts: list[tuple[Any, RemoteRegion]] = []
        for number in range(100):
            sizes = [chance.choice((1, 8, 700, 2 * PAGE)) for _ in range(1 + number % 2)]
            offset, pieces = chance.randrange(2 * SIZE - 4 * PAGE), []
            expected[at : at + sum(sizes)] = here.remote.buffer[offset : offset + sum(sizes)]
            remote = here.remote.remote()[offset : offset + sum(sizes)]
            for size in sizes:
                pieces.append(here.local[at : at + size])
                at += size
            parts.append((pieces, remote))
        if model == "batch":
            for begin in range(0, len(parts), 10):
                async with near.batch() as batch:
                    for pieces, remote in parts[begin : begin + 10]:
                        batch.read(pieces, remote)
        elif model == "at once":
            await asyncio.gather(*(near.read(pieces, remote) for pieces, remote in parts))
        else:
            for pieces, remote in parts:
                await near.read(pieces, remote)
        assert requests_sent(device) == before
        assert here.local.buffer == expected


@direct_only
async def test_a_queue_that_never_runs_empty_uses_the_cache(device: Device) -> None:
    """The first reads are sent as requests, and later ones wait for their answers."""
    async with scene(device) as here:

        async def keep_on() -> None:
            for _ in range(100):
                await here.pair.near.read(here.local[:8], here.remote.remote()[:8])
                await asyncio.sleep(0)

        before = requests_sent(device)
        await asyncio.gather(*(keep_on() for _ in range(8)))
        assert requests_sent(device) - before < 100


@direct_only
async def test_cached_reads_keep_the_order_of_requests(device: Device) -> None:
    async with scene(device) as here:
        near, remote = here.pair.near, here.remote.remote()
        assert await is_cached(here)
        for number in range(300):
            here.local.buffer[:8] = number.to_bytes(8, "little")
            written = near.write(here.local[:8], remote[:8])
            read = near.read(here.local[64:72], remote[:8])
            added = near.fetch_and_add(remote[:8], 1)
            again = near.read(here.local[128:136], remote[:8])
            await asyncio.gather(written, read, added, again)
            assert int.from_bytes(here.local.buffer[64:72], "little") == number
            assert int.from_bytes(here.local.buffer[128:136], "little") == number + 1


# ---- Revocation


def _deregister(here: Scene) -> None:
    here.remote.handle.destroy()


def _to_error(here: Scene) -> None:
    here.pair.far.to_error()


def _allow_nothing(here: Scene) -> None:
    here.pair.far.handle.modify(qp_access_flags=AccessFlags.LOCAL_WRITE)


def _port_down(here: Scene) -> None:
    remote_device(here.pair.device).faults.set_port(False)


def _own_port_down(here: Scene) -> None:
    here.pair.device.faults.set_port(False)


def _stall(here: Scene) -> None:
    remote_device(here.pair.device).faults.stall_streams()


def _own_stall(here: Scene) -> None:
    here.pair.device.faults.stall_streams()


def _drop(here: Scene) -> None:
    here.plan("request_in").drop_frames("request_in", every=1, times=1000)


def _drop_answers(here: Scene) -> None:
    here.plan("answer_in").drop_frames("answer_in", every=1, times=1000)


def _lose(here: Scene) -> None:
    here.pair.device.faults.lose_messages(times=1000)


REVOCATIONS: dict[str, tuple[Callable[[Scene], None], WcStatus]] = {
    "the region goes": (_deregister, WcStatus.REM_ACCESS_ERR),
    "the queue pair breaks": (_to_error, WcStatus.RETRY_EXC_ERR),
    "the queue pair allows no reads": (_allow_nothing, WcStatus.REM_INV_REQ_ERR),
    "the port goes down": (_port_down, WcStatus.RETRY_EXC_ERR),
    "the own port goes down": (_own_port_down, WcStatus.RETRY_EXC_ERR),
    "the peer falls silent": (_stall, WcStatus.RETRY_EXC_ERR),
    "the own device falls silent": (_own_stall, WcStatus.RETRY_EXC_ERR),
    "requests are lost": (_drop, WcStatus.RETRY_EXC_ERR),
    "answers are lost": (_drop_answers, WcStatus.RETRY_EXC_ERR),
    "messages are lost": (_lose, WcStatus.RETRY_EXC_ERR),
}


@direct_only
@pytest.mark.parametrize("cause", REVOCATIONS)
async def test_a_read_sends_a_request_after_its_permission_is_revoked(device: Device, cause: str) -> None:
    revoke, status = REVOCATIONS[cause]
    async with scene(device, **(QUICK if status is WcStatus.RETRY_EXC_ERR else {})) as here:
        assert await is_cached(here)
        remote = here.remote.remote()[:8]
        revoke(here)
        with pytest.raises(WorkCompletionError) as caught:
            await asyncio.wait_for(here.pair.near.read(here.local[:8], remote), patience(30))
        assert caught.value.status is status
        for faults in {device.faults, remote_device(device).faults}:
            faults.stall_streams(on=False)


@direct_only
async def test_a_reconnected_queue_pair_has_no_old_permissions(device: Device) -> None:
    """Permissions of the previous connection do not apply to the new one."""
    async with scene(device) as here:
        assert await is_cached(here)
        for qp in (here.pair.near, here.pair.far):
            qp.to_reset()
        here.pair.near.connect(here.pair.far.local_endpoint(), PEERS, **LONG_TIMEOUT)
        here.pair.far.connect(here.pair.near.local_endpoint(), PEERS & ~AccessFlags.REMOTE_READ)
        with pytest.raises(WorkCompletionError) as caught:
            await here.pair.near.read(here.local[:8], here.remote.remote()[:8])
        assert caught.value.status is WcStatus.REM_INV_REQ_ERR


@direct_only
@pytest.mark.parametrize("cause", ["invalidated", "by its owner", "closed"])
async def test_a_permission_ends_with_its_window(device: Device, cause: str) -> None:
    async with scene(device) as here, here.pair.remote_domain.memory_window() as window:
        far = here.pair.far
        bound = await far.bind_window(window, here.remote[PAGE : 3 * PAGE], AccessFlags.REMOTE_READ)
        here.remote.buffer[PAGE : PAGE + 8] = b"a window"
        assert await is_cached(here, bound)
        assert bytes(here.local.buffer[:8]) == b"a window"
        if cause == "invalidated":
            back = here.pair.receive()
            await here.pair.near.send_with_invalidate(here.local[:8], bound.rkey)
            await back
        elif cause == "by its owner":
            await far.invalidate(bound.rkey)
        else:
            await window.aclose()
        with pytest.raises(WorkCompletionError) as caught:
            await here.pair.near.read(here.local[:8], bound[:8])
        assert caught.value.status is WcStatus.REM_ACCESS_ERR


@direct_only
async def test_a_permission_is_for_its_window_alone(device: Device) -> None:
    async with scene(device) as here, here.pair.remote_domain.memory_window() as window:
        bound = await here.pair.far.bind_window(window, here.remote[PAGE : 2 * PAGE], AccessFlags.REMOTE_READ)
        assert await is_cached(here, bound)
        with pytest.raises(WorkCompletionError) as caught:
            await here.pair.near.read(here.local[:16], RemoteRegion(bound.address + PAGE - 8, 16, bound.rkey))
        assert caught.value.status is WcStatus.REM_ACCESS_ERR


async def distinct_regions(here: Scene, opened: contextlib.AsyncExitStack) -> list[MemoryRegion]:
    """Register regions whose keys use different slots and words; the first one is `here.remote`.

    Keys of closed regions are reused in any order, so several may have to be registered.
    """
    regions = [here.remote]
    while len(regions) < SLOTS:
        region = await opened.enter_async_context(here.pair.remote_domain.register(PAGE, ACCESS))
        numbers = [each.remote().rkey >> 8 for each in (*regions, region)]
        if all(len({number % count for number in numbers}) == len(numbers) for count in (SLOTS, WORDS)):
            regions.append(region)
    return regions


@direct_only
async def test_other_regions_keep_their_permissions(device: Device) -> None:
    async with scene(device) as here, contextlib.AsyncExitStack() as opened:
        regions = await distinct_regions(here, opened)
        for region in regions:
            assert await is_cached(here, region.remote())
        before = requests_sent(device)
        await regions[-1].aclose()
        for region in regions[:-1]:
            await here.pair.near.read(here.local[:8], region.remote()[:8])
        assert requests_sent(device) == before


@direct_only
async def test_permissions_end_when_the_stream_is_cut(device: Device) -> None:
    async with scene(device, **QUICK) as here:
        for _ in range(5):
            assert await is_cached(here)
            before = requests_sent(device)
            device.faults.cut_streams()
            await here.pair.near.read(here.local[:8], here.remote.remote()[:8])
            assert requests_sent(device) > before
        assert here.pair.near.query().qp_state is QpState.RTS


async def test_reads_over_streams_always_send_requests(device: Device, request: pytest.FixtureRequest) -> None:
    async with scene(device) as here:
        assert await is_cached(here) == ("direct" in request.node.name)


# ---- Two processes


@models
async def test_memory_that_is_no_longer_lent_is_not_read(model: MessageModel, direct: bool) -> None:
    """The other process lends memory and takes it back, again and again, while reads run.

    A read returns the data that the memory had while it was lent, or fails.
    """
    lent, taken = b"\xa5" * 64, b"\x5a" * 64
    async with peer_process(model) as there, end(model, queue_pairs=12) as here:
        for qp in here.qps:
            await there.connect(qp)
            address, rkey = (await there.command("lend")).split()
            remote = RemoteRegion(int(address), PAGE, int(rkey))

            async def read_on(qp: QueuePair = qp, remote: RemoteRegion = remote) -> None:
                for count in range(1_000_000):
                    await qp.read(here.region[:PAGE], remote)
                    assert bytes(here.region.buffer[:PAGE]) == lent * (PAGE // 64), (
                        "read memory that was no longer lent"
                    )
                    if not count % 4:
                        await asyncio.sleep(0)

            reading = asyncio.create_task(read_on())
            await asyncio.sleep(random.Random(qp.qp_num).random() / 200)
            assert bytes.fromhex(await there.command("take")) == taken
            with pytest.raises(WorkCompletionError) as caught:
                await reading
            assert caught.value.status is WcStatus.REM_ACCESS_ERR


async def test_memory_of_a_killed_owner_is_not_read() -> None:
    async with peer_process() as there, end() as here:
        (qp,) = here.qps
        await there.connect(qp, timeout=14, retry_cnt=2)  # 67 ms, three times
        for _ in range(3):
            await qp.read(here.region[:PAGE], there.region[:PAGE])
        there.kill()
        await there.process.wait()
        with pytest.raises(WorkCompletionError) as caught:
            await qp.read(here.region[:PAGE], there.region[:PAGE])
        assert caught.value.status is WcStatus.RETRY_EXC_ERR


# ---- Files that the peer maps

FILE = 1 << 20  # bytes


@contextlib.asynccontextmanager
async def bound_file(here: Scene, size: int) -> AsyncIterator[tuple[FileRegion, RemoteRegion]]:
    """Register a memory file with the queue pair at the other end, and yield it, and a window over all of it."""
    far = here.pair.far
    memory, file = register_file(lifecycle_of(far), here.pair.remote_domain.base.handle, size)
    async with here.pair.remote_domain.memory_window() as window:
        yield file, await far.bind_window(window, memory, AccessFlags.REMOTE_READ)
    file.destroy()
    lifecycle_of(far).detach(file)


@direct_only
@pytest.mark.parametrize("size", [8, MAX_CACHED_READ + 1, FILE])
async def test_reads_of_a_mapped_file_send_no_requests(device: Device, size: int) -> None:
    async with (
        scene(device) as here,
        bound_file(here, FILE) as (file, remote),
        here.pair.domain.register(FILE) as local,
    ):
        assert await is_cached(here, remote)
        before = requests_sent(device)
        for seed, at in enumerate({0, min(1, FILE - size), FILE - size}):
            content = random.Random(seed).randbytes(FILE)
            file.fill([content])
            pieces = [local[: size // 2], local[size // 2 : size]]
            await here.pair.near.read(pieces, remote[at : at + size])
            assert local.buffer[:size] == content[at : at + size]
        assert requests_sent(device) == before


@direct_only
async def test_small_reads_of_a_mapped_file_are_combined(device: Device) -> None:
    content = random.Random(3).randbytes(FILE)
    async with scene(device) as here, bound_file(here, FILE) as (file, remote):
        file.fill([content[:5], memoryview(content)[5:]])
        assert await is_cached(here, remote)
        before = requests_sent(device)
        starts = range(0, SIZE - 64, 64)
        await asyncio.gather(*(here.pair.near.read(here.local[at : at + 64], remote[at : at + 64]) for at in starts))
        assert here.local.buffer[: len(starts) * 64] == content[: len(starts) * 64]
        assert requests_sent(device) == before


@direct_only
async def test_a_file_is_not_read_when_its_window_is_gone(device: Device) -> None:
    async with scene(device) as here, bound_file(here, FILE) as (file, remote):
        assert await is_cached(here, remote)
        await here.pair.far.invalidate(remote.rkey)
        file.fill([b"a secret"])
        with pytest.raises(WorkCompletionError) as caught:
            await here.pair.near.read(here.local[:8], remote[:8])
        assert caught.value.status is WcStatus.REM_ACCESS_ERR
        assert bytes(here.local.buffer[:8]) != b"a secret"


@direct_only
async def test_mappings_end_with_the_queue_pair(device: Device) -> None:
    collect_garbage()
    others = mapped_copies()
    async with scene(device) as here, contextlib.AsyncExitStack() as files:
        for count in range(1, 4):
            remote = (await files.enter_async_context(bound_file(here, PAGE)))[1]
            assert await is_cached(here, remote)
            assert mapped_copies() == others + 2 * count  # the owner's is in this process, too
        here.pair.near.to_reset()
        assert mapped_copies() == others + 3
    assert mapped_copies() == others


@direct_only
async def test_mappings_of_deregistered_files_go_with_the_next_one(device: Device) -> None:
    collect_garbage()
    others = mapped_copies()
    async with scene(device) as here:
        for _ in range(3):
            async with bound_file(here, PAGE) as (_, remote):
                assert await is_cached(here, remote)
                assert mapped_copies() == others + 2
            assert mapped_copies() == others + 1
    assert mapped_copies() == others


async def test_a_file_is_filled_within_its_bounds(device: Device) -> None:
    async with scene(device) as here, bound_file(here, PAGE) as (file, _):
        file.fill([])
        file.fill([bytes(PAGE - 1), b"x"])
        with pytest.raises(ValueError, match="more than 4096 bytes"):
            file.fill([bytes(PAGE), b"x"])
        with pytest.raises(TypeError):
            file.fill([17])  # type: ignore[list-item]  # what is tested
    with pytest.raises(ClosedResourceError):
        file.fill([b"x"])


@pytest.mark.parametrize("size", [0, (4 << 20) + 1])
async def test_files_have_at_most_4_mib(device: Device, size: int) -> None:
    async with scene(device) as here:
        with pytest.raises(VerbsError) as caught:
            register_file(lifecycle_of(here.pair.far), here.pair.remote_domain.base.handle, size)
        assert caught.value.errno == errno.EINVAL


async def test_few_descriptors_are_left_to_others(device: Device) -> None:
    """Files take the lower half of the descriptors alone, however many are requested."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with scene(device) as here:
        far, pd = here.pair.far, here.pair.remote_domain.base.handle
        files: list[FileRegion] = []
        in_use = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * in_use + 40, limits[1]))
        try:
            with pytest.raises(VerbsError, match="Too many open files"):
                files.extend(register_file(lifecycle_of(far), pd, PAGE)[1] for _ in range(2 * in_use + 40))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert 20 <= len(files) <= in_use + 21
        for file in files:
            file.destroy()
            lifecycle_of(far).detach(file)


# ---- Reads of mapped files without requests


def read_now(here: Scene, remote: RemoteRegion, length: int) -> bytes | None:
    """Read by both functions; return the bytes, or None if neither can."""
    qp, memory = here.pair.near.handle, bytearray(b"!" * length)
    data = read_mapped_bytes(qp, remote.address, remote.rkey, length)
    assert read_mapped(qp, remote.address, remote.rkey, memory) == (data is not None)
    assert data is None or data == memory
    return data


@direct_only
@pytest.mark.parametrize("size", [1, 8, MAX_CACHED_READ + 1, FILE])
async def test_a_mapped_file_is_read_while_requests_are_in_flight(device: Device, size: int) -> None:
    async with scene(device) as here, bound_file(here, FILE) as (file, remote):
        content = random.Random(size).randbytes(FILE)
        file.fill([content])
        assert read_now(here, remote, size) is None  # no read has led there
        assert await is_cached(here, remote)
        waiting = here.pair.near.send(here.local[:8])  # finds no receive, and is repeated
        for at in {0, min(1, FILE - size), FILE - size}:
            assert read_now(here, remote[at : at + size], size) == content[at : at + size]
        assert not waiting.ended
        here.pair.near.to_error()
        with pytest.raises(WorkCompletionError):
            await waiting
        assert read_now(here, remote, size) is None


@direct_only
async def test_a_mapped_file_is_read_within_its_bounds(device: Device) -> None:
    async with scene(device) as here, bound_file(here, 2 * PAGE) as (file, remote):
        file.fill([b"x" * 2 * PAGE])
        assert await is_cached(here, remote)
        qp = here.pair.near.handle
        for offset, length in ((0, 2 * PAGE + 1), (2 * PAGE, 1), (-1, 1), (PAGE, PAGE + 1), (0, 0), (1 << 63, 1)):
            address = (remote.address + offset) % (1 << 64)
            assert read_mapped_bytes(qp, address, remote.rkey, length) is None
            assert not read_mapped(qp, address, remote.rkey, bytearray(length))
        assert read_mapped_bytes(qp, remote.address, remote.rkey ^ 0x100, 8) is None
        assert read_mapped_bytes(qp, remote.address, remote.rkey, 2 * PAGE) == b"x" * 2 * PAGE
        with pytest.raises(BufferError):
            read_mapped(qp, remote.address, remote.rkey, b"constant")
        with pytest.raises(OverflowError):
            read_mapped_bytes(qp, -1, remote.rkey, 8)
        with pytest.raises(OverflowError):
            read_mapped_bytes(qp, remote.address, remote.rkey, -1)


@direct_only
async def test_memory_that_is_not_mapped_is_not_read_without_a_request(device: Device) -> None:
    async with scene(device) as here:
        assert await is_cached(here)
        assert read_now(here, here.remote.remote(), 8) is None


@direct_only
async def test_a_mapped_file_is_not_read_when_its_key_is_gone(device: Device) -> None:
    async with scene(device) as here, bound_file(here, FILE) as (file, remote):
        assert await is_cached(here, remote)
        assert read_now(here, remote, 8) is not None
        await here.pair.far.invalidate(remote.rkey)
        file.fill([b"a secret"])
        assert read_now(here, remote, 8) is None


@direct_only
async def test_fault_plans_see_reads_of_mapped_files(device: Device) -> None:
    """A plan that may concern them has them posted."""
    async with scene(device) as here, bound_file(here, FILE) as (_, remote):
        assert await is_cached(here, remote)
        here.pair.device.faults.lose_messages_at_random(1)
        assert read_now(here, remote, 8) is None


@direct_only
async def test_wrong_callers_cannot_read_a_mapped_file(device: Device) -> None:
    async with scene(device) as here, bound_file(here, FILE) as (_, remote):
        assert await is_cached(here, remote)
        with pytest.raises(AffinityError):
            await asyncio.to_thread(read_now, here, remote, 8)
        qp = here.pair.near.handle
    with pytest.raises(ClosedResourceError):
        read_mapped_bytes(qp, remote.address, remote.rkey, 8)
