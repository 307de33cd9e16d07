"""What a network does to frames: lost, twice, late and out of order, streams cut and peers silent.

Reliable queue pairs get over it with their data intact, each thing done once, or tell within their timeout and retries;
unreliable ones lose whole messages.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from aioverbs import (
    Device,
    MemoryRegion,
    QpState,
    QpType,
    RegionSlice,
    RemoteRegion,
    WcStatus,
    WorkCompletionError,
    open_device,
)
from aioverbs._core.data_path.data_path import Operation
from aioverbs._core.software import software
from aioverbs.attributes import FrameKind
from tests.conftest import LOOP_FACTORIES
from tests.data_path.ends import ACCESS, Ends, ends
from tests.devices import remote_device, remote_devices
from tests.fabric.words import words
from tests.listening import own_address
from tests.pace import fewer, patience
from tests.waiting import until

SIZE = 1 << 20
QUICK: dict[str, Any] = {"timeout": 13, "retry_cnt": 7, "rnr_retry": 7}  # 34 ms, eight times
MS = 1_000_000
KINDS = software.FaultPlan.frames
MISHAPS: dict[str, Callable[..., None]] = {
    "drop": software.FaultPlan.drop_frames,
    "duplicate": software.FaultPlan.duplicate_frames,
    "delay": lambda plan, *arguments, **more: plan.delay_frames(3 * MS, *arguments, **more),
    "late": lambda plan, *arguments, **more: plan.delay_frames(40 * MS, *arguments, **more),  # it is repeated before
    "cut": software.FaultPlan.cut_at_frames,
}
SENT_AGAIN = ("drop", "delay", "late", "cut")  # what these strike, or what overtook it, when its time is over


@dataclass
class Scene:
    """Near asks; both have memory in which each 8 bytes are their own."""

    pair: Ends
    local: MemoryRegion
    remote: MemoryRegion

    def plan(self, kind: FrameKind) -> software.FaultPlan:
        """Of the side that has such frames of near's requests."""
        device = self.pair.device if kind in ("request_out", "answer_in") else remote_device(self.pair.device)
        return device.faults

    @property
    def plans(self) -> tuple[software.FaultPlan, software.FaultPlan]:
        return self.plan("request_out"), self.plan("request_in")

    def clear(self) -> None:
        for plan in self.plans:
            plan.clear()

    def refused(self) -> int:
        """How many streams were closed for what came over them."""
        return sum(plan.context.fabric().refused_frames for plan in self.plans)

    def part(self, at: int, length: int) -> tuple[RegionSlice, RemoteRegion]:
        return self.local[at : at + length], self.remote.remote()[at : at + length]


def pattern(seed: int, length: int) -> bytes:
    return words(seed << 32, length)


@asynccontextmanager
async def scene(device: Device, qp_type: QpType = QpType.RC, **attributes: Any) -> AsyncIterator[Scene]:
    """Near's device has reached far's before: near's time is that of its requests alone.

    :param attributes: QUICK where something is sent again, or nobody answers.
    """
    async with (
        ends(device) as first,
        ends(device, qp_type, **attributes) as pair,
        pair.domain.register(2 * SIZE, ACCESS) as local,
        pair.far_domain.register(2 * SIZE, ACCESS) as remote,
    ):
        await first.write(b"at last!")
        made = Scene(pair, local, remote)
        refused = made.refused()
        try:
            yield made
            assert made.refused() == refused, "both are honest"
        finally:
            made.clear()
            for qp in (pair.near, pair.far):  # nothing comes into this memory any more
                if qp.query().qp_state is not QpState.RESET:
                    qp.to_error()
            await until(pair.nothing_is_left)


SIZES = (8, 4096, 4096, 70_000, 8, 300_000)
MESSAGES = 12


