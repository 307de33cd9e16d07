"""Short messages that are sent in one turn of the loop leave together: their order, their limits, and their end."""

import array
import asyncio
import contextlib
import ctypes
import errno
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    ClosedResourceError,
    Connection,
    ConnectionSettings,
    Device,
    MessageModel,
    VerbsError,
    connect,
    listen,
)
from aioverbs._connection.connection import end_of
from aioverbs._connection.connection_end import ConnectionEnd
from aioverbs._connection.wire import CREDITS_AT, FIRST, HAS_IMMEDIATE, TOTAL, WHOLE, FrameKind, header
from aioverbs._core.data_path.data_path import MessageFrame
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL, cancel_by_its_task, deeper, pair, root_of, use_up
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import until

USUAL = ConnectionSettings()


def posted(connection: Connection) -> int:
    """Return the number of sends so far."""
    return connection.qp.statistics().sends.posted


async def idle(connection: Connection) -> None:
    """Wait until the peer has acknowledged everything, and the connection knows that."""
    await until(lambda: not connection.qp.statistics().sends.in_flight)


async def send_all(connection: Connection, messages: list[bytes]) -> None:
    for message in messages:
        await connection.send(message)


async def receive_all(connection: Connection, count: int) -> list[bytes]:
    return [await connection.receive() for _ in range(count)]


async def receive_until_lost(connection: Connection) -> list[bytes]:
    received: list[bytes] = []
    with contextlib.suppress(BrokenResourceError):
        while True:
            received.append(await connection.receive())
    return received


@pytest.mark.every_way
async def test_messages_of_one_turn_leave_together(device: Device) -> None:
    """The first one leaves at once, the others when the turn ends."""
    messages = [bytes([number]) * number for number in range(40)]
    async with pair(device, USUAL) as ends:
        before = posted(ends.near)
        await send_all(ends.near, messages)
        assert posted(ends.near) - before == 2
        assert ends.near.traffic().messages_sent == 40
        assert await receive_all(ends.far, 40) == messages
        assert ends.far.traffic().messages_received == 40


@pytest.mark.parametrize("form", [bytearray, memoryview, lambda each: [each], lambda each: (b"", each[:2], each[2:])])
async def test_messages_of_all_forms_share_a_frame(device: Device, form: Callable[[bytes], Any]) -> None:
    async with pair(device, USUAL) as ends:
        before = posted(ends.near)
        for _ in range(10):
            await ends.near.send(form(b"sent"))
            ends.near.send_nowait(form(b"sent"))
        assert posted(ends.near) - before == 2
        assert await receive_all(ends.far, 20) == [b"sent"] * 20


async def test_single_messages_leave_at_once(device: Device) -> None:
    async with pair(device, USUAL) as ends:
        for together in (1, 3, 1):
            await send_all(ends.near, [b"together"] * together)
            await receive_all(ends.far, together)
        for _ in range(3):
            await idle(ends.near)
            rung = ends.near.qp.statistics().sends.doorbells
            ends.near.send_nowait(b"alone")
            assert ends.near.qp.statistics().sends.doorbells == rung + 1
            assert await ends.far.receive() == b"alone"


@pytest.mark.parametrize("model", list(MessageModel))
async def test_messages_of_one_turn_are_answered(device: Device, model: MessageModel) -> None:
    """An await that polls sends first what the peer has to answer."""
    async with (
        device.resource_domain(message_model=model) as domain,
        listen(HOST, domain=domain) as listener,
        connect(HOST, listener.port, domain=domain) as near,
        await listener.accept() as far,
        asyncio.timeout(patience(20)),
    ):

        async def answer() -> None:
            for _ in range(5):
                await far.send(b"".join(await receive_all(far, 7)))

        answering = asyncio.create_task(answer())
        for _ in range(5):
            await send_all(near, [b"ask"] * 7)
            assert await near.receive() == b"ask" * 7
        await answering


