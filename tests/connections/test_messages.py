"""Messages of every size, in order, by many tasks, with slow receivers, and without any RNR NAK."""

import array
import asyncio
import contextlib
import errno
import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from aioverbs import (
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    Connection,
    ConnectionSettings,
    Device,
    WcStatus,
)
from aioverbs._connection.connection import end_of
from aioverbs._connection.reassembly import ReceivedMessage
from aioverbs._connection.wire import FrameKind, header
from aioverbs._verbs import qp_defaults as repeating
from tests.capabilities import Capability, needs
from tests.connections.ends import SMALL, deeper, pair, use_up, works
from tests.holding import hold, unhold
from tests.pace import fewer, patience
from tests.waiting import until

HUGE = ConnectionSettings(buffer_size=512, receive_depth=4, send_buffers=1, send_depth=8, max_message=1 << 20)


@pytest.fixture(autouse=True)
def _never_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the connection at the first RNR NAK."""
    monkeypatch.setitem(repeating.RETRIES, "rnr_retry", 0)


def sample(size: int, seed: int = 0) -> bytes:
    return random.Random(seed * 1_000_003 + size).randbytes(size)


async def test_messages_in_both_directions(device: Device) -> None:
    async with pair(device) as ends:
        await ends.near.send(b"ping")
        assert await ends.far.receive() == b"ping"
        await ends.far.send(b"pong")
        assert await ends.near.receive() == b"pong"
        assert type(await _one(ends.near, ends.far, b"")) is bytes


async def _one(near: Any, far: Any, data: bytes) -> bytes:
    sending = asyncio.create_task(near.send(data))
    received: bytes = await far.receive()
    await sending
    return received


@pytest.mark.parametrize("settings", [SMALL, HUGE, ConnectionSettings()], ids=["small", "one buffer", "usual"])
async def test_every_size_around_the_fragments(device: Device, settings: ConnectionSettings) -> None:
    size = settings.buffer_size
    bounds = [0, 1, 7, 8, 12, 13, size, *(n * size - 8 for n in range(1, 4)), 5 * size, settings.receive_depth * size]
    async with pair(device, settings) as ends:
        for at in sorted({max(0, bound + step) for bound in bounds for step in (-13, -12, -9, -8, -1, 0, 1)}):
            data = sample(at)
            assert await _one(ends.near, ends.far, data) == data
            sending = asyncio.create_task(ends.far.send(data, immediate=at))
            assert await ends.near.receive_with_immediate() == (data, at)
            await sending


async def test_ends_with_different_settings(device: Device) -> None:
    """Fragments fit the smaller buffers, and credits follow the receiver's settings."""
    async with pair(device, SMALL, deeper(SMALL, buffer_size=512, receive_depth=9)) as ends:
        for size in (511, 512, 513, 1024, 1025, 20_000):
            assert await _one(ends.near, ends.far, sample(size)) == sample(size)
            assert await _one(ends.far, ends.near, sample(size)) == sample(size)


async def test_immediate_data_arrives_with_its_message(device: Device) -> None:
    async with pair(device) as ends:
        await ends.near.send(b"with", immediate=0xFFFFFFFF)
        await ends.near.send(b"without")
        await ends.near.send(b"", immediate=0)
        assert await ends.far.receive_with_immediate() == (b"with", 0xFFFFFFFF)
        assert await ends.far.receive_with_immediate() == (b"without", None)
        assert await ends.far.receive() == b"", "who does not want it does not get it"
        with pytest.raises(ValueError, match="32 bits"):
            await ends.near.send(b"", immediate=1 << 32)


async def test_any_buffer_may_be_changed_after_sending(device: Device) -> None:
    async with pair(device) as ends:
        data = bytearray(b"abc")
        await ends.near.send(data)
        data[:] = b"xyz"
        await ends.near.send(memoryview(b"0123456789")[::1][2:4])
        assert await ends.far.receive() == b"abc"
        assert await ends.far.receive() == b"23"
        with pytest.raises(TypeError):
            await ends.near.send("text")  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [SMALL, HUGE, ConnectionSettings()], ids=["small", "one buffer", "usual"])
