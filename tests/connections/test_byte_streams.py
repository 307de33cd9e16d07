"""Byte streams over connections, and streams on top of them."""

import asyncio
import random
from pathlib import Path

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSStream

from aioverbs import BusyResourceError, ClosedResourceError, Device
from aioverbs._connection import announcer, message_sender
from aioverbs._connection.connection import end_of
from tests.connections.certificates import contexts
from tests.connections.ends import pair
from tests.waiting import until


async def test_bytes_arrive_in_order(device: Device) -> None:
    async with pair(device) as ends:
        near, far = ends.near.as_byte_stream(), ends.far.as_byte_stream()
        await near.send(b"")
        await near.send(b"abcdef")
        assert await far.receive(4) == b"abcd"
        assert await far.receive(4) == b"ef"
        data = random.Random(1).randbytes(20_000)
        sending = asyncio.create_task(near.send(data))
        got = b""
        while len(got) < len(data):
            got += await far.receive(777)
        assert got == data
        await sending
        await near.send_eof()
        for _ in range(2):
            with pytest.raises(anyio.EndOfStream):
                await far.receive()
        await far.send(b"still")
        assert await near.receive() == b"still"
        waiting = asyncio.create_task(near.receive())
        await asyncio.sleep(0)
        with pytest.raises(BusyResourceError):
            await near.receive()
        await far.aclose()
        with pytest.raises(anyio.EndOfStream):
            await waiting
        assert ends.far.closed
        assert near.extra(anyio.abc.SocketAttribute.remote_address) == ends.near.remote_address
        with pytest.raises(ValueError, match="1 or more"):
            await near.receive(0)


@pytest.mark.parametrize("kind", [bytes, bytearray])
async def test_large_writes_are_not_copied_into_buffers(
    device: Device, monkeypatch: pytest.MonkeyPatch, kind: type[bytes | bytearray]
) -> None:
    monkeypatch.setattr(message_sender, "_PIECE_BYTES", 500_000)
    monkeypatch.setattr(announcer, "_COPIED_BYTES", 0)
    async with pair(device) as ends:
        near, far = ends.near.as_byte_stream(), ends.far.as_byte_stream()
        data = random.Random(1).randbytes(1_200_000)
        sending = asyncio.create_task(near.send(kind(data)))  # type: ignore[arg-type]
        got = bytearray()
        while len(got) < len(data):
            got += await far.receive(77_777)
        await sending
        assert got == data
        assert ends.near.qp.statistics().sends.bytes < len(data) // 4
        memory = end_of(ends.far).channel.receiver.announced._memory
        assert not memory._in_use


async def test_unread_messages_are_lost_with_the_connection(device: Device) -> None:
    async with pair(device) as ends:
        near, far = ends.near.as_byte_stream(), ends.far.as_byte_stream()
        await near.send(b"abc")
        await near.send(b"unread")
        assert await far.receive(1) == b"a"
        await until(lambda: len(end_of(ends.far).channel.receiver.inbox))
        await far.aclose()
        assert await far.receive() == b"bc"
        with pytest.raises(ClosedResourceError):
            await far.receive()


async def test_small_reads_yield_to_other_tasks(device: Device) -> None:
    async with pair(device) as ends:
        near, far = ends.near.as_byte_stream(), ends.far.as_byte_stream()
        await near.send(bytes(512))
        assert await far.receive(1) == b"\0"
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        for _ in range(511):
            assert await far.receive(1) == b"\0"
        turning.cancel()
        assert turns >= 8


async def test_buffered_byte_receive_stream(device: Device) -> None:
    async with pair(device) as ends:
        reader = BufferedByteReceiveStream(ends.far.as_byte_stream())
        await ends.near.as_byte_stream().send(b"one line\nand " + b"more")
        assert await reader.receive_until(b"\n", 100) == b"one line"
        assert await reader.receive_exactly(8) == b"and more"


async def test_tls_over_a_byte_stream(device: Device, tmp_path: Path) -> None:
    server, client = contexts(tmp_path)
    async with pair(device) as ends:
        near, far = await asyncio.gather(
            TLSStream.wrap(ends.near.as_byte_stream(), hostname="localhost", ssl_context=client),
            TLSStream.wrap(ends.far.as_byte_stream(), ssl_context=server, server_side=True),
        )
        data = random.Random(2).randbytes(50_000)
        sending = asyncio.create_task(near.send(data))
        got = b""
        while len(got) < len(data):
            got += await far.receive()
        assert got == data
        await sending
        await asyncio.gather(near.aclose(), far.aclose())