async def test_other_requests_follow_the_messages_before_them(device: Device) -> None:
    """All requests of one turn arrive in the order of the calls."""
    access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
    async with (
        pair(device, USUAL) as ends,
        ends.domain.register(64) as source,
        ends.domain.register(64, access) as target,
    ):
        await ends.far.grant(target, AccessFlags.REMOTE_WRITE)
        granted = await ends.near.receive_grant()
        near = ends.near
        await near.send(b"1")
        await near.send(b"2")
        await near.send(b"3", immediate=3)
        await near.send(b"4")
        await near.send([b"", b"5"])
        await near.send(bytearray(b"6"))
        await near.send(bytes(5000))
        await near.send(b"7")
        order = posted(near)
        write = near.write(source[:8], granted[:8])
        assert posted(near) == order + 1
        near.send_nowait(memoryview(b"8"))
        await near.send_eof()
        received = [await ends.far.receive_with_immediate() for _ in range(9)]
        assert received[:3] == [(b"1", None), (b"2", None), (b"3", 3)]
        assert received[3:6] == [(b"4", None), (b"5", None), (b"6", None)]
        assert received[6:] == [(bytes(5000), None), (b"7", None), (b"8", None)]
        with pytest.raises(anyio.EndOfStream):
            await ends.far.receive()
        await write


@pytest.mark.parametrize("length", [0, 1, 1015, 1016, 1017, 1019, 1020, 1021, 1024])
async def test_messages_around_the_size_of_a_frame(device: Device, length: int) -> None:
    async with pair(device) as ends:
        messages = [b"first", b"second", bytes([7]) * length, b"fourth", bytes(length), b"", b"last"]
        sending = asyncio.create_task(send_all(ends.near, messages))
        assert await receive_all(ends.far, len(messages)) == messages
        await sending


async def test_all_ways_to_receive_messages_of_a_frame(device: Device) -> None:
    async with pair(device, USUAL) as ends:
        await send_all(ends.near, [b"0", b"one", b"two", b"three", b"four", b"five"])
        assert await ends.far.receive() == b"0"
        buffer = bytearray(4)
        assert await ends.far.receive_into(buffer) == 3
        assert buffer[:3] == b"one"
        assert await ends.far.receive_with_immediate() == (b"two", None)
        with pytest.raises(ValueError, match="has 5 bytes"):
            await ends.far.receive_into(buffer)
        assert await ends.far.receive() == b"three"
        assert bytes(await ends.far.receive_buffer()) == b"four"
        assert await ends.far.receive() == b"five"


async def test_a_message_that_does_not_fit_stays_the_next_one(device: Device) -> None:
    """Also the last one of its frame, whose credit goes back when it is received."""
    async with pair(device, USUAL) as ends:
        await send_all(ends.near, [b"0", b"one", b"two"])
        assert await receive_all(ends.far, 2) == [b"0", b"one"]
        owed = ends.far.traffic().owed
        with pytest.raises(ValueError, match="has 3 bytes"):
            await ends.far.receive_into(bytearray(2))
        assert ends.far.traffic().owed == owed
        assert await ends.far.receive() == b"two"
        assert ends.far.traffic().owed == owed + 1


async def test_a_message_without_memory_for_it_stays_the_next_one(device: Device) -> None:
    """Also the last one of its frame."""
    testcapi = pytest.importorskip("_testcapi")
    async with pair(device, USUAL) as ends:
        messages = [b"0", b"a" * 100, b"b" * 300, b"c" * 600]
        await send_all(ends.near, messages)
        assert await receive_all(ends.far, 2) == messages[:2]
        unread = end_of(ends.far).channel.receiver.unread
        for message in messages[2:]:
            received, failing = None, 0  # the number of the allocation that fails
            while received is None:
                testcapi.set_nomemory(failing, failing + 1)
                try:
                    received = unread.take()
                except MemoryError:
                    failing += 1
                finally:
                    testcapi.remove_mem_hooks()
            assert failing
            assert received == message
        assert ends.far.traffic().owed == 2
        assert ends.far.traffic().messages_received == 4


