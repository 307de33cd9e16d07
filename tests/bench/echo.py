"""Echoes of a few bytes with both ends on the running loop: other work of a loop, on two sockets."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from tests.bench.measuring import Contender

__all__ = ["protocol_echo", "stream_echo", "tcp_echo"]

MESSAGE = b"8 bytes."


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(4096):
            writer.write(data)
    finally:
        writer.close()


async def _round_trips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, operations: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(operations):
        writer.write(MESSAGE)
        await reader.readexactly(len(MESSAGE))
    return time.perf_counter_ns() - begin


@asynccontextmanager
async def stream_echo() -> AsyncIterator[Contender]:
    """Open an echo over a Unix socket pair, with asyncio streams."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    server = asyncio.create_task(_answer(*await asyncio.open_unix_connection(sock=far)))
    reader, writer = await asyncio.open_unix_connection(sock=near)
    try:
        yield lambda operations: _round_trips(reader, writer, operations)
    finally:
        writer.close()
        await server


@asynccontextmanager
async def tcp_echo() -> AsyncIterator[Contender]:
    """Open an echo over TCP on the loopback interface, with asyncio streams."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address)
        try:
            yield lambda operations: _round_trips(reader, writer, operations)
        finally:
            writer.close()
            await writer.wait_closed()


class _Answering(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass of it

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class _Asking(_Answering):
    def __init__(self) -> None:
        self.waiter = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.waiter.set_result(None)


@asynccontextmanager
async def protocol_echo() -> AsyncIterator[Contender]:
    """Open an echo over a Unix socket pair, with asyncio protocols: less than streams do, and than programs need."""
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    answering, _ = await loop.create_unix_connection(_Answering, sock=far)
    asking, protocol = await loop.create_unix_connection(_Asking, sock=near)

    async def round_trips(operations: int) -> float:
        begin = time.perf_counter_ns()
        for _ in range(operations):
            protocol.waiter = loop.create_future()
            asking.write(MESSAGE)
            await protocol.waiter
        return time.perf_counter_ns() - begin

    try:
        yield round_trips
    finally:
        asking.close()
        answering.close()