async def work(here: Scene, seed: int) -> None:
    """All kinds of requests, posted at once; then all is as it would be without any mishap."""
    near, local, remote = here.pair.near, here.local, here.remote
    written = pattern(seed, SIZE)
    local.buffer[:SIZE] = written
    local.buffer[SIZE:] = bytes(SIZE)
    remote.buffer[:SIZE] = bytes(SIZE)
    remote.buffer[SIZE:] = pattern(seed + 1, SIZE)
    remote.buffer[:8] = bytes(8)
    received = [here.pair.receive(here.pair.target[32 * n : 32 * n + 32]) for n in range(MESSAGES)]
    asked: list[Operation[Any]] = []
    adding: list[Operation[int]] = []
    at = 8
    for number in range(MESSAGES):
        size = SIZES[number % len(SIZES)]
        if at + size <= SIZE:
            asked.append(near.write(*here.part(at, size), **here.pair.way))
            asked.append(near.read(*here.part(SIZE + at, size), **here.pair.way))
            at += size
        adding.append(near.fetch_and_add(remote.remote()[:8], 1, **here.pair.way))
        here.pair.source.buffer[32 * number : 32 * number + 32] = pattern(seed + number, 32)
        asked.append(near.send(here.pair.source[32 * number : 32 * number + 32], **here.pair.way))
    for each in asked:
        await each
    assert [await each for each in adding] == list(range(MESSAGES)), "each atomic is done once, in its turn"
    messages = [bytes((await each).data) for each in received]
    assert messages == [pattern(seed + number, 32) for number in range(MESSAGES)]
    assert bytes(remote.buffer[:8]) == MESSAGES.to_bytes(8, "little")
    assert bytes(remote.buffer[8:at]) == written[8:at]
    assert bytes(remote.buffer[at:SIZE]) == bytes(SIZE - at)
    assert bytes(local.buffer[SIZE + 8 : SIZE + at]) == pattern(seed + 1, SIZE)[8:at]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mishap", MISHAPS)
async def test_mishaps_of_frames_are_made_good(device: Device, mishap: str, kind: FrameKind) -> None:
    async with scene(device, **(QUICK if mishap in SENT_AGAIN else {})) as here:
        await work(here, 0)
        plan = here.plan(kind)
        for number, strike in enumerate(
            ({"first": 1}, {"first": 2}, {"first": 9}, {"first": 3, "every": 4, "times": 3})
        ):
            before = len(plan.records())
            MISHAPS[mishap](plan, kind, **strike)
            await asyncio.wait_for(work(here, 100 * number), patience(20))
            records = plan.records()[before:]
            assert {(record.kind, record.value) for record in records} == {
                ("delay" if mishap == "late" else mishap, kind)
            }
        assert here.pair.near.query().qp_state is QpState.RTS


@pytest.mark.parametrize("mishap", MISHAPS)
async def test_mishaps_of_frames_are_made_good_with_xrc(device: Device, mishap: str) -> None:
    async with scene(device, QpType.XRC_SEND, **(QUICK if mishap in SENT_AGAIN else {})) as here:
        for kind in KINDS:
            MISHAPS[mishap](here.plan(kind), kind, first=2, every=5, times=2)
            await asyncio.wait_for(work(here, 7), patience(20))


@pytest.mark.every_way
async def test_what_was_done_in_parts_is_repeated_in_parts(device: Device) -> None:
    """More large writes than the peer may move at once: the last ones go through the socket, and a part is lost."""
    async with scene(device, **QUICK) as here:
        size, count = 256 << 10, 20
        near, far = here.plans
        far.delay_frames(4 * MS, "answer_out", times=0)
        near.drop_frames("request_out", first=18, times=1)
        here.local.buffer[:] = pattern(3, 2 * SIZE)
        async with here.pair.far_domain.register(count * size, ACCESS) as large:
            asked = [
                here.pair.near.write(here.local[8 * n : 8 * n + size], large.remote()[n * size : (n + 1) * size])
                for n in range(count)
            ]
            for each in asked:
                await asyncio.wait_for(each, patience(20))
            for number in range(count):
                assert (
                    large.buffer[number * size : (number + 1) * size]
                    == here.local.buffer[8 * number : 8 * number + size]
                )
        assert [record.ordinal for record in near.records()] == [18]