async def test_a_buffer_that_receives_while_it_is_given_back(device: Device) -> None:
    """The object behind a buffer may run code then."""
    async with pair(device, USUAL) as ends:
        await send_all(ends.near, [b"0", b"one", b"two", b"three", b"four"])
        assert await receive_all(ends.far, 2) == [b"0", b"one"]
        others: list[bytes] = []

        def receive() -> None:
            for _ in range(2):
                with pytest.raises(StopIteration) as message:
                    ends.far.receive().send(None)
                others.append(message.value.value)

        memory = ctypes.create_string_buffer(8)
        assert await ends.far.receive_into(buffer_that_calls(memory, receive)) == 3
        assert memory.value == b"two"
        assert others == [b"three", b"four"]
        assert ends.far.traffic().owed == 2
        assert ends.far.traffic().messages_received == 5
        await send_all(ends.near, [b"five", b"six"])
        assert await receive_all(ends.far, 2) == [b"five", b"six"]


def buffer_that_calls(memory: ctypes.Array[ctypes.c_char], when_released: Callable[[], None]) -> Any:
    """Return an object with a writable buffer, which calls a function each time that the buffer is given back."""
    api = ctypes.pythonapi
    fill = api.PyBuffer_FillInfo
    fill.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_int]

    def get(obj: object, view: int, flags: int) -> int:
        return int(fill(view, obj, ctypes.addressof(memory), len(memory), 0, flags))

    def release(_: object, __: int) -> None:
        when_released()

    get_type = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
    release_type = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_void_p)
    callbacks = get_type(get), release_type(release)

    class Slot(ctypes.Structure):
        _fields_ = (("slot", ctypes.c_int), ("function", ctypes.c_void_p))

    class Spec(ctypes.Structure):
        _fields_ = (
            ("name", ctypes.c_char_p),
            ("basicsize", ctypes.c_int),
            ("itemsize", ctypes.c_int),
            ("flags", ctypes.c_uint),
            ("slots", ctypes.POINTER(Slot)),
        )

    get_slot, release_slot = 1, 2  # Py_bf_getbuffer, Py_bf_releasebuffer
    slots = (Slot * 3)(
        Slot(get_slot, ctypes.cast(callbacks[0], ctypes.c_void_p)),
        Slot(release_slot, ctypes.cast(callbacks[1], ctypes.c_void_p)),
    )
    make = api.PyType_FromSpec
    make.argtypes, make.restype = [ctypes.POINTER(Spec)], ctypes.py_object
    spec = Spec(b"tests.BufferThatCalls", object.__basicsize__, 0, 1 << 10, slots)  # Py_TPFLAGS_HEAPTYPE is implied
    made = make(ctypes.byref(spec))()
    type(made).kept_alive = callbacks, slots, spec, memory
    return made


async def test_wrong_buffers_lose_no_message_of_a_frame(device: Device) -> None:
    async with pair(device, USUAL) as ends:
        await send_all(ends.near, [b"0", b"one", b"two", b"", b"end"])
        assert await ends.far.receive() == b"0"
        for wrong in (b"read-only", memoryview(bytearray(8))[::2], 5):
            with pytest.raises(TypeError):
                await ends.far.receive_into(wrong)  # type: ignore[arg-type]
        numbers = array.array("H", [0, 0])
        assert await ends.far.receive_into(numbers) == 3
        assert numbers.tobytes()[:3] == b"one"
        assert bytes(await ends.far.receive_buffer()) == b"two"
        assert await ends.far.receive_into(bytearray()) == 0
        assert await ends.far.receive() == b"end"
        assert ends.far.traffic().messages_received == 5


async def test_unread_messages_of_a_frame_are_lost_by_closing(device: Device) -> None:
    async with pair(device, USUAL) as ends:
        await send_all(ends.near, [b"0", b"one", b"two"])
        assert await receive_all(ends.far, 2) == [b"0", b"one"]
        await ends.far.aclose()
        for receive in (ends.far.receive, ends.far.receive_buffer, lambda: ends.far.receive_into(bytearray(8))):
            with pytest.raises(ClosedResourceError):
                await receive()


async def test_messages_that_arrived_outlive_the_connection(device: Device) -> None:
    """The user gets them before the error."""
    async with pair(device, USUAL) as ends:
        await send_all(ends.near, [b"0", b"one", b"two"])
        assert await ends.far.receive() == b"0"
        assert await ends.far.receive() == b"one"
        ends.near.abort()
        await ends.far.wait_lost()
        assert await ends.far.receive() == b"two"
        with pytest.raises(BrokenResourceError):
            await ends.far.receive()


