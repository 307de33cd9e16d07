"""Processes that close a shared domain or die: others continue, and the last one leaves nothing behind."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable

import pytest

from aioverbs import BrokenResourceError, RemoteRegion, WcStatus, WorkCompletionError
from tests.fabric.two import End, end
from tests.pace import patience
from tests.sharing.processes import KEY, CommandFailed, Pair
from tests.sharing.test_shared_memory_access import check_remote_access

pytestmark = pytest.mark.asyncio(loop_scope="module")

# All interleavings of the owner's closes (domain, device) and the importer's (region, instance, device).
OURS, THEIRS = ["pd", "device"], ["b", "pd", "device"]
ORDERS = [
    [next(parts[place in chosen]) for place in range(5)]
    for chosen in itertools.combinations(range(5), 2)
    for parts in [(iter((1, each) for each in THEIRS), iter((0, each) for each in OURS))]
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(f"{what}{index}" for index, what in order))
async def test_every_order_of_closing(pair: Pair, order: list[tuple[int, str]]) -> None:
    async with pair() as both, end() as here:
        remotes = [await each.register(name, 4096) for each, name in zip(both, "ab", strict=True)]
        await both[0].call("close a")
        instances = {0, 1}
        for index, what in order:
            await both[index].call(f"close {what}")
            if what == "pd":
                instances.discard(index)
            for each in instances:  # remaining instances still work
                await both[each].register("more", 1 << 20)
                await both[each].call("close more")
        assert [await each.call("leftovers") for each in both] == ["nothing", "nothing"]
        assert remotes[0].rkey != remotes[1].rkey
        assert len(here.region.pins) == 0


async def test_closing_the_last_instance_removes_the_domain(pair: Pair) -> None:
    async with pair() as (first, second):
        await second.call("close pd")
        await second.open_instance()  # allowed while the first instance exists
        await first.call("close pd")
        assert await first.call("leftovers") == "nothing"
        await second.register("b", 4096)
        await second.call("close b")
        await second.call("close pd")
        with pytest.raises(CommandFailed, match=r"ENOENT .*its last instance was closed"):
            await second.open_instance()
        await second.call("close device")
        assert await second.call("leftovers") == "nothing"


@pytest.mark.parametrize("dies", [False, True], ids=["closed", "killed"])
async def test_joining_after_the_last_instance_closed(pair: Pair, dies: bool) -> None:
    async with pair(imported=False) as (first, second):
        await first.share_with(second)
        if dies:
            await first.kill()
        else:
            await first.call("close pd")
        with pytest.raises(CommandFailed, match=r"ENOENT .*its last instance was closed"):
            await second.open_instance()
        await second.call("close device")
        assert await second.call("leftovers") == "nothing"


async def test_wrong_ids_and_keys(pair: Pair) -> None:
    async with pair(imported=False) as (first, second):
        for shared_id, key, pattern in (
            (first.shared_id, KEY ^ 1, "EACCES"),
            (first.shared_id ^ 1 << 20, KEY, "ENOENT"),
            (first.shared_id ^ 1 << 40, KEY, "EXDEV"),
        ):
            second.send_command(f"import {shared_id} {key}")
            with pytest.raises(CommandFailed, match=pattern):
                await first.call("send")
            with pytest.raises(CommandFailed, match=pattern):
                await second.read_answer()
        await first.share_with(second)
        with pytest.raises(CommandFailed, match="EACCES"):
            await second.open_instance(KEY ^ 1)
        for shared_id, pattern in ((second.shared_id ^ 1, "EXDEV"), (second.shared_id ^ 1 << 40, "EXDEV")):
            with pytest.raises(CommandFailed, match=pattern):
                await second.call(f"instance {shared_id} {KEY}")
        await second.open_instance()


async def check_access_denied_soon(try_it: Callable[[], Awaitable[object]]) -> None:
    """Check that an access fails with REM_ACCESS_ERR 50 ms from now, when the death of the process must be noticed."""
    await asyncio.sleep(0.05)
    with pytest.raises(WorkCompletionError) as caught:
        await try_it()
    assert caught.value.status is WcStatus.REM_ACCESS_ERR


@pytest.mark.parametrize("index", [0, 1], ids=["owner", "importer"])
async def test_a_process_dies(pair: Pair, index: int, direct: bool) -> None:
    async with pair() as both, end(queue_pairs=2) as here:
        victim, survivor = both[index], both[1 - index]
        victim_region = await victim.register("v", 1 << 20)
        survivor_region = await survivor.register("s", 1 << 20)
        for qp in here.qps:
            await survivor.connect(qp)
        await check_remote_access(here, here.qps[0], victim, "v", victim_region)
        await survivor.write_memory("s", 0, b"kept")
        await victim.kill()
        await check_access_denied_soon(lambda: here.qps[1].write(here.region[:8], victim_region[:8]))
        assert await survivor.read_memory("s", 0, 4) == b"kept"
        await check_remote_access(here, here.qps[0], survivor, "s", survivor_region)
        await survivor.register("t", 1 << 20)
        for what in ("s", "t", "domain", "pd", "device"):
            await survivor.call(f"close {what}")
        assert await survivor.call("leftovers") == "nothing"


async def test_memory_of_a_dead_process_is_freed(pair: Pair) -> None:
    """The next process that takes part frees the pages of the dead one."""
    async with pair() as (first, second):
        await first.register("a", 1 << 20)
        before = int(await first.call("blocks"))
        await second.register("b", 8 << 20)
        assert int(await first.call("blocks")) >= before + (8 << 20)
        await second.kill()
        await first.call("reap")
        assert int(await first.call("blocks")) <= before + (1 << 20)
        assert await first.read_memory("a", 0, 4096) == b"a" * 4096


async def test_a_child_of_a_dead_process_does_not_count_as_alive(pair: Pair) -> None:
    async with pair() as (first, second), end(queue_pairs=2) as here:
        remote = await first.register("a", 4096)
        for qp in here.qps:
            await second.connect(qp)
        await first.call("fork")
        await here.qps[0].write(here.region[:8], remote[:8])
        await first.kill()
        await check_access_denied_soon(lambda: here.qps[1].write(here.region[:8], remote[:8]))


async def traffic(here: End, which: int, remotes: list[RemoteRegion], seed: int) -> None:
    """Write and read random remote regions until an operation fails.

    :param which: index of the queue pair, and of the 256 KiB of local memory for it.
    """
    chance = random.Random(seed)
    qp, begin = here.qps[which], which << 18
    while True:
        remote = chance.choice(remotes)
        size = chance.choice([8, 4096, 1 << 18])
        kind = chance.choice([qp.write, qp.read])
        await kind(here.region[begin : begin + size], remote[:size])


async def kill_during_traffic(pair: Pair, seed: int) -> None:
    """Kill one of two processes at a random moment of traffic; the other one still serves its own memory."""
    chance = random.Random(seed)
    async with pair() as both, end(queue_pairs=5) as here:
        index = chance.randrange(2)
        victim, survivor = both[index], both[1 - index]
        remotes = [await each.register("r", 1 << 18) for each in both]
        for qp in here.qps[:2]:
            await victim.connect(qp, timeout=10, retry_cnt=2)
        for qp in here.qps[2:]:
            await survivor.connect(qp)
        tasks = [asyncio.create_task(traffic(here, each, remotes, chance.getrandbits(32))) for each in range(4)]
        await asyncio.sleep(chance.random() * 0.05)
        await victim.kill()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), patience(20))
        assert all(isinstance(each, WorkCompletionError | BrokenResourceError) for each in found), found
        assert {each.status for each in found[2:] if isinstance(each, WorkCompletionError)} == {WcStatus.REM_ACCESS_ERR}
        own = remotes[1 - index]
        await check_remote_access(here, here.qps[4], survivor, "r", own)
        await survivor.call("close r")
        assert await survivor.register("r", 1 << 18)
        await survivor.call("close r")
        assert len(here.region.pins) == 0


@pytest.mark.parametrize("seed", range(2))
async def test_kill_during_traffic(pair: Pair, direct: bool, seed: int) -> None:
    await kill_during_traffic(pair, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_fifty_kills_during_traffic(pair: Pair, direct: bool) -> None:
    for seed in range(100, 150):
        await kill_during_traffic(pair, seed)


async def test_closing_both_instances_at_once_removes_the_domain(pair: Pair) -> None:
    async with pair() as (first, second):
        await asyncio.gather(first.register("a", 4096), second.register("b", 4096))
        await asyncio.gather(*(each.call("close pd") for each in (first, second)))
        with pytest.raises(CommandFailed, match="ENOENT"):
            await second.open_instance()
        await second.call("close device")
        assert [await each.call("leftovers") for each in (first, second)] == ["nothing"] * 2
