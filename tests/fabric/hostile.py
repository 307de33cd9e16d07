"""A peer that answers requests as the test chooses: a proxy that leaves the handshake to an honest device."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from aioverbs import WcStatus
from tests.waiting import until

__all__ = ["HostilePeer", "Request", "hostile_peer"]

_HEADER = struct.Struct("<8B10IQ4I2Q2HI")  # layout: soft/fabric/frame.h
_RESPONSE = 2
_PSNS = 1 << 24


class _Answer(IntEnum):
    ACK = 0
    NAK = 1
    RNR = 2


@dataclass(frozen=True, slots=True)
class Request:
    """A request frame of a queue pair: a message, or a part of one."""

    to: int
    sender: int
    token: int
    psn: int
    packets: int

    def ack(self, ahead: int = 0) -> bytes:
        """Encode an acknowledgement of all packets up to the last one of this request.

        :param ahead: number of further packets to acknowledge.
        """
        return self._answer(_Answer.ACK, (self.psn + self.packets - 1 + ahead) % _PSNS)

    def read_response(self, data: bytes, packets: int) -> bytes:
        """Encode the first part of a read response, which covers `packets` packets."""
        return self._answer(_Answer.ACK, (self.psn + packets - 1) % _PSNS, data=data)

    def nak(self, status: WcStatus) -> bytes:
        """Encode a NAK of this request, or, for ``RNR_RETRY_EXC_ERR``, an RNR NAK."""
        if status is WcStatus.RNR_RETRY_EXC_ERR:
            return self._answer(_Answer.RNR, self.psn, delay_ns=1000)
        return self._answer(_Answer.NAK, self.psn, status=status)

    def _answer(self, answer: _Answer, psn: int, *, status: int = 0, delay_ns: int = 0, data: bytes = b"") -> bytes:
        head = (_RESPONSE, answer, 0, 0, status, 0, 0, 0)
        size, rest = len(data), (0,) * 9
        frame = _HEADER.pack(*head, size, self.sender, self.to, self.token, psn, 0, 0, 0, size, 0, delay_ns, *rest)
        return frame + data


@dataclass
class HostilePeer:
    """State of the hostile peer.

    :param requests: requests received since `take_over`.
    :param limit: number of requests after which the peer stops reading until `go_on` is set.
    """

    requests: list[Request] = field(default_factory=list)
    limit: int | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    _taken_over: bool = False
    _rest: bytearray = field(default_factory=bytearray)
    _writer: asyncio.StreamWriter | None = None

    def take_over(self, limit: int | None = None) -> None:
        """Stop passing data on to the honest device. Call with no request in flight."""
        self._taken_over = True
        self.limit = limit

    async def receive_requests(self, count: int) -> list[Request]:
        """Wait for the first `count` requests, and return them."""
        await until(lambda: len(self.requests) >= count)
        return self.requests[:count]

    def packets(self) -> int:
        """Return the number of packets in all requests received."""
        return sum(request.packets for request in self.requests)

    def send(self, *answers: bytes) -> None:
        """Send answers, all at once."""
        assert self._writer is not None
        self._writer.write(b"".join(answers))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: Path) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(to)
        self._writer = writer

        async def forward_answers() -> None:
            while data := await there_reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

        directions = [
            asyncio.ensure_future(self._forward_requests(reader, there_writer)),
            asyncio.ensure_future(forward_answers()),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            for end in (there_writer, writer):
                end.transport.abort()

    async def _forward_requests(self, reader: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self._taken_over:
                self._rest += data
                self._parse()
                if self.limit is not None and len(self.requests) >= self.limit:
                    await self.go_on.wait()
            else:
                there.write(data)
                await there.drain()

    def _parse(self) -> None:
        at = 0
        while len(self._rest) - at >= _HEADER.size:
            _, _, _, _, _, _, _, _, size, to, sender, token, psn, packets, *_ = _HEADER.unpack_from(self._rest, at)
            if len(self._rest) - at < _HEADER.size + size:
                break
            self.requests.append(Request(to, sender, token, psn, packets))
            at += _HEADER.size + size
        del self._rest[:at]


@contextlib.asynccontextmanager
async def hostile_peer(at: Path, to: Path) -> AsyncIterator[HostilePeer]:
    """Accept the connections of a Unix socket in place of the honest device, which listens at another one."""
    peer = HostilePeer()
    tasks: set[asyncio.Task[None]] = set()

    async def handle_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await peer._serve(reader, writer, to)
        writer.close()
        tasks.discard(task)

    server = await asyncio.start_unix_server(handle_connection, at)
    try:
        yield peer
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