async def test_credits_go_back_when_the_last_message_of_a_frame_is_received(device: Device) -> None:
    async with pair(device, USUAL) as ends:
        await send_all(ends.near, [b"0", *[b"shared"] * 5])
        owed = []
        for _ in range(6):
            await ends.far.receive()
            owed.append(ends.far.traffic().owed)
        assert owed == [1, 1, 1, 1, 1, 2]


@needs(Capability.FAULT_PLAN)
async def test_a_frame_with_room_takes_messages_without_a_credit(device: Device) -> None:
    """But none that would overtake a sender that waits."""
    async with pair(device, SMALL) as ends:
        hold(device, ends.near.qp)
        ends.near.send_nowait(b"first")
        ends.near.send_nowait(b"second")
        assert end_of(ends.near).channel.statistics().credits == 2
        ends.near.send_nowait(b"third")
        assert end_of(ends.near).channel.statistics().credits == 2
        waiting = asyncio.create_task(ends.near.send(bytes(5000)))
        await until(lambda: ends.near.traffic().waits)
        with pytest.raises(anyio.WouldBlock):
            ends.near.send_nowait(b"later")
        unhold(device, ends.near.qp)
        assert await receive_all(ends.far, 4) == [b"first", b"second", b"third", bytes(5000)]
        await waiting


async def receive_one_into(connection: Connection) -> bytes:
    buffer = bytearray(16)
    return bytes(buffer[: await connection.receive_into(buffer)])


async def receive_one_with_immediate(connection: Connection) -> bytes:
    return (await connection.receive_with_immediate())[0]


async def receive_one_buffer(connection: Connection) -> bytes:
    return bytes(await connection.receive_buffer())


every_way_to_receive = pytest.mark.parametrize(
    "receive", [Connection.receive, receive_one_into, receive_one_with_immediate, receive_one_buffer]
)


@needs(Capability.FAULT_PLAN)
async def test_messages_share_a_frame_that_waits_for_a_place(device: Device) -> None:
    """The send queue is full of other requests."""
    settings = ConnectionSettings(receive_depth=8, send_buffers=4, send_depth=16)
    async with pair(device, settings) as ends:
        near = ends.near
        before = near.qp.statistics().sends.bytes
        hold(device, near.qp)
        sender = end_of(near).channel.sender
        probes = [sender.probe() for _ in range(near.qp.statistics().sends.depth)]
        for number in range(100):
            near.send_nowait(b"%d" % number)
        assert near.qp.statistics().sends.queued == 2
        unhold(device, near.qp)
        assert await receive_all(ends.far, 100) == [b"%d" % number for number in range(100)]
        await idle(near)
        sends = near.qp.statistics().sends
        assert sends.posted - len(probes) <= 4
        assert sends.bytes - before == 190 + 99 * 4  # all but the first one follow their lengths
        assert all(each.ended for each in probes)


@needs(Capability.FAULT_PLAN)
async def test_a_message_does_not_overtake_a_request_that_waits_for_a_place(device: Device) -> None:
    """Although a frame with room for it is before that request."""
    settings = ConnectionSettings(receive_depth=8, send_buffers=4, send_depth=16)
    async with pair(device, settings) as ends:
        near = ends.near
        hold(device, near.qp)
        sender = end_of(near).channel.sender
        probes = [sender.probe() for _ in range(near.qp.statistics().sends.depth - 2)]
        near.send_nowait(b"1")
        near.send_nowait(b"2")
        assert near.qp.statistics().sends.queued == 0
        probes.append(sender.probe())
        near.send_nowait(b"3")
        assert near.qp.statistics().sends.queued == 2
        unhold(device, near.qp)
        assert await receive_all(ends.far, 3) == [b"1", b"2", b"3"]
        await idle(near)
        assert all(each.ended for each in probes)


