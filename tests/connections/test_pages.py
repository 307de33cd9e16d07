"""Quiet connections give the pages of their buffers back to the kernel."""

import asyncio
import mmap

import pytest

from aioverbs import Connection, ConnectionSettings, Device
from aioverbs._connection.connection import end_of
from aioverbs._connection.message_channel import MessageChannel
from tests.connections.ends import deeper, pair, receive_while_pages_are_given_back, works
from tests.resident import resident_pages
from tests.waiting import until

PAGE_SIZED = ConnectionSettings(buffer_size=mmap.PAGESIZE, receive_depth=8, send_buffers=4, keep_alive_s=None)
UNALIGNED = deeper(PAGE_SIZED, buffer_size=10_000)


def block_of(connection: Connection) -> tuple[int, int]:
    """Return the address and length of the buffers of an end."""
    block = end_of(connection).channel.sender.frames.memory
    return block.address, len(block)


async def use_buffers(near: Connection, far: Connection, rounds: int = 20) -> None:
    """Send messages each way that share no frame, so that all receives are used."""
    for number in range(rounds):
        for one, other in ((near, far), (far, near)):
            await one.send(bytes([number]) * 3000, immediate=number)
            assert await other.receive() == bytes([number]) * 3000


@pytest.mark.parametrize("settings", [PAGE_SIZED, UNALIGNED])
async def test_buffers_of_a_quiet_connection_have_no_pages(device: Device, settings: ConnectionSettings) -> None:
    async with pair(device, deeper(settings, keep_alive_s=0.4)) as ends:
        blocks = [block_of(each) for each in (ends.near, ends.far)]
        await use_buffers(ends.near, ends.far)
        kept = 0 if settings is PAGE_SIZED else 2  # which the send buffers do not fill
        if device.software:
            await until(lambda: all(resident_pages(*block) <= kept for block in blocks))
        else:  # pinned
            await asyncio.sleep(0.5)
            assert all(resident_pages(*block) >= block[1] // mmap.PAGESIZE for block in blocks)
        await use_buffers(ends.near, ends.far)


async def test_send_buffers_in_use_keep_their_pages(device: Device) -> None:
    async with pair(device, PAGE_SIZED) as ends:
        await ends.near.send(b"posted")
        await ends.near.send(b"in use" * 100)  # in a frame that is posted at the end of the turn
        assert end_of(ends.near).channel.sender.frames.free_buffers < PAGE_SIZED.send_buffers
        end_of(ends.near).channel.give_back_pages()
        assert await ends.far.receive() == b"posted"
        assert await ends.far.receive() == b"in use" * 100
        await works(ends.near, ends.far)


@pytest.mark.every_way
async def test_messages_arrive_while_pages_are_given_back(device: Device) -> None:
    """At any moment, with fragments of messages received and others in flight."""
    async with pair(device, PAGE_SIZED) as ends:
        await receive_while_pages_are_given_back(ends.near, ends.far, ends.near, ends.far)


async def test_pages_are_given_back_once_when_a_connection_becomes_quiet(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(device, PAGE_SIZED) as ends:
        calls: list[None] = []
        monkeypatch.setattr(MessageChannel, "give_back_pages", lambda _: calls.append(None))
        liveness = end_of(ends.near).liveness
        liveness.tick()
        quiet = len(calls)  # for frames of the handshake
        await use_buffers(ends.near, ends.far, 40)  # 80 frames
        liveness.tick()
        assert len(calls) == quiet
        for _ in range(3):
            liveness.tick()
        assert len(calls) == quiet + 1
        await use_buffers(ends.near, ends.far, 1)
        for _ in range(3):
            liveness.tick()
        assert len(calls) == quiet + 2
