"""Reads of another process's memory that its device is not asked about again, until something is taken back."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    Device,
    MemoryRegion,
    MessageModel,
    QpState,
    QueuePair,
    RemoteRegion,
    WcStatus,
    WorkCompletionError,
)
from tests.data_path.ends import ACCESS, PATIENT, PEERS
from tests.devices import remote_device
from tests.fabric.test_frames import QUICK, SIZE, Scene, pattern, scene
from tests.fabric.two import end, other
from tests.pace import patience

PAGE = 4096
LONGEST = 16 * 1024  # of a read that is not asked about
PLACES, WORDS = (
    4,
    251,
)  # for permissions that a queue pair remembers, and for what is taken back: a key has one by its number

directly = pytest.mark.parametrize("device", ["direct-inline"], indirect=True)
models = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


def asked(device: Device) -> int:
    """How many requests went to the other one."""
    return sum(peer.frames_out for peer in device.peers() if peer.connected_by_us)


async def is_remembered(here: Scene, remote: RemoteRegion | None = None) -> bool:
    """Whether the second of two reads is not asked about."""
    remote = here.remote.remote() if remote is None else remote
    await here.pair.near.read(here.local[:8], remote[:8])
    before = asked(here.pair.device)
    await here.pair.near.read(here.local[:8], remote[:8])
    return asked(here.pair.device) == before


@directly
@pytest.mark.parametrize("size", [1, 8, PAGE, PAGE + 1, LONGEST])
async def test_what_was_allowed_once_is_read_without_asking(device: Device, size: int) -> None:
    async with scene(device) as here:
        here.remote.buffer[:] = pattern(1, 2 * SIZE)
        expected = bytes(here.remote.buffer)
        assert await is_remembered(here)
        before = asked(device)
        for at in (0, 5, PAGE - 1, 2 * SIZE - size):
            here.local.buffer[:size] = bytes(size)
            await here.pair.near.read(here.local[:size], here.remote.remote()[at : at + size])
            assert bytes(here.local.buffer[:size]) == expected[at : at + size]
        assert asked(device) == before


@directly
async def test_what_is_larger_is_asked_about(device: Device) -> None:
    async with scene(device) as here:
        assert await is_remembered(here)
        before = asked(device)
        await here.pair.near.read(here.local[: LONGEST + 1], here.remote.remote()[: LONGEST + 1])
        assert asked(device) > before


@directly
@pytest.mark.parametrize("model", ["one by one", "batch", "at once"])
async def test_many_are_read_together(device: Device, model: str) -> None:
    """More than one system call takes, into pieces of all sizes."""
    chance = random.Random(7)
    async with scene(device) as here:
        near = here.pair.near
        here.remote.buffer[:] = chance.randbytes(2 * SIZE)
        expected = bytearray(here.local.buffer)
        assert await is_remembered(here)
        expected[:8] = here.remote.buffer[:8]
        before, at = asked(device), 64
        parts: list[tuple[Any, RemoteRegion]] = []
        for number in range(100):
            sizes = [chance.choice((1, 8, 700, 2 * PAGE)) for _ in range(1 + number % 2)]
            away, pieces = chance.randrange(2 * SIZE - 4 * PAGE), []
            expected[at : at + sum(sizes)] = here.remote.buffer[away : away + sum(sizes)]
            remote = here.remote.remote()[away : away + sum(sizes)]
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
        assert asked(device) == before
        assert here.local.buffer == expected


@directly
async def test_a_queue_that_never_runs_empty_comes_to_it(device: Device) -> None:
    """The first reads are asked about, and those behind them wait for their answers rather than ask, too."""
    async with scene(device) as here:

        async def keep_on() -> None:
            for _ in range(100):
                await here.pair.near.read(here.local[:8], here.remote.remote()[:8])
                await asyncio.sleep(0)

        before = asked(device)
        await asyncio.gather(*(keep_on() for _ in range(8)))
        assert asked(device) - before < 100


@directly
async def test_reads_stay_behind_what_was_posted_before(device: Device) -> None:
    async with scene(device) as here:
        near, remote = here.pair.near, here.remote.remote()
        assert await is_remembered(here)
        for number in range(300):
            here.local.buffer[:8] = number.to_bytes(8, "little")
            written = near.write(here.local[:8], remote[:8])
            read = near.read(here.local[64:72], remote[:8])
            added = near.fetch_and_add(remote[:8], 1)
            again = near.read(here.local[128:136], remote[:8])
            await asyncio.gather(written, read, added, again)
            assert int.from_bytes(here.local.buffer[64:72], "little") == number
            assert int.from_bytes(here.local.buffer[128:136], "little") == number + 1


# ---- What takes it back


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


TAKEN_BACK: dict[str, tuple[Callable[[Scene], None], WcStatus]] = {
    "the region goes": (_deregister, WcStatus.REM_ACCESS_ERR),
    "the queue pair breaks": (_to_error, WcStatus.RETRY_EXC_ERR),
    "the queue pair allows no reads": (_allow_nothing, WcStatus.REM_INV_REQ_ERR),
    "the port goes down": (_port_down, WcStatus.RETRY_EXC_ERR),
    "the own port goes down": (_own_port_down, WcStatus.RETRY_EXC_ERR),
    "the peer falls silent": (_stall, WcStatus.RETRY_EXC_ERR),
    "the peer is not heard": (_own_stall, WcStatus.RETRY_EXC_ERR),
    "requests are lost": (_drop, WcStatus.RETRY_EXC_ERR),
    "answers are lost": (_drop_answers, WcStatus.RETRY_EXC_ERR),
    "messages are lost": (_lose, WcStatus.RETRY_EXC_ERR),
}


@directly
@pytest.mark.parametrize("what", TAKEN_BACK)
async def test_a_read_is_asked_about_when_its_permission_is_taken_back(device: Device, what: str) -> None:
    take_back, status = TAKEN_BACK[what]
    async with scene(device, **(QUICK if status is WcStatus.RETRY_EXC_ERR else {})) as here:
        assert await is_remembered(here)
        remote = here.remote.remote()[:8]
        take_back(here)
        with pytest.raises(WorkCompletionError) as caught:
            await asyncio.wait_for(here.pair.near.read(here.local[:8], remote), patience(30))
        assert caught.value.status is status
        for faults in {device.faults, remote_device(device).faults}:
            faults.stall_streams(on=False)


@directly
async def test_a_queue_pair_that_is_connected_anew_has_no_old_permissions(device: Device) -> None:
    """What its former life was allowed is none of the new one's."""
    async with scene(device) as here:
        assert await is_remembered(here)
        for qp in (here.pair.near, here.pair.far):
            qp.to_reset()
        here.pair.near.connect(here.pair.far.local_endpoint(), PEERS, **PATIENT)
        here.pair.far.connect(here.pair.near.local_endpoint(), PEERS & ~AccessFlags.REMOTE_READ)
        with pytest.raises(WorkCompletionError) as caught:
            await here.pair.near.read(here.local[:8], here.remote.remote()[:8])
        assert caught.value.status is WcStatus.REM_INV_REQ_ERR