@every_way_to_receive
async def test_a_stream_of_messages_lets_other_tasks_run(
    device: Device, receive: Callable[[Connection], Awaitable[bytes]]
) -> None:
    """Neither end does more than a share of the loop's turn at once."""
    settings = ConnectionSettings(receive_depth=32, send_buffers=16, send_depth=32)  # so that no message waits
    async with pair(device, settings) as ends:
        turns: list[int] = []

        async def count_turns() -> None:
            while True:
                turns.append(len(turns))
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        await send_all(ends.near, [number.to_bytes(4) for number in range(900)])
        assert 4 <= len(turns) < 30
        await idle(ends.near)
        sent_in = len(turns)
        assert [await receive(ends.far) for _ in range(900)] == [number.to_bytes(4) for number in range(900)]
        assert 4 <= len(turns) - sent_in < 30
        counting.cancel()


async def test_long_messages_use_up_the_turn_sooner(device: Device) -> None:
    async with pair(device, ConnectionSettings(buffer_size=2 << 20, send_buffers=4)) as ends:
        sent: list[int] = []

        async def flood() -> None:
            while True:
                await ends.near.send(bytes(16 << 10))
                sent.append(len(sent))

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(0)
        assert 10 < len(sent) < 32
        flooding.cancel()
        await asyncio.wait([flooding])


async def test_a_cancelled_call_that_lets_other_tasks_run(device: Device) -> None:
    async with pair(device, USUAL) as ends:
        sent: list[int] = []

        async def flood() -> None:
            while True:
                number = len(sent)
                await ends.near.send(number.to_bytes(4))
                sent.append(number)

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(0)  # it yields now: all of its messages but the first share a frame
        assert len(sent) > 20
        flooding.cancel()
        await asyncio.wait([flooding])
        await ends.near.send(b"end")
        received = await receive_all(ends.far, len(sent) + 1)
        assert received == [*(number.to_bytes(4) for number in sent), b"end"]


@needs(Capability.FAULT_PLAN)
async def test_a_frame_that_the_verb_refuses_breaks_the_connection(device: Device) -> None:
    """No message arrives without those before it, and both ends learn of it."""
    async with pair(device, USUAL) as ends, asyncio.timeout(patience(20)):
        ends.near.send_nowait(b"1")
        ends.near.send_nowait(b"2")
        ends.near.send_nowait(b"3")
        device.faults.fail("post_send", errno.ENOMEM)
        received: list[bytes] = []
        with contextlib.suppress(BrokenResourceError):
            received += await receive_all(ends.far, 1)
            received += await receive_all(ends.far, 1)
        assert received in ([], [b"1"])
        assert root_of(await ends.near.wait_lost()).errno == errno.ENOMEM  # type: ignore[attr-defined]
        with pytest.raises(BrokenResourceError, match="ibv_post_send"):
            await ends.near.send(b"4")


