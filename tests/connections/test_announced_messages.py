"""Long messages, which the receiver reads from the sender's memory; test_copied_messages.py has those from a copy."""

import array
import asyncio
import contextlib
import errno
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from dataclasses import replace
from typing import Any
from unittest import mock

import anyio
import pytest
from hypothesis import given, strategies as st

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    Connection,
    ConnectionSettings,
    Device,
    MemoryRegion,
    QueuePair,
    RemoteRegion,
    VerbsError,
    WcStatus,
    WorkCompletionError,
    connect,
    listen,
)
from aioverbs._connection import announced_messages, announcer, establishment, recycled_memory
from aioverbs._connection.connection import end_of, send_constant_nowait
from aioverbs._connection.credits import max_announced
from aioverbs._connection.handshake import Capabilities
from aioverbs._connection.wire import (
    HAS_IMMEDIATE,
    LAST,
    AnnouncedPart,
    FrameKind,
    GrantNotice,
    header,
    pack_announcement,
    parse_announcement,
)
from aioverbs._core.data_path.data_path import Operation, RegionSlice
from aioverbs._verbs.base_domain import shared_resources_of
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL, Cancel, Pair, deeper, every_way_to_cancel, pair, use_up, works
from tests.connections.test_messages import sample
from tests.garbage import collect_garbage
from tests.holding import hold, unhold
from tests.pace import fewer, patience
from tests.waiting import until

LENGTH = 400_000
DEEP = deeper(SMALL, receive_depth=16)


@pytest.fixture(autouse=True)
def _no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce messages of any length from where they are."""
    monkeypatch.setattr(announcer, "_COPIED_BYTES", 0)


def changeable(seed: int = 0) -> bytearray:
    return bytearray(sample(LENGTH, seed))


def unread(connection: Connection) -> int:
    """Return the number of messages that the peer announced and this end has neither read nor dropped."""
    return len(end_of(connection).channel.receiver.announced._unanswered)


def being_read(connection: Connection) -> announced_messages.AnnouncedMessage | None:
    """Return the message that the peer announced and that this end is reading; None if there is none."""
    messages = end_of(connection).channel.receiver.announced._unanswered.values()
    return next((each for each in messages if each.reading is not None), None)


def is_withdrawn(connection: Connection) -> bool:
    """Return whether the peer has withdrawn the message that this end is reading."""
    message = being_read(connection)
    return message is not None and message.withdrawn


async def finished(connection: Connection) -> None:
    """Wait until the peer has read all messages that this end announced, and their memory is no longer registered."""
    announcer = end_of(connection).announcer
    if announcer is None:  # this end has announced nothing
        return
    async with asyncio.timeout(patience(10)):
        await announcer.wait_answered()
        await until(lambda: not announcer._finishing)


async def settled(ends: Pair) -> None:
    """Check that nothing is left of announced messages at either end, and that the connection works."""
    for connection in (ends.near, ends.far):
        end = end_of(connection)
        await finished(connection)
        assert not end.channel.sender._announced
        assert not end.grants._local_grants
        assert not unread(connection)
        assert not ends.domain.cache._entries or all(each.idle for each in ends.domain.cache._entries.values())
    await works(ends.near, ends.far)


# ---- Messages of every kind, received in every way


async def receive(connection: Connection, how: str) -> bytes:
    """Receive a message by one of the methods, and return its bytes."""
    if how == "receive":
        return await connection.receive()
    if how == "receive_into":
        buffer = bytearray(b"\xff" * (LENGTH * 3))
        length = await connection.receive_into(buffer)
        assert buffer[length:] == b"\xff" * (len(buffer) - length), "bytes behind the message were written"
        return bytes(buffer[:length])
    view = await connection.receive_buffer()
    assert (view.readonly, view.format, view.ndim) == (False, "B", 1)
    view[:1] = view[:1]
    return bytes(view)


HOW = ["receive", "receive_into", "receive_buffer"]
PAYLOADS: dict[str, Any] = {
    "bytes": sample(LENGTH),
    "bytearray": bytearray(sample(LENGTH)),
    "array": array.array("d", range(60_000)),
    "view": memoryview(sample(2 * LENGTH))[17 : LENGTH + 20],
    "as many as possible": [*[b"-", sample(6500)] * 64, b"-"],
    "many": [b"head", bytearray(LENGTH), b"", b"be", b"tween", sample(LENGTH), b"tail"],
    "too many": [sample(6000, each) for each in range(70)],
    "short": b"short",
    "empty": b"",
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("settings", [SMALL, ConnectionSettings()], ids=["small", "usual"])
async def test_messages_of_every_kind(device: Device, settings: ConnectionSettings, how: str) -> None:
    async with pair(device, settings) as ends:
        for payload in PAYLOADS.values():
            expected = b"".join(map(bytes, payload)) if isinstance(payload, list) else bytes(payload)
            for immediate in (None, 5):
                sending = asyncio.create_task(ends.near.send(payload, immediate=immediate))
                assert await receive(ends.far, how) == expected
                await sending
                sending = asyncio.create_task(ends.far.send(payload, immediate=immediate))
                assert await ends.near.receive_with_immediate() == (expected, immediate)
                await sending
        await settled(ends)


async def test_short_parts_are_not_joined_if_they_do_not_fit(device: Device) -> None:
    part = sample(4000)
    async with pair(device) as ends:
        tracemalloc.start()
        try:
            sending = asyncio.create_task(ends.near.send([part] * 250))
            await until(lambda: ends.near.traffic().waits)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert await ends.far.receive() == part * 250
        await sending
        assert peak < len(part) * 250 // 2


@pytest.mark.parametrize("how", ["received", "dropped"])
async def test_an_end_that_closes_answers_first(device: Device, how: str) -> None:
    """Answers to messages leave at the end of the loop's turn, or when the end closes."""
    async with pair(device, ConnectionSettings()) as ends:
        sending = asyncio.create_task(ends.near.send(changeable()))
        await until(lambda: unread(ends.far))
        if how == "received":
            assert await ends.far.receive() == changeable()
        await ends.far.aclose()
        await sending


async def test_order_and_backpressure(device: Device) -> None:
    """Short and long messages of many tasks arrive in the order of sending; of long ones no more are announced than the
    sender has receives for the answers.
    """
    async with pair(device, DEEP) as ends:
        messages = [sample(LENGTH if number % 3 else 10, number) for number in range(20)]
        sending = [asyncio.create_task(ends.near.send(bytearray(message))) for message in messages]
        await until(lambda: unread(ends.far) == max_announced(DEEP.receive_depth))
        for message in messages:
            assert unread(ends.far) <= max_announced(DEEP.receive_depth)
            assert await ends.far.receive() == message
        await asyncio.gather(*sending)
        await settled(ends)


async def test_memory_may_be_changed_when_send_returns(device: Device) -> None:
    async with pair(device) as ends:
        data = changeable()
        sending = asyncio.create_task(ends.near.send(data))
        await until(lambda: unread(ends.far))
        await asyncio.sleep(0.02)
        assert not sending.done(), "the peer has not read it"
        assert await ends.far.receive() == sample(LENGTH)
        await sending
        data[:] = bytes(LENGTH)
        data.extend(b"resized")  # no longer registered for the peer, and not in use
        await settled(ends)


async def test_memory_whose_object_ends_with_the_message_is_not_cached(device: Device) -> None:
    held = bytes(changeable())
    async with pair(device) as ends:
        for payload, hits, misses in ((memoryview(bytes(held[1:])), 0, 0), (held, 0, 1), (memoryview(held), 1, 1)):
            await ends.near.send(payload)
            assert await ends.far.receive() == payload
            await finished(ends.near)
            statistics = ends.domain.cache.statistics()
            assert (statistics.hits, statistics.misses) == (hits, misses)


