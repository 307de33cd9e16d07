"""Baseline without RDMA: two processes with a Unix stream in between, on uvloop.

    python stream_end.py streams|protocols ASKED ANSWERED OPERATIONS

The client sends ASKED bytes and receives ANSWERED bytes, one request after the other. The program prints the
nanoseconds for one.
"""

import asyncio
import multiprocessing
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import cast

import uvloop

Asker = Callable[[int], Awaitable[None]]


async def _answer_by_streams(sock: socket.socket, asked: int, answer: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    try:
        while True:
            await reader.readexactly(asked)
            writer.write(answer)
    except asyncio.IncompleteReadError:
        writer.close()


class _Counting(asyncio.Protocol):
    """Call a function each time that a number of bytes has arrived.

    :param length: that number.
    """

    def __init__(self, length: int) -> None:
        self._length = self._missing = length
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        while self._missing <= 0:
            self._missing += self._length
            self.came()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    def came(self) -> None:
        raise NotImplementedError


class _Answering(_Counting):
    def __init__(self, length: int, answer: bytes) -> None:
        super().__init__(length)
        self._answer = answer

    def came(self) -> None:
        self.transport.write(self._answer)


class _Asking(_Counting):
    waiter: asyncio.Future[None]

    def came(self) -> None:
        self.waiter.set_result(None)


async def _answer_by_protocols(sock: socket.socket, asked: int, answer: bytes) -> None:
    _, protocol = await asyncio.get_running_loop().create_unix_connection(lambda: _Answering(asked, answer), sock=sock)
    await protocol.ended


def _other(kind: str, sock: socket.socket, asked: int, answered: int) -> None:
    answer = {"streams": _answer_by_streams, "protocols": _answer_by_protocols}[kind]
    uvloop.run(answer(sock, asked, bytes(answered)))


async def _by_streams(sock: socket.socket, question: bytes, answered: int) -> Asker:
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=max(1 << 16, 2 * answered))

    async def ask(operations: int) -> None:
        for _ in range(operations):
            writer.write(question)
            await reader.readexactly(answered)

    return ask


async def _by_protocols(sock: socket.socket, question: bytes, answered: int) -> Asker:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_unix_connection(lambda: _Asking(answered), sock=sock)

    async def ask(operations: int) -> None:
        for _ in range(operations):
            protocol.waiter = loop.create_future()
            transport.write(question)
            await protocol.waiter

    return ask


async def _measure(kind: str, sock: socket.socket, asked: int, answered: int, operations: int) -> float:
    make = {"streams": _by_streams, "protocols": _by_protocols}[kind]
    ask = await make(sock, bytes(asked), answered)
    await ask(operations // 10 + 1)
    began = time.perf_counter_ns()
    await ask(operations)
    return (time.perf_counter_ns() - began) / operations


def main() -> None:
    kind, *numbers = sys.argv[1:]
    asked, answered, operations = map(int, numbers)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    other = multiprocessing.get_context("fork").Process(target=_other, args=(kind, far, asked, answered))
    other.start()
    far.close()
    print(uvloop.run(_measure(kind, near, asked, answered, operations)), flush=True)
    near.close()
    other.terminate()  # the process inherited our end of the stream, so closing the stream does not end it
    other.join()


if __name__ == "__main__":
    main()
