"""PURE: what the environment says of the software device and of its peers in other processes."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from aioverbs._providers.software_names import SoftAddress

__all__ = ["SoftSettings"]

T = TypeVar("T")
U = TypeVar("U")

SPIN_US = 50
MAX_DIRECTORY = 74  # bytes: a slash and the 32 digits of a GID follow, and sun_path of a Unix socket has 108
MAX_USERS = 64
MAX_SECRET = 256
MAX_SPIN_US = 1_000_000
_NOBODY = 0xFFFFFFFF  # (uid_t)-1


@dataclass(frozen=True, slots=True)
class SoftSettings:
    """How software devices of this process are found, and by whom.

    :param directory: AIOVERBS_SOFT_DIRECTORY, where devices of this host find each other; without it a private one of
        this user, in XDG_RUNTIME_DIR or else in /tmp. With `users`, it needs the sticky bit where several can write.
        Processes that have it in common have the XRC domains of inodes in common.
    :param address: AIOVERBS_SOFT_ADDRESS, of the device that is named by ``"soft0"`` alone; None: it has none.
    :param users: AIOVERBS_SOFT_USERS, the numbers of the users whose processes may be peers, beside this one's.
    :param secret: AIOVERBS_SOFT_SECRET, what a peer has to know; empty: nothing. It is not shown. A random one of 32
        bytes is not guessed, a word is: who is connected to can try secrets on what he is told.
    :param direct: AIOVERBS_SOFT_DIRECT, whether data may go from one process's memory to another's.
    :param spin_us: AIOVERBS_SOFT_SPIN, how many microseconds the thread that serves peers looks for what comes next
        before it sleeps.
    """

    directory: bytes
    address: SoftAddress | None = None
    users: tuple[int, ...] = ()
    secret: bytes = field(default=b"", repr=False)
    direct: bool = True
    spin_us: int = SPIN_US

    @classmethod
    def read(cls, environment: Mapping[str, str], user: int) -> "SoftSettings":
        """From environment variables; one that is empty is as if it was not there.

        :param user: the number of this process's effective user.
        :raises ValueError: one cannot be understood; the error says which, and what to write.
        """
        private = _parse(environment, "XDG_RUNTIME_DIR", _runtime_directory, b"/tmp/aioverbs-%d" % user)
        settings = cls(
            _parse(environment, "AIOVERBS_SOFT_DIRECTORY", _directory, private),
            _parse(environment, "AIOVERBS_SOFT_ADDRESS", SoftAddress.parse, None),
            _parse(environment, "AIOVERBS_SOFT_USERS", _users, ()),
            _parse(environment, "AIOVERBS_SOFT_SECRET", _secret, b""),
            _parse(environment, "AIOVERBS_SOFT_DIRECT", _direct, True),
            _parse(environment, "AIOVERBS_SOFT_SPIN", _spin, SPIN_US),
        )
        if settings.users and settings.directory == private:
            raise ValueError(
                "AIOVERBS_SOFT_USERS: the private directory is no other user's: name one that all of them can write in"
                " AIOVERBS_SOFT_DIRECTORY"
            )
        return settings


def _parse(environment: Mapping[str, str], name: str, parse: Callable[[str], T], default: U) -> T | U:
    text = environment.get(name)
    try:
        return parse(text) if text else default
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _directory(text: str) -> bytes:
    path = os.fsencode(text)
    if not path.startswith(b"/"):
        raise ValueError(f"a path that begins with / is needed, not {text!r}")
    if len(path) > MAX_DIRECTORY:
        raise ValueError(f"a path has {MAX_DIRECTORY} bytes at most, since sockets are named in it, not {len(path)}")
    return path


def _runtime_directory(text: str) -> bytes:
    try:
        return _directory(f"{text.rstrip('/')}/aioverbs")
    except ValueError as error:
        raise ValueError(f"{error}: or name one by AIOVERBS_SOFT_DIRECTORY") from None


def _users(text: str) -> tuple[int, ...]:
    users = tuple(_number(each, _NOBODY - 1, "the number of a user") for each in text.split(","))
    if len(users) > MAX_USERS:
        raise ValueError(f"{MAX_USERS} users at most, not {len(users)}")
    return users


def _number(text: str, most: int, what: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 10 or int(digits) > most:
        raise ValueError(f"{text!r} is not {what}, from 0 to {most}")
    return int(digits)


def _secret(text: str) -> bytes:
    secret = os.fsencode(text)
    if len(secret) > MAX_SECRET:  # and no word of what it is
        raise ValueError(f"a secret has {MAX_SECRET} bytes at most, not {len(secret)}")
    return secret


def _direct(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"write 1 for yes or 0 for no, not {text!r}")
    return text == "1"


def _spin(text: str) -> int:
    return _number(text, MAX_SPIN_US, "a number of microseconds")
