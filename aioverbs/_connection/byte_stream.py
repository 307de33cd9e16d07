"""Bytes without bounds, over messages."""

from collections.abc import Callable

from anyio.abc import ByteStream, ObjectStream

from aioverbs._lifecycle.turns import LIGHT, spend, yield_to_loop
from aioverbs.errors import BusyResourceError

__all__ = ["MessageByteStream"]


class MessageByteStream(ByteStream):
    """An `anyio.abc.ByteStream` over a stream of messages. Made by `Connection.as_byte_stream`.

    :param messages: what it goes over; closing this closes that.
    :param piece: what is sent in one message, in bytes, at most.
    :param check: called with a method's name; it raises where that is not to be called here.
    """

    def __init__(self, messages: ObjectStream[bytes], max_piece: int, check: Callable[[str], None]) -> None:
        self._messages = messages
        self._max_piece = max_piece
        self._check = check
        self._remaining = memoryview(b"")  # of a message that came
        self._receiving = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """As many bytes as there are, up to so many.

        :raises anyio.EndOfStream: the peer sends no more.
        """
        if max_bytes < 1:
            raise ValueError(f"max_bytes is 1 or more, not {max_bytes}")
        self._check("receive")  # what is left of a message is not asked of the stream below
        if self._receiving:
            raise BusyResourceError("another task is receiving from this stream already")
        self._receiving = True
        try:
            if self._remaining and (turn := spend(LIGHT)):
                await go_round(turn)
            while not self._remaining:
                message = await self._messages.receive()
                if 0 < len(message) <= max_bytes:
                    return message
                self._remaining = memoryview(message)
        finally:
            self._receiving = False
        data, self._remaining = bytes(self._remaining[:max_bytes]), self._remaining[max_bytes:]
        return data

    async def send(self, item: bytes) -> None:
        """Send bytes."""
        if len(item) <= self._max_piece:
            if item:
                await self._messages.send(item)
            return
        view = memoryview(item)
        for offset in range(0, len(view), self._max_piece):
            await self._messages.send(view[offset : offset + self._max_piece])  # type: ignore[arg-type]  # which takes any buffer

    async def send_eof(self) -> None:
        """Send no more."""
        await self._messages.send_eof()

    async def aclose(self) -> None:
        """Close what it goes over."""
        await self._messages.aclose()

    @property
    def extra_attributes(self):  # type: ignore[no-untyped-def]  # anyio says it at its base
        """Those of what it goes over."""
        return self._messages.extra_attributes
