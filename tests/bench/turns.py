"""Processes that measure one thing each and print numbers, in turns: some processes are slower for their whole life."""

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

__all__ = ["alone", "in_turns", "line_of", "running"]


@asynccontextmanager
async def running(*command: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Process]:
    """Run a process, and end it with the block."""
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line_of(process: Process) -> bytes:
    """Return the process's next line; raise an error if there is none."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a benchmark process ended without output, status {await process.wait()}")
    return line


async def alone(*command: str, env: Mapping[str, str] | None = None) -> bytes:
    """Run a process, and return its line."""
    async with running(*command, env=env) as process:
        answer = await line_of(process)
        await process.wait()
    return answer


async def in_turns(
    contenders: Mapping[str, Callable[[], Awaitable[bytes]]], rounds: int, seconds: float
) -> dict[str, list[list[float]]]:
    """Return the numbers of each contender, number by number. Each has one turn in each round, in rotating order.

    :param seconds: limit for each turn.
    """
    taken: dict[str, list[list[float]]] = {name: [] for name in contenders}
    names = list(contenders)
    for at in range(rounds):
        first = at % len(names)
        for name in (*names[first:], *names[:first]):
            async with asyncio.timeout(seconds):
                answer = await contenders[name]()
            taken[name].append(list(map(float, answer.split())))
    return taken
