"""The clients, from the side of who tells them what to do."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aioverbs.cli.demonstration.children import Child, ChildEndedError, child
from aioverbs.cli.demonstration.client import Assignment

__all__ = ["Staff", "staff"]

Tell = Callable[[int, int], object]
"""Is told which client has done how much."""


class Staff:
    """All clients. Made by `staff`."""

    def __init__(self, clients: list[Child]) -> None:
        self.clients = clients

    async def all(self, order: str, tell: Tell = lambda number, done: None) -> list[Any]:
        """Have all of them do something at the same time; what came of it, for each.

        :raises ChildEndedError: one failed, or ended.
        """
        async with asyncio.TaskGroup() as tasks:
            doing = [tasks.create_task(self.one(number, order, tell)) for number in range(len(self.clients))]
        return [each.result() for each in doing]

    async def one(self, number: int, order: str, tell: Tell = lambda number, done: None) -> Any:
        """Have one of them do something; what came of it."""
        self.clients[number].order(order)
        return await self._answer(number, tell)

    async def _answer(self, number: int, tell: Tell) -> Any:
        client = self.clients[number]
        while True:
            answer = json.loads(await client.line())
            if "progress" in answer:
                tell(number, answer["progress"])
            elif "failed" in answer:
                raise ChildEndedError(f"{client.name} (process {client.pid}) failed: {answer['failed']}")
            else:
                return answer["done"]

    async def ready(self) -> None:
        """Wait until all are connected."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self.clients)):
                tasks.create_task(self._answer(number, lambda number, done: None))

    async def end(self) -> None:
        """Have all of them close what they have open, and end.

        :raises ChildEndedError: one ended in another way.
        """
        await self.all("end")
        for client in self.clients:
            if await client.wait():
                raise client.problem()


@contextlib.asynccontextmanager
async def staff(assignments: list[Assignment], folder: Path, device: str, monitor: Path) -> AsyncIterator[Staff]:
    """A process for each assignment, for the time of the block.

    :param folder: what they complain of is written to files there.
    :param device: their device's name.
    :param monitor: the directory of their sockets for those who watch them.
    """
    environment = {
        "AIOVERBS_DEVICE": device,
        "AIOVERBS_MONITOR": "1",
        "AIOVERBS_MONITOR_DIRECTORY": str(monitor),
    }
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for assignment in assignments:
            command = ["-m", "aioverbs.cli.demonstration.client", f"{os.getpid()}", json.dumps(asdict(assignment))]
            name = f"client {assignment.number}"
            clients.append(await stack.enter_async_context(child(name, command, folder, environment)))
        started = Staff(clients)
        await started.ready()
        yield started
