"""Letting others look at what is open in this process: `aioverbs top` does, through a private Unix socket.

A thread answers, so that it does whatever the event loops are at, and asks nothing of them. It sleeps as long as nobody
looks, takes no signals, keeps no process alive, and is no thread of a child made by fork.
"""

import atexit
import logging
import os
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio.to_thread

from aioverbs._exports import publish
from aioverbs._monitoring.server import MonitorServer

__all__ = ["Monitor", "monitor", "start_if_enabled"]

logger = logging.getLogger("aioverbs")

_lock = threading.Lock()  # of what follows
_server: MonitorServer | None = None
_users = 0
_environment_was_read = False  # whether the environment was listened to


def _acquire() -> Path:
    global _server, _users
    with _lock:
        if _server is not None and not _server.alive:
            _server.close_descriptors()
            _server = None
        if _server is None:
            _server = MonitorServer()
            atexit.unregister(_at_exit)  # of one before
            atexit.register(_at_exit)
            _at_exit_of_children()
        _users += 1
        return _server.path


def _at_exit_of_children() -> None:
    """Children of `multiprocessing` end without what the interpreter does at its end."""
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, _at_exit, exitpriority=0)


def _release() -> MonitorServer | None:
    """The server, where it was the last one's."""
    global _server, _users
    with _lock:
        _users -= 1
        if _users or _server is None:
            return None
        server, _server = _server, None
        atexit.unregister(_at_exit)
        server.stop()
        return server


def _at_exit() -> None:
    global _server
    with _lock:
        server, _server = _server, None
    if server is not None:
        server.stop()
        server.join()


class Monitor:
    """Lets other processes of this user look at what is open in this one, by `aioverbs top`. Made by `monitor`.

    ``async with`` begins and ends that; outside of a block `open` and `aclose` do the same. Any number of them are one.
    """

    def __init__(self) -> None:
        self._process = 0  # in which it is open
        self._path: Path | None = None

    async def open(self) -> Self:
        """Begin.

        :raises OSError: there can be no socket: the error says why, and what to do.
        :raises RuntimeError: it is open.
        """
        if self._process == os.getpid():
            raise RuntimeError("it is open: make another one, or close this first")
        self._path = _acquire()
        self._process = os.getpid()
        return self

    @property
    def path(self) -> Path:
        """The socket.

        :raises RuntimeError: it is not open.
        """
        if self._path is None or self._process != os.getpid():
            raise RuntimeError("it is not open in this process")
        return self._path

    async def aclose(self) -> None:
        """End it. Closing twice is fine."""
        process, self._process, self._path = self._process, 0, None
        if process != os.getpid():  # it was never open, or is the parent's
            return
        server = _release()
        if server is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(server.join)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def monitor() -> Monitor:
    """Let other processes of this user look at what is open in this one, by `aioverbs top`: ``async with monitor():``.

    The environment variable AIOVERBS_MONITOR=1 does so without that, from the first device that is opened to the end of
    the process. A thread answers them; event loops have nothing to do with it, and are not slowed down but by the
    moments that a sample takes. In the child of a fork it is not open, but by that variable.

    They find it by a socket in AIOVERBS_MONITOR_DIRECTORY, else in ``aioverbs-monitor`` in XDG_RUNTIME_DIR, else in
    ``/tmp/aioverbs-monitor-`` and the user's number: a directory that only this user can look into. Processes of other
    users are turned away in any case.
    """
    return Monitor()


def start_if_enabled() -> None:
    """Have this process watched until it ends, where the environment says so. What fails is a warning to the log."""
    global _environment_was_read
    text = os.environ.get("AIOVERBS_MONITOR", "")
    if text in ("", "0") or _environment_was_read:
        return
    _environment_was_read = True
    if text != "1":
        logger.warning("AIOVERBS_MONITOR: write 1 for yes or 0 for no, not %r", text)
        return
    try:
        _acquire()
    except (OSError, RuntimeError, ValueError) as error:
        logger.warning("AIOVERBS_MONITOR: nobody can look at this process: %s", error)


def _forked() -> None:
    global _lock, _environment_was_read, _server, _users
    _lock, _environment_was_read, _users = threading.Lock(), False, 0
    server, _server = _server, None
    if server is not None:
        atexit.unregister(_at_exit)
        server.close_descriptors()


os.register_at_fork(after_in_child=_forked)


publish(__name__)
