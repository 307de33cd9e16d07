"""The processes of the demonstration: started, listened to, missed where they end too early, and ended."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import anyio

from aioverbs.cli.common import tell

__all__ = ["Child", "ChildEndedError", "child", "unless_ended"]

SILENCE_S = 60.0  # the longest that a process may say nothing which is at work
_NOTICED_S = 1.0  # for the end of a process to be known
_END_S = 5.0  # for a process to end by itself
_LINE_MOST = 64 << 20

T = TypeVar("T")


class ChildEndedError(ChildProcessError):
    """A process of the demonstration ended, or failed, or fell silent, before it was done."""


class Child:
    """A process. Made by `child`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._log = log

    async def line(self) -> str:
        """What it says next.

        :raises ChildEndedError: it ended, or said nothing for a long time.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(SILENCE_S):
                line = await self._process.stdout.readline()
                if not line.endswith(b"\n"):
                    await self._process.wait()
                    raise self.problem()
        except TimeoutError as error:
            raise ChildEndedError(f"{self.name} (process {self.pid}) said nothing for {SILENCE_S:g} s") from error
        return line.decode().rstrip("\n")

    def order(self, text: str) -> None:
        """Tell it something. Where it has ended nobody is told: `line` says so."""
        assert self._process.stdin is not None
        tell(self._process.stdin, text)

    def problem(self) -> ChildEndedError:
        """That it has ended."""
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        said = self._log.read_text(errors="replace").strip().splitlines()
        last = f": {said[-1]}" if said else ""
        return ChildEndedError(f"{self.name} (process {self.pid}) {how} before it was done{last}")

    async def wait(self) -> int:
        """Its exit status."""
        return await self._process.wait()

    async def end(self) -> int:
        """End it, by force where it takes long; its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_END_S):
                return await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            return await self._process.wait()


@contextlib.asynccontextmanager
async def child(name: str, arguments: list[str], folder: Path, environment: Mapping[str, str]) -> AsyncIterator[Child]:
    """A process of this Python, for the time of the block.

    :param name: as people are told of it.
    :param arguments: of Python.
    :param folder: what it complains of is written to a file there.
    :param environment: what is to be otherwise than here.
    """
    log = folder / f"{name.replace(' ', '-')}.log"
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # it is to find what this finds
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            *arguments,
            env={**here, **environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_LINE_MOST,
            start_new_session=True,  # a terminal's Ctrl-C is for this process, which ends the others
        )
    started = Child(name, process, log)
    try:
        yield started
    finally:
        with anyio.CancelScope(shield=True):
            await started.end()


async def unless_ended(needed: Child, work: Coroutine[Any, Any, T]) -> T:
    """Do what cannot be done without a process.

    :param needed: the process: when it ends, so does the work. What others say of that meanwhile is not what is told.
    :raises ChildEndedError: it ended, or another one did.
    """
    ended, working = asyncio.create_task(needed.wait()), asyncio.create_task(work)
    try:
        await asyncio.wait([ended, working], return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:  # its end may be why, and may not be known yet
            await asyncio.wait([ended], timeout=_NOTICED_S)
        if ended.done() and not (working.done() and working.exception() is None):
            raise needed.problem()
        return working.result()
    finally:
        with anyio.CancelScope(shield=True):
            ended.cancel()
            working.cancel()
            await asyncio.gather(ended, working, return_exceptions=True)  # what is not told is not wondered at, either