@directly
@pytest.mark.parametrize("how", ["invalidated", "by its owner", "closed"])
async def test_a_window_that_goes_takes_its_permission_with_it(device: Device, how: str) -> None:
    async with scene(device) as here, here.pair.far_domain.memory_window() as window:
        far = here.pair.far
        bound = await far.bind_window(window, here.remote[PAGE : 3 * PAGE], AccessFlags.REMOTE_READ)
        here.remote.buffer[PAGE : PAGE + 8] = b"a window"
        assert await is_remembered(here, bound)
        assert bytes(here.local.buffer[:8]) == b"a window"
        if how == "invalidated":
            back = here.pair.receive()
            await here.pair.near.send_with_invalidate(here.local[:8], bound.rkey)
            await back
        elif how == "by its owner":
            await far.invalidate(bound.rkey)
        else:
            await window.aclose()
        with pytest.raises(WorkCompletionError) as caught:
            await here.pair.near.read(here.local[:8], bound[:8])
        assert caught.value.status is WcStatus.REM_ACCESS_ERR


@directly
async def test_a_permission_is_for_its_window_alone(device: Device) -> None:
    async with scene(device) as here, here.pair.far_domain.memory_window() as window:
        bound = await here.pair.far.bind_window(window, here.remote[PAGE : 2 * PAGE], AccessFlags.REMOTE_READ)
        assert await is_remembered(here, bound)
        with pytest.raises(WorkCompletionError) as caught:
            await here.pair.near.read(here.local[:16], RemoteRegion(bound.address + PAGE - 8, 16, bound.rkey))
        assert caught.value.status is WcStatus.REM_ACCESS_ERR


