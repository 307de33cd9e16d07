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
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.over: Exception | None = None
        self._numbers = itertools.cycle(range(1, 1 << 32))
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._to_come = 0  # number of answers not yet received
        self._receiving = False
        self._listener: asyncio.Task[None] | None = None

    async def _ask(self, request: Message) -> Answer:
        """Send a request; return its answer. Raise the error of a `Failed` answer."""
        if self.over is not None:
            raise self._lost()
        number = next(self._numbers)
        asked: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        alone = not self._to_come and not self._receiving
        try:
            await self.connection.send(pack(number, request))  # if cancelled here, nothing was sent
            self._to_come += 1
            if alone and not self._receiving:
                await self._receive(asked)
            elif not self._receiving:
                self._listen()
            answer = await asked
        finally:
            del self._asked[number]
            if self._to_come and not self._receiving:
                self._listen()
        if isinstance(answer, Failed):
            raise error_of(answer.code, answer.text)
        return answer

    def _lost(self) -> BrokenResourceError:
        lost = BrokenResourceError(f"the server went before it answered: {self.over}")
        lost.__cause__ = self.over
        return lost

    def _listen(self) -> None:
        if self.over is None and (self._listener is None or self._listener.done()):
            self._receiving = True  # already now, and not only once the task starts
            self._listener = asyncio.create_task(self._receive(None))

    async def _receive(self, wanted: "asyncio.Future[Answer] | None") -> None:
        """Receive answers and pass each to its request, until `wanted` is done or no answer is outstanding."""
        self._receiving = True
        try:
            while self._to_come and (wanted is None or not wanted.done()):
                number, answer = parse(await self.connection.receive())
                if not isinstance(answer, Answer):
                    raise ProtocolError(f"a {type(answer).__name__} is no answer")
                self._to_come -= 1
                asked = self._asked.get(number)
                if asked is not None and not asked.done():  # otherwise, the requesting task was cancelled
                    asked.set_result(answer)
        except (anyio.EndOfStream, BrokenResourceError, ClosedResourceError, ProtocolError) as error:
            self.over = error
            self._to_come = 0
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(self._lost())
                    asked.exception()  # mark as retrieved: the requesting task may still be in `send`
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        """Stop receiving."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])

    async def expect(self, request: Message, kind: type[A]) -> A:
        """Send a request; return its answer, which must be of type `kind`."""
        answer = await self._ask(request)
        if not isinstance(answer, kind):
            raise ProtocolError(f"{type(request).__name__} was answered by {type(answer).__name__}")
        return answer

    async def done(self, request: Message) -> None:
        """Send a request, and check that the answer is `Done`."""
        await self.expect(request, Done)
