"""What a pool and a worker that is a process say to each other, over a socket that nobody else has."""

import asyncio
import contextlib
import enum
import errno
import socket
import struct
from collections.abc import Callable
from typing import cast

__all__ = ["FrameType", "Link", "encode_frame", "receive_socket", "send_socket"]

_INT = struct.Struct("=i")
_HEADER = struct.Struct("=QQB")  # bytes that follow, number of the call, kind


class FrameType(enum.IntEnum):
    """What is said."""

    READY = 1
    """From the worker: it is at work."""
    FAILED = 2
    """From the worker: the error for which it cannot be; it ends."""
    CALL = 3
    """To the worker: a function and its arguments."""
    CANCEL = 4
    """To the worker: a call is to be cancelled, if it is not over."""
    RESULT = 5
    """From the worker: what a call returned."""
    ERROR = 6
    """From the worker: what a call raised."""
    CANCELLED = 7
    """From the worker: a call ended by a cancellation."""
    STOP = 8
    """To the worker: it is to end."""
    SOCKET_CALL = 9
    """To the worker: a function that gets a socket, which was sent over another socket before, and its arguments."""
    REPORT = 10
    """From the worker: a truth value that such a call tells before it is over."""


def encode_frame(frame_type: FrameType, number: int, payload: bytes = b"") -> bytes:
    """One thing to say."""
    return _HEADER.pack(len(payload), number, frame_type) + payload


def send_socket(fd_channel: socket.socket, sent: socket.socket) -> None:
    """Send a socket over a non-blocking one that keeps messages apart: it is there before what is said after this.

    :raises OSError: not now, or never.
    """
    socket.send_fds(fd_channel, [b"\0"], [sent.fileno()])


def receive_socket(fd_channel: socket.socket) -> socket.socket:
    """The next one that was sent.

    :raises OSError: it was lost, as this process has no more descriptors.
    """
    size = socket.CMSG_LEN(_INT.size)
    _, ancillary, _, _ = fd_channel.recvmsg(1, size, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
    for _, _, data in ancillary:
        return socket.socket(fileno=_INT.unpack(data)[0])
    raise OSError(errno.EMFILE, "a socket was sent and could not be received: no more descriptors")


class Link(asyncio.Protocol):
    """One end.

    :param on_frame: called with each thing that is said: its kind, the call's number, and the rest.
    """

    def __init__(self, on_frame: Callable[[FrameType, int, bytes], None]) -> None:
        self.disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_frame = on_frame
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It can be spoken."""
        self._transport = cast(asyncio.Transport, transport)  # which uvloop's is only by what it can do

    def data_received(self, data: bytes) -> None:
        """Something was said, or a part of it."""
        buffer = self._buffer
        buffer += data
        offset = 0
        while len(buffer) - offset >= _HEADER.size:
            length, number, frame_type = _HEADER.unpack_from(buffer, offset)
            end = offset + _HEADER.size + length
            if len(buffer) < end:
                break
            payload = bytes(memoryview(buffer)[offset + _HEADER.size : end])
            offset = end
            self._on_frame(FrameType(frame_type), number, payload)
        del buffer[:offset]

    def eof_received(self) -> None:
        """Drop what the other end has not read: nobody reads it any more, and the transport would wait for that."""
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """The other end is gone, or this one was closed."""
        self._transport = None
        if not self.disconnected.done():
            self.disconnected.set_result(None)

    def send(self, frame_type: FrameType, number: int = 0, payload: bytes = b"") -> None:
        """Say something; where the other end is gone, nobody hears it."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(frame_type, number, payload))

    def close(self) -> None:
        """Say no more, when what was said is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Say no more, and drop what was said and is not sent."""
        if self._transport is not None:
            self._transport.abort()

    def finish_reading(self, sock: socket.socket) -> None:
        """Receive what has arrived, then be lost, though a process may keep the other end open.

        A socket that is shut down for reading gives what it has, and then its end, like one whose peer has closed it.

        :param sock: the socket of this end.
        """
        transport = cast(asyncio.ReadTransport | None, self._transport)
        if transport is None:
            return
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RD)
        # A forked child's copy of the loop may have seen the end before, and have removed the socket from the kernel
        # object that both loops poll. This adds it again.
        transport.pause_reading()
        transport.resume_reading()