# ---- Silence and cuts


async def fails_in_time(here: Scene) -> None:
    """Not before all repetitions, and not long after."""
    begun = time.monotonic()
    with pytest.raises(WorkCompletionError) as caught:
        await asyncio.wait_for(here.pair.near.write(*here.part(0, 8)), patience(20))
    assert caught.value.status is WcStatus.RETRY_EXC_ERR
    assert 8 * 0.0335 < time.monotonic() - begun < patience(2)


def connect_again(pair: Ends) -> None:
    for qp in (pair.near, pair.far):
        qp.to_error()
        qp.to_reset()
    pair.connect(**QUICK)


@pytest.mark.parametrize("side", ["near", "far"])
@pytest.mark.every_way
async def test_a_request_fails_in_time_where_the_peer_is_silent(device: Device, side: str) -> None:
    async with scene(device, **QUICK) as here:
        await here.pair.near.write(*here.part(0, 8))
        plan = here.plans[side == "far"]
        assert plan.stall_streams(bytes(16)) == 0  # there is no such peer
        assert plan.stall_streams() == 1
        await fails_in_time(here)
        assert here.pair.near.query().qp_state is QpState.ERR
        assert plan.stall_streams(on=False) == 1
        connect_again(here.pair)
        await work(here, 5)


@pytest.mark.every_way
async def test_requests_wait_for_a_peer_that_is_silent_for_a_while(device: Device) -> None:
    async with scene(device) as here:
        await here.pair.near.write(*here.part(0, 8))
        for plan in here.plans:
            asked = asyncio.ensure_future(work(here, 11))
            plan.stall_streams()
            await asyncio.sleep(0.02)
            assert not asked.done()
            plan.stall_streams(on=False)
            await asyncio.wait_for(asked, patience(20))


@pytest.mark.every_way
async def test_streams_that_are_cut_are_connected_again(device: Device) -> None:
    async with scene(device, **QUICK) as here:
        for times, plan in enumerate((*here.plans, *here.plans)):
            asked = asyncio.ensure_future(work(here, times))
            while not any(peer.connected for peer in device.peers()):  # noqa: ASYNC110  (nobody tells)
                await asyncio.sleep(0)
            assert plan.cut_streams(bytes(15) + b"x") == 0
            assert plan.cut_streams() >= 1
            await asyncio.wait_for(asked, patience(20))
        (peer,) = (each for each in device.peers() if each.connected_by_us and each.connected)
        assert peer.connections > 1


async def test_a_request_fails_in_time_where_each_stream_is_cut(device: Device) -> None:
    async with scene(device, **QUICK) as here:
        await here.pair.near.write(*here.part(0, 8))
        here.plans[0].cut_at_frames("request_out", times=0)
        await fails_in_time(here)


async def test_a_request_fails_in_time_where_all_frames_are_lost(device: Device) -> None:
    """Of any kind, for good: what nobody answers may have been done."""
    for kind in KINDS:
        async with scene(device, **QUICK) as here:
            here.local.buffer[:8] = kind[:8].encode()
            here.plan(kind).drop_frames(kind, times=0)
            await fails_in_time(here)
            done = bytes(here.remote.buffer[:8]) == bytes(here.local.buffer[:8])
            assert done == kind.startswith("answer")


# ---- Whose frames


async def test_a_rule_is_for_one_queue_pair_or_peer(device: Device) -> None:
    async with scene(device, **QUICK) as here, ends(device) as other:
        plan = here.plans[0]
        there = here.pair.far.local_endpoint().gid
        plan.drop_frames("request_out", here.pair.near.handle)
        await other.write(b"12345678")
        assert plan.records() == []
        await here.pair.near.write(*here.part(0, 8))
        number = here.pair.near.handle.qp_num
        assert plan.records() == [("drop", number, 1, "request_out")]
        plan.duplicate_frames("answer_in", peer=here.pair.near.local_endpoint().gid, times=0)
        plan.delay_frames(1, "answer_in", peer=there)
        await here.pair.near.write(*here.part(0, 8))
        assert plan.records()[1:] == [("delay", number, 1, "answer_in")]


