"""Byte stream over the messages of a connection."""

from anyio.abc import ByteStream, ObjectStream

from aioverbs._connection.message_channel import MessageChannel
from aioverbs._lifecycle.turns import LIGHT, spend, yield_to_loop
from aioverbs.errors import BusyResourceError

__all__ = ["MessageByteStream"]


class MessageByteStream(ByteStream):
    """An `anyio.abc.ByteStream` over a stream of messages. Use `Connection.as_byte_stream` to create one.

    :param messages: the connection, which is closed when the byte stream is closed.
    :param channel: its message channel.
    """

    def __init__(self, messages: ObjectStream[bytes], channel: MessageChannel) -> None:
        self._messages = messages
        self._channel = channel
        self._remaining = memoryview(b"")  # rest of the last message
        self._receiving = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive the bytes that are available, and wait if there are none yet. A cancelled call loses no bytes.

        :param max_bytes: largest number of bytes to return, 1 or more.
        :returns: the bytes, 1 to `max_bytes` of them.
        :raises anyio.EndOfStream: the peer sends no more bytes, and all that it sent were returned.
        :raises BusyResourceError: another task is receiving.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed, and no bytes are left of the last received message.
        :raises AffinityError: another event loop owns the connection.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain; no bytes are
            lost.
        :raises VerbsError: ``ibv_post_send`` failed; no bytes are lost.
        :raises MemoryError: the process has no memory for the next bytes, which are not lost.
        :raises ValueError: `max_bytes` is less than 1.
        """
        if max_bytes < 1:
            raise ValueError(f"`max_bytes` must be 1 or more, got {max_bytes}")
        self._channel.check_caller(
            "receive"
        )  # checked here, as the rest of a message is returned without calling the stream below
        if self._receiving:
            raise BusyResourceError("another task is already receiving from this stream")
        self._receiving = True
        try:
            if self._remaining and (turn := spend(LIGHT)):
                await yield_to_loop(turn)
            while not self._remaining:
                if self._channel.closed:
                    raise self._channel.closed_error()
                message = await self._channel.receiver.receive_view("receive")
                if type(message) is bytes and 0 < len(message) <= max_bytes:
                    return message
                self._remaining = memoryview(message)
        finally:
            self._receiving = False
        data, rest = bytes(self._remaining[:max_bytes]), self._remaining[max_bytes:]
        self._remaining = rest or memoryview(b"")  # an empty slice would keep the memory in use
        return data

    async def send(self, item: bytes) -> None:
        """Send all bytes, divided into as many messages as necessary.

        This waits in the same cases as `Connection.send`. If the call is cancelled or raises, some of these messages
        may have been sent.

        :param item: the bytes; if there are none, nothing is sent or checked.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed, or `send_eof` was called.
        :raises AffinityError: another event loop owns the connection.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises VerbsError: ``ibv_post_send`` failed.
        :raises TypeError: `item` is not a contiguous buffer.
        """
        size = self._channel.sender.piece_size(len(item))
        if len(item) <= size:
            if item:
                await self._messages.send(item)
            return
        view = memoryview(item)
        for offset in range(0, len(view), size):
            await self._messages.send(view[offset : offset + size])  # type: ignore[arg-type]  # send takes any buffer

    async def send_eof(self) -> None:
        """Notify the peer that no more bytes follow: `Connection.send_eof`. This end can still receive.

        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection.
        :raises Exception: any other exception that `Connection.send_eof` raises.
        """
        await self._messages.send_eof()

    async def aclose(self) -> None:
        """Close the connection below this stream with `Connection.aclose`, which first delivers all sent bytes.

        After ``close_timeout_s`` of the settings, or if this call is cancelled, the bytes not yet delivered are lost.

        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises Exception: any other exception that `Connection.aclose` raises.
        """
        await self._messages.aclose()

    @property
    def extra_attributes(self):  # type: ignore[no-untyped-def]  # untyped at its base in anyio
        """Typed attributes of anyio, the same as those of the connection: see `Connection.extra_attributes`."""
        return self._messages.extra_attributes
