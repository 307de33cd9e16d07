"""Baseline for the storage server's benchmarks: blocks of the same file over TCP, with uvloop.

This is as good as such a protocol can be in Python. Requests and answers have fixed headers; any number of requests is
in flight; all requests that arrive together are parsed and answered together; blocks are sent from the mapped file
without a copy in user space; received data is copied once, from the parse buffer to its destination.

Run as a script, this serves the file in its argument, and prints its port.
"""

import asyncio
import mmap
import os
import socket
import struct
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import cast

import uvloop

__all__ = ["TcpVolume", "start"]

_REQUEST = struct.Struct("<QQI")  # number, offset, length; length 0: flush
_ANSWER = struct.Struct("<QI")  # number, length
_ROOM = 4 << 20


class _Server(asyncio.Protocol):
    """Connection of one client."""

    def __init__(self, memory: memoryview, fd: int) -> None:
        self._memory = memory
        self._fd = fd
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass of it

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        memory, whole = self._memory, len(data) - len(data) % _REQUEST.size
        pieces: list[bytes | memoryview] = []
        for number, offset, length in _REQUEST.iter_unpack(memoryview(data)[:whole]):
            if not length:
                os.fdatasync(self._fd)
            pieces.append(_ANSWER.pack(number, length))
            pieces.append(memory[offset : offset + length])
        self._rest = data[whole:]
        self._transport.writelines(pieces)


async def _serve(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    memory = memoryview(mmap.mmap(fd, 0))
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: _Server(memory, fd), "127.0.0.1", 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


class TcpVolume(asyncio.BufferedProtocol):
    """Client, with the same method as a volume of the storage server."""

    def __init__(self) -> None:
        self._buffer = bytearray(_ROOM)
        self._view = memoryview(self._buffer)
        self._begin = self._end = self._number = 0
        self._asked: dict[int, tuple[asyncio.Future[None], memoryview]] = {}
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif _ROOM - self._end < _ROOM // 4:
            self._view[: self._end - self._begin] = self._view[self._begin : self._end]
            self._begin, self._end = 0, self._end - self._begin
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        begin, end, view = self._begin, self._end, self._view
        while end - begin >= _ANSWER.size:
            number, length = _ANSWER.unpack_from(self._buffer, begin)
            if end - begin - _ANSWER.size < length:
                break
            begin += _ANSWER.size
            done, into = self._asked.pop(number)
            into[:] = view[begin : begin + length]
            begin += length
            if not done.done():
                done.set_result(None)
        self._begin = begin

    def connection_lost(self, exc: Exception | None) -> None:
        for done, _ in self._asked.values():
            if not done.done():
                done.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def read_into(self, into: memoryview, offset: int) -> Awaitable[None]:
        """Read a part of the file. Await the result."""
        self._number += 1
        done: asyncio.Future[None] = self._loop.create_future()
        self._asked[self._number] = done, into
        self._transport.write(_REQUEST.pack(self._number, offset, len(into)))
        return done


def start(path: Path) -> tuple[str, ...]:
    """Return the command of a server."""
    return sys.executable, __file__, str(path)


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1])))