@pytest.mark.parametrize("data", [sample(LENGTH), changeable()], ids=["window", "registration"])
async def test_a_peer_cannot_read_memory_after_the_message(device: Device, data: bytes | bytearray) -> None:
    async with pair(device) as ends, ends.domain.register(LENGTH) as target:
        sending = asyncio.create_task(ends.near.send(data))
        await until(lambda: unread(ends.far))
        (message,) = end_of(ends.far).channel.receiver.announced._unanswered.values()
        (part,) = message.parts
        await ends.far.receive()
        await sending
        await finished(ends.near)
        with pytest.raises(WorkCompletionError) as caught:
            await ends.far.qp.read(target, RemoteRegion(part.address, part.length, part.rkey))
        assert caught.value.status is WcStatus.REM_ACCESS_ERR


async def test_constant_messages_do_not_wait_for_the_peer_within_a_bound(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "_MAX_UNREAD_BYTES", 2 * LENGTH)
    async with pair(device, DEEP) as ends:
        await ends.near.send(sample(LENGTH, 1))
        await ends.near.send(memoryview(sample(LENGTH, 2)))
        third = asyncio.create_task(ends.near.send(sample(LENGTH, 3)))
        await until(lambda: unread(ends.far) == 3)
        await asyncio.sleep(0.02)
        assert not third.done()
        for number in (1, 2, 3):
            assert await ends.far.receive() == sample(LENGTH, number)
        await third
        await settled(ends)


async def test_an_answer_needs_no_credit(device: Device) -> None:
    """An end that has no credits left receives a long message, although its peer, which waits, reads nothing."""
    async with pair(device) as ends, asyncio.timeout(patience(20)):
        count = await use_up(ends.far)
        for seed in range(5):
            sending = asyncio.create_task(ends.near.send(changeable(seed)))
            assert await ends.far.receive() == sample(LENGTH, seed)
            await sending
        for _ in range(count):
            assert await ends.near.receive() == b"one of them"
        await settled(ends)


async def test_both_ends_have_no_credits(device: Device) -> None:
    async with pair(device, DEEP) as ends, asyncio.timeout(patience(20)):
        counts = await use_up(ends.near), await use_up(ends.far)
        sending = [asyncio.create_task(each.send(changeable())) for each in (ends.near, ends.far)]
        for connection, count in zip((ends.far, ends.near), counts, strict=True):
            for _ in range(count):
                assert await connection.receive() == b"one of them"
            assert await connection.receive() == sample(LENGTH)
        await asyncio.gather(*sending)
        await settled(ends)


@pytest.mark.parametrize("without", [0, 1], ids=["connecting end", "listening end"])
async def test_an_end_that_does_not_announce(device: Device, monkeypatch: pytest.MonkeyPatch, without: int) -> None:
    """Messages go in fragments then, and all receives are credits."""
    offers = 0
    make_offer = establishment._make_offer

    def without_announces(*args: Any) -> Any:
        nonlocal offers
        offer = make_offer(*args)
        offers += 1
        is_chosen = offers == 1 + without
        return replace(offer, capabilities=offer.capabilities & ~Capabilities.ANNOUNCES) if is_chosen else offer

    monkeypatch.setattr(establishment, "_make_offer", without_announces)
    async with pair(device, deeper(DEEP, buffer_size=16 << 10)) as ends:
        assert ends.near.traffic().credits == ends.far.traffic().credits == DEEP.receive_depth
        for one, other in ((ends.near, ends.far), (ends.far, ends.near)):
            sending = asyncio.create_task(one.send(sample(LENGTH)))
            assert await other.receive() == sample(LENGTH)
            await sending
        assert end_of(ends.near).announcer is None


@needs(Capability.FAULT_PLAN)
async def test_memory_that_cannot_be_registered_is_sent_in_fragments(device: Device) -> None:
    async with pair(device) as ends:
        device.faults.fail("reg_mr", errno.ENOMEM)
        sending = asyncio.create_task(ends.near.send(changeable()))
        assert await ends.far.receive() == sample(LENGTH)
        await sending
        await settled(ends)


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("how", ["receive", "receive_buffer"])
@pytest.mark.parametrize("what", ["register", "map"])
async def test_a_receiver_that_has_no_memory_reads_by_pieces(
    device: Device, monkeypatch: pytest.MonkeyPatch, how: str, what: str
) -> None:
    async with pair(device) as ends:
        await ends.near.send([b"head", sample(LENGTH), b"tail"])
        await until(lambda: unread(ends.far))
        if what == "register":
            device.faults.fail("reg_mr", errno.ENOMEM, times=1000)
        else:
            failing = mock.Mock(side_effect=OSError(errno.ENOMEM, "no memory"))
            monkeypatch.setattr(recycled_memory, "map_pages", failing)
        hold(device, ends.far.qp)
        receiving = asyncio.create_task(receive(ends.far, how))
        await until(lambda: being_read(ends.far))
        receiving.cancel()  # the task that reads goes on
        await asyncio.wait([receiving])
        unhold(device, ends.far.qp)
        assert await receive(ends.far, how) == b"head" + sample(LENGTH) + b"tail"
        device.faults.fail("reg_mr", errno.ENOMEM, times=0)
        await settled(ends)


@needs(Capability.FAULT_PLAN)
async def test_a_message_that_is_read_by_pieces_is_withdrawn(device: Device, reading_may_end: asyncio.Event) -> None:
    async with pair(device) as ends:
        sending = asyncio.create_task(ends.near.send(changeable()))
        await until(lambda: unread(ends.far))
        device.faults.fail("reg_mr", errno.ENOMEM)
        receiving = asyncio.create_task(ends.far.receive())
        await until(lambda: being_read(ends.far))
        sending.cancel()
        await until(lambda: is_withdrawn(ends.far))
        assert not sending.done()
        reading_may_end.set()
        await asyncio.wait([sending])
        await ends.near.send(b"next")
        assert await receiving == b"next"
        await settled(ends)


@needs(Capability.FAULT_PLAN)
async def test_a_message_that_cannot_be_read_by_pieces_breaks_the_connection(device: Device) -> None:
    async with talking(device) as (ends, send):
        await send(FrameKind.ANNOUNCE, 1, announcement())
        await until(lambda: unread(ends.far))
        device.faults.fail("reg_mr", errno.ENOMEM)
        for _ in range(2):
            with pytest.raises(BrokenResourceError):
                await ends.far.receive()


@needs(Capability.FAULT_PLAN)
async def test_receive_into_memory_that_cannot_be_registered_loses_no_message(device: Device) -> None:
    async with pair(device) as ends:
        await ends.near.send(sample(LENGTH))
        await until(lambda: unread(ends.far))
        device.faults.fail("reg_mr", errno.ENOMEM)
        with pytest.raises(VerbsError, match="ibv_reg_mr"):
            await receive(ends.far, "receive_into")
        assert await receive(ends.far, "receive_into") == sample(LENGTH)
        await settled(ends)


