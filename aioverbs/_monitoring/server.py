"""Socket through which other processes monitor this one, and the thread that serves it.

The protocol is lines of JSON:

    viewer                              monitored process
    connect        ------------------>
                   <------------------  {"aioverbs-monitor": 1, "pid": ..., "program": ...}
    {"interval_s": 1.0}  ------------>
                   <------------------  a sample at once, and one after each interval, until the viewer disconnects

Samples are those of `aioverbs._monitoring.snapshot`. A sample is skipped while the previous one is not sent completely.
"""

import contextlib
import functools
import json
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from aioverbs._durations import duration
from aioverbs._monitoring.directory import MonitorDirectory, peer_user
from aioverbs._monitoring.snapshot import encode, sample

__all__ = ["INTERVALS_S", "VERSION", "MonitorServer"]

logger = logging.getLogger("aioverbs")

VERSION = 1
INTERVALS_S = (0.05, 3600.0)  # minimum and maximum of the interval
_MAX_VIEWERS = 8  # maximum number of connected viewers
_REQUEST_TIMEOUT_S = 5.0  # maximum time between connecting and the request
_MAX_REQUEST_BYTES = 4096  # maximum size of a request
_ACCEPT_PAUSE_S = 1.0  # pause after accept() failed, for example because no descriptor was free
_JOIN_TIMEOUT_S = 5.0
# Maximum time that a fork waits for a sample, which may itself wait for a lock that the forking thread holds.
_FORK_TIMEOUT_S = 1.0