@needs(Capability.FAULT_PLAN)
async def test_a_refused_frame_stops_the_request_that_posts_it(device: Device) -> None:
    """A message with immediate data, which shares no frame, has the one before it posted first."""
    async with pair(device, USUAL) as ends, asyncio.timeout(patience(20)):
        for message in (b"1", b"2", b"3"):
            ends.near.send_nowait(message)
        device.faults.fail("post_send", errno.ENOMEM)
        with pytest.raises(BrokenResourceError, match="ibv_post_send"):
            ends.near.send_nowait(b"4", immediate=4)
        assert await receive_until_lost(ends.far) in ([], [b"1"])
        assert root_of(await ends.near.wait_lost()).errno == errno.ENOMEM  # type: ignore[attr-defined]


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("immediate", [None, 5], ids=["frame", "single message"])
async def test_a_request_refused_after_a_wait_for_a_place_stops_those_behind_it(
    device: Device, immediate: int | None
) -> None:
    """END waits behind it: the peer does not take what arrived for all that was sent."""
    settings = ConnectionSettings(buffer_size=1024, receive_depth=8, send_buffers=6, send_depth=16)
    async with pair(device, settings) as ends, asyncio.timeout(patience(20)):
        near = ends.near
        await near.send(b"1")
        assert await ends.far.receive() == b"1"
        await idle(near)
        hold(device, near.qp)
        sender = end_of(near).channel.sender
        probes = [sender.probe() for _ in range(near.qp.statistics().sends.depth)]
        for message in (b"2", b"3", b"4"):
            near.send_nowait(message, immediate=immediate)
        closing = asyncio.create_task(near.aclose())
        await until(lambda: near.qp.statistics().sends.queued > 2)
        device.faults.fail("post_send", errno.ENOMEM, first=2)
        unhold(device, near.qp)
        assert await receive_until_lost(ends.far) in ([], [b"2"])
        await asyncio.wait([closing])
        assert all(each.ended for each in probes)


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("what", ["message", "fragment", "credits"])
async def test_a_request_refused_at_the_end_of_the_turn_breaks_the_connection(device: Device, what: str) -> None:
    """With HIGH_BANDWIDTH, all requests are posted then, and no caller awaits those of messages."""
    async with (
        device.resource_domain(message_model=MessageModel.HIGH_BANDWIDTH) as domain,
        listen(HOST, domain=domain, settings=SMALL) as listener,
        connect(HOST, listener.port, domain=domain, settings=SMALL) as near,
        await listener.accept() as far,
        asyncio.timeout(patience(20)),
    ):
        if what == "credits":
            count = await use_up(near)
            await until(lambda: len(end_of(far).channel.receiver.unread) == count)
            device.faults.fail("post_send", errno.ENOMEM)
            assert await receive_all(far, count) == [b"one of them"] * count
            lost, other = far, near
        else:
            device.faults.fail("post_send", errno.ENOMEM)
            if what == "message":
                near.send_nowait(b"1", immediate=1)
                near.send_nowait(b"2", immediate=2)
            else:
                with contextlib.suppress(VerbsError):  # awaits the buffer of the first one
                    await near.send(bytes(5000))
            lost, other = near, far
            assert await receive_until_lost(far) == []
        assert root_of(await lost.wait_lost()).errno == errno.ENOMEM  # type: ignore[attr-defined]
        assert "protocol violation" not in str(await other.wait_lost())


