"""What programs do without RDMA, either side of it: requests and answers over a TCP or Unix stream.

A request is a head, and after that of a write or a message its bytes. A write is answered by one byte when its bytes
are in the peer's memory, a read by the bytes, a message by its first eight.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable

from aioverbs._proofs import NONCE_BYTES, PROOF_BYTES, Proofs, make_nonce
from aioverbs.cli.bench_memory import Memory
from aioverbs.cli.measuring import Operation

__all__ = ["StreamClient", "serve_stream"]

_HEAD = struct.Struct("!cII")  # the operation, its bytes, where in the memory
_CODES: dict[Operation, bytes] = {"write": b"w", "read": b"r", "send": b"s"}
ANSWER = 8  # bytes that a message is answered with
LIMIT = 4 << 20  # of what a stream keeps until it is read: as much as is ever under way


def _proofs(secret: bytes) -> Proofs:
    return Proofs(b"aioverbs bench", secret)


class StreamClient:
    """The side that asks.

    :param reader: of a stream that is open.
    :param writer: of the same.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, memory: Memory) -> None:
        self._reader, self._writer, self._memory = reader, writer, memory

    async def prove(self, secret: bytes) -> None:
        """Prove to the other side that this one may ask."""
        self._writer.write(_proofs(secret).make(b"client", await self._reader.readexactly(NONCE_BYTES)))

    async def one(self, operation: Operation, size: int) -> None:
        """Do it once."""
        self._ask(operation, size, 0)
        await self._answer(operation, size, 0)

    async def many(self, operation: Operation, size: int, window: int, count: int) -> None:
        """Do it so often, with a window of them under way."""
        for at in range(min(window, count)):
            self._ask(operation, size, at)
        for at in range(count):
            await self._answer(operation, size, at % window)
            if at + window < count:
                self._ask(operation, size, at % window)

    def _ask(self, operation: Operation, size: int, place: int) -> None:
        head = _HEAD.pack(_CODES[operation], size, place * size)
        if operation == "read":
            self._writer.write(head)
        else:
            self._writer.writelines((head, self._memory.outgoing[place * size : (place + 1) * size]))

    async def _answer(self, operation: Operation, size: int, place: int) -> None:
        if operation == "read":
            self._memory.incoming[place * size : (place + 1) * size] = await self._reader.readexactly(size)
        elif operation == "write":
            await self._reader.readexactly(1)
        else:
            self._memory.check_answer(await self._reader.readexactly(ANSWER), size, place)

    async def aclose(self) -> None:
        """Close the stream."""
        self._writer.close()
        await self._writer.wait_closed()


def serve_stream(
    memory: Memory, secret: bytes
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """The side that answers: for `asyncio.start_server`.

    :param secret: that who may ask knows.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            nonce = make_nonce()
            writer.write(nonce)
            if _proofs(secret).check(await reader.readexactly(PROOF_BYTES), b"client", nonce):
                await _answer_all(reader, writer, memory)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it has no more to ask
        finally:
            writer.close()

    return answer


async def _answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, memory: Memory) -> None:
    while True:
        code, size, offset = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if code == b"r":
            writer.write(memory.outgoing[offset : offset + size])
            await writer.drain()
            continue
        data = await reader.readexactly(size)
        if code == b"w":
            memory.incoming[offset : offset + size] = data
            writer.write(b"\0")
        else:
            memory.message(data)
            writer.write(data[:ANSWER])
