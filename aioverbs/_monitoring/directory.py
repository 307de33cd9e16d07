"""Private directory that contains a Unix socket for each process that can be monitored."""

import contextlib
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from errno import EACCES, ELOOP, ENOTDIR
from pathlib import Path

__all__ = ["MonitorDirectory", "default_path", "peer_user"]

_NAME = re.compile(r"(\d+)-[0-9a-f]{8}\.sock")
_SWEEP_TIMEOUT_S = 0.1  # timeout of a connection that tests whether a process is alive
_ABANDONED_S = 60.0  # age after which an unfinished socket file is removed
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


def default_path(environment: Mapping[str, str], user: int) -> Path:
    """Return the path of the socket directory.

    The path is AIOVERBS_MONITOR_DIRECTORY; if that is not set, ``aioverbs-monitor`` in XDG_RUNTIME_DIR; if that is not
    set either, ``/tmp/aioverbs-monitor-`` followed by the user ID. An empty variable counts as not set.

    :param environment: environment variables, by name.
    :param user: effective user ID of this process.
    :raises ValueError: the variable that is used is not an absolute path; the message names the variable.
    """
    for name, below in (("AIOVERBS_MONITOR_DIRECTORY", ""), ("XDG_RUNTIME_DIR", "aioverbs-monitor")):
        text = environment.get(name)
        if text:
            if not text.startswith("/"):
                raise ValueError(f"{name}: a path that begins with / is needed, not {text!r}")
            return Path(text, below)
    return Path(f"/tmp/aioverbs-monitor-{user}")


def peer_user(connected: socket.socket) -> int:
    """Return the user ID of the process at the other end of a Unix socket, using SO_PEERCRED.

    :param connected: connected Unix socket.
    :raises OSError: the socket is closed.
    """
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user


class MonitorDirectory:
    """Open directory of the sockets. Only its user can list it or create files in it.

    :param path: path of the directory; None for the result of `default_path`.
    :param make: True to create the directory if it does not exist.
    :raises FileNotFoundError: the directory does not exist.
    :raises PermissionError: other users can access the directory, or own it, or it is not a directory. The message
        says what to do.
    :raises OSError: the directory cannot be created or opened.
    :raises ValueError: `path` is None, and the variable that `default_path` uses is not an absolute path.
    """

    def __init__(self, path: Path | None = None, *, make: bool = False) -> None:
        self.path = path if path is not None else default_path(os.environ, os.geteuid())
        if make:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(0o700)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (ENOTDIR, ELOOP):
                raise
            raise self._permission_error("is not a directory: remove it, or name another") from None
        found = os.fstat(self._fd)
        try:
            if found.st_uid != os.geteuid():
                raise self._permission_error("belongs to another user: name one of your own")
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise self._permission_error("is open to others: chmod 0700 it, or name another")
        except BaseException:
            os.close(self._fd)
            raise

    def _permission_error(self, what: str) -> PermissionError:
        """Return the `PermissionError` for a socket directory that must not be used.

        :param what: text that says what is wrong with the directory and what to do about that.
        """
        return PermissionError(EACCES, f"{what} with AIOVERBS_MONITOR_DIRECTORY", str(self.path))

    def close(self) -> None:
        """Close the directory's descriptor. Call this only once."""
        os.close(self._fd)

    def __enter__(self) -> "MonitorDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _at(self, name: str) -> str:
        """Return a path of the file ``name`` in the directory that is short enough for the address of a Unix socket."""
        # Short enough for the address of a Unix socket (108 bytes), wherever the directory is.
        return f"/proc/self/fd/{self._fd}/{name}"

    # ---- For the monitored process

    def listen(self, backlog: int) -> tuple[socket.socket, str]:
        """Create a listening Unix socket of this process in the directory.

        The caller must close the socket and remove its file with `remove`.

        :param backlog: maximum number of connections that wait to be accepted.
        :returns: a tuple of the socket and the name of its file in the directory.
        :raises OSError: the socket cannot be created.
        """
        name = f"{os.getpid()}-{secrets.token_hex(4)}.sock"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # Listen before the file gets its name: a socket that does not listen would be mistaken for one of a process
            # that has ended.
            hidden = f".{name}"
            os.fchmod(listening.fileno(), 0o600)  # mode of the file that bind() creates
            listening.bind(self._at(hidden))
            try:
                listening.listen(backlog)
                os.rename(hidden, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except BaseException:
                self.remove(hidden)
                raise
        except BaseException:
            listening.close()
            raise
        return listening, name

    def remove(self, name: str) -> None:
        """Remove the socket file ``name`` from the directory; do nothing if it does not exist.

        :raises OSError: the file cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def sweep(self) -> None:
        """Remove the socket files of processes that have ended.

        :raises OSError: the directory cannot be listed.
        """
        for pid, name in self.names():
            if not Path(f"/proc/{pid}").exists():  # may still run in another PID namespace, so connect
                with contextlib.suppress(OSError):
                    alive = self.connect(name, _SWEEP_TIMEOUT_S)
                    if alive is not None:
                        alive.close()

    # ---- For the monitor

    def names(self) -> Iterator[tuple[int, str]]:
        """Yield a tuple of the process ID and the file name for each socket file.

        Files that were never completed are removed if they are older than 60 s.

        :raises OSError: the directory cannot be listed, for example because it has been removed.
        """
        for name in sorted(os.listdir(self._fd)):
            found = _NAME.fullmatch(name.removeprefix("."))
            if found is None:
                continue
            if not name.startswith("."):
                yield int(found[1]), name
            elif self._age(name) > _ABANDONED_S:
                self.remove(name)

    def _age(self, name: str) -> float:
        """Return the seconds since the file ``name`` in the directory was last changed; 0.0 if it does not exist."""
        try:
            return time.time() - os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return 0.0

    def connect(self, name: str, timeout_s: float) -> socket.socket | None:
        """Connect to a monitored process. If the process has ended, remove its socket file.

        :param name: name of the socket file.
        :param timeout_s: timeout in seconds for connecting and for later operations on the socket.
        :returns: the connected socket, which the caller must close; None if the process has ended.
        :raises PermissionError: the process belongs to another user.
        :raises TimeoutError: the process did not answer in time.
        :raises OSError: the connection failed for another reason.
        """
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(timeout_s)
            connected.connect(self._at(name))
            user = peer_user(connected)
            if user != os.geteuid():
                raise PermissionError(EACCES, f"a process of user {user} listens there", str(self.path / name))
        except BaseException as error:
            connected.close()
            if not isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                raise
            self.remove(name)
            return None
        return connected
