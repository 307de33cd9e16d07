"""The processes that can be watched, and what they say: the other end of `aioverbs._monitoring.server`."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from aioverbs._monitoring.directory import MonitorDirectory
from aioverbs._monitoring.server import VERSION
from aioverbs.cli.rates import Sample

__all__ = ["NotWatchableError", "Process", "Watch", "open_watch", "processes"]

_CONNECT_S = 5.0  # a busy process's monitor has to wait for its interpreter
_LONGEST = 64 << 20  # bytes of a line


class NotWatchableError(ConnectionError):
    """No such process lets itself be watched."""


@dataclass(frozen=True)
class Process:
    """A process that can be watched.

    :param program: its command line, empty where it does not answer.
    :param problem: why it does not.
    """

    pid: int
    program: str
    problem: str | None = None


async def processes() -> list[Process]:
    """Those of this user. What dead ones left is taken away.

    :raises PermissionError: the directory is not this user's alone.
    """
    with _directory() as directory:
        if directory is None:
            return []
        found = [await _look_at(directory, pid, name) for pid, name in directory.names()]
    return [process for process in found if process is not None]


@contextlib.contextmanager
def _directory(path: Path | None = None) -> Iterator[MonitorDirectory | None]:
    """None where nobody made it yet."""
    try:
        directory = MonitorDirectory(path)
    except FileNotFoundError:
        yield None
        return
    with directory:
        yield directory


async def _look_at(directory: MonitorDirectory, pid: int, name: str) -> Process | None:
    try:
        connected = directory.connect(name, _CONNECT_S)
        if connected is None:
            return None
        async with Watch(pid, connected) as watch:
            return Process(pid, watch.program)
    except OSError as error:
        return Process(pid, "", str(error))


async def open_watch(pid: int, path: Path | None = None) -> "Watch":
    """Watch a process, to be used by ``async with``.

    :param path: where its socket is; None: where those of this user are.
    :raises NotWatchableError: there is none, or it does not let itself be watched.
    :raises PermissionError: the directory, or who listens there, is not this user's.
    :raises TimeoutError: it does not answer.
    """
    with _directory(path) as directory:
        if directory is not None:
            for number, name in directory.names():
                connected = directory.connect(name, _CONNECT_S) if number == pid else None
                if connected is not None:
                    return Watch(pid, connected)
    raise NotWatchableError(
        f"there is no process {pid} that lets itself be watched: start it with AIOVERBS_MONITOR=1, or have it call"
        " aioverbs.monitor(); `aioverbs top` lists those that do"
    )


class Watch:
    """A connection with a process, which ``async with`` begins.

    :raises NotWatchableError: it is watched by as many as it lets, or speaks something else.
    :raises TimeoutError: it does not answer.
    """

    def __init__(self, pid: int, connected: socket.socket) -> None:
        self.pid = pid
        self.program = ""
        self._socket = connected

    async def __aenter__(self) -> Self:
        try:
            self._socket.setblocking(False)
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=_LONGEST)
        except BaseException:
            self._socket.close()
            raise
        try:
            self._greet(await self._line(_CONNECT_S))
        except BaseException:
            self._writer.close()
            raise
        return self

    def _greet(self, line: bytes | None) -> None:
        told = None
        with contextlib.suppress(ValueError, RecursionError):
            told = json.loads(line or b"")
        if not isinstance(told, dict) or told.get("aioverbs-monitor") != VERSION:
            raise NotWatchableError(f"process {self.pid} speaks another version than this: use the same of aioverbs")
        if "refused" in told:
            raise NotWatchableError(f"process {self.pid} cannot be watched now: {told['refused']}")
        program = str(told.get("program", ""))
        self.program = "".join(each if each.isprintable() else "�" for each in program)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def begin(self, interval_s: float) -> None:
        """Ask for a sample now, and after each interval."""
        self._writer.write(json.dumps({"interval_s": interval_s}).encode() + b"\n")

    async def sample(self, timeout_s: float) -> Sample | None:
        """The next; None where the process has ended.

        :raises TimeoutError: none came in time.
        :raises ValueError: it was none.
        """
        line = await self._line(timeout_s)
        if line is None:
            return None
        try:
            return Sample.parse(line)
        except ValueError as error:
            raise ValueError(f"process {self.pid} said what is no sample: {error}") from error

    async def _line(self, timeout_s: float) -> bytes | None:
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._reader.readline()
        except ConnectionError:
            return None
        except ValueError as error:
            raise ValueError(f"process {self.pid} said more than {_LONGEST:,} bytes at once") from error
        except TimeoutError as error:
            raise TimeoutError(f"process {self.pid} does not answer: it may be stopped") from error
        return line if line.endswith(b"\n") else None
