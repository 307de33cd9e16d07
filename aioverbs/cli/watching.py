"""Client of `aioverbs._monitoring.server`: finds processes that can be watched and receives their samples."""

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

__all__ = ["NotWatchableError", "Watch", "WatchableProcess", "open_watch", "processes"]

_CONNECT_S = 5.0  # generous, since the monitor of a busy process waits for the interpreter
_MAX_LINE = 64 << 20  # bytes of a line


class NotWatchableError(ConnectionError):
    """The process does not exist, or cannot be watched: it has no monitor, too many watchers, or another version of the
    protocol.
    """


@dataclass(frozen=True)
class WatchableProcess:
    """A process with a monitor socket. Made by `processes`.

    :param pid: process ID.
    :param program: the process's command line; empty if the process does not answer.
    :param problem: reason why the process does not answer; None if it does.
    """

    pid: int
    program: str
    problem: str | None = None


async def processes() -> list[WatchableProcess]:
    """List the processes of this user that can be watched, and remove the sockets of processes that have ended.

    :returns: the processes, including those that do not answer; empty if there is no socket directory.
    :raises PermissionError: the socket directory is accessible to other users.
    :raises OSError: the socket directory cannot be opened or listed.
    :raises ValueError: AIOVERBS_MONITOR_DIRECTORY or XDG_RUNTIME_DIR is not an absolute path, or a process sent a line
        of more than 64 MiB.
    """
    with _directory() as directory:
        if directory is None:
            return []
        found = [await _inspect(directory, pid, name) for pid, name in directory.names()]
    return [process for process in found if process is not None]


@contextlib.contextmanager
def _directory(path: Path | None = None) -> Iterator[MonitorDirectory | None]:
    """Open the socket directory and yield it, or None if it does not exist; close it when the block ends.

    :param path: path of the directory; None for this user's default directory.
    :raises PermissionError: the directory is accessible to other users.
    :raises OSError: the directory exists but cannot be opened.
    :raises ValueError: ``path`` is None, and AIOVERBS_MONITOR_DIRECTORY or XDG_RUNTIME_DIR is not an absolute path.
    """
    try:
        directory = MonitorDirectory(path)
    except FileNotFoundError:
        yield None
        return
    with directory:
        yield directory


async def _inspect(directory: MonitorDirectory, pid: int, name: str) -> WatchableProcess | None:
    """Connect to the monitor of a process, read the process's command line and disconnect again.

    :param name: name of the monitor's socket in the directory.
    :returns: the process; None if it has ended. If connecting failed, `WatchableProcess.problem` contains the error
        message.
    :raises ValueError: the process sent a line of more than 64 MiB.
    """
    try:
        connection = directory.connect(name, _CONNECT_S)
        if connection is None:
            return None
        async with Watch(pid, connection) as watch:
            return WatchableProcess(pid, watch.program)
    except OSError as error:
        return WatchableProcess(pid, "", str(error))


async def open_watch(pid: int, path: Path | None = None) -> "Watch":
    """Connect to the monitor of a process.

    :param pid: process ID.
    :param path: socket directory; None for this user's default directory.
    :returns: the connection, to be used with ``async with``, which performs the handshake and closes the connection.
    :raises NotWatchableError: the process does not exist, or cannot be watched.
    :raises PermissionError: the directory or the listening process belongs to another user.
    :raises TimeoutError: the process does not answer.
    :raises OSError: the directory cannot be opened or listed, or connecting failed for another reason.
    :raises ValueError: `path` is None, and AIOVERBS_MONITOR_DIRECTORY or XDG_RUNTIME_DIR is not an absolute path.
    """
    with _directory(path) as directory:
        if directory is not None:
            for number, name in directory.names():
                connection = directory.connect(name, _CONNECT_S) if number == pid else None
                if connection is not None:
                    return Watch(pid, connection)
    raise NotWatchableError(
        f"process {pid} cannot be watched: start it with AIOVERBS_MONITOR=1, or call aioverbs.monitor() in it;"
        " `aioverbs top` lists the processes that can be watched"
    )


class Watch:
    """Connection to a process's monitor. Made by `open_watch`.

    ``async with`` performs the handshake, yields this object and closes the connection at the end. Entering may raise
    the exceptions below, and then closes the connection.

    :param pid: process ID.
    :param connection: socket connected to the monitor; owned by this object.
    :raises NotWatchableError: there are too many watchers, or the process has ended or uses another version of the
        protocol.
    :raises TimeoutError: the process does not answer within 5 s.
    :raises ValueError: the process sent a line of more than 64 MiB.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.program = ""
        self._socket = connection

    async def __aenter__(self) -> Self:
        try:
            self._socket.setblocking(False)
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=_MAX_LINE)
        except BaseException:
            self._socket.close()
            raise
        try:
            self._check_greeting(await self._read_line(_CONNECT_S))
        except BaseException:
            self._writer.close()
            raise
        return self

    def _check_greeting(self, line: bytes | None) -> None:
        """Check the monitor's first line and set `program`, with unprintable characters replaced.

        :param line: the line; None if the process has ended.
        :raises NotWatchableError: there are too many watchers, the process uses another version of the protocol, or it
            has ended.
        """
        greeting = None
        with contextlib.suppress(ValueError, RecursionError):
            greeting = json.loads(line or b"")
        if not isinstance(greeting, dict) or greeting.get("aioverbs-monitor") != VERSION:
            raise NotWatchableError(
                f"process {self.pid} has ended, or uses another version of the protocol: if it is still running, use "
                "the same version of aioverbs"
            )
        if "refused" in greeting:
            raise NotWatchableError(f"process {self.pid} cannot be watched now: {greeting['refused']}")
        program = str(greeting.get("program", ""))
        self.program = "".join(each if each.isprintable() else "�" for each in program)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def begin(self, interval_s: float) -> None:
        """Request samples: one now, and one after each interval of ``interval_s`` seconds.

        Call this once, then call `sample` to receive them.
        """
        self._writer.write(json.dumps({"interval_s": interval_s}).encode() + b"\n")

    async def sample(self, timeout_s: float) -> Sample | None:
        """Return the next sample, or None if the process has ended. Call `begin` first.

        :param timeout_s: seconds to wait.
        :raises TimeoutError: no sample arrived in time; the call may be repeated.
        :raises ValueError: the process sent an invalid sample, or a line of more than 64 MiB.
        """
        line = await self._read_line(timeout_s)
        if line is None:
            return None
        try:
            return Sample.parse(line)
        except ValueError as error:
            raise ValueError(f"process {self.pid} sent an invalid sample: {error}") from error

    async def _read_line(self, timeout_s: float) -> bytes | None:
        """Return the next line from the monitor; None if the process has ended.

        :param timeout_s: seconds to wait.
        :raises TimeoutError: no line arrived in time.
        :raises ValueError: the line has more than 64 MiB.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._reader.readline()
        except ConnectionError:
            return None
        except ValueError as error:
            raise ValueError(f"process {self.pid} sent a line of more than {_MAX_LINE:,} bytes") from error
        except TimeoutError as error:
            raise TimeoutError(f"process {self.pid} does not answer: it may be stopped") from error
        return line if line.endswith(b"\n") else None
