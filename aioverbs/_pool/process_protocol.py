"""Protocol between a pool and a worker process, over private socket pairs.

The link is a stream of frames. Over a second socket pair, the fd channel, the pool sends sockets. A third pair, over
which the pool shares its protection domain, is not used here::

    pool                                  worker process
      |                                         |
      | <----------------------------- READY -- |   or FAILED, and the process exits
      | -- CALL n ----------------------------> |
      | -- CANCEL n --------------------------> |   optional
      | <-------- RESULT n, ERROR n, CANCELLED n|   one of these
      |                                         |
      | == socket, over the fd channel =======> |   sent before the frame, so present when the frame arrives
      | -- SOCKET_CALL m ---------------------> |
      | <-------------------------- REPORT m -- |   any number
      | <-------- RESULT m, ERROR m, CANCELLED m|   one of these
      |                                         |
      | -- STOP ------------------------------> |   the process ends its tasks and exits
"""

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
_HEADER = struct.Struct("=QQB")  # payload size in bytes, number of the call, frame type


class FrameType(enum.IntEnum):
    """Type of a frame."""

    READY = 1
    """From the worker: it is ready for calls."""
    FAILED = 2
    """From the worker: exception that prevented its start; the process then exits."""
    CALL = 3
    """To the worker: function and arguments of a call."""
    CANCEL = 4
    """To the worker: cancel a call, if it has not ended."""
    RESULT = 5
    """From the worker: result of a call."""
    ERROR = 6
    """From the worker: exception of a call."""
    CANCELLED = 7
    """From the worker: a call was cancelled."""
    STOP = 8
    """To the worker: end the process."""
    SOCKET_CALL = 9
    """To the worker: function and arguments of a call that takes the next socket of the fd channel."""
    REPORT = 10
    """From the worker: bool that a socket call reports before it ends; an empty payload means False."""


def encode_frame(frame_type: FrameType, number: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame: its header and its payload.

    :param frame_type: type of the frame.
    :param number: number of the call; 0 if the frame belongs to no call.
    :param payload: pickled contents of the frame; may be empty.
    """
    return _HEADER.pack(len(payload), number, frame_type) + payload


def send_socket(fd_channel: socket.socket, sent: socket.socket) -> None:
    """Send a socket to a worker process over the fd channel. The socket arrives before any frame that is sent later.

    :param fd_channel: non-blocking SOCK_SEQPACKET socket.
    :param sent: socket to send, which the caller must still close.
    :raises OSError: the channel is full (EAGAIN), the worker process is gone, or a descriptor is invalid.
    """
    socket.send_fds(fd_channel, [b"\0"], [sent.fileno()])


def receive_socket(fd_channel: socket.socket) -> socket.socket:
    """Return the next socket that was sent over the fd channel, without waiting for one. The caller must close it.

    :param fd_channel: SOCK_SEQPACKET socket.
    :raises OSError: with EAGAIN if no socket was sent; with EMFILE if the socket was lost, because this process has no
        free file descriptors; with ECONNRESET if the other end of the channel is closed and no socket is left in it.
    """
    size = socket.CMSG_LEN(_INT.size)
    data, ancillary, _, _ = fd_channel.recvmsg(1, size, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
    if not data:
        raise OSError(errno.ECONNRESET, "the pool closed the channel over which it sends sockets")
    for _, _, descriptor in ancillary:
        return socket.socket(fileno=_INT.unpack(descriptor)[0])
    raise OSError(errno.EMFILE, "a received socket was lost, because this process has no free file descriptors")


class Link(asyncio.Protocol):
    """One end of the stream of frames, as the protocol of an asyncio transport. Create it on the transport's loop.

    The future ``disconnected`` completes when the link is closed or the other end is gone.

    :param on_frame: function that is called with the type, the call number and the payload of each received frame.
    :raises RuntimeError: no asyncio event loop is running.
    """

    def __init__(self, on_frame: Callable[[FrameType, int, bytes], None]) -> None:
        self.disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_frame = on_frame
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Record the transport of the link. asyncio calls this when the link is connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class has the methods, but not the base class

    def data_received(self, data: bytes) -> None:
        """Call `on_frame` for each complete frame that has arrived, and keep the rest until more bytes arrive.

        :raises ValueError: the type of a frame is not a `FrameType`. Whatever this raises, asyncio closes the link.
        :raises Exception: whatever `on_frame` raised.
        """
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
        """Drop unsent frames and close the link at once: the other end no longer reads, so they could not be sent.

        asyncio calls this when the other end has been closed.
        """
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Complete the future ``disconnected`` with None. asyncio calls this when this end or the other one has been
        closed.
        """
        self._transport = None
        if not self.disconnected.done():
            self.disconnected.set_result(None)

    def send(self, frame_type: FrameType, number: int = 0, payload: bytes = b"") -> None:
        """Send a frame to the other end. Do nothing if the link is closing or disconnected.

        :param frame_type: type of the frame.
        :param number: number of the call; 0 if the frame belongs to no call.
        :param payload: pickled contents of the frame; may be empty.
        """
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(frame_type, number, payload))

    def close(self) -> None:
        """Close the link after the pending frames have been sent, without waiting for that."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the link at once and drop pending frames."""
        if self._transport is not None:
            self._transport.abort()

    def finish_reading(self, sock: socket.socket) -> None:
        """Receive all frames that have arrived, then disconnect, even if another process keeps the other end open.

        The frames are handled in later turns of the loop. Do nothing if the link is not connected.

        After a socket was shut down for reading, it returns the data that has arrived and then end-of-file, as if the
        peer had closed its end.

        :param sock: socket of this end.
        """
        transport = cast(asyncio.ReadTransport | None, self._transport)
        if transport is None:
            return
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RD)
        # A copy of the loop in a forked child may have handled end-of-file before, and have removed the socket from the
        # epoll set that both loops share. Pausing and resuming adds the socket again.
        transport.pause_reading()
        transport.resume_reading()
