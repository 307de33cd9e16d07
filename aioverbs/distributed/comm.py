"""A comm: messages of Dask over a connection."""

import logging
import weakref
from itertools import accumulate
from typing import Any

import anyio
import dask.config
from dask.utils import parse_bytes
from distributed.comm.core import Comm, CommClosedError
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.utils import host_array

from aioverbs._connection.connection import Connection
from aioverbs.distributed.framing import encode, parse
from aioverbs.distributed.outbox import Outbox

__all__ = ["PREFIX", "AioverbsComm"]

logger = logging.getLogger("aioverbs")

PREFIX = "aioverbs://"
"""Scheme of the addresses."""

_LOST = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class AioverbsComm(Comm):
    """Comm over an RDMA connection, which the comm closes. One task may read and one may write at a time.

    `read` and `write` are called on the event loop that made the connection; `abort`, `closed` and finalizers on any
    thread.

    :param connection: the open connection.
    :param local_address: address of this end, such as ``aioverbs://10.0.0.1:40123``.
    :param peer_address: address of the peer.
    :param deserialize: False to leave the objects in received messages serialized.
    """

    max_shard_size: int = parse_bytes(dask.config.get("distributed.comm.shard"))
    """Size in bytes above which the memory of an object is sent as several frames."""

    def __init__(self, connection: Connection, local_address: str, peer_address: str, deserialize: bool = True) -> None:
        super().__init__(deserialize=deserialize)
        self._connection = connection
        self._outbox = Outbox(connection)
        self._local_addr = local_address  # these two names are read by `distributed.comm.core.connect`
        self._peer_addr = peer_address
        self._closed = False
        self._finalizer = weakref.finalize(self, _abort_dangling, connection, local_address, peer_address)
        self._finalizer.atexit = False

    @property
    def local_address(self) -> str:
        """Address of this end."""
        return self._local_addr

    @property
    def peer_address(self) -> str:
        """Address of the peer: the one that was connected to, or that the peer connected from."""
        return self._peer_addr

    @property
    def extra_info(self) -> dict[str, Any]:
        """Further information about the connection: nothing."""
        return {}

    async def read(self, deserializers: Any = None) -> Any:
        """Wait for the next message and return it. If the call raises, the comm is closed.

        :param deserializers: as for `distributed.protocol.deserialize`.
        :raises distributed.comm.CommClosedError: the comm is closed, the connection is lost, or the message is
            malformed.
        """
        try:
            frames = await self._receive_frames()
        except (*_LOST, ValueError) as error:
            self.abort()
            cause = self._outbox.failure or error
            raise CommClosedError(f"in {self}: {str(cause) or type(cause).__name__}") from cause
        except BaseException:
            self.abort()  # part of the message may have been received
            raise
        try:
            return await from_frames(
                frames, deserialize=self.deserialize, deserializers=deserializers, allow_offload=self.allow_offload
            )
        except EOFError as error:
            self.abort()
            raise CommClosedError(f"in {self}: a received object is truncated") from error

    async def _receive_frames(self) -> list[memoryview]:
        """Receive the frames of a message, each run of them in writable memory of its own: see `framing`. A run that is
        a message of its own is not copied: a long one was read from the peer's memory, into memory that is recycled
        when nothing refers to it.

        :raises ValueError: the peer sent no such message.
        :raises Exception: whatever `Connection.receive_buffer` raises.
        """
        message = await self._connection.receive_buffer()
        start, runs, messages = parse(message)
        message = message[start:]
        if len(runs) == 1:
            return _split(message, runs[0])
        memories: dict[int, memoryview] = {}  # by number of the run
        for numbers in messages:
            if numbers[0] > 0:
                message = await self._connection.receive_buffer()
            totals = [sum(runs[number]) for number in numbers]
            if len(message) != sum(totals):
                raise ValueError(f"the peer sent {len(message):,} bytes instead of {sum(totals):,}")
            if len(numbers) == 1:
                memories[numbers[0]] = message
                continue
            at = 0
            for number, total in zip(numbers, totals, strict=True):
                memory = memories[number] = host_array(total)
                memory[:] = message[at : at + total]
                at += total
        return [frame for number, sizes in enumerate(runs) for frame in _split(memories[number], sizes)]

    async def write(self, msg: Any, serializers: Any = None, on_error: str | None = "message") -> int:
        """Send a message. As with ``tcp://``, this does not wait for the peer, and the memory of large objects in the
        message must not change until the peer has received it.

        :param msg: the message, an object.
        :param serializers: as for `distributed.protocol.serialize`.
        :param on_error: what to do if an object cannot be serialized, as for `distributed.protocol.dumps`.
        :returns: the number of bytes of the message.
        :raises distributed.comm.CommClosedError: the comm is closed, or the connection is lost.
        """
        self._check_open()
        frames = await to_frames(
            msg,
            allow_offload=self.allow_offload,
            serializers=serializers,
            on_error=on_error,
            context={"sender": self.local_info, "recipient": self.remote_info, **self.handshake_options},
            frame_split_size=self.max_shard_size,
        )
        self._check_open()
        total, messages = encode(frames)
        try:
            self._outbox.put(messages)
        except _LOST as error:
            self.abort()
            raise CommClosedError(f"in {self}: {error}") from error
        return total

    def _check_open(self) -> None:
        """Check that the comm can be written to.

        :raises distributed.comm.CommClosedError: the comm is closed, or the connection is lost.
        """
        if self.closed():
            cause = self._outbox.failure or self._connection.broken
            raise CommClosedError(f"in {self}: {cause or 'the comm is closed'}") from cause

    async def close(self) -> None:
        """Deliver the messages that were written, and close the connection. Closing twice has no effect."""
        if self._finalizer.detach() is None:
            return
        self._closed = True
        try:
            if await self._outbox.flush(self._connection.settings.close_timeout_s):
                await self._connection.aclose()
        finally:
            self._connection.abort()

    def abort(self) -> None:
        """Close the connection at once, from any thread, and end a call of `close`. Messages may be lost."""
        self._finalizer.detach()
        self._closed = True
        self._connection.abort()

    def closed(self) -> bool:
        """Return whether the comm is closed, a message could not be sent, or the connection is closed or lost."""
        connection = self._connection
        return self._closed or self._outbox.failure is not None or connection.closed or connection.broken is not None


def _split(memory: memoryview, sizes: list[int]) -> list[memoryview]:
    """Return the frames of a run.

    :param memory: memory of the run.
    :param sizes: size of each frame in bytes.
    """
    if len(sizes) == 1:
        return [memory]
    return [memory[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _abort_dangling(connection: Connection, local_address: str, peer_address: str) -> None:
    """Close the connection of a comm that was dropped without being closed, in any thread."""
    if connection.broken is None:
        logger.warning("a comm from %s to %s was dropped without being closed", local_address, peer_address)
    connection.abort()