async def test_the_oldest_rule_decides(device: Device) -> None:
    async with scene(device) as here:
        plan = here.plans[0]
        plan.duplicate_frames("request_out", first=2)
        plan.drop_frames("request_out", first=2)
        for _ in range(3):
            await here.pair.near.write(*here.part(0, 8))
        assert [record[::2] for record in plan.records()] == [("duplicate", 2)]
        plan.drop_frames("request_out", times=0)
        plan.clear()
        await here.pair.near.write(*here.part(0, 8))
        assert len(plan.records()) == 1


# ---- Unreliable ones


async def arrive(here: Scene, count: int, expected: int) -> list[bytes]:
    """What was received when what is expected came, and nothing more does; sorted."""
    target = here.pair.target
    received = [here.pair.receive(target[64 * n : 64 * n + 64]) for n in range(16)]
    for number in range(count):
        here.pair.source.buffer[8 * number : 8 * number + 8] = pattern(number, 8)
        await here.pair.near.send(here.pair.source[8 * number : 8 * number + 8], **here.pair.way)
    waiting = {asyncio.ensure_future(_take(each)) for each in received}
    messages: list[bytes] = []
    while True:
        limit = patience(10) if len(messages) < expected else 0.05
        done, waiting = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        messages += [each.result() for each in done]
    here.pair.far.to_error()
    await asyncio.gather(*waiting, return_exceptions=True)
    here.pair.far.to_reset()
    return sorted(messages)


async def _take(receive: Operation[Any]) -> bytes:
    return bytes((await receive).data)


@pytest.mark.parametrize("qp_type", [QpType.UC, QpType.UD], ids=lambda qp_type: qp_type.name)
@pytest.mark.parametrize(
    ("mishap", "arrived"),
    [("drop", [0, 2, 3]), ("duplicate", [0, 1, 1, 2, 3]), ("delay", [0, 1, 2, 3]), ("cut", [0])],
)
async def test_unreliable_messages_come_whole_or_not_at_all(
    device: Device, qp_type: QpType, mishap: str, arrived: list[int]
) -> None:
    """Whoever sends is told that it is sent, and no more; what comes is whole."""
    async with scene(device, qp_type) as here:
        MISHAPS[mishap](here.plans[1], "request_in", first=2)
        messages = await arrive(here, 4, len(arrived))
        assert here.pair.near.query().qp_state is QpState.RTS
        if mishap == "cut":  # what is sent before that is noticed is lost, too
            assert pattern(0, 8) in messages
            assert pattern(1, 8) not in messages
        else:
            assert messages == [pattern(number, 8) for number in arrived]