class _Viewer:
    """Connection to one viewer.

    :param connected: non-blocking socket.
    :param due: time of the request timeout, on the clock of ``time.monotonic``.
    """

    def __init__(self, connected: socket.socket, due: float) -> None:
        self.socket = connected
        self.request = b""
        self.unsent = memoryview(b"")
        self.interval_s: float | None = None  # None before the request
        self.due = due  # time of the next sample, or of the request timeout

    def send(self, line: bytes) -> None:
        """Send as much of a line as possible without waiting, and keep the rest for `flush`.

        If an earlier line has not been sent completely, skip this line.

        :raises OSError: the viewer has closed the connection.
        """
        if not self.unsent:
            self.unsent = memoryview(line)
            self.flush()

    def flush(self) -> None:
        """Send as much as possible of the rest of a line without waiting.

        :raises OSError: the viewer has closed the connection.
        """
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]

    def receive_request(self) -> None:
        """Receive the viewer's request or a part of it, without waiting. Once the request is complete, set
        `interval_s`, and make a sample due immediately.

        :raises OSError: the viewer has closed the connection.
        :raises ValueError: the request is invalid or longer than 4,096 bytes, or is the viewer's second one.
        """
        try:
            received = self.socket.recv(_MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionResetError
        if self.interval_s is not None:
            raise ValueError("the viewer sent a second request")
        self.request += received
        line, newline, rest = self.request.partition(b"\n")
        if newline and not rest:
            self.interval_s = _interval_of(line)
            self.due = time.monotonic()
        elif newline or len(self.request) > _MAX_REQUEST_BYTES:
            raise ValueError(f"a request is one line of at most {_MAX_REQUEST_BYTES} bytes")


def _interval_of(line: bytes) -> float:
    """Return the interval in seconds that a request contains.

    :param line: request without the newline.
    :raises ValueError: the request is not JSON, or its interval is missing or is not a number in 0.05..3600.
    """
    try:
        request = json.loads(line)
    except RecursionError:
        raise ValueError("the request is not a JSON object") from None
    interval = request.get("interval_s") if isinstance(request, dict) else None
    least, most = INTERVALS_S
    if isinstance(interval, bool) or not isinstance(interval, (int, float)) or not least <= interval <= most:
        raise ValueError(f"interval_s must be from {duration(least)} to {duration(most)}, got {interval!r}")
    return float(interval)


class MonitorServer:
    """Listening socket and the thread that serves it. Both exist as soon as this object is made.

    The caller must end the server with `stop` and then `join`.

    :raises OSError: the socket or its directory cannot be created.
    :raises ValueError: a variable that names the directory is not an absolute path.
    :raises RuntimeError: no thread can be started.
    """

    def __init__(self) -> None:
        self._directory = MonitorDirectory(make=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self._directory.close)
            self._directory.sweep()
            self._listening, self._name = self._directory.listen(_MAX_VIEWERS)
            undo.callback(self._listening.close)
            undo.callback(self._directory.remove, self._name)
            self._selector = selectors.DefaultSelector()
            undo.callback(self._selector.close)
            self._wake_writer, self._wake_reader = socket.socketpair()
            undo.callback(self._wake_writer.close)
            undo.callback(self._wake_reader.close)
            self._viewers: dict[socket.socket, _Viewer] = {}
            self._accept_after = 0.0
            self._stopping = False
            self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
            self._selector.register(self._wake_reader, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name="aioverbs-monitor", daemon=True)
            self._start()
            undo.pop_all()

    def _start(self) -> None:
        """Start the server's thread with all signals blocked in it.

        :raises RuntimeError: no thread can be started.
        """
        # The thread must not handle signals of the program. It inherits the mask of this thread from its start.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def path(self) -> Path:
        """Path of the socket."""
        return self._directory.path / self._name

    @property
    def alive(self) -> bool:
        """True while the server's thread is running. The thread ends after `stop`, or if it raises an exception."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Remove the socket file and tell the thread to end, without waiting for that. Any thread can call this."""
        self._directory.remove(self._name)
        self._stopping = True
        self._wake_writer.send(b"!")

    def join(self) -> None:
        """Wait until the thread has ended, then close the descriptors. If it has not ended after 5 s, log an error and
        leave them open.
        """
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():  # blocked in a sample; the descriptors stay open until the process ends
            logger.error("the thread that serves monitors of this process did not end")
        else:
            self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close the server's descriptors. Call this once the thread has ended, or in a forked child, where the thread
        does not exist.
        """
        for each in (self._listening, self._wake_writer, self._wake_reader, *self._viewers):
            each.close()
        self._selector.close()
        self._directory.close()

    # ---- In the thread

    def _run(self) -> None:
        """Serve viewers until the server is stopped. An `Exception` is logged and ends the monitoring."""
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._timeout_s()):
                    if key.data is not None:
                        key.data(events)
                self._serve()
        except Exception:
            logger.exception("this process can no longer be monitored")
            self._directory.remove(self._name)
            self._listening.close()
            for viewer in tuple(self._viewers.values()):
                viewer.socket.close()

    def _timeout_s(self) -> float | None:
        """Return the seconds until something is due: a sample, a request timeout, or another attempt to accept viewers.
        Return None if nothing will be due.
        """
        times = [viewer.due for viewer in self._viewers.values()]
        if self._accept_after:
            times.append(self._accept_after)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self, events: int) -> None:
        """Accept the connection of a viewer (a monitoring process) and greet it. Reject it if its process belongs to
        another user, or if 8 viewers are connected. If accepting fails, pause accepting for a second.

        :param events: events of `selectors` for which the socket is ready; ignored.
        """
        try:
            connected, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:  # such as EMFILE: pause, since accept() would fail again at once
            logger.warning("no monitor is accepted for %s: %s", duration(_ACCEPT_PAUSE_S), error)
            self._selector.unregister(self._listening)
            self._accept_after = time.monotonic() + _ACCEPT_PAUSE_S
            return
        connected.setblocking(False)
        user = peer_user(connected)
        if user != os.geteuid():
            logger.warning("a process of user %d tried to monitor this process and was rejected", user)
            connected.close()
            return
        viewer = _Viewer(connected, time.monotonic() + _REQUEST_TIMEOUT_S)
        if len(self._viewers) >= _MAX_VIEWERS:
            with contextlib.suppress(OSError):
                viewer.send(_line({**_greeting(), "refused": f"{_MAX_VIEWERS} others are already monitoring it"}))
            connected.close()
            return
        self._viewers[connected] = viewer
        self._selector.register(connected, selectors.EVENT_READ, lambda events: self._on_viewer_ready(viewer, events))
        self._call_or_drop(viewer, lambda: viewer.send(_line(_greeting())))

    def _on_viewer_ready(self, viewer: _Viewer, events: int) -> None:
        """Receive the request of a viewer if its socket is readable, and send the rest of a line if it is writable.

        :param events: events of `selectors` for which the socket is ready.
        """
        if events & selectors.EVENT_READ:
            self._call_or_drop(viewer, viewer.receive_request)
        if events & selectors.EVENT_WRITE and viewer.socket in self._viewers:
            self._call_or_drop(viewer, viewer.flush)

    def _call_or_drop(self, viewer: _Viewer, act: Callable[[], None]) -> None:
        """Call `act`, which sends to or receives from a viewer; disconnect the viewer if `act` raises OSError or
        ValueError.
        """
        try:
            act()
        except (OSError, ValueError) as error:
            logger.debug("a monitor of this process is gone: %s", error)
            self._selector.unregister(viewer.socket)
            del self._viewers[viewer.socket]
            viewer.socket.close()
        else:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if viewer.unsent else 0)
            key = self._selector.get_key(viewer.socket)
            if key.events != wanted:
                self._selector.modify(viewer.socket, wanted, key.data)

    def _serve(self) -> None:
        """Send a sample to each viewer whose interval has passed, and disconnect the viewers that did not send their
        request in time.
        """
        now = time.monotonic()
        if self._accept_after and now >= self._accept_after:
            self._accept_after = 0.0
            self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        due = [viewer for viewer in self._viewers.values() if viewer.due <= now]
        line = self._sample() if any(viewer.interval_s is not None for viewer in due) else b""
        now = time.monotonic()
        for viewer in due:
            if viewer.interval_s is None:
                self._call_or_drop(viewer, _raise_no_request)
                continue
            viewer.due += viewer.interval_s
            if viewer.due <= now:  # late, or the sample takes longer than the interval: yield to other threads
                viewer.due = now + viewer.interval_s
            self._call_or_drop(viewer, functools.partial(viewer.send, line))

    def _sample(self) -> bytes:
        """Return a sample encoded as a line. If another thread is forking, wait until the fork is over."""
        with _sampling:
            return encode(sample()).encode() + b"\n"


def _raise_no_request() -> None:
    """Raise the exception for a viewer that did not send its request in time.

    :raises TimeoutError: always.
    """
    raise TimeoutError("the viewer sent no request in time")


def _line(message: dict[str, object]) -> bytes:
    """Return a message encoded as a line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _greeting() -> dict[str, object]:
    """Return the first message to each viewer as a dict: the version of the protocol, and this process's ID and command
    line.
    """
    command = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
    return {"aioverbs-monitor": VERSION, "pid": os.getpid(), "program": os.fsdecode(command)[:1000]}


# ---- Forks

_sampling = threading.Lock()  # held during a sample, which takes locks, and during a fork
_forker: int | None = None  # ID of the thread that holds the lock for a fork


def _before_fork() -> None:
    """Prevent samples from being taken during a fork: wait for a running sample to finish, but at most 1 s, after which
    the process forks anyway.
    """
    global _forker
    if _sampling.acquire(timeout=_FORK_TIMEOUT_S):
        _forker = threading.get_ident()


def _after_fork() -> None:
    """Allow samples to be taken again, in the parent after a fork, if `_before_fork` prevented them."""
    global _forker
    if _forker == threading.get_ident():
        _forker = None
        _sampling.release()


def _forked() -> None:
    """Replace the lock that guards samples in a forked child, where the thread that held it may not exist."""
    global _forker, _sampling
    _sampling, _forker = threading.Lock(), None


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked)
