"""Long messages that are copied before they are announced, so that the sender may go on at once."""

import array
import asyncio
import ctypes
import errno
import weakref
from typing import Any, cast

import pytest

from aioverbs import Connection, ConnectionSettings, Device, WcStatus, WorkCompletionError, connect
from aioverbs._connection import announcer, recycled_memory, staging
from aioverbs._connection.connection import end_of, send_constant_nowait
from aioverbs._connection.credits import max_announced
from aioverbs._connection.recycled_memory import rounded
from aioverbs._core.data_path.data_path import FrameSender
from aioverbs._lifecycle.resource import lifecycle_of
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, Cancel, every_way_to_cancel, pair, use_up, works
from tests.connections.test_messages import sample
from tests.garbage import collect_garbage
from tests.waiting import until

LENGTH = 400_000
SETTINGS = ConnectionSettings()
SLOTS = max_announced(SETTINGS.receive_depth)  # messages that may wait for the peer


def announcer_of(connection: Connection) -> announcer.Announcer:
    """Return what has announced messages of an end."""
    found = end_of(connection).announcer
    assert found is not None
    return found


def copies(connection: Connection) -> list[staging.Copy]:
    """Return the memory for copies that an end has registered and does not use."""
    return announcer_of(connection)._staging._idle


@pytest.fixture
def _kept_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_KEEP_S", 0.02)


MESSAGES: dict[str, Any] = {
    "bytes": sample(LENGTH),
    "bytearray": bytearray(sample(LENGTH)),
    "array": array.array("d", range(60_000)),
    "view": memoryview(sample(2 * LENGTH))[17 : LENGTH + 20],
    "parts": [b"head", bytearray(sample(LENGTH)), b"", memoryview(b"tail")],
    "many parts": [sample(100)] * 5000,
    "longest": sample(announcer._COPIED_BYTES - 1),
}


def joined(message: Any) -> bytes:
    return b"".join(message) if isinstance(message, list) else bytes(message)


@pytest.mark.parametrize("how", ["receive", "receive_into", "receive_buffer"])
@pytest.mark.parametrize("name", MESSAGES)
async def test_messages_of_every_kind_arrive(device: Device, name: str, how: str) -> None:
    message = MESSAGES[name]
    expected = joined(message)
    buffer = bytearray(len(expected) + 1)
    async with pair(device, SETTINGS) as ends:
        for _ in range(2):
            await ends.near.send(message)
            if how == "receive_into":
                assert await ends.far.receive_into(buffer) == len(expected)
                assert buffer == expected + b"\0"
            else:
                assert await getattr(ends.far, how)() == expected
            await until(lambda: len(copies(ends.near)) == 1)  # used twice