async def test_a_frame_that_cannot_be_posted_holds_up_no_later_message(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(device) as ends:
        sender = end_of(ends.near).channel.sender
        frames = sender.frames

        class Unposted:
            def close(self) -> None:
                raise MemoryError

            def __getattr__(self, name: str) -> Any:
                return getattr(frames, name)

            def __setattr__(self, name: str, value: object) -> None:
                setattr(frames, name, value)

        with monkeypatch.context() as patch:
            patch.setattr(sender, "frames", Unposted())
            with pytest.raises(MemoryError):
                await ends.near.send(bytes(5000))
        ends.near.send_nowait(b"later")
        assert await ends.far.receive() == b"later"


async def test_a_frame_takes_no_message_after_the_end_of_the_connection(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a function fails that is called at the end."""
    on_ended, errors = ConnectionEnd.on_ended, [ZeroDivisionError()]

    def fail_once(end: ConnectionEnd) -> None:
        if errors:
            raise errors.pop()
        on_ended(end)

    monkeypatch.setattr(ConnectionEnd, "on_ended", fail_once)
    async with pair(device, USUAL) as ends:
        ends.near.send_nowait(b"1")
        ends.near.send_nowait(b"2")
        with pytest.raises(ZeroDivisionError):
            end_of(ends.near).channel.fail("for a reason")
        with pytest.raises(BrokenResourceError, match="for a reason"):
            await ends.near.send(b"3")
        with pytest.raises(BrokenResourceError, match="for a reason"):
            ends.near.send_nowait(b"4")


async def test_messages_are_refused_after_the_end(device: Device) -> None:
    async with pair(device, USUAL) as ends:
        for connection in (ends.near, ends.far):
            await send_all(connection, [b"a", b"b"])
        ends.near.abort()
        for send in (ends.near.send, ends.far.send):
            await until(lambda: ends.far.broken is not None)
            with pytest.raises((anyio.ClosedResourceError, BrokenResourceError)):
                await send(b"c")


async def test_a_frame_is_delivered_before_closing(device: Device) -> None:
    async with pair(device, USUAL) as ends:
        await send_all(ends.near, [b"a", b"b", b"c"])
        await ends.near.aclose()
        assert await receive_all(ends.far, 3) == [b"a", b"b", b"c"]
        with pytest.raises(anyio.EndOfStream):
            await ends.far.receive()


# ---- Hostile peers


def frame(*messages: bytes) -> bytes:
    return b"".join(len(each).to_bytes(4) + each for each in messages)


MESSAGES = header(FrameKind.MESSAGES)
WRONG: dict[str, tuple[bytes, int]] = {
    "empty": (b"", MESSAGES),
    "half a length": (frame(b"fine") + b"\0\0\0", MESSAGES),
    "too long": (frame(b"fine") + (5).to_bytes(4) + b"1234", MESSAGES),
    "far too long": ((0xFFFFFFFF).to_bytes(4) + b"1234", MESSAGES),
    "longer than accepted": (frame(bytes(101)), MESSAGES),
    "flags": (frame(b"fine"), MESSAGES | HAS_IMMEDIATE),
    "number": (frame(b"fine"), MESSAGES | 1),
    "returns credits": (frame(b"fine"), MESSAGES | 1 << CREDITS_AT),
    "alone, longer than accepted": (bytes(101), WHOLE),
    "alone, with a number": (b"fine", WHOLE | 1),
    "alone, returns credits": (b"fine", WHOLE | 1 << CREDITS_AT),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_frames_break_the_connection(device: Device, wrong: str) -> None:
    data, immediate = WRONG[wrong]
    settings = deeper(SMALL, max_message=100)
    async with pair(device, settings) as ends, ends.domain.register(256) as memory:
        memory.buffer[: len(data)] = data
        _ = ends.near.qp.send(memory[: len(data)] if data else None, immediate=immediate)
        async with asyncio.timeout(patience(10)):
            with pytest.raises(BrokenResourceError, match="protocol violation: the peer"):
                await ends.far.receive()
        assert not ends.far.traffic().messages_received


@pytest.mark.parametrize(("immediate", "text"), [(MESSAGES, "messages after END"), (WHOLE, "a message after END")])
async def test_messages_after_the_end_break_the_connection(device: Device, immediate: int, text: str) -> None:
    async with pair(device) as ends, ends.domain.register(64) as memory:
        await ends.near.send_eof()
        memory.buffer[:5] = frame(b"x")
        _ = ends.near.qp.send(memory[:5], immediate=immediate)
        await until(lambda: ends.far.broken is not None)
        assert text in str(ends.far.broken)


@pytest.mark.parametrize(("immediate", "data"), [(MESSAGES, frame(b"whole")), (WHOLE, b"whole")])
async def test_a_whole_message_replaces_an_incomplete_one(device: Device, immediate: int, data: bytes) -> None:
    """The sender of that one was cancelled. Another fragment of it violates the protocol."""
    first = TOTAL.pack(100) + b"x"
    async with pair(device) as ends, ends.domain.register(256) as memory:
        credit: Any = end_of(ends.near).channel.sender._credits
        for at, (each, bits) in enumerate(
            [(first, header(FrameKind.DATA, FIRST)), (data, immediate), (data, immediate)]
        ):
            memory.buffer[64 * at : 64 * at + len(each)] = each
            credit.take()  # the far end may return some before the last message
            await ends.near.qp.send(memory[64 * at : 64 * at + len(each)], immediate=bits)
        assert await receive_all(ends.far, 2) == [b"whole"] * 2
        await ends.near.qp.send(memory[:1], immediate=header(FrameKind.DATA))
        async with asyncio.timeout(patience(10)):
            with pytest.raises(BrokenResourceError, match="without the first one"):
                await ends.far.receive()


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\0\0\1", b"\0\0\0\5abcd", frame(b"a") + b"\0\0\0"])
def test_frames_whose_lengths_do_not_add_up(data: bytes) -> None:
    with pytest.raises(ValueError, match="the peer sent"):
        MessageFrame(data, 1 << 30)


async def test_a_send_cancelled_while_it_waits_leaves_its_frame(device: Device) -> None:
    async with pair(device) as ends:
        count = await use_up(ends.near)
        waits: Any = ends.near.traffic().waits
        await cancel_by_its_task(ends.near.send(b"cancelled"), lambda: ends.near.traffic().waits > waits)
        assert await receive_all(ends.far, count) == [b"one of them"] * count
        await until(lambda: ends.near.traffic().credits > 1)
        await ends.near.send(b"next")
        assert await ends.far.receive() == b"next"