async def apart(here: Scene, opened: contextlib.AsyncExitStack) -> list[MemoryRegion]:
    """As many regions as have places and words of their own, ours first. Keys are used again, in any order."""
    found = [here.remote]
    while len(found) < PLACES:
        region = await opened.enter_async_context(here.pair.far_domain.register(PAGE, ACCESS))
        numbers = [each.remote().rkey >> 8 for each in (*found, region)]
        if all(len({number % count for number in numbers}) == len(numbers) for count in (PLACES, WORDS)):
            found.append(region)
    return found


@directly
async def test_other_regions_keep_their_permissions(device: Device) -> None:
    async with scene(device) as here, contextlib.AsyncExitStack() as opened:
        regions = await apart(here, opened)
        for region in regions:
            assert await is_remembered(here, region.remote())
        before = asked(device)
        await regions[-1].aclose()
        for region in regions[:-1]:
            await here.pair.near.read(here.local[:8], region.remote()[:8])
        assert asked(device) == before


@directly
async def test_permissions_end_with_a_stream_that_is_cut(device: Device) -> None:
    async with scene(device, **QUICK) as here:
        for _ in range(5):
            assert await is_remembered(here)
            before = asked(device)
            device.faults.cut_streams()
            await here.pair.near.read(here.local[:8], here.remote.remote()[:8])
            assert asked(device) > before
        assert here.pair.near.query().qp_state is QpState.RTS


async def test_without_leave_everything_is_asked_about(device: Device, request: pytest.FixtureRequest) -> None:
    async with scene(device) as here:
        assert await is_remembered(here) == ("direct" in request.node.name)


# ---- Two processes


@models
async def test_memory_that_becomes_something_else_is_not_read(model: MessageModel, direct: bool) -> None:
    """The other process lends memory and takes it back, again and again, while it is read. What is read is what was
    there while it was lent, whole; or it is refused."""
    lent, taken = b"\xa5" * 64, b"\x5a" * 64
    async with other(model) as there, end(model, queue_pairs=12) as here:
        for qp in here.qps:
            await there.connect(qp)
            address, rkey = (await there.ask("lend")).split()
            remote = RemoteRegion(int(address), PAGE, int(rkey))

            async def read_on(qp: QueuePair = qp, remote: RemoteRegion = remote) -> None:
                for count in range(1_000_000):
                    await qp.read(here.region[:PAGE], remote)
                    assert bytes(here.region.buffer[:PAGE]) == lent * (PAGE // 64), "memory that was not lent any more"
                    if not count % 4:
                        await asyncio.sleep(0)

            reading = asyncio.create_task(read_on())
            await asyncio.sleep(random.Random(qp.qp_num).random() / 200)
            assert bytes.fromhex(await there.ask("take")) == taken
            with pytest.raises(WorkCompletionError) as caught:
                await reading
            assert caught.value.status is WcStatus.REM_ACCESS_ERR


async def test_memory_of_a_killed_owner_is_not_read() -> None:
    async with other() as there, end() as here:
        (qp,) = here.qps
        await there.connect(qp, timeout=14, retry_cnt=2)  # 67 ms, three times
        for _ in range(3):
            await qp.read(here.region[:PAGE], there.region[:PAGE])
        there.kill()
        await there.process.wait()
        with pytest.raises(WorkCompletionError) as caught:
            await qp.read(here.region[:PAGE], there.region[:PAGE])
        assert caught.value.status is WcStatus.RETRY_EXC_ERR
