"""Monitoring of this process by other processes, such as `aioverbs top`, through a private Unix socket.

A thread serves the socket independently of the event loops. It sleeps while no other process is connected, handles no
signals, does not keep this process alive, and does not exist in a forked child.
"""

import asyncio
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
from aioverbs._lifecycle.affinity import wait_uncancelled
from aioverbs._monitoring.server import MonitorServer

__all__ = ["Monitor", "monitor", "start_if_enabled"]

logger = logging.getLogger("aioverbs")

_lock = threading.Lock()  # guards the variables below
_server: MonitorServer | None = None
_users = 0
_environment_was_read = False  # True after AIOVERBS_MONITOR was read


def _acquire() -> Path:
    """Increment the number of users of this process's monitor socket; create the socket and its server if there are
    none.

    :returns: path of the socket.
    :raises OSError: the socket or its directory cannot be created.
    :raises ValueError: AIOVERBS_MONITOR_DIRECTORY or XDG_RUNTIME_DIR is not an absolute path.
    :raises RuntimeError: no thread can be started.
    """
    global _server, _users
    with _lock:
        if _server is not None and not _server.alive:
            _server.close_descriptors()
            _server = None
        if _server is None:
            _server = MonitorServer()
            atexit.unregister(_at_exit)  # registered for an earlier server
            atexit.register(_at_exit)
            _at_exit_of_children()
        _users += 1
        return _server.path


def _at_exit_of_children() -> None:
    """Make `_at_exit` run at the end of a child process of `multiprocessing`, which does not run functions registered
    with `atexit`. In other processes, do nothing.
    """
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, _at_exit, exitpriority=0)


def _release() -> MonitorServer | None:
    """Decrement the number of users of the monitor socket; stop the server if no user is left.

    :returns: the stopped server, which the caller must join; None if there are other users, or if there is no server.
    """
    global _server, _users
    with _lock:
        _users -= 1
        if _users or _server is None:
            return None
        server, _server = _server, None
        atexit.unregister(_at_exit)
        server.stop()
        return server


async def _wait_for_thread(server: MonitorServer) -> None:
    """Wait for the thread of a stopped server, even if this is cancelled."""
    joining = anyio.to_thread.run_sync(server.join)
    if asyncio._get_running_loop() is not None:
        await wait_uncancelled(joining)
        return
    with anyio.CancelScope(shield=True):  # in trio, only scopes cancel
        await joining


def _at_exit() -> None:
    """Stop the server, if there is one, at the end of the process and wait for its thread."""
    global _server
    with _lock:
        server, _server = _server, None
    if server is not None:
        server.stop()
        server.join()


class Monitor:
    """Permission for other processes of this user to monitor this one with `aioverbs top`. Use `monitor` to create one.

    ``async with`` begins and ends the monitoring and yields the monitor itself; without a block, `open` and `aclose` do
    the same. All open monitors of a process share one socket.
    """

    def __init__(self) -> None:
        self._process = 0  # ID of the process that opened it
        self._path: Path | None = None

    async def open(self) -> Self:
        """Let other processes monitor this one, until `aclose` is called.

        :returns: the monitor itself.
        :raises OSError: the socket or its directory cannot be created.
        :raises ValueError: AIOVERBS_MONITOR_DIRECTORY or XDG_RUNTIME_DIR is not an absolute path.
        :raises RuntimeError: the monitor is already open, or no thread can be started.
        """
        if self._process == os.getpid():
            raise RuntimeError("the monitor is already open: make another one, or close this one first")
        self._path = _acquire()
        self._process = os.getpid()
        return self

    @property
    def path(self) -> Path:
        """Path of the socket that the monitors of this process share.

        :raises RuntimeError: the monitor is not open in this process.
        """
        if self._path is None or self._process != os.getpid():
            raise RuntimeError("the monitor is not open in this process")
        return self._path

    async def aclose(self) -> None:
        """End the monitoring, unless another monitor in this process is open or AIOVERBS_MONITOR is 1.

        When the last monitor is closed, this waits for the thread that serves the socket, but at most 5 s; if the
        thread has not ended by then, an error is logged. Closing a closed monitor does nothing. A cancellation does not
        interrupt this call, and is raised afterwards.
        """
        process, self._process, self._path = self._process, 0, None
        if process != os.getpid():  # never opened, or opened by the parent process
            return
        server = _release()
        if server is not None:
            await _wait_for_thread(server)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def monitor() -> Monitor:
    """Let other processes of this user monitor this one with `aioverbs top`: ``async with monitor():``.

    The environment variable AIOVERBS_MONITOR=1 has the same effect from the time the first device is opened until the
    process ends. A thread serves the other processes; event loops are not involved and are slowed down only while a
    sample is taken. A forked child is not monitored, unless that variable is set and the child opens a device.

    Other processes find this one by a socket in AIOVERBS_MONITOR_DIRECTORY; if that is not set, in ``aioverbs-monitor``
    in XDG_RUNTIME_DIR; if that is not set either, in ``/tmp/aioverbs-monitor-`` followed by the user ID. Only this user
    can access the directory, and processes of other users are always rejected.

    :returns: an unopened monitor.
    """
    return Monitor()


def start_if_enabled() -> None:
    """Let other processes monitor this one until it ends, if AIOVERBS_MONITOR is 1. A failure is logged as a warning.

    Only the first call in a process that finds the variable set to a value other than ``0`` has an effect; any value
    other than ``0`` or ``1`` is logged as a warning.
    """
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
        logger.warning("AIOVERBS_MONITOR: this process cannot be monitored: %s", error)


def _forked() -> None:
    """Reset this module in a forked child, which is not monitored, and close the descriptors of the parent's server."""
    global _lock, _environment_was_read, _server, _users
    _lock, _environment_was_read, _users = threading.Lock(), False, 0
    server, _server = _server, None
    if server is not None:
        atexit.unregister(_at_exit)
        server.close_descriptors()


os.register_at_fork(after_in_child=_forked)


publish(__name__)