async def test_memory_may_be_changed_and_resized_when_send_returns(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        message = bytearray(sample(LENGTH))
        await ends.near.send(message)
        message[:] = bytes(LENGTH)
        message.extend(b"more")
        assert await ends.far.receive() == sample(LENGTH)


async def test_immediate_data_arrives(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        await ends.near.send(sample(LENGTH), immediate=0xFFFF_FFFF)
        assert await ends.far.receive_with_immediate() == (sample(LENGTH), 0xFFFF_FFFF)


async def test_send_waits_while_too_many_messages_are_unread(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        for number in range(SLOTS):
            await asyncio.wait_for(ends.near.send(sample(LENGTH, number)), 10)
        waiting = asyncio.create_task(ends.near.send(sample(LENGTH, SLOTS)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        for number in range(SLOTS + 1):
            assert await ends.far.receive() == sample(LENGTH, number)
        await waiting
        await works(ends.near, ends.far)


@every_way_to_cancel
async def test_a_cancelled_send_that_waits_sends_nothing(device: Device, cancel: Cancel) -> None:
    async with pair(device, SETTINGS) as ends:
        for number in range(SLOTS):
            await ends.near.send(sample(LENGTH, number))
        await cancel(ends.near.send(sample(LENGTH, SLOTS)), lambda: end_of(ends.near).channel.sender.frames.in_line)
        for number in range(SLOTS):
            assert await ends.far.receive() == sample(LENGTH, number)
        await ends.near.send(b"next")
        assert await ends.far.receive() == b"next"
        await until(lambda: len(copies(ends.near)) == SLOTS)


async def test_a_short_message_does_not_overtake(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        for each in (b"first", sample(LENGTH), b"second", sample(LENGTH, 1), b"third"):
            await ends.near.send(each)
        for each in (b"first", sample(LENGTH), b"second", sample(LENGTH, 1), b"third"):
            assert await ends.far.receive() == each


async def test_a_message_waits_for_a_credit(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        used = await use_up(ends.near)
        waiting = asyncio.create_task(ends.near.send(sample(LENGTH)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        assert not end_of(ends.near).grants._local_grants
        for _ in range(used):
            await ends.far.receive()
        assert await ends.far.receive() == sample(LENGTH)
        await waiting


async def test_other_tasks_run_between_messages(device: Device) -> None:
    """Copying takes long, so that a sender that never waits must not keep the loop."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def receive() -> None:
        for _ in range(20):
            await ends.far.receive()

    async with pair(device, SETTINGS) as ends:
        counting, receiving = asyncio.create_task(count_turns()), asyncio.create_task(receive())
        for _ in range(20):
            await ends.near.send(sample(announcer._COPIED_BYTES - 1))
        await receiving
        counting.cancel()
        assert turns >= 10


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("how", ["send", "nowait"])
async def test_memory_that_cannot_be_registered(device: Device, how: str) -> None:
    """The message is sent as if it was too long to be copied."""
    async with pair(device, SETTINGS) as ends:
        device.faults.fail("reg_mr", errno.ENOMEM)
        if how == "send":
            sending = asyncio.create_task(ends.near.send(bytearray(sample(LENGTH))))
            assert await ends.far.receive() == sample(LENGTH)
            await sending
        else:
            assert not send_constant_nowait(ends.near, sample(LENGTH))
        assert not copies(ends.near)
        await works(ends.near, ends.far)


async def test_a_process_without_memory_for_a_copy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(length: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(recycled_memory, "map_pages", refuse)
    async with pair(device, SETTINGS) as ends:
        sending = asyncio.create_task(ends.near.send(sample(LENGTH)))
        assert await ends.far.receive() == sample(LENGTH)
        await sending


@pytest.mark.usefixtures("_kept_shortly")
async def test_memory_is_deregistered_when_it_was_not_used_for_a_while(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        parts = lifecycle_of(ends.near.qp).children
        for _ in range(2):
            for number in range(SLOTS):
                await ends.near.send(sample(LENGTH, number))
            assert len(parts) == SLOTS  # windows
            for _ in range(SLOTS):
                await ends.far.receive()
            await until(lambda: not parts)
            assert not copies(ends.near)
        await works(ends.near, ends.far)


@pytest.mark.usefixtures("_kept_shortly")
async def test_memory_in_use_is_kept(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        await ends.near.send(sample(LENGTH))
        await asyncio.sleep(0.1)
        assert await ends.far.receive() == sample(LENGTH)


async def test_memory_grows_with_the_messages(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        for length in (LENGTH, 2 * LENGTH, LENGTH):
            await ends.near.send(sample(length))
            assert await ends.far.receive() == sample(length)
            await until(lambda: len(copies(ends.near)) == 1)
        assert len(copies(ends.near)[0]) >= 2 * LENGTH


async def test_a_peer_sees_nothing_of_other_connections_in_a_copy(device: Device) -> None:
    """Memory that had a message is used for copies of another connection."""
    async with pair(device, SETTINGS) as ends:
        longest = rounded(LENGTH)
        await ends.near.send(b"\xaa" * longest)
        received = await ends.far.receive_buffer()
        address = ctypes.addressof(ctypes.c_char.from_buffer(received))
        del received
        await ends.far.send(sample(LENGTH))
        await ends.near.receive()
        await until(lambda: copies(ends.far))
        remote = copies(ends.far)[0].remote
        if not device.software:  # whose copies have files of their own
            assert remote.address == address
        address = remote.address
        assert ctypes.string_at(address, longest) == sample(LENGTH) + bytes(longest - LENGTH)


@needs(Capability.FAULT_PLAN)
@pytest.mark.usefixtures("_kept_shortly")
async def test_a_key_that_cannot_be_taken_back_breaks_the_connection(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        await ends.near.send(sample(LENGTH))
        device.faults.fail("dealloc_mw", errno.EIO)
        assert await ends.far.receive() == sample(LENGTH)
        assert "could not be invalidated" in str(await ends.near.wait_lost())


@pytest.mark.usefixtures("_kept_shortly")
@pytest.mark.parametrize("how", ["closed", "aborted", "lost"])
async def test_the_end_of_the_connection_releases_all(device: Device, how: str) -> None:
    """Fixtures check that no memory is registered afterwards."""
    async with pair(device, ConnectionSettings(close_timeout_s=0.01)) as ends:
        await ends.near.send(sample(LENGTH))
        await ends.far.receive()
        await ends.near.send(sample(LENGTH))  # is not read
        if how == "closed":
            await ends.near.aclose()
        elif how == "aborted":
            ends.near.abort()
        else:
            ends.far.abort()
            await ends.near.wait_lost()
        await asyncio.sleep(0.05)  # longer than the memory is kept


async def used_and_closed(device: Device) -> "weakref.ref[staging.Staging]":
    """Send a message over a connection, and return a reference to its copies after it was closed."""
    async with pair(device, SETTINGS) as ends:
        await ends.near.send(sample(LENGTH))
        await ends.far.receive()
        await until(lambda: copies(ends.near))
        return weakref.ref(announcer_of(ends.near)._staging)


async def test_the_timer_does_not_keep_a_connection(device: Device) -> None:
    kept = await used_and_closed(device)
    collect_garbage()
    assert kept() is None


async def test_each_connection_has_memory_of_its_own(device: Device) -> None:
    """The peer may read it whenever it likes."""
    async with pair(device, SETTINGS) as one, pair(device, SETTINGS) as other:
        for ends in (one, other):
            await ends.near.send(sample(LENGTH))
            await ends.far.receive()
        await until(lambda: len(copies(one.near)) == len(copies(other.near)) == 1)
        assert copies(one.near)[0].remote.rkey != copies(other.near)[0].remote.rkey


async def test_no_other_peer_of_the_domain_reads_a_copy(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        spy = await connect(HOST, ends.listener.port, domain=ends.domain, settings=SETTINGS)
        spied = await ends.listener.accept()
        await ends.near.send(sample(LENGTH))
        await ends.far.receive()
        await until(lambda: copies(ends.near))
        secret = copies(ends.near)[0].remote
        memory = bytearray(len(secret))
        async with ends.domain.cache.region(memory) as region:
            with pytest.raises(WorkCompletionError) as caught:
                await spy.qp.read(region[:], secret)
        assert caught.value.status is WcStatus.REM_ACCESS_ERR
        assert not any(memory)
        spy.abort()
        spied.abort()
        await works(ends.near, ends.far)


class Interrupted:
    """Sender of frames whose `post` is interrupted by a signal, before or after its work."""

    def __init__(self, frames: FrameSender, is_posted: bool) -> None:
        self._frames = frames
        self._is_posted = is_posted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frames, name)

    def post(self, *arguments: Any, **more: Any) -> None:
        if self._is_posted:
            _ = self._frames.post(*arguments, **more)
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_posted", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
async def test_a_send_that_a_signal_interrupts(device: Device, is_posted: bool, is_first: bool) -> None:
    async with pair(device, SETTINGS) as ends:
        if not is_first:
            await ends.near.send(sample(LENGTH))
            await ends.far.receive()
            await until(lambda: copies(ends.near))
        sender = end_of(ends.near).channel.sender
        frames, sender.frames = sender.frames, cast(FrameSender, Interrupted(sender.frames, is_posted))
        with pytest.raises(KeyboardInterrupt):
            await ends.near.send(sample(LENGTH, 1))
        sender.frames = frames
        for number in range(2, 2 + SLOTS - is_posted):
            await ends.near.send(sample(LENGTH, number))
        if is_posted:
            assert await ends.far.receive() == sample(LENGTH, 1)
        for number in range(2, 2 + SLOTS - is_posted):
            assert await ends.far.receive() == sample(LENGTH, number)
        await until(lambda: len(set(copies(ends.near))) == len(copies(ends.near)) == SLOTS)
        assert not announcer_of(ends.near)._unread_bytes
        await works(ends.near, ends.far)


async def test_no_more_is_copied_than_may_be_unread(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further message is sent as if it was too long to be copied: its sender waits."""
    monkeypatch.setattr(announcer, "_MAX_UNREAD_BYTES", LENGTH)
    async with pair(device, SETTINGS) as ends:
        await ends.near.send(bytearray(sample(LENGTH)))
        waiting = asyncio.create_task(ends.near.send(bytearray(sample(LENGTH, 1))))
        await until(lambda: end_of(ends.near).channel.sender._announced.keys() == {1, 2})
        assert not waiting.done()
        for number in range(2):
            assert await ends.far.receive() == sample(LENGTH, number)
        await waiting


@pytest.mark.usefixtures("_kept_shortly")
async def test_a_broken_connection_keeps_no_memory(device: Device) -> None:
    async with pair(device, SETTINGS) as ends:
        await ends.near.send(sample(LENGTH))
        ends.far.abort()
        await ends.near.wait_lost()
        await until(lambda: not copies(ends.near) and not lifecycle_of(ends.near.qp).children)
