"""Where the processes that can be watched are found: a private directory with a Unix socket of each."""

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
_SWEEP_TIMEOUT_S = 0.1  # the longest that one is asked whether it is alive
_ABANDONED_S = 60.0  # the age of what somebody began to make and did not finish
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


def default_path(environment: Mapping[str, str], user: int) -> Path:
    """AIOVERBS_MONITOR_DIRECTORY, else one in XDG_RUNTIME_DIR, else one in /tmp.

    :param user: the number of this process's effective user.
    :raises ValueError: a variable has no absolute path; the error says which.
    """
    for name, below in (("AIOVERBS_MONITOR_DIRECTORY", ""), ("XDG_RUNTIME_DIR", "aioverbs-monitor")):
        text = environment.get(name)
        if text:
            if not text.startswith("/"):
                raise ValueError(f"{name}: a path that begins with / is needed, not {text!r}")
            return Path(text, below)
    return Path(f"/tmp/aioverbs-monitor-{user}")


def peer_user(connected: socket.socket) -> int:
    """The number of the user whose process is at the other end: SO_PEERCRED."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user


class MonitorDirectory:
    """The directory, open. Nobody but this user can look into it, nor put anything there.

    :param path: where it is; None: see `default_path`.
    :param make: make it, where it is not there.
    :raises FileNotFoundError: it is not there.
    :raises PermissionError: others can look into it, or it is another user's, or no directory; the error says what to
        do.
    :raises ValueError: see `default_path`.
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
            raise self._permission_error("is no directory: remove it, or name another") from None
        found = os.fstat(self._fd)
        try:
            if found.st_uid != os.geteuid():
                raise self._permission_error("is another user's: name one of your own")
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise self._permission_error("is open to others: chmod 0700 it, or name another")
        except BaseException:
            os.close(self._fd)
            raise

    def _permission_error(self, what: str) -> PermissionError:
        return PermissionError(EACCES, f"{what} by AIOVERBS_MONITOR_DIRECTORY", str(self.path))

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)

    def __enter__(self) -> "MonitorDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _at(self, name: str) -> str:
        # As short as the path of a socket has to be, wherever the directory is.
        return f"/proc/self/fd/{self._fd}/{name}"

    # ---- Who is watched

    def listen(self, backlog: int) -> tuple[socket.socket, str]:
        """A socket of this process that listens, and its name there."""
        name = f"{os.getpid()}-{secrets.token_hex(4)}.sock"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # Whoever finds it by its name finds somebody listening: else it would be taken for a dead one's.
            hidden = f".{name}"
            os.fchmod(listening.fileno(), 0o600)  # the mode that its file gets
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
        """Take a socket's name away, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def sweep(self) -> None:
        """Take away what dead processes left."""
        for pid, name in self.names():
            if not Path(f"/proc/{pid}").exists():  # here; a container may have it
                with contextlib.suppress(OSError):
                    alive = self.connect(name, _SWEEP_TIMEOUT_S)
                    if alive is not None:
                        alive.close()

    # ---- Who watches

    def names(self) -> Iterator[tuple[int, str]]:
        """Numbers of processes and the names of their sockets. What was begun and not finished is taken away."""
        for name in sorted(os.listdir(self._fd)):
            found = _NAME.fullmatch(name.removeprefix("."))
            if found is None:
                continue
            if not name.startswith("."):
                yield int(found[1]), name
            elif self._age(name) > _ABANDONED_S:
                self.remove(name)

    def _age(self, name: str) -> float:
        try:
            return time.time() - os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return 0.0

    def connect(self, name: str, timeout_s: float) -> socket.socket | None:
        """Connect to a process that can be watched; None where it is gone, and its socket is taken away then.

        :raises PermissionError: it is not this user's.
        :raises TimeoutError: it does not answer.
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
