"""Requests and answers over a connection, for any number of concurrent tasks."""

import asyncio
import itertools
from typing import TypeVar

import anyio

from aioverbs import BrokenResourceError, ClosedResourceError, Connection
from storage_server.errors import error_of
from storage_server.protocol import Answer, Data, Done, Failed, Listing, Message, Opened, ProtocolError, pack, parse

__all__ = ["RpcClient"]

A = TypeVar("A", Done, Listing, Opened, Data)


class RpcClient:
    """Client side of request and answer. `aclose` stops receiving.

    A task that makes the only request receives its answer itself, which saves a switch to another task. If there are
    several requests, or the requesting task is cancelled before its answer arrives, a listener task receives for all of
    them until no answer is outstanding. An answer must always be received: a server whose answers are not received
    stops reading requests.

    `failure` is the error that broke the connection; None if the connection is not broken.

    :param connection: connection to the server, closed by the caller.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.failure: Exception | None = None
        self._numbers = itertools.cycle(range(1, 1 << 32))
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._unanswered = 0  # number of answers not yet received
        self._receiving = False
        self._listener: asyncio.Task[None] | None = None

    async def _ask(self, request: Message) -> Answer:
        """Send a request and wait for its answer; return the answer.

        :raises StorageError: the answer is `Failed`.
        :raises BrokenResourceError: the connection was lost before the answer arrived.
        :raises ValueError: the request cannot be encoded.
        """
        if self.failure is not None:
            raise self._connection_lost()
        number = next(self._numbers)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        alone = not self._unanswered and not self._receiving
        try:
            await self.connection.send(pack(number, request))  # if cancelled here, nothing was sent
            self._unanswered += 1
            if alone and not self._receiving:
                await self._receive(future)
            elif not self._receiving:
                self._listen()
            answer = await future
        finally:
            del self._pending[number]
            if self._unanswered and not self._receiving:
                self._listen()
        if isinstance(answer, Failed):
            raise error_of(answer.code, answer.text)
        return answer

    def _connection_lost(self) -> BrokenResourceError:
        """Return the error to raise for a request on a broken connection."""
        error = BrokenResourceError(f"the connection to the server was lost before the answer arrived: {self.failure}")
        error.__cause__ = self.failure
        return error

    def _listen(self) -> None:
        """Start the listener task, unless it is running or the connection is broken."""
        if self.failure is None and (self._listener is None or self._listener.done()):
            self._receiving = True  # already now, and not only once the task starts
            self._listener = asyncio.create_task(self._receive(None))

    async def _receive(self, wanted: "asyncio.Future[Answer] | None") -> None:
        """Receive answers and pass each to its request, until `wanted` is done or no answer is outstanding.

        If the connection breaks, set `failure` and make all requests fail; raise nothing.

        :param wanted: the answer that the caller waits for; None to receive all answers.
        """
        self._receiving = True
        try:
            while self._unanswered and (wanted is None or not wanted.done()):
                number, answer = parse(await self.connection.receive())
                if not isinstance(answer, Answer):
                    raise ProtocolError(f"expected an answer from the server, got {type(answer).__name__}")
                self._unanswered -= 1
                future = self._pending.get(number)
                if future is not None and not future.done():  # otherwise, the requesting task was cancelled
                    future.set_result(answer)
        except (anyio.EndOfStream, BrokenResourceError, ClosedResourceError, ProtocolError) as error:
            self.failure = error
            self._unanswered = 0
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(self._connection_lost())
                    future.exception()  # mark as retrieved: the requesting task may still be in `send`
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        """Stop receiving. The connection stays open."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])

    async def expect(self, request: Message, kind: type[A]) -> A:
        """Send a request and wait for its answer, which must be of type `kind`; return the answer.

        :raises StorageError: the server reported an error.
        :raises BrokenResourceError: the connection was lost before the answer arrived.
        :raises ProtocolError: the answer has a different type.
        :raises ValueError: a text or the data of the request is too long, or a number is too large.
        """
        answer = await self._ask(request)
        if not isinstance(answer, kind):
            raise ProtocolError(
                f"expected {kind.__name__} as the answer to {type(request).__name__}, got {type(answer).__name__}"
            )
        return answer

    async def done(self, request: Message) -> None:
        """Send a request and wait for the answer `Done`.

        Raises the same exceptions as `expect`.
        """
        await self.expect(request, Done)
