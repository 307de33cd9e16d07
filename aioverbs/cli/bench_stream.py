"""Stream contenders of `aioverbs bench`, client and server: requests and answers over a TCP or Unix stream.

A request is a header, followed by the bytes of a write or a message. The server answers a write with one byte when the
bytes are in its memory, a read with the bytes, and a message with the first eight bytes of the message.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable

from aioverbs._proofs import NONCE_BYTES, PROOF_BYTES, Proofs, make_nonce
from aioverbs.cli.bench_memory import Memory
from aioverbs.cli.measuring import Operation

__all__ = ["StreamClient", "serve_stream"]

_HEAD = struct.Struct("!cII")  # operation code, size in bytes, offset in the memory
_CODES: dict[Operation, bytes] = {"write": b"w", "read": b"r", "send": b"s"}
ANSWER_BYTES = 8  # size of the answer to a message
READ_LIMIT = 4 << 20  # bytes that a stream buffers until they are read: more than is ever in flight


def _proofs(secret: bytes) -> Proofs:
    """Return the `Proofs` for a secret. They are valid only for streams of the benchmark, not in other protocols."""
    return Proofs(b"aioverbs bench", secret)


class StreamClient:
    """Client side of an open stream. Call `prove` first, and `aclose` at the end.

    :param reader: the stream's reader.
    :param writer: the stream's writer, closed by `aclose`.
    :param memory: outgoing and incoming bytes of this side.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, memory: Memory) -> None:
        self._reader, self._writer, self._memory = reader, writer, memory

    async def prove(self, secret: bytes) -> None:
        """Prove to the server that this client knows the secret. A server that does not accept the proof closes the
        stream, so that later operations raise EOFError or ConnectionError.

        :raises EOFError: the server closed the stream before it sent its nonce.
        :raises ConnectionError: the stream broke.
        """
        self._writer.write(_proofs(secret).make(b"client", await self._reader.readexactly(NONCE_BYTES)))

    async def run_one(self, operation: Operation, size: int) -> None:
        """Run one operation of `size` bytes and wait until it completes.

        :raises EOFError: the server closed the stream.
        :raises ConnectionError: the stream broke.
        :raises ValueError: the answer to a message is wrong.
        """
        self._send_request(operation, size, 0)
        await self._receive_answer(operation, size, 0)

    async def run_many(self, operation: Operation, size: int, window: int, count: int) -> None:
        """Run `count` operations of `size` bytes, at most `window` of them in flight; wait until all complete.

        This raises the same exceptions as `run_one`.
        """
        for index in range(min(window, count)):
            self._send_request(operation, size, index)
        for index in range(count):
            await self._receive_answer(operation, size, index % window)
            if index + window < count:
                self._send_request(operation, size, index % window)

    def _send_request(self, operation: Operation, size: int, slot: int) -> None:
        """Write a request to the stream's buffer without waiting. A write or a message includes the bytes of the
        outgoing slot number ``slot``.
        """
        head = _HEAD.pack(_CODES[operation], size, slot * size)
        if operation == "read":
            self._writer.write(head)
        else:
            self._writer.writelines((head, self._memory.outgoing[slot * size : (slot + 1) * size]))

    async def _receive_answer(self, operation: Operation, size: int, slot: int) -> None:
        """Wait for the answer to the oldest unanswered request, which used slot number ``slot``. Store the bytes of a
        read in that incoming slot, and check the answer to a message.

        This raises the same exceptions as `run_one`.
        """
        if operation == "read":
            self._memory.incoming[slot * size : (slot + 1) * size] = await self._reader.readexactly(size)
        elif operation == "write":
            await self._reader.readexactly(1)
        else:
            self._memory.check_answer(await self._reader.readexactly(ANSWER_BYTES), size, slot)

    async def aclose(self) -> None:
        """Close the stream and wait until it is closed.

        :raises ConnectionError: the stream broke.
        """
        self._writer.close()
        await self._writer.wait_closed()


def serve_stream(
    memory: Memory, secret: bytes
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Return a callback for `asyncio.start_server` and `asyncio.start_unix_server` that serves the memory.

    The callback returns when the client has closed the stream, and closes the stream of a client that does not know the
    secret.

    :param memory: outgoing and incoming bytes of the server.
    :param secret: the secret that a client must prove it knows.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            nonce = make_nonce()
            writer.write(nonce)
            if _proofs(secret).check(await reader.readexactly(PROOF_BYTES), b"client", nonce):
                await _answer_requests(reader, writer, memory)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client closed the stream
        finally:
            writer.close()

    return answer


async def _answer_requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, memory: Memory) -> None:
    """Answer the requests of a client until an exception ends the call, at the latest when the client closes the
    stream.

    :raises asyncio.IncompleteReadError: the client closed the stream.
    :raises ConnectionError: the stream broke.
    :raises ValueError: a write or message does not fit into the memory.
    """
    while True:
        code, size, offset = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if code == b"r":
            writer.write(memory.outgoing[offset : offset + size])
            await writer.drain()
            continue
        payload = await reader.readexactly(size)
        if code == b"w":
            memory.incoming[offset : offset + size] = payload
            writer.write(b"\0")
        else:
            memory.store_message(payload)
            writer.write(payload[:ANSWER_BYTES])
