"""PURE: settings of the software device and of its peers in other processes, read from environment variables."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from aioverbs._providers.software_names import SoftAddress, SoftHost, parse_address

__all__ = ["SoftSettings"]

T = TypeVar("T")
U = TypeVar("U")

SPIN_US = 50
MAX_DIRECTORY = 74  # bytes: a slash and a GID of 32 digits follow; sun_path has 108
MAX_USERS = 64
MAX_SECRET = 256
MAX_SPIN_US = 1_000_000
_INVALID_UID = 0xFFFFFFFF  # (uid_t)-1


@dataclass(frozen=True, slots=True)
class SoftSettings:
    """Settings of the software devices of this process, from `SoftSettings.read`.

    :param directory: AIOVERBS_SOFT_DIRECTORY, directory in which devices of this host find each other. By default a
        private directory of the user, in XDG_RUNTIME_DIR or else in /tmp. With `users`, a directory that several users
        can write to needs the sticky bit. XRC domains of inodes are shared by the processes with the same directory.
    :param address: AIOVERBS_SOFT_ADDRESS, address of the device with the name ``"soft0"``, or a host name that stands
        for it; None if it has no address.
    :param users: AIOVERBS_SOFT_USERS, IDs of the users whose processes are accepted as peers, in addition to this user.
    :param secret: AIOVERBS_SOFT_SECRET, secret that a peer must know; empty if there is none. Not part of the repr. Use
        32 random bytes: a peer that accepts a connection can try secrets against the messages that it receives, and
        would find a word.
    :param direct: AIOVERBS_SOFT_DIRECT, whether data may be copied directly between the memory of two processes.
    :param rings: AIOVERBS_SOFT_RINGS, whether requests to other processes of this user go through shared memory.
    :param spin_us: AIOVERBS_SOFT_SPIN, time that the thread serving peers polls before it sleeps, in microseconds.
    """

    directory: bytes
    address: SoftAddress | SoftHost | None = None
    users: tuple[int, ...] = ()
    secret: bytes = field(default=b"", repr=False)
    direct: bool = True
    rings: bool = True
    spin_us: int = SPIN_US

    @classmethod
    def read(cls, environment: Mapping[str, str], user: int) -> "SoftSettings":
        """Read the settings from environment variables. An empty variable counts as not set.

        :param environment: the environment variables, by name.
        :param user: ID of the effective user of this process.
        :returns: the settings, with defaults for variables that are not set.
        :raises ValueError: a variable is invalid, or `users` are given without a directory that they can use; the
            message says which variable is wrong and what to write.
        """
        private = _parse(environment, "XDG_RUNTIME_DIR", _runtime_directory, b"/tmp/aioverbs-%d" % user)
        settings = cls(
            _parse(environment, "AIOVERBS_SOFT_DIRECTORY", _directory, private),
            _parse(environment, "AIOVERBS_SOFT_ADDRESS", parse_address, None),
            _parse(environment, "AIOVERBS_SOFT_USERS", _users, ()),
            _parse(environment, "AIOVERBS_SOFT_SECRET", _secret, b""),
            _parse(environment, "AIOVERBS_SOFT_DIRECT", _yes_or_no, True),
            _parse(environment, "AIOVERBS_SOFT_RINGS", _yes_or_no, True),
            _parse(environment, "AIOVERBS_SOFT_SPIN", _spin, SPIN_US),
        )
        if settings.users and settings.directory == private:
            raise ValueError(
                "AIOVERBS_SOFT_USERS: other users cannot use the private directory: set AIOVERBS_SOFT_DIRECTORY to one"
                " that all of them can write to"
            )
        return settings


def _parse(environment: Mapping[str, str], name: str, parse: Callable[[str], T], default: U) -> T | U:
    """Return the value of the environment variable `name`, converted by the function `parse`; `default` if the variable
    is not set or is empty.

    :raises ValueError: `parse` raised ValueError. The message of the new exception begins with the name of the
        variable.
    """
    text = environment.get(name)
    try:
        return parse(text) if text else default
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _directory(text: str) -> bytes:
    """Check the path of a directory and return it as bytes. The directory need not exist.

    :raises ValueError: the path is relative, or is longer than 74 bytes.
    """
    path = os.fsencode(text)
    if not path.startswith(b"/"):
        raise ValueError(f"a path must begin with /, got {text!r}")
    if len(path) > MAX_DIRECTORY:
        raise ValueError(f"a path must have at most {MAX_DIRECTORY} bytes, so that sockets fit in it, got {len(path)}")
    return path


def _runtime_directory(text: str) -> bytes:
    """Return the path of the subdirectory ``aioverbs`` of the directory `text`, as bytes. Neither need exist.

    :raises ValueError: the path is relative, or, with the subdirectory, is longer than 74 bytes.
    """
    try:
        return _directory(f"{text.rstrip('/')}/aioverbs")
    except ValueError as error:
        raise ValueError(f"{error}; or set AIOVERBS_SOFT_DIRECTORY") from None


def _users(text: str) -> tuple[int, ...]:
    """Parse user IDs separated by commas, such as ``1000,1001``, and return them.

    :raises ValueError: one of them is not a user ID, or there are more than 64.
    """
    users = tuple(_number(each, _INVALID_UID - 1, "a user ID") for each in text.split(","))
    if len(users) > MAX_USERS:
        raise ValueError(f"at most {MAX_USERS} users are allowed, got {len(users)}")
    return users


def _number(text: str, most: int, what: str) -> int:
    """Parse a decimal number and return it. Spaces around the number are ignored.

    :param text: text of the number.
    :param most: largest allowed number.
    :param what: what the number means, such as "a user ID", for the error message.
    :raises ValueError: `text` is not a number from 0 to `most`.
    """
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 10 or int(digits) > most:
        raise ValueError(f"{what} must be 0 to {most}, got {text!r}")
    return int(digits)


def _secret(text: str) -> bytes:
    """Return the secret `text` as bytes.

    :raises ValueError: the secret is longer than 256 bytes; the message does not contain the secret.
    """
    secret = os.fsencode(text)
    if len(secret) > MAX_SECRET:  # the message must not reveal the secret
        raise ValueError(f"a secret must have at most {MAX_SECRET} bytes, got {len(secret)}")
    return secret


def _yes_or_no(text: str) -> bool:
    """Return True if `text` is ``1`` and False if it is ``0``.

    :raises ValueError: `text` is neither ``1`` nor ``0``.
    """
    if text not in ("0", "1"):
        raise ValueError(f"write 1 for yes or 0 for no, got {text!r}")
    return text == "1"


def _spin(text: str) -> int:
    """Parse a polling time in microseconds and return it.

    :raises ValueError: `text` is not a number from 0 to 1,000,000.
    """
    return _number(text, MAX_SPIN_US, "a time in microseconds")