async def test_buffers_of_any_kind_are_sent_as_one_message(device: Device, settings: ConnectionSettings) -> None:
    numbers = array.array("I", range(1000))
    matrix = memoryview(bytes(range(12))).cast("B", (3, 4))
    payloads: list[Any] = [
        [],
        (b"", bytearray()),
        [b"one"],
        (b"length", b"", bytearray(b"body")),
        [b"head", numbers, matrix, memoryview(b"tail")[1:]],
        numbers,
        matrix,
    ]
    async with pair(device, settings) as ends:
        for payload in payloads:
            expected = b"".join(map(bytes, payload)) if isinstance(payload, list | tuple) else bytes(payload)
            for immediate in (None, 7):
                sending = asyncio.create_task(ends.near.send(payload, immediate=immediate))
                assert await ends.far.receive_with_immediate() == (expected, immediate)
                await sending
        for wrong in ("text", ["text"], [b"fine", 5], 5, memoryview(b"0123")[::2]):
            with pytest.raises(TypeError):
                await ends.near.send(wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                ends.near.send_nowait(wrong)  # type: ignore[arg-type]
        assert await _one(ends.near, ends.far, b"fine") == b"fine"


async def test_a_send_that_has_credit_lets_no_other_task_run(device: Device) -> None:
    async with pair(device) as ends:
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        await ends.near.send([b"with ", b"credit"], immediate=1)
        await ends.near.send(b"and again")
        assert not turns


async def test_a_frame_longer_than_a_buffer_is_refused(device: Device) -> None:
    async with pair(device) as ends:
        frames = end_of(ends.near).channel.sender.frames
        credit = ends.near.traffic().credits
        with pytest.raises(ValueError, match=r"1,025 bytes does not fit in a buffer of 1,024"):
            _ = frames.post([memoryview(bytes(1000)), memoryview(bytes(25))], header(FrameKind.DATA))
        assert ends.near.traffic().credits == credit
        assert await _one(ends.near, ends.far, b"fine") == b"fine"


async def test_send_nowait(device: Device) -> None:
    async with pair(device, SMALL, deeper(SMALL, max_message=1000)) as ends:
        ends.near.send_nowait(bytes(1000))
        ends.near.send_nowait([b"a", b"b"], immediate=5)
        assert await ends.far.receive() == bytes(1000)
        assert await ends.far.receive_with_immediate() == (b"ab", 5)
        ends.near.send_nowait(bytes(1000), immediate=6)
        assert await ends.far.receive_with_immediate() == (bytes(1000), 6)
        with pytest.raises(ValueError, match="at most 1,000 bytes"):
            ends.near.send_nowait(bytes(1001))
        with pytest.raises(ValueError, match=r"at most 1,020 bytes.*got 1,021: await `send`"):
            ends.far.send_nowait(bytes(1021), immediate=0)
        with pytest.raises(ValueError, match="32 bits"):
            ends.near.send_nowait(b"", immediate=-1)
        count = await use_up(ends.near)
        with pytest.raises(anyio.WouldBlock):
            ends.near.send_nowait(b"no credit")
        for _ in range(count):
            assert await ends.far.receive() == b"one of them"
        await until(lambda: ends.near.traffic().credits > 1)
        ends.near.send_nowait(b"credit")
        assert await ends.far.receive() == b"credit"
        await ends.near.send_eof()
        with pytest.raises(ClosedResourceError, match="send_eof"):
            ends.near.send_nowait(b"more")
        ends.far.abort()
        with pytest.raises(ClosedResourceError):
            ends.far.send_nowait(b"more")


async def test_no_message_overtakes_senders_that_wait(device: Device) -> None:
    async with pair(device) as ends:

        async def send_two() -> None:
            await ends.near.send(b"1")
            with pytest.raises(anyio.WouldBlock):
                ends.near.send_nowait(b"too early")
            await ends.near.send(b"3")

        count = await use_up(ends.near)
        sending = [asyncio.create_task(send_two())]
        await asyncio.sleep(0)
        sending.append(asyncio.create_task(ends.near.send(b"2")))
        await asyncio.sleep(0)
        received = [await ends.far.receive() for _ in range(count + 3)]
        assert received[count:] == [b"1", b"2", b"3"]
        await asyncio.gather(*sending)


@needs(Capability.FAULT_PLAN)
async def test_send_nowait_does_not_overtake_messages_that_wait(device: Device) -> None:
    async with pair(device, deeper(SMALL, receive_depth=8)) as ends:
        hold(device, ends.near.qp)
        sending = asyncio.create_task(ends.near.send(bytes(5000)))
        await until(lambda: ends.near.traffic().waits)
        with pytest.raises(anyio.WouldBlock):
            ends.near.send_nowait(b"later")
        unhold(device, ends.near.qp)
        assert await ends.far.receive() == bytes(5000)
        await sending


@pytest.mark.every_way
@needs(Capability.FAULT_PLAN)
async def test_a_refused_control_message_breaks_the_connection(device: Device) -> None:
    """The peer would wait for ever for the credits that were not returned."""
    async with pair(device) as ends:
        count = await use_up(ends.near)
        sending = asyncio.create_task(ends.near.send(b"waits for a credit"))
        await asyncio.sleep(0)
        device.faults.fail("post_send", errno.ENOMEM)
        async with asyncio.timeout(patience(10)):
            with contextlib.suppress(BrokenResourceError):  # not all of them may have arrived before
                for _ in range(count):
                    assert await ends.far.receive() == b"one of them"
            assert "a control message cannot be sent" in str(await ends.far.wait_lost())
            await ends.near.wait_lost()
            await asyncio.wait([sending])
            error = sending.exception()
            assert error is None or error.__cause__ is ends.near.broken


@pytest.mark.every_way
async def test_one_way_traffic_returns_credits(device: Device) -> None:
    """The peer sends no messages, and so returns credits by messages of their own."""
    async with pair(device) as ends:
        count = fewer(2000)

        async def send() -> None:
            for number in range(count):
                await ends.near.send(number.to_bytes(4))

        sending = asyncio.create_task(send())
        for number in range(count):
            assert await ends.far.receive() == number.to_bytes(4)
        await sending
        frames = ends.near.qp.statistics().sends.posted  # messages may share one
        assert ends.far.traffic().updates >= frames // (SMALL.receive_depth + 1) > 0
        assert ends.near.traffic().messages_sent == ends.far.traffic().messages_received == count
        failed = ends.near.qp.statistics().sends.failed
        assert WcStatus.RNR_RETRY_EXC_ERR not in dict(failed)


@pytest.mark.every_way
async def test_many_tasks_send_in_both_directions(device: Device) -> None:
    """Each message arrives whole, and messages of one task arrive in order."""
    tasks, each = 6, fewer(40)
    async with pair(device) as ends:

        async def send(connection: Any, task: int) -> None:
            chance = random.Random(task)
            for number in range(each):
                size = chance.choice([0, 3, 900, 1023, 1024, 2500, 9000])
                await connection.send(bytes([task]) + number.to_bytes(4) + sample(size, task))

        async def receive(connection: Any) -> None:
            seen = [0] * tasks
            for _ in range(tasks * each):
                data = await connection.receive()
                task, number = data[0], int.from_bytes(data[1:5])
                assert number == seen[task]
                seen[task] += 1
                assert data[5:] == sample(len(data) - 5, task)

        async with asyncio.TaskGroup() as group:
            for connection in (ends.near, ends.far):
                group.create_task(receive(connection))
                for task in range(tasks):
                    group.create_task(send(connection, task))


async def test_an_unread_connection_blocks_the_sender(device: Device) -> None:
    async with pair(device) as ends:
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await ends.near.send(sent.to_bytes(4))
                sent += 1

        flooding = asyncio.create_task(flood())
        await until(lambda: ends.near.traffic().waits)
        await asyncio.sleep(0.05)
        each = 4 + len(sent.to_bytes(4))  # after its length
        assert sent * each <= SMALL.receive_depth * SMALL.buffer_size
        await ends.far.send(b"the other way is open")
        assert await ends.near.receive() == b"the other way is open"
        for number in range(10):
            assert await ends.far.receive() == number.to_bytes(4)
        flooding.cancel()
        await asyncio.wait([flooding])


async def test_unread_long_messages_block_the_sender(device: Device) -> None:
    """One long message is accepted ahead; of those behind it no more than the receives hold."""
    async with pair(device) as ends:
        big = sample(20_000)
        done = 0

        async def flood() -> None:
            nonlocal done
            for _ in range(4):
                await ends.near.send(big)
                done += 1

        flooding = asyncio.create_task(flood())
        await until(lambda: done >= 1)
        await asyncio.sleep(0.1)
        assert done == 1
        for _ in range(4):
            assert await ends.far.receive() == big
        await flooding


async def test_concurrent_receive_raises_busy(device: Device) -> None:
    async with pair(device) as ends:
        waiting = asyncio.create_task(ends.far.receive())
        await asyncio.sleep(0.01)
        with pytest.raises(BusyResourceError):
            await ends.far.receive()
        await ends.near.send(b"1")
        assert await waiting == b"1"


async def test_messages_longer_than_the_peer_accepts(device: Device) -> None:
    async with pair(device, SMALL, deeper(SMALL, max_message=5000)) as ends:
        with pytest.raises(ValueError, match="at most 5,000 bytes"):
            await ends.near.send(bytes(5001))
        assert await _one(ends.near, ends.far, bytes(5000)) == bytes(5000)


async def test_the_longest_message_may_have_any_length(device: Device) -> None:
    async with pair(device, deeper(SMALL, max_message=2**64 - 1)) as ends:
        for length in (1, 10_000):
            await ends.near.send(sample(length))
            assert await ends.far.receive() == sample(length)


@pytest.mark.parametrize("length", [5000, 400_000])
@pytest.mark.parametrize("receive", [Connection.receive, Connection.receive_buffer])
async def test_a_message_for_which_there_is_no_memory_stays_the_next_one(
    device: Device, monkeypatch: pytest.MonkeyPatch, length: int, receive: Callable[[Connection], Any]
) -> None:
    def refuse(_: ReceivedMessage) -> bytes:
        raise MemoryError

    async with pair(device) as ends:
        sending = asyncio.create_task(ends.near.send(sample(length)))
        with monkeypatch.context() as patch:
            patch.setattr(ReceivedMessage, "data", property(refuse))
            patch.setattr(ReceivedMessage, "writable_data", property(refuse))
            if length < 400_000 or receive is Connection.receive:  # else it is read into memory that is there
                for _ in range(2):
                    with pytest.raises(MemoryError):
                        await receive(ends.far)
        assert bytes(await receive(ends.far)) == sample(length)
        await sending
        await works(ends.near, ends.far)


async def test_receiving_after_send_eof(device: Device) -> None:
    async with pair(device) as ends:
        await ends.near.send(b"last")
        await ends.near.send_eof()
        await ends.near.send_eof()
        with pytest.raises(ClosedResourceError, match="send_eof"):
            await ends.near.send(b"more")
        assert await ends.far.receive() == b"last"
        for _ in range(2):
            with pytest.raises(anyio.EndOfStream):
                await ends.far.receive()
        await ends.far.send(b"still here")
        assert await ends.near.receive() == b"still here"


async def test_anyio_stream_interface(device: Device) -> None:
    async with pair(device) as ends:
        assert isinstance(ends.near, anyio.abc.ObjectStream)
        remote = ends.near.extra(anyio.abc.SocketAttribute.remote_address)
        assert remote[1] == ends.listener.port
        assert remote == ends.far.extra(anyio.abc.SocketAttribute.local_address)
        assert ends.near.peer.device == device.name
        assert ends.near.peer.depth == SMALL.receive_depth


async def test_a_broken_connection_reports_the_cause(device: Device) -> None:
    async with pair(device) as ends:
        receiving = asyncio.create_task(ends.far.receive())
        await asyncio.sleep(0)
        ends.far.qp.to_error()
        with pytest.raises(BrokenResourceError, match="broken"):
            await receiving
        with pytest.raises(BrokenResourceError, match="broken"):
            await ends.far.send(b"x")
        with pytest.raises(BrokenResourceError, match="broken"):
            await ends.far.receive()