async def test_a_receiver_that_cannot_deregister_loses_no_message(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at the end of the block of the registration cache, when the message has been read."""
    async with pair(device) as ends:
        receiver = end_of(ends.far).channel.receiver
        region = receiver._cache.region

        @contextlib.asynccontextmanager
        async def failing(buffer: Any) -> AsyncIterator[MemoryRegion]:
            async with region(buffer) as yielded:
                yield yielded
            raise VerbsError("ibv_dereg_mr", errno.EIO)

        await ends.near.send(sample(LENGTH))
        await until(lambda: unread(ends.far))
        with monkeypatch.context() as patch:
            patch.setattr(receiver._cache, "region", failing)
            with pytest.raises(VerbsError, match="ibv_dereg_mr"):
                await receive(ends.far, "receive_into")
        assert await receive(ends.far, "receive_into") == sample(LENGTH)
        await settled(ends)


# ---- Memory of the receiver


@pytest.mark.parametrize("length", [100, LENGTH])
async def test_receive_into_a_buffer_that_is_too_short(device: Device, length: int) -> None:
    async with pair(device) as ends:
        await ends.near.send(sample(length), immediate=3)
        await ends.near.send(b"next")
        for _ in range(2):
            with pytest.raises(ValueError, match=f"the next message has {length:,} bytes, but `buffer` only 99"):
                await ends.far.receive_into(bytearray(99))
        assert await ends.far.receive_with_immediate() == (sample(length), 3)
        assert await ends.far.receive_into(bytearray(4)) == 4
        await ends.near.send(b"")
        assert await ends.far.receive_into(bytearray()) == 0
        for wrong in (b"read-only", memoryview(bytearray(10))[::2], "text"):
            with pytest.raises(TypeError):
                await ends.far.receive_into(wrong)  # type: ignore[arg-type]
        await settled(ends)


@pytest.mark.parametrize("how", ["receive", "receive_into", "receive_buffer"])
async def test_an_interrupt_after_the_answer_hurts_no_later_call(
    device: Device, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A signal handler that raises between the answer and the return loses this message, as it may, and no other."""

    class Interrupt(BaseException):
        pass

    real = announced_messages.AnnouncedMessages.finish

    def finish(self: announced_messages.AnnouncedMessages, message: announced_messages.AnnouncedMessage) -> bool:
        monkeypatch.undo()
        real(self, message)
        raise Interrupt

    async with pair(device) as ends:
        arguments = (bytearray(LENGTH),) if how == "receive_into" else ()
        await ends.near.send(sample(LENGTH, 1))
        monkeypatch.setattr(announced_messages.AnnouncedMessages, "finish", finish)
        with pytest.raises(Interrupt):
            await getattr(ends.far, how)(*arguments)
        await ends.near.send(sample(LENGTH, 2))
        assert await ends.far.receive() == sample(LENGTH, 2)
        await works(ends.near, ends.far)


async def test_memory_of_a_received_buffer_is_its_own(device: Device) -> None:
    async with pair(device) as ends:
        kept = []
        for seed in range(4):
            for length in (100, LENGTH):
                await ends.near.send(sample(length, seed))
                kept.append((await ends.far.receive_buffer())[1:])
        memory = end_of(ends.far).channel.receiver.announced._memory
        assert len(memory._in_use) == 4
        for seed in range(4):
            assert bytes(kept[2 * seed]) == sample(100, seed)[1:]
            assert bytes(kept[2 * seed + 1]) == sample(LENGTH, seed)[1:]
        kept.clear()
        assert not memory._in_use
        assert len(memory._idle) == 4
        await ends.near.send(sample(LENGTH))
        assert await ends.far.receive() == sample(LENGTH)
        assert len(memory._idle) == 4, "the memory is used again"


async def test_idle_memory_is_bounded(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycled_memory, "_MAX_IDLE_BYTES", 2 * LENGTH)
    async with device.resource_domain() as domain:
        memory = recycled_memory.recycled_memory_of(domain)
        taken = [await memory.take(LENGTH) for _ in range(5)]
        regions = [each.region for each, _ in taken]
        taken.clear()
        await until(lambda: sum(each.closed for each in regions) == 4)
        taken = [await memory.take(LENGTH) for _ in range(3)]
        regions = [each.region for each, _ in taken]
        await asyncio.to_thread(taken.clear)
        await until(lambda: sum(each.closed for each in regions) == 2)
        assert sum(map(len, memory._idle)) <= 2 * LENGTH


async def test_memory_above_the_limit_is_kept_for_a_while(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycled_memory, "_MAX_IDLE_BYTES", LENGTH // 2)
    monkeypatch.setattr(recycled_memory, "_KEEP_S", 1000)
    async with device.resource_domain() as domain:
        memory = recycled_memory.recycled_memory_of(domain)
        taken = [await memory.take(LENGTH) for _ in range(2)]
        first, last = (each.region for each, _ in taken)
        while taken:
            del taken[0]
        await until(lambda: first.closed)
        await until(lambda: memory._trimming is not None and memory._trimming.done())
        taken = [await memory.take(LENGTH)]
        assert taken[0][0].region is last
        monkeypatch.setattr(recycled_memory, "_KEEP_S", 0)
        taken.clear()
        memory._stop_waiting(asyncio.get_running_loop())  # as the timer does
        await until(lambda: last.closed)
        assert not memory._idle


async def test_memory_that_is_kept_for_a_while_waits_for_one_timer(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recycled_memory, "_MAX_IDLE_BYTES", LENGTH // 2)
    monkeypatch.setattr(recycled_memory, "_KEEP_S", 0.05)
    stop_waiting, timers = recycled_memory.RecycledMemory._stop_waiting, 0

    def count(self: recycled_memory.RecycledMemory, loop: asyncio.AbstractEventLoop) -> None:
        nonlocal timers
        timers += 1
        stop_waiting(self, loop)

    monkeypatch.setattr(recycled_memory.RecycledMemory, "_stop_waiting", count)
    async with device.resource_domain() as domain:
        memory = recycled_memory.recycled_memory_of(domain)
        for _ in range(20):
            taken = [await memory.take(LENGTH)]
            taken.clear()
            await asyncio.sleep(0)
        await until(lambda: not memory._idle)
        assert timers < 10


async def test_memory_is_not_kept_when_the_loop_that_waits_has_ended(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recycled_memory, "_MAX_IDLE_BYTES", LENGTH // 2)
    async with device.protection_domain() as pd:
        memory = recycled_memory.recycled_memory_of(pd)

        async def use() -> MemoryRegion:
            taken = [await memory.take(LENGTH)]
            region = taken[0][0].region
            taken.clear()
            await until(lambda: memory._waiting is not None)
            return region

        region = await asyncio.to_thread(asyncio.run, use())
        await asyncio.sleep(0.01)
        assert not region.closed
        monkeypatch.setattr(recycled_memory, "_KEEP_S", 0)
        _ = await memory.take(100)
        await until(lambda: region.closed)


async def test_memory_of_longer_messages_is_not_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycled_memory, "_MAX_IDLE_BYTES", LENGTH // 2)
    monkeypatch.setattr(recycled_memory, "_MAX_RECENT_BYTES", LENGTH // 2)
    async with device.resource_domain() as domain:
        memory = recycled_memory.recycled_memory_of(domain)
        taken = [await memory.take(LENGTH)]
        region = taken[0][0].region
        taken.clear()
        await until(lambda: region.closed)


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_idle_memory_makes_room_for_other_sizes(device: Device, count: int) -> None:
    """The memory that was not used for the longest time is given back first, and no more than necessary."""
    async with device.resource_domain() as domain:
        memory = recycled_memory.recycled_memory_of(domain)
        taken = [await memory.take(length * LENGTH) for length in (1, 2)]
        regions = [each.region for each, _ in taken]
        while taken:
            del taken[0]
        device.faults.fail("reg_mr", errno.ENOMEM, times=count)
        if count < 3:
            assert len((await memory.take(3 * LENGTH))[1]) == 3 * LENGTH
        else:
            with pytest.raises(VerbsError, match="ibv_reg_mr"):
                await memory.take(3 * LENGTH)
        assert [each.closed for each in regions] == [True, count > 1]


def test_memory_of_closed_loops_is_used_again(device: Device) -> None:
    """A protection domain may outlive many loops. A message that outlives its loop stays as it is."""
    pd = device.protection_domain()
    kept: list[memoryview] = []

    async def receive_buffer(seed: int) -> None:
        if not seed:
            await pd.open()
        async with device.resource_domain(pd) as domain, listen(HOST, domain=domain, settings=SMALL) as listener:
            near = await connect(HOST, listener.port, domain=domain, settings=SMALL)
            far = await listener.accept()
            await near.send(sample(LENGTH, seed))
            message = await far.receive_buffer()
            assert bytes(message) == sample(LENGTH, seed)
            if seed == 1:
                kept.append(message)
            near.abort()
            far.abort()

    for seed in range(4):
        asyncio.run(receive_buffer(seed))
        collect_garbage()
    (memory,) = (each for each in shared_resources_of(pd).values() if isinstance(each, recycled_memory.RecycledMemory))
    assert (len(memory._idle), len(memory._in_use)) == (1, 1)
    assert bytes(kept[0]) == sample(LENGTH, 1)
    kept.clear()
    assert (len(memory._idle), len(memory._in_use)) == (2, 0)
    asyncio.run(pd.aclose())


async def test_memory_is_shared_by_loops_at_the_same_time(device: Device) -> None:
    async with device.resource_domain() as domain:
        memory = recycled_memory.recycled_memory_of(domain)
        assert recycled_memory.recycled_memory_of(domain) is memory

        async def use(seed: int) -> None:
            for _ in range(fewer(200)):
                _, view = await memory.take(LENGTH)
                view[:] = bytes([seed]) * LENGTH
                await asyncio.sleep(0)
                assert view[0] == view[-1] == seed
                del view

        async with asyncio.TaskGroup() as group:
            for seed in range(3):
                group.create_task(asyncio.to_thread(asyncio.run, use(seed)))
        assert len(memory._idle) <= 3
        assert not memory._in_use


# ---- Cancellation


@pytest.fixture
def short_withdrawal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "_WITHDRAW_TIMEOUT_S", 0.05)


@every_way_to_cancel
async def test_a_cancelled_send_is_withdrawn(device: Device, cancel: Cancel) -> None:
    async with pair(device) as ends:
        data = changeable()
        await cancel(ends.near.send(data), lambda: unread(ends.far))
        collect_garbage()  # the traceback of the cancellation refers to the memory
        data.extend(b"free to be resized")
        await ends.near.send(b"after it")
        assert await ends.far.receive() == b"after it"
        await settled(ends)


@every_way_to_cancel
async def test_a_send_cancelled_while_it_waits_for_another_is_not_sent(device: Device, cancel: Cancel) -> None:
    async with pair(device) as ends:
        first = asyncio.create_task(ends.near.send(changeable(1)))
        await until(lambda: unread(ends.far))
        await cancel(ends.near.send(changeable(2)), lambda: end_of(ends.near).channel.sender.frames.in_line)
        third = asyncio.create_task(ends.near.send(changeable(3)))
        assert await ends.far.receive() == sample(LENGTH, 1)
        assert await ends.far.receive() == sample(LENGTH, 3)
        await asyncio.gather(first, third)
        await settled(ends)


@every_way_to_cancel
@pytest.mark.parametrize("is_cached", [True, False])
@needs(Capability.FAULT_PLAN)
async def test_a_send_cancelled_while_it_binds_a_window_is_not_sent(
    device: Device, cancel: Cancel, is_cached: bool
) -> None:
    """The call does not wait for the device, which binds the window behind sends that the peer has not acknowledged."""
    async with pair(device) as ends:
        ends.domain.cache.max_bytes = 256 << 20 if is_cached else LENGTH - 1
        grants = end_of(ends.near).grants
        hold(device, ends.near.qp)
        sending = ends.near.send([sample(LENGTH), sample(LENGTH, 1)])
        async with asyncio.timeout(patience(10)):
            await cancel(sending, lambda: grants._local_grants and ends.near.qp.statistics().sends.in_flight)
        assert not grants._local_grants
        unhold(device, ends.near.qp)
        await until(lambda: not grants._closing)
        await settled(ends)


@every_way_to_cancel
async def test_a_send_cancelled_without_a_credit_is_not_sent(device: Device, cancel: Cancel) -> None:
    async with pair(device) as ends:
        count = await use_up(ends.near)
        waits = ends.near.traffic().waits
        await cancel(ends.near.send(changeable()), lambda: ends.near.traffic().waits > waits)
        for _ in range(count):
            assert await ends.far.receive() == b"one of them"
        await settled(ends)


class Slow:
    """Read that is not done before an event is set."""

    def __init__(self, read: Operation[None], may_end: asyncio.Event) -> None:
        self._read = read
        self._may_end = may_end

    def __await__(self) -> Generator[Any, Any, None]:
        yield from self._may_end.wait().__await__()
        yield from self._read.__await__()

    def result(self) -> None:
        return self._read.result()


@pytest.fixture
def reading_may_end(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Event without which reads of connections do not end."""
    may_end, read = asyncio.Event(), QueuePair.read
    monkeypatch.setattr(QueuePair, "read", lambda *args, **options: Slow(read(*args, **options), may_end))
    return may_end


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets the operation of each read of a connection from now on."""
    posted: list[Any] = []
    read = QueuePair.read

    def counted(*args: Any, **options: Any) -> Any:
        posted.append(read(*args, **options))
        return posted[-1]

    monkeypatch.setattr(QueuePair, "read", counted)
    return posted


@every_way_to_cancel
async def test_a_send_cancelled_while_the_peer_reads(
    device: Device, cancel: Cancel, reading_may_end: asyncio.Event
) -> None:
    """The message is not delivered; the read that is in flight completes first."""
    async with pair(device) as ends:
        receiving = asyncio.create_task(ends.far.receive())
        sending = asyncio.create_task(cancel(ends.near.send(changeable()), lambda: being_read(ends.far)))
        await until(lambda: is_withdrawn(ends.far))
        assert not sending.done()
        reading_may_end.set()
        await sending
        await ends.near.send(b"next")
        assert await receiving == b"next"
        await settled(ends)


async def test_few_reads_are_in_flight_and_none_follows_a_withdrawal(
    device: Device, monkeypatch: pytest.MonkeyPatch, reading_may_end: asyncio.Event
) -> None:
    monkeypatch.setattr(announced_messages, "_READ_BYTES", LENGTH // 40)
    posted = count_reads(monkeypatch)
    async with pair(device) as ends:
        receiving = asyncio.create_task(ends.far.receive())
        sending = asyncio.create_task(ends.near.send(changeable()))
        await until(lambda: being_read(ends.far))
        assert len(posted) == announced_messages._READS_IN_FLIGHT
        sending.cancel()
        await until(lambda: is_withdrawn(ends.far))
        reading_may_end.set()
        await asyncio.wait([sending])
        assert len(posted) == announced_messages._READS_IN_FLIGHT
        sending = asyncio.create_task(ends.near.send(changeable()))
        assert await receiving == sample(LENGTH)
        await sending
        await settled(ends)


@pytest.mark.parametrize("how", HOW)
async def test_a_send_cancelled_while_the_peer_makes_room(
    device: Device, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with pair(device) as ends:
        announced = end_of(ends.far).channel.receiver.announced
        of, name = (announced, "read_into") if how == "receive_into" else (announced._memory, "take")
        do, reached, may_go_on = getattr(of, name), asyncio.Event(), asyncio.Event()

        async def do_late(*args: Any) -> Any:
            reached.set()
            await may_go_on.wait()
            return await do(*args)

        monkeypatch.setattr(of, name, do_late)
        receiving = asyncio.create_task(receive(ends.far, how))
        sending = asyncio.create_task(ends.near.send(changeable()))
        await reached.wait()
        sending.cancel()
        await asyncio.wait([sending])
        may_go_on.set()
        await ends.near.send(b"next")
        assert await receiving == b"next"
        await settled(ends)


@pytest.mark.usefixtures("short_withdrawal")
async def test_a_send_cancelled_beside_used_up_credits_is_withdrawn_at_once(device: Device) -> None:
    """The credit for withdrawing is reserved; with another one, this end goes on to return credits."""
    async with pair(device, DEEP) as ends:
        sending = asyncio.create_task(ends.near.send(changeable()))
        await until(lambda: unread(ends.far))
        count = await use_up(ends.near)
        assert ends.near.traffic().credits == 2
        for _ in range(3 * DEEP.receive_depth):
            await ends.far.send(b"answered by credits")
            await ends.near.receive()
        sending.cancel()
        await asyncio.wait([sending])
        await until(lambda: not unread(ends.far))
        for _ in range(count):
            assert await ends.far.receive() == b"one of them"
        await settled(ends)


@pytest.mark.parametrize("into", [False, True], ids=["receive", "receive_into"])
@pytest.mark.parametrize("after", [0, 3])
async def test_a_withdrawal_that_has_arrived_ends_the_reads(
    device: Device, monkeypatch: pytest.MonkeyPatch, into: bool, after: int
) -> None:
    """Even if the loop of the receiver was busy, and handles completions only later: the key may be invalid by then."""
    monkeypatch.setattr(announced_messages, "_READ_BYTES", LENGTH // 20)
    async with pair(device) as ends:
        near, buffer, posted, read = end_of(ends.near).channel, bytearray(LENGTH), 0, QueuePair.read

        async def receive() -> bytes:
            return bytes(buffer[: await ends.far.receive_into(buffer)]) if into else await ends.far.receive()

        def withdraw() -> None:
            (number,) = near.sender._announced
            near.sender.withdraw_announcement(number)
            time.sleep(0.05)  # until it has arrived

        def counted_read(*args: Any, **options: Any) -> Any:
            nonlocal posted
            posted += 1
            operation = read(*args, **options)
            if posted == after:
                withdraw()
            return operation

        sending = asyncio.create_task(ends.near.send(changeable()))
        assert await receive() == sample(LENGTH)  # its memory is registered from now on
        await sending
        monkeypatch.setattr(QueuePair, "read", counted_read)
        sending = asyncio.create_task(ends.near.send(changeable()))
        await until(lambda: unread(ends.far))
        following = asyncio.create_task(ends.near.send(b"next"))  # begins when this task waits
        if not after:
            withdraw()
        assert await receive() == b"next"
        assert posted == after
        await asyncio.gather(sending, following)
        await settled(ends)


class Link:
    """Slow connection, with a clock of its own.

    :param rate: bytes per second.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.now = self.free_at = 0.0
        self.lengths: list[int] = []
        self.longest_s = 0.0  # for the reads that were in flight at a moment

    async def transfer(self, read: Operation[None], ends_at: float) -> None:
        await read
        self.now = max(self.now, ends_at)

    def read(self, read: Callable[..., Operation[None]], qp: QueuePair, local: RegionSlice, *args: Any) -> Any:
        self.lengths.append(len(local))
        self.free_at = max(self.free_at, self.now) + len(local) / self.rate
        self.longest_s = max(self.longest_s, self.free_at - self.now)
        return self.transfer(read(qp, local, *args), self.free_at)


@pytest.mark.parametrize("rate", [1e6, 13e6, 100e6, 10e9])
async def test_reads_in_flight_end_soon_on_slow_connections(
    device: Device, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """The sender of a message that is withdrawn waits for 5 seconds."""
    length = 48 << 20
    async with pair(device, deeper(SMALL, max_message=length)) as ends:
        link, read = Link(rate), QueuePair.read
        monkeypatch.setattr(announced_messages, "monotonic", lambda: link.now)
        monkeypatch.setattr(QueuePair, "read", lambda *args: link.read(read, *args))
        sending = asyncio.create_task(ends.near.send(bytes(length)))
        assert len(await ends.far.receive_buffer()) == length
        await sending
        assert link.longest_s < 2.5
        if rate > 1e9:
            assert link.lengths == [1 << 20, 1 << 20, length - (2 << 20)]
        link.rate /= 4  # while the reads of the usual length are in flight
        link.longest_s = 0
        sending = asyncio.create_task(ends.near.send(bytes(length)))
        assert len(await ends.far.receive_buffer()) == length
        await sending
        assert link.longest_s < 2.5


async def test_a_cancelled_send_of_memory_that_cannot_change_does_not_wait(device: Device) -> None:
    """The key stays valid, so that the connection of a peer that reads slowly does not break."""
    async with pair(device) as ends:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(announcer, "_MAX_UNREAD_BYTES", 0)
            patch.setattr(end_of(ends.far).channel.receiver.announced, "withdraw", lambda number: True)
            sending = asyncio.create_task(ends.near.send(sample(LENGTH)))
            await until(lambda: unread(ends.far))
            sending.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert sending.cancelled()
            await ends.near.send(b"next")
            assert await ends.far.receive() == sample(LENGTH)
            assert await ends.far.receive() == b"next"
        await settled(ends)


@pytest.mark.usefixtures("short_withdrawal")
async def test_a_cancelled_send_takes_the_key_back_from_a_peer_that_does_not_answer(device: Device) -> None:
    async with pair(device) as ends:
        end_of(ends.far).channel.receiver.announced.withdraw = lambda number: True  # type: ignore[method-assign]
        sending = asyncio.create_task(ends.near.send(changeable()))
        await until(lambda: unread(ends.far))
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        with pytest.raises(BrokenResourceError):
            await ends.far.receive()


@every_way_to_cancel
@needs(Capability.FAULT_PLAN)
async def test_a_cancelled_receive_into_waits_for_the_device(device: Device, cancel: Cancel) -> None:
    """The call ends when the device no longer writes to the memory of the caller. No message is lost."""
    async with pair(device) as ends:
        await ends.near.send(sample(LENGTH), immediate=1)
        await until(lambda: unread(ends.far))
        hold(device, ends.far.qp)
        cancelling = asyncio.create_task(cancel(receive(ends.far, "receive_into"), lambda: being_read(ends.far)))
        await asyncio.sleep(0.05)
        assert not cancelling.done()
        unhold(device, ends.far.qp)
        await cancelling
        await ends.near.send(b"next")
        assert await ends.far.receive_with_immediate() == (sample(LENGTH), 1)
        assert await ends.far.receive() == b"next"
        await settled(ends)


@needs(Capability.FAULT_PLAN)
async def test_a_cancelled_receive_into_breaks_the_connection_if_the_device_does_not_answer(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announced_messages, "_END_TIMEOUT_S", 0.05)
    async with pair(device) as ends:
        await ends.near.send(sample(LENGTH))
        await until(lambda: unread(ends.far))
        hold(device, ends.far.qp)
        receiving = asyncio.create_task(receive(ends.far, "receive_into"))
        await until(lambda: being_read(ends.far))
        receiving.cancel()
        async with asyncio.timeout(patience(10)):
            assert "has not answered reads of a cancelled call for 0.05 s" in str(await ends.far.wait_lost())
        assert not receiving.done(), "the memory may still be written to"
        unhold(device, ends.far.qp)
        await asyncio.wait([receiving])
        assert receiving.cancelled()


async def receive_from_stream(connection: Connection) -> bytes:
    stream, received = connection.as_byte_stream(), b""
    while len(received) < LENGTH:
        received += await stream.receive()
    return received


Receive = Callable[[Connection], Coroutine[Any, Any, Any]]

OF_THE_LIBRARY: dict[str, Receive] = {
    "receive": lambda connection: connection.receive(),
    "receive_with_immediate": lambda connection: connection.receive_with_immediate(),
    "receive_buffer": lambda connection: receive(connection, "receive_buffer"),
    "stream": receive_from_stream,
}
"""Ways to receive that need no memory of the caller."""

EVERY_WAY: dict[str, Receive] = {
    **OF_THE_LIBRARY,
    "receive_into": lambda connection: receive(connection, "receive_into"),
}


@every_way_to_cancel
@pytest.mark.parametrize("first", OF_THE_LIBRARY)
@pytest.mark.parametrize("then", EVERY_WAY)
@needs(Capability.FAULT_PLAN)
async def test_a_cancelled_receive_does_not_wait_for_the_device(
    device: Device, monkeypatch: pytest.MonkeyPatch, cancel: Cancel, first: str, then: str
) -> None:
    """The requests go on, and the next call gets what they have read: nothing is read twice."""
    monkeypatch.setattr(announced_messages, "_READ_BYTES", LENGTH // 20)
    posted = count_reads(monkeypatch)
    async with pair(device) as ends:
        await ends.near.send(sample(LENGTH), immediate=1)
        await until(lambda: unread(ends.far))
        hold(device, ends.far.qp)
        async with asyncio.timeout(patience(10)):
            await cancel(OF_THE_LIBRARY[first](ends.far), lambda: being_read(ends.far))
            again = EVERY_WAY[then]
            await cancel(again(ends.far), lambda: end_of(ends.far).channel.receiver.unread.receiving)
        receiving = asyncio.create_task(again(ends.far))
        await asyncio.sleep(0)
        unhold(device, ends.far.qp)
        received = await receiving
        assert received == ((sample(LENGTH), 1) if then == "receive_with_immediate" else sample(LENGTH))
        assert len(posted) == 20
        await settled(ends)


@pytest.mark.usefixtures("reading_may_end")
async def test_a_message_is_withdrawn_while_reads_of_a_cancelled_receive_are_in_flight(device: Device) -> None:
    """The sender waits for them, and the receiver does not."""
    async with pair(device) as ends:
        sending = asyncio.create_task(ends.near.send(changeable()))
        receiving = asyncio.create_task(ends.far.receive())
        await until(lambda: being_read(ends.far))
        message = being_read(ends.far)
        assert message is not None
        assert message.reading is not None
        pins = message.reading.pins
        pins.add()  # as a read that the peer's device has not answered
        receiving.cancel()
        await asyncio.wait([receiving])
        sending.cancel()
        await until(lambda: is_withdrawn(ends.far))
        receiving = asyncio.create_task(ends.far.receive())
        await ends.near.send(b"next")
        assert await receiving == b"next"
        assert not sending.done()
        pins.discard()
        await asyncio.wait([sending])
        assert sending.cancelled()
        await settled(ends)


@needs(Capability.FAULT_PLAN)
async def test_a_receive_begins_again_if_the_rest_cannot_be_read(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announced_messages, "_READ_BYTES", LENGTH // 20)
    async with pair(device) as ends:
        await ends.near.send(sample(LENGTH))
        await until(lambda: unread(ends.far))
        hold(device, ends.far.qp)
        receiving = asyncio.create_task(ends.far.receive())
        await until(lambda: being_read(ends.far))
        receiving.cancel()
        await asyncio.wait([receiving], timeout=patience(10))
        with monkeypatch.context() as patch:
            patch.setattr(QueuePair, "read", mock.Mock(side_effect=ConcurrentAccessError("another thread is inside")))
            unhold(device, ends.far.qp)
            await until(lambda: not being_read(ends.far))
        assert await ends.far.receive() == sample(LENGTH)
        await settled(ends)


async def test_a_cancelled_receive_does_not_wait_for_other_uses_of_its_buffer(
    device: Device, reading_may_end: asyncio.Event
) -> None:
    async with pair(device) as ends:
        buffer = bytearray(LENGTH)
        async with ends.domain.cache.region(buffer) as region:
            await ends.near.send(sample(LENGTH))
            await until(lambda: unread(ends.far))
            receiving = asyncio.create_task(ends.far.receive_into(buffer))
            await until(lambda: being_read(ends.far))
            region.pins.add()  # as a receive that is posted in the buffer
            receiving.cancel()
            await asyncio.wait([receiving], timeout=patience(5))
            region.pins.discard()
            assert receiving.cancelled()
        reading_may_end.set()
        assert await receive(ends.far, "receive_into") == sample(LENGTH)
        await settled(ends)


@every_way_to_cancel
@pytest.mark.parametrize("how", HOW)
async def test_a_receive_cancelled_while_it_waits(device: Device, cancel: Cancel, how: str) -> None:
    async with pair(device) as ends:
        await cancel(receive(ends.far, how), lambda: end_of(ends.far).channel.receiver.unread.receiving)
        await ends.near.send(sample(LENGTH))
        assert await receive(ends.far, how) == sample(LENGTH)
        await settled(ends)


# ---- The end


async def test_closing_delivers_announced_messages(device: Device) -> None:
    async with pair(device) as ends:
        await ends.near.send(sample(LENGTH))
        closing = asyncio.create_task(ends.near.aclose())
        await until(lambda: end_of(ends.far).channel.eof_received)
        assert await ends.far.receive() == sample(LENGTH)
        with pytest.raises(anyio.EndOfStream):
            await ends.far.receive()
        await closing


async def test_both_ends_close_without_reading(device: Device) -> None:
    """Neither waits for the other to read."""
    async with pair(device, deeper(SMALL, close_timeout_s=600)) as ends, asyncio.timeout(patience(30)):
        for connection in (ends.near, ends.far):
            await connection.send(sample(LENGTH))
        await until(lambda: unread(ends.near) and unread(ends.far))
        await asyncio.gather(ends.near.aclose(), ends.far.aclose())


async def test_closing_drops_messages_that_are_announced_meanwhile(device: Device) -> None:
    async with pair(device, deeper(SMALL, close_timeout_s=600)) as ends, asyncio.timeout(patience(30)):
        await ends.far.send(sample(LENGTH))
        closing = asyncio.create_task(ends.far.aclose())
        await until(lambda: end_of(ends.near).channel.eof_received)
        with contextlib.suppress(BrokenResourceError):
            await ends.near.send(changeable())
        await ends.near.aclose()
        await closing


@pytest.mark.parametrize("broken", [False, True], ids=["closed", "aborted"])
async def test_senders_learn_of_the_end(device: Device, broken: bool) -> None:
    async with pair(device) as ends:
        data = changeable()
        sending = [asyncio.create_task(ends.near.send(each)) for each in (data, changeable())]
        await until(lambda: unread(ends.far))
        (ends.far if broken else ends.near).abort()
        await asyncio.wait(sending, timeout=patience(10))
        for task in sending:
            assert isinstance(task.exception(), BrokenResourceError if broken else ClosedResourceError)
        sending.clear()  # the traceback of its exception refers to the memory
        del task
        collect_garbage()
        data.extend(b"free to be resized")


@needs(Capability.FAULT_PLAN)
async def test_a_peer_that_is_lost_while_it_is_read(device: Device) -> None:
    async with pair(device) as ends:
        await ends.near.send(sample(LENGTH))
        await until(lambda: unread(ends.far))
        hold(device, ends.far.qp)
        receiving = asyncio.create_task(ends.far.receive())
        await until(lambda: being_read(ends.far))
        ends.near.abort()
        await ends.far.wait_lost()
        unhold(device, ends.far.qp)
        with contextlib.suppress(BrokenResourceError):  # the read may have ended before
            assert await receiving == sample(LENGTH)
        with pytest.raises(BrokenResourceError):
            await ends.far.receive()


# ---- Messages that are announced without waiting

MANY_BUFFERS = deeper(DEEP, send_buffers=6)


async def test_announcing_does_not_wait(device: Device) -> None:
    async with pair(device, MANY_BUFFERS) as ends:
        one, two = changeable(1), changeable(2)
        assert send_constant_nowait(ends.near, [b"head", one])
        assert send_constant_nowait(ends.near, [two, b"tail"])
        assert send_constant_nowait(ends.near, b"short")
        await until(lambda: unread(ends.far) == 2)
        assert await ends.far.receive() == b"head" + sample(LENGTH, 1)
        assert await ends.far.receive_buffer() == sample(LENGTH, 2) + b"tail"
        assert await ends.far.receive() == b"short"
        assert ends.near.traffic().messages_sent == ends.far.traffic().messages_received == 3
        await settled(ends)
        for buffer in (one, two):
            buffer.extend(b"free to be resized")


@pytest.mark.parametrize("length", [1024, 1025, 2040, 2041, 6 * 1024 - 8])
async def test_fragments_are_sent_without_waiting(device: Device, length: int) -> None:
    """Messages that are too short to be announced."""
    async with pair(device, MANY_BUFFERS) as ends:
        assert send_constant_nowait(ends.near, [sample(length)[:10], memoryview(sample(length))[10:]])
        assert await ends.far.receive() == sample(length)
        assert ends.near.traffic().messages_sent == 1
        await works(ends.near, ends.far)


async def test_fragments_are_refused_without_enough_buffers_or_credits(device: Device) -> None:
    async with pair(device, MANY_BUFFERS) as ends:
        assert not send_constant_nowait(ends.near, sample(6 * 1024 - 7))
        assert send_constant_nowait(ends.near, sample(6 * 1024 - 8))
        assert await ends.far.receive() == sample(6 * 1024 - 8)
        assert ends.near.traffic().messages_sent == 1
    async with pair(device, deeper(SMALL, send_buffers=6)) as ends:
        assert ends.near.traffic().credits == 4
        assert not send_constant_nowait(ends.near, sample(4 * 1024 - 8))
        assert send_constant_nowait(ends.near, sample(3 * 1024 - 8))
        assert not send_constant_nowait(ends.near, b"the last credit is reserved")
        assert await ends.far.receive() == sample(3 * 1024 - 8)


async def test_a_message_that_is_too_long_is_refused(device: Device) -> None:
    async with pair(device) as ends:
        assert not send_constant_nowait(ends.near, bytearray(SMALL.max_message + 1))
        assert send_constant_nowait(ends.near, bytearray(SMALL.max_message))
        assert len(await ends.far.receive()) == SMALL.max_message
        await settled(ends)


async def test_announcing_is_refused_where_it_has_to_wait(device: Device) -> None:
    """The message is sent by a call that waits, in the order of the calls."""
    async with pair(device, MANY_BUFFERS) as ends:
        slots = max_announced(MANY_BUFFERS.receive_depth)
        for number in range(slots):
            assert send_constant_nowait(ends.near, changeable(number))
        assert not send_constant_nowait(ends.near, changeable(slots))
        sending = asyncio.create_task(ends.near.send(changeable(slots)))
        await asyncio.sleep(0)
        assert await ends.far.receive() == sample(LENGTH, 0)
        assert not send_constant_nowait(ends.near, b"must not overtake the task")
        for number in range(1, slots + 1):
            assert await ends.far.receive() == sample(LENGTH, number)
        await sending
        await settled(ends)


async def test_announcing_is_refused_without_credits(device: Device) -> None:
    async with pair(device) as ends:
        await use_up(ends.near)
        data = changeable()
        assert not send_constant_nowait(ends.near, data)
        assert not send_constant_nowait(ends.near, b"short")
        assert not end_of(ends.near).grants._local_grants
        data.extend(b"free to be resized")


@needs(Capability.FAULT_PLAN)
async def test_memory_that_cannot_be_registered_now_is_not_announced(device: Device) -> None:
    async with pair(device) as ends:
        device.faults.fail("reg_mr", errno.ENOMEM)
        data = changeable()
        assert not send_constant_nowait(ends.near, data)
        data.extend(b"free to be resized")
        await settled(ends)


async def test_large_memory_is_not_announced_now(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread registers it."""
    monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", LENGTH)
    async with pair(device) as ends:
        assert not send_constant_nowait(ends.near, [bytearray(LENGTH // 2), bytearray(LENGTH)])
        assert send_constant_nowait(ends.near, [bytearray(LENGTH - 1), b"one more"])
        assert len(await ends.far.receive()) == LENGTH + 7
        await settled(ends)


async def test_memory_that_is_announced_now_is_not_cached(device: Device) -> None:
    held = sample(LENGTH)
    async with pair(device) as ends:
        assert send_constant_nowait(ends.near, held)
        assert await ends.far.receive() == held
        await settled(ends)
        assert not ends.domain.cache.statistics().misses


async def test_closing_delivers_what_was_announced_without_waiting(device: Device) -> None:
    async with pair(device) as ends:
        assert send_constant_nowait(ends.near, changeable())
        closing = asyncio.create_task(ends.near.aclose())
        await until(lambda: end_of(ends.far).channel.eof_received)
        await asyncio.sleep(0.02)
        assert not closing.done()
        assert await ends.far.receive() == sample(LENGTH)
        await closing


@pytest.mark.parametrize("how", ["closed", "aborted by the peer"])
async def test_the_end_releases_what_was_announced_without_waiting(device: Device, how: str) -> None:
    async with pair(device, deeper(SMALL, close_timeout_s=0.01)) as ends:
        data = changeable()
        assert send_constant_nowait(ends.near, data)
        await until(lambda: unread(ends.far))
        if how == "closed":
            await ends.near.aclose()
        else:
            ends.far.abort()
            await ends.near.wait_lost()
            await finished(ends.near)
        await asyncio.sleep(0)
        data.extend(b"free to be resized")
        with pytest.raises((BrokenResourceError, ClosedResourceError)):
            send_constant_nowait(ends.near, b"more")


@needs(Capability.FAULT_PLAN)
async def test_a_key_that_cannot_be_taken_back_breaks_the_connection(device: Device) -> None:
    async with pair(device) as ends:
        data = changeable()
        assert send_constant_nowait(ends.near, data)
        device.faults.fail("dereg_mr", errno.EIO)
        assert await ends.far.receive() == sample(LENGTH)
        assert "could not be invalidated" in str(await ends.near.wait_lost())
        await ends.near.aclose()
        data.extend(b"free to be resized")


# ---- Hostile peers


@contextlib.asynccontextmanager
async def talking(device: Device) -> AsyncIterator[tuple[Pair, Callable[[FrameKind, int, bytes], Any]]]:
    """Connect two ends, and return a function that sends any frame from the near one."""
    async with pair(device, DEEP) as ends:
        sender = end_of(ends.near).channel.sender

        async def send(kind: FrameKind, number: int, data: bytes, flags: int = 0) -> None:
            await sender._send_frame(header(kind, flags, 0, number), [memoryview(data)])

        yield ends, send


def announcement(length: int = LENGTH, rkey: int = 0x1234) -> bytes:
    return pack_announcement([AnnouncedPart(4096, length, rkey)])


BAD_FRAMES: dict[str, tuple[list[tuple[Any, ...]], str]] = {
    "too long": ([(FrameKind.ANNOUNCE, 1, announcement(SMALL.max_message + 1))], "of 1,048,577 bytes"),
    "too long in parts": (
        [(FrameKind.ANNOUNCE, 1, pack_announcement([AnnouncedPart(0, 1 << 63, 1)] * 3))],
        "at most 1,048,576",
    ),
    "number in use": ([(FrameKind.ANNOUNCE, 1, announcement())] * 2, "message 1, which exists already"),
    "more than may be unanswered": (
        [(FrameKind.ANNOUNCE, number, announcement()) for number in range(4)],
        "exceeds 3",
    ),
    "after the end": ([(FrameKind.END, 0, b""), (FrameKind.ANNOUNCE, 1, announcement())], "after END"),
    "no parts": ([(FrameKind.ANNOUNCE, 1, b"\0\0")], "ANNOUNCE of 0 parts"),
    "nothing": ([(FrameKind.ANNOUNCE, 1, b"")], "with 0 bytes"),
    "an empty part": ([(FrameKind.ANNOUNCE, 1, announcement(0))], "0 bytes at 0x1000"),
    "cut off": ([(FrameKind.ANNOUNCE, 1, announcement()[:-1])], "ANNOUNCE of 1 parts"),
    "flags": ([(FrameKind.ANNOUNCE, 1, announcement(), LAST)], "with flags"),
    "immediate data is missing": ([(FrameKind.ANNOUNCE, 1, announcement(), HAS_IMMEDIATE)], "ANNOUNCE"),
    "an answer to nothing": ([(FrameKind.REVOKED, 1, b"")], "was not revoked"),
    "withdrawn without being announced": ([(FrameKind.REVOKE, 1, b"")], "does not exist"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_frames_that_violate_the_protocol_break_the_connection(device: Device, name: str) -> None:
    frames, reason = BAD_FRAMES[name]
    async with talking(device) as (ends, send):
        for frame in frames:
            await send(*frame)
        assert reason in str(await ends.far.wait_lost())


@pytest.mark.parametrize("while_", ["waiting for a credit", "registering"])
async def test_an_answer_before_the_announcement_breaks_the_connection(
    device: Device, monkeypatch: pytest.MonkeyPatch, while_: str
) -> None:
    data = changeable()
    async with talking(device) as (ends, send):
        reached, may_go_on = asyncio.Event(), asyncio.Event()

        async def late(*_: Any) -> Any:
            reached.set()
            await may_go_on.wait()
            raise VerbsError("ibv_reg_mr", errno.ENOMEM)

        grants = end_of(ends.far).grants
        if while_ == "registering":
            monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", LENGTH)
            monkeypatch.setattr(grants, "register", late)
        else:
            await use_up(ends.far)
        sending = asyncio.create_task(ends.far.send(data))
        await until(lambda: grants._local_grants)
        (number,) = grants._local_grants
        await send(FrameKind.REVOKED, number, b"")
        assert "was not revoked" in str(await ends.far.wait_lost())
        may_go_on.set()
        await asyncio.wait([sending])
        assert isinstance(sending.exception(), BrokenResourceError)
        assert not grants._local_grants
    del sending  # the traceback of its exception refers to the memory
    collect_garbage()
    data.extend(b"free to be resized")


class Unacknowledged:
    """Operation of a send that the peer's device never acknowledges."""

    ended = False

    def __init__(self, operation: object) -> None:
        self._operation = operation


async def test_a_peer_that_acknowledges_no_answers_breaks_the_connection(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests that this end keeps are bounded, although answers need no credit."""
    async with pair(device, DEEP) as ends:
        sender = end_of(ends.far).channel.sender
        keep = sender.keep_until_done
        kept: Any = Unacknowledged
        monkeypatch.setattr(sender, "keep_until_done", lambda operation: keep(kept(operation)))

        async def receive_all() -> None:
            while True:
                await ends.far.receive()

        async def send_all() -> None:
            while True:
                await ends.near.send(changeable())

        tasks = [asyncio.create_task(receive_all()), asyncio.create_task(send_all())]
        async with asyncio.timeout(patience(20)):
            assert "does not acknowledge 69 messages" in str(await ends.far.wait_lost())
        await asyncio.wait(tasks)
        assert all(isinstance(task.exception(), BrokenResourceError) for task in tasks)


@pytest.mark.parametrize("how", HOW)
async def test_memory_that_cannot_be_read_breaks_the_connection(device: Device, how: str) -> None:
    async with talking(device) as (ends, send):
        await send(FrameKind.ANNOUNCE, 1, announcement())
        async with asyncio.timeout(patience(20)):
            with pytest.raises(BrokenResourceError):
                await receive(ends.far, how)
            with pytest.raises(BrokenResourceError):
                await receive(ends.far, how)


async def test_withdrawn_messages_keep_their_credits_until_the_user_receives(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that announces and withdraws for ever makes this end keep no more than its credits allow."""
    async with talking(device) as (ends, send):
        free = ends.near.traffic().credits
        near = end_of(ends.near).channel
        monkeypatch.setattr(near.user, "on_control", lambda *_: None)
        inbox = end_of(ends.far).channel.receiver.inbox
        count = 0
        while ends.near.traffic().credits > 2:
            near.sender._announced[count] = False
            await send(FrameKind.ANNOUNCE, count, announcement())
            await send(FrameKind.REVOKE, count, b"")
            count += 1
            await until(lambda: len(inbox) == count and not unread(ends.far))  # noqa: B023
        assert count < free
        assert len(inbox) == count
        receiving = asyncio.create_task(ends.far.receive())
        await until(lambda: ends.near.traffic().credits > 2)
        await ends.near.send(b"real")
        assert await receiving == b"real"


async def test_a_withdrawal_that_crosses_the_answer_is_no_violation(device: Device) -> None:
    async with pair(device) as ends:
        sending = asyncio.create_task(ends.near.send(changeable()))
        await until(lambda: unread(ends.far))
        (number,) = end_of(ends.near).channel.sender._announced
        assert await ends.far.receive() == sample(LENGTH)
        end_of(ends.near).channel.sender.send_control(FrameKind.REVOKE, number)  # as if sent before the answer arrived
        await sending
        await settled(ends)


async def test_a_number_is_used_again_for_a_grant(device: Device) -> None:
    """The grant is revoked, although the peer expects that a message with its number might be withdrawn."""
    async with pair(device) as ends, ends.domain.register(64) as memory:
        sending = asyncio.create_task(ends.near.send(changeable()))
        await ends.far.receive()
        await sending
        end_of(ends.near).grants._last_number = 0  # as after all the others
        grant = await ends.near.grant(memory, AccessFlags.REMOTE_READ)
        there = await ends.far.receive_grant()
        await grant.revoke(timeout_s=patience(20))
        assert there.revoked
        await settled(ends)


async def test_a_number_is_used_again_for_a_message(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    async with talking(device) as (ends, send), ends.domain.register(LENGTH, AccessFlags.REMOTE_READ) as memory:
        near = end_of(ends.near).channel
        monkeypatch.setattr(near.user, "on_control", lambda *_: None)
        remote = memory.remote()
        for _ in range(3):
            near.sender._announced[1] = False
            await send(FrameKind.ANNOUNCE, 1, pack_announcement([AnnouncedPart(remote.address, LENGTH, remote.rkey)]))
            await ends.far.receive()
            await until(lambda: not near.sender._announced)
        await send(FrameKind.REVOKE, 1, b"")  # crosses the answer
        await send(FrameKind.GRANT, 1, GrantNotice(4096, 64, 1, AccessFlags.REMOTE_READ).pack())
        await send(FrameKind.REVOKE, 1, b"")
        grant = await ends.far.receive_grant()
        await until(lambda: grant.revoked)


parts = st.lists(
    st.builds(AnnouncedPart, st.integers(0, 2**63), st.integers(1, 2**62), st.integers(0, 2**32 - 1), st.none())
    | st.binary(min_size=1, max_size=9).map(lambda data: AnnouncedPart(0, len(data), 0, data)),
    min_size=1,
    max_size=6,
)


@given(parts)
def test_announcement_round_trip(parts: list[AnnouncedPart]) -> None:
    assert parse_announcement(pack_announcement(parts)) == parts


def test_announcements_of_too_many_parts() -> None:
    short, long = AnnouncedPart(0, 1, 0, b"x"), AnnouncedPart(4096, 1, 1)
    most = [*[short, long] * 64, short]
    assert parse_announcement(pack_announcement(most)) == most
    with pytest.raises(ValueError, match="of 130 parts, more than 129"):
        parse_announcement(pack_announcement([*most, short]))
    with pytest.raises(ValueError, match="with 65 parts to read, more than 64"):
        parse_announcement(pack_announcement([long] * 65))


@given(st.binary(max_size=60))
def test_arbitrary_announcements_raise_only_value_errors(data: bytes) -> None:
    try:
        parsed = parse_announcement(data)
    except ValueError:
        return
    assert pack_announcement(parsed) == data
