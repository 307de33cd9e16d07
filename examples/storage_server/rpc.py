"""Requests and answers over a connection: any number of tasks ask, and each gets its own answer."""

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
    """What is asked of a server, over a connection; `aclose` ends it.

    Who asks alone receives the answer itself, without a second task's turn of the loop. Where more is asked at once, or
    who asked is gone before the answer came, a task receives for all until there is nothing more to come: as long as
    there is, somebody receives, since a server whose answers nobody takes stops reading.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.over: Exception | None = None
        self._numbers = itertools.cycle(range(1, 1 << 32))
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._to_come = 0  # answers
        self._receiving = False
        self._listener: asyncio.Task[None] | None = None

    async def _ask(self, request: Message) -> Answer:
        """The answer, whatever it is but `Failed`."""
        if self.over is not None:
            raise self._lost()
        number = next(self._numbers)
        asked: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        alone = not self._to_come and not self._receiving
        try:
            await self.connection.send(pack(number, request))  # where it is cancelled nothing was sent
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
            self._receiving = True  # from now on, and not when the task begins
            self._listener = asyncio.create_task(self._receive(None))

    async def _receive(self, wanted: "asyncio.Future[Answer] | None") -> None:
        """Give answers to those who asked, until this one is there, or all are."""
        self._receiving = True
        try:
            while self._to_come and (wanted is None or not wanted.done()):
                number, answer = parse(await self.connection.receive())
                if not isinstance(answer, Answer):
                    raise ProtocolError(f"a {type(answer).__name__} is no answer")
                self._to_come -= 1
                asked = self._asked.get(number)
                if asked is not None and not asked.done():  # else who asked is gone
                    asked.set_result(answer)
        except (anyio.EndOfStream, BrokenResourceError, ClosedResourceError, ProtocolError) as error:
            self.over = error
            self._to_come = 0
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(self._lost())
                    asked.exception()  # who asked may be sending yet
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        """Nothing more is asked."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])

    async def expect(self, request: Message, kind: type[A]) -> A:
        """The answer, of that kind."""
        answer = await self._ask(request)
        if not isinstance(answer, kind):
            raise ProtocolError(f"{type(request).__name__} was answered by {type(answer).__name__}")
        return answer

    async def done(self, request: Message) -> None:
        """See that it is done."""
        await self.expect(request, Done)
