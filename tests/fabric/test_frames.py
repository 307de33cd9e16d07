"""Frames that are lost, duplicated, late or reordered, streams that are cut, and silent peers.

Reliable queue pairs recover with intact data and each request done once, or report a failure within their timeout and
retries; unreliable ones lose whole messages.
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
FRAME_KINDS = software.FaultPlan.frames
FAULTS: dict[str, Callable[..., None]] = {
    "drop": software.FaultPlan.drop_frames,
    "duplicate": software.FaultPlan.duplicate_frames,
    "delay": lambda plan, *arguments, **more: plan.delay_frames(3 * MS, *arguments, **more),
    "late": lambda plan, *arguments, **more: plan.delay_frames(40 * MS, *arguments, **more),  # past the retransmission
    "cut": software.FaultPlan.cut_at_frames,
}
# Faults after which a request is sent again once its timeout has passed.
NEEDS_RETRANSMISSION = ("drop", "delay", "late", "cut")


@dataclass
class Scene:
    """A connected pair, and memory on both sides in which every 8 bytes have a unique value."""

    pair: Ends
    local: MemoryRegion
    remote: MemoryRegion

    def plan(self, kind: FrameKind) -> software.FaultPlan:
        """Return the fault plan of the side that handles frames of this kind for requests of near."""
        device = self.pair.device if kind in ("request_out", "answer_in") else remote_device(self.pair.device)
        return device.faults

    @property
    def plans(self) -> tuple[software.FaultPlan, software.FaultPlan]:
        return self.plan("request_out"), self.plan("request_in")

    def clear(self) -> None:
        for plan in self.plans:
            plan.clear()

    def refused(self) -> int:
        """Return the number of streams closed because of invalid frames."""
        return sum(plan.context.fabric().refused_frames for plan in self.plans)

    def part(self, at: int, length: int) -> tuple[RegionSlice, RemoteRegion]:
        return self.local[at : at + length], self.remote.remote()[at : at + length]


def pattern(seed: int, length: int) -> bytes:
    return words(seed << 32, length)


@asynccontextmanager
async def scene(device: Device, qp_type: QpType = QpType.RC, **attributes: Any) -> AsyncIterator[Scene]:
    """Open a connected pair between devices that are linked already, so that timeouts cover only the requests.

    :param attributes: of the connection: QUICK if a request is to be retransmitted, or to fail for lack of an answer.
    """
    async with (
        ends(device) as first,
        ends(device, qp_type, **attributes) as pair,
        pair.domain.register(2 * SIZE, ACCESS) as local,
        pair.remote_domain.register(2 * SIZE, ACCESS) as remote,
    ):
        await first.write(b"at last!")
        opened = Scene(pair, local, remote)
        refused = opened.refused()
        try:
            yield opened
            assert opened.refused() == refused, "frames were refused between honest peers"
        finally:
            opened.clear()
            for qp in (pair.near, pair.far):  # afterwards no data is written to this memory
                if qp.query().qp_state is not QpState.RESET:
                    qp.to_error()
            await until(pair.is_idle)


SIZES = (8, 4096, 4096, 70_000, 8, 300_000)
MESSAGES = 12


async def run_traffic(here: Scene, seed: int) -> None:
    """Post all kinds of requests at once, and check that the results are those of a network without faults."""
    near, local, remote = here.pair.near, here.local, here.remote
    written = pattern(seed, SIZE)
    local.buffer[:SIZE] = written
    local.buffer[SIZE:] = bytes(SIZE)
    remote.buffer[:SIZE] = bytes(SIZE)
    remote.buffer[SIZE:] = pattern(seed + 1, SIZE)
    remote.buffer[:8] = bytes(8)
    received = [here.pair.receive(here.pair.target[32 * n : 32 * n + 32]) for n in range(MESSAGES)]
    operations: list[Operation[Any]] = []
    adds: list[Operation[int]] = []
    at = 8
    for number in range(MESSAGES):
        size = SIZES[number % len(SIZES)]
        if at + size <= SIZE:
            operations.append(near.write(*here.part(at, size), **here.pair.addressing))
            operations.append(near.read(*here.part(SIZE + at, size), **here.pair.addressing))
            at += size
        adds.append(near.fetch_and_add(remote.remote()[:8], 1, **here.pair.addressing))
        here.pair.source.buffer[32 * number : 32 * number + 32] = pattern(seed + number, 32)
        operations.append(near.send(here.pair.source[32 * number : 32 * number + 32], **here.pair.addressing))
    for each in operations:
        await each
    assert [await each for each in adds] == list(range(MESSAGES)), "each atomic is executed once, in order"
    messages = [bytes((await each).data) for each in received]
    assert messages == [pattern(seed + number, 32) for number in range(MESSAGES)]
    assert bytes(remote.buffer[:8]) == MESSAGES.to_bytes(8, "little")
    assert bytes(remote.buffer[8:at]) == written[8:at]
    assert bytes(remote.buffer[at:SIZE]) == bytes(SIZE - at)
    assert bytes(local.buffer[SIZE + 8 : SIZE + at]) == pattern(seed + 1, SIZE)[8:at]


@pytest.mark.parametrize("kind", FRAME_KINDS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_requests_recover_from_frame_faults(device: Device, fault: str, kind: FrameKind) -> None:
    async with scene(device, **(QUICK if fault in NEEDS_RETRANSMISSION else {})) as here:
        await run_traffic(here, 0)
        plan = here.plan(kind)
        for number, selection in enumerate(
            ({"first": 1}, {"first": 2}, {"first": 9}, {"first": 3, "every": 4, "times": 3})
        ):
            before = len(plan.records())
            FAULTS[fault](plan, kind, **selection)
            await asyncio.wait_for(run_traffic(here, 100 * number), patience(20))
            records = plan.records()[before:]
            assert {(record.kind, record.value) for record in records} == {
                ("delay" if fault == "late" else fault, kind)
            }
        assert here.pair.near.query().qp_state is QpState.RTS


@pytest.mark.parametrize("fault", FAULTS)
async def test_xrc_requests_recover_from_frame_faults(device: Device, fault: str) -> None:
    async with scene(device, QpType.XRC_SEND, **(QUICK if fault in NEEDS_RETRANSMISSION else {})) as here:
        for kind in FRAME_KINDS:
            FAULTS[fault](here.plan(kind), kind, first=2, every=5, times=2)
            await asyncio.wait_for(run_traffic(here, 7), patience(20))


@pytest.mark.every_way
async def test_large_writes_are_repeated_in_parts(device: Device) -> None:
    """Post more large writes than the peer may copy at once: the last go through the socket, and a part is lost."""
    async with scene(device, **QUICK) as here:
        size, count = 256 << 10, 20
        near, far = here.plans
        far.delay_frames(4 * MS, "answer_out", times=0)
        near.drop_frames("request_out", first=18, times=1)
        here.local.buffer[:] = pattern(3, 2 * SIZE)
        async with here.pair.remote_domain.register(count * size, ACCESS) as large:
            operations = [
                here.pair.near.write(here.local[8 * n : 8 * n + size], large.remote()[n * size : (n + 1) * size])
                for n in range(count)
            ]
            for each in operations:
                await asyncio.wait_for(each, patience(20))
            for number in range(count):
                assert (
                    large.buffer[number * size : (number + 1) * size]
                    == here.local.buffer[8 * number : 8 * number + size]
                )
        assert [record.ordinal for record in near.records()] == [18]


# ---- Silence and cuts


async def check_timeout(here: Scene) -> None:
    """Check that a write fails after all retransmissions, and not long after."""
    started = time.monotonic()
    with pytest.raises(WorkCompletionError) as caught:
        await asyncio.wait_for(here.pair.near.write(*here.part(0, 8)), patience(20))
    assert caught.value.status is WcStatus.RETRY_EXC_ERR
    assert 8 * 0.0335 < time.monotonic() - started < patience(2)


def reconnect(pair: Ends) -> None:
    for qp in (pair.near, pair.far):
        qp.to_error()
        qp.to_reset()
    pair.connect(**QUICK)


@pytest.mark.parametrize("side", ["near", "far"])
@pytest.mark.every_way
async def test_a_request_to_a_silent_peer_times_out(device: Device, side: str) -> None:
    async with scene(device, **QUICK) as here:
        await here.pair.near.write(*here.part(0, 8))
        plan = here.plans[side == "far"]
        assert plan.stall_streams(bytes(16)) == 0  # no such peer exists
        assert plan.stall_streams() == 1
        await check_timeout(here)
        assert here.pair.near.query().qp_state is QpState.ERR
        assert plan.stall_streams(on=False) == 1
        reconnect(here.pair)
        await run_traffic(here, 5)


@pytest.mark.every_way
async def test_requests_survive_a_peer_that_is_silent_for_a_while(device: Device) -> None:
    async with scene(device) as here:
        await here.pair.near.write(*here.part(0, 8))
        for plan in here.plans:
            operations = asyncio.ensure_future(run_traffic(here, 11))
            plan.stall_streams()
            await asyncio.sleep(0.02)
            assert not operations.done()
            plan.stall_streams(on=False)
            await asyncio.wait_for(operations, patience(20))


@pytest.mark.every_way
async def test_cut_streams_are_reconnected(device: Device) -> None:
    async with scene(device, **QUICK) as here:
        for times, plan in enumerate((*here.plans, *here.plans)):
            operations = asyncio.ensure_future(run_traffic(here, times))
            while not any(peer.connected for peer in device.peers()):  # noqa: ASYNC110  (no notification exists)
                await asyncio.sleep(0)
            assert plan.cut_streams(bytes(15) + b"x") == 0
            assert plan.cut_streams() >= 1
            await asyncio.wait_for(operations, patience(20))
        (peer,) = (each for each in device.peers() if each.connected_by_us and each.connected)
        assert peer.connections > 1


async def test_a_request_times_out_when_each_stream_is_cut(device: Device) -> None:
    async with scene(device, **QUICK) as here:
        await here.pair.near.write(*here.part(0, 8))
        here.plans[0].cut_at_frames("request_out", times=0)
        await check_timeout(here)


async def test_a_request_times_out_when_all_frames_are_lost(device: Device) -> None:
    """Drop all frames of one kind: a request whose answer is lost may have been executed."""
    for kind in FRAME_KINDS:
        async with scene(device, **QUICK) as here:
            here.local.buffer[:8] = kind[:8].encode()
            here.plan(kind).drop_frames(kind, times=0)
            await check_timeout(here)
            done = bytes(here.remote.buffer[:8]) == bytes(here.local.buffer[:8])
            assert done == kind.startswith("answer")


# ---- Scope of rules


async def test_a_rule_applies_to_one_queue_pair_or_peer(device: Device) -> None:
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


async def test_the_oldest_matching_rule_applies(device: Device) -> None:
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


# ---- Unreliable queue pairs


async def receive_messages(here: Scene, count: int, expected: int) -> list[bytes]:
    """Send messages, wait until `expected` have arrived and no more arrive, and return them sorted."""
    target = here.pair.target
    received = [here.pair.receive(target[64 * n : 64 * n + 64]) for n in range(16)]
    for number in range(count):
        here.pair.source.buffer[8 * number : 8 * number + 8] = pattern(number, 8)
        await here.pair.near.send(here.pair.source[8 * number : 8 * number + 8], **here.pair.addressing)
    waiting = {asyncio.ensure_future(_received_data(each)) for each in received}
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


async def _received_data(receive: Operation[Any]) -> bytes:
    return bytes((await receive).data)


@pytest.mark.parametrize("qp_type", [QpType.UC, QpType.UD], ids=lambda qp_type: qp_type.name)
@pytest.mark.parametrize(
    ("fault", "arrived"),
    [("drop", [0, 2, 3]), ("duplicate", [0, 1, 1, 2, 3]), ("delay", [0, 1, 2, 3]), ("cut", [0])],
)
async def test_unreliable_messages_arrive_whole_or_not_at_all(
    device: Device, qp_type: QpType, fault: str, arrived: list[int]
) -> None:
    """A send completes once it is sent; messages arrive whole or not at all."""
    async with scene(device, qp_type) as here:
        FAULTS[fault](here.plans[1], "request_in", first=2)
        messages = await receive_messages(here, 4, len(arrived))
        assert here.pair.near.query().qp_state is QpState.RTS
        if fault == "cut":  # messages sent before the cut is noticed are lost, too
            assert pattern(0, 8) in messages
            assert pattern(1, 8) not in messages
        else:
            assert messages == [pattern(number, 8) for number in arrived]


@pytest.mark.every_way
async def test_an_unreliable_message_that_lost_a_frame_is_not_received(device: Device) -> None:
    """Drop one of the frames of a message on an unreliable connection."""
    async with scene(device, QpType.UC) as here:
        here.local.buffer[:] = pattern(9, 2 * SIZE)
        for lost in (1, 2, 4):
            receive = here.pair.far.receive(here.remote[:SIZE])
            here.plans[0].drop_frames("request_out", first=lost)
            await here.pair.near.send(here.local[: SIZE // 2])
            receiving = asyncio.ensure_future(_received_data(receive))
            async with asyncio.timeout(patience(10)):
                # The next message may be lost, too, while far is blocked behind so much data.
                while not receiving.done():
                    await here.pair.near.send(here.local[SIZE : SIZE + 4096])
                    await asyncio.wait([receiving], timeout=0.5)
            assert await receiving == bytes(here.local.buffer[SIZE : SIZE + 4096])


async def test_memory_for_delayed_frames_is_bounded(device: Device) -> None:
    """4 MiB of delayed frames are kept, that is 31 frames of 128 KiB with their headers; further ones are lost."""
    async with scene(device, QpType.UC) as here:
        here.plans[0].delay_frames(500 * MS, "request_out", times=0)  # all are sent before the first is released
        part = 128 << 10
        here.local.buffer[:] = pattern(1, 2 * SIZE)
        async with here.pair.remote_domain.register(40 * part, ACCESS) as large:
            for number in range(40):
                await here.pair.near.write(here.local[:part], large.remote()[number * part : (number + 1) * part])
            assert len(here.plans[0].records()) == 40
            await until(lambda: large.buffer[30 * part : 31 * part] == here.local.buffer[:part])
            assert bytes(large.buffer[31 * part :]) == bytes(9 * part)


async def test_a_seed_determines_the_lost_requests(device: Device) -> None:
    """The seed alone decides which requests are lost."""
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


# ---- Random combinations


@dataclass(frozen=True)
class Rule:
    fault: str
    kind: FrameKind
    selection: tuple[int, int, int]


RULES = st.builds(
    Rule,
    st.sampled_from(list(FAULTS)),
    st.sampled_from(FRAME_KINDS),
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


async def check_recovery(rules: list[Rule], chances: dict[str, int], seed: int) -> None:
    """Check that all requests succeed under these faults, or fail with one of two statuses."""
    async with open_device("soft0") as near, open_device(FAR_NAME) as far:
        remote_devices[near] = far
        try:
            async with scene(near, **QUICK) as here:
                for plan in here.plans:
                    plan.seed(seed)
                    plan.disturb_frames_at_random(**chances)
                for rule in rules:
                    first, every, times = rule.selection
                    FAULTS[rule.fault](here.plan(rule.kind), rule.kind, first=first, every=every, times=times)
                for number in range(3):
                    try:
                        await asyncio.wait_for(run_traffic(here, number), patience(20))
                    except WorkCompletionError as error:
                        # A request flushed by a failure may be awaited before the one that failed.
                        assert error.status in (WcStatus.RETRY_EXC_ERR, WcStatus.WR_FLUSH_ERR)  # noqa: PT017
                        break
        finally:
            del remote_devices[near]


FAR_NAME = f"soft0@{own_address()}:7476"  # its own number; the devices find each other by their Unix sockets


@pytest.mark.parametrize("loop", LOOP_FACTORIES)
@pytest.mark.parametrize("direct", ["0", "1"])
@settings(max_examples=fewer(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rules=st.lists(RULES, max_size=4), chances=CHANCES, seed=st.integers(0, 1000))
def test_random_faults_are_recovered_or_reported(
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
        runner.run(check_recovery(rules, chances, seed))