@pytest.mark.every_way
async def test_an_unreliable_message_that_lost_a_frame_does_not_come(device: Device) -> None:
    """A message of many frames of an unreliable connection, of which one is lost, is none."""
    async with scene(device, QpType.UC) as here:
        here.local.buffer[:] = pattern(9, 2 * SIZE)
        for lost in (1, 2, 4):
            receive = here.pair.far.receive(here.remote[:SIZE])
            here.plans[0].drop_frames("request_out", first=lost)
            await here.pair.near.send(here.local[: SIZE // 2])
            hearing = asyncio.ensure_future(_take(receive))
            async with asyncio.timeout(patience(10)):
                while not hearing.done():  # behind so much data that may be lost, too, where far stands still
                    await here.pair.near.send(here.local[SIZE : SIZE + 4096])
                    await asyncio.wait([hearing], timeout=0.5)
            assert await hearing == bytes(here.local.buffer[SIZE : SIZE + 4096])


async def test_memory_for_what_is_late_is_bounded(device: Device) -> None:
    """4 MiB of it are kept, which are 31 frames of 128 KiB with their heads; others are lost."""
    async with scene(device, QpType.UC) as here:
        here.plans[0].delay_frames(500 * MS, "request_out", times=0)  # all are sent before the first one goes
        part = 128 << 10
        here.local.buffer[:] = pattern(1, 2 * SIZE)
        async with here.pair.far_domain.register(40 * part, ACCESS) as large:
            for number in range(40):
                await here.pair.near.write(here.local[:part], large.remote()[number * part : (number + 1) * part])
            assert len(here.plans[0].records()) == 40
            await until(lambda: large.buffer[30 * part : 31 * part] == here.local.buffer[:part])
            assert bytes(large.buffer[31 * part :]) == bytes(9 * part)


async def test_a_seed_chooses_what_is_lost(device: Device) -> None:
    """Which requests are lost is the seed's choice alone."""
    async with scene(device, QpType.UC) as here:
        plan = here.plans[0]

        async def lost(seed: int) -> list[tuple[str, int]]:
            before = len(plan.records())
            plan.seed(seed)
            plan.disturb_frames_at_random(drop=200_000, duplicate=100_000, delay=100_000, max_delay_ns=1000)
            for _ in range(60):
                await here.pair.near.write(*here.part(0, 8))
            plan.disturb_frames_at_random()
            return [(record.kind, record.ordinal) for record in plan.records()[before:]]

        first = await lost(7)
        assert {kind for kind, _ in first} == {"drop", "duplicate", "delay"}
        assert 10 < len(first) < 40
        assert await lost(8) != first
        assert await lost(7) == first


# ---- Anything at once


@dataclass(frozen=True)
class Rule:
    mishap: str
    kind: FrameKind
    strike: tuple[int, int, int]


RULES = st.builds(
    Rule,
    st.sampled_from(list(MISHAPS)),
    st.sampled_from(KINDS),
    st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3)),
)
CHANCES = st.fixed_dictionaries(
    {
        "drop": st.integers(0, 50_000),
        "duplicate": st.integers(0, 100_000),
        "delay": st.integers(0, 100_000),
        "cut": st.integers(0, 5_000),
        "max_delay_ns": st.integers(0, 15 * MS),
    }
)


async def meet(rules: list[Rule], chances: dict[str, int], seed: int) -> None:
    """All of it is done as it should be, or what was not is told by the two statuses that there are for it."""
    async with open_device("soft0") as near, open_device(OTHER) as far:
        remote_devices[near] = far
        try:
            async with scene(near, **QUICK) as here:
                for plan in here.plans:
                    plan.seed(seed)
                    plan.disturb_frames_at_random(**chances)
                for rule in rules:
                    first, every, times = rule.strike
                    MISHAPS[rule.mishap](here.plan(rule.kind), rule.kind, first=first, every=every, times=times)
                for number in range(3):
                    try:
                        await asyncio.wait_for(work(here, number), patience(20))
                    except WorkCompletionError as error:
                        # What failed first may be awaited later than what was flushed by that.
                        assert error.status in (WcStatus.RETRY_EXC_ERR, WcStatus.WR_FLUSH_ERR)  # noqa: PT017
                        break
        finally:
            del remote_devices[near]


OTHER = f"soft0@{own_address()}:7476"  # its own number; both find each other by their Unix sockets


@pytest.mark.parametrize("loop", LOOP_FACTORIES)
@pytest.mark.parametrize("direct", ["0", "1"])
@settings(max_examples=fewer(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rules=st.lists(RULES, max_size=4), chances=CHANCES, seed=st.integers(0, 1000))
def test_mishaps_at_once_are_made_good_or_told(
    loop: str,
    direct: str,
    monkeypatch: pytest.MonkeyPatch,
    short_path: Any,
    rules: list[Rule],
    chances: dict[str, int],
    seed: int,
) -> None:
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", direct)
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(short_path))
    short_path.chmod(0o700)
    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop]) as runner:
        runner.run(meet(rules, chances, seed))
