"""The messages of a comm that were written, but not sent yet."""

import asyncio
import logging
from collections import deque

import anyio

from aioverbs._connection.connection import Connection, send_constant_nowait
from aioverbs.distributed.framing import Buffers

__all__ = ["Outbox"]

logger = logging.getLogger("aioverbs")


class Outbox:
    """Queue of messages to send. Writing to a comm does not wait for the peer, as with ``tcp://``: Dask relies on that.

    The memory of a long message is not copied, and must not change before the peer has received it. The queue is used
    on the event loop of the connection only.

    :param connection: the open connection.
    """

    def __init__(self, connection: Connection) -> None:
        self.failure: BaseException | None = None  # with which sending ended
        self._connection = connection
        self._messages: deque[Buffers] = deque()
        self._sender: asyncio.Task[None] | None = None  # None if all messages were sent

    def put(self, messages: list[Buffers]) -> None:
        """Send messages: at once as far as that needs no waiting, the others by a task.

        :param messages: messages, each a list of contiguous buffers.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed.
        """
        sent = 0
        if self._sender is None:
            try:
                for message in messages:
                    if not send_constant_nowait(self._connection, message[0] if len(message) == 1 else message):
                        break
                    sent += 1
            except BaseException as error:
                if sent:
                    self._fail(error)
                raise
        if sent < len(messages):
            self._messages.extend(messages[sent:])
            if self._sender is None:
                self._sender = asyncio.get_running_loop().create_task(self._send())

    def _fail(self, error: BaseException) -> None:
        """Abort the connection after a failure, because a message to the comm lacks a part."""
        self.failure = error
        self._messages.clear()
        self._connection.abort()

    async def _send(self) -> None:
        """Send all messages of the queue. On failure or cancellation, abort the connection."""
        try:
            while self._messages:
                await self._connection.send(self._messages.popleft())
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, anyio.BrokenResourceError | anyio.ClosedResourceError):
                logger.error("a message to a comm could not be sent", exc_info=error)
        finally:
            self._sender = None

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all messages are sent, or sending failed, or the time is over. Then the rest is discarded.

        :param timeout_s: limit in seconds.
        :returns: whether all messages were sent.
        """
        sender = self._sender
        if sender is None:
            return self.failure is None
        try:
            await asyncio.wait((sender,), timeout=timeout_s)
        finally:
            if not sender.done():
                self._messages.clear()
                sender.cancel()
        return sender.done() and self.failure is None
