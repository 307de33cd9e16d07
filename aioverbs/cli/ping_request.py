"""PURE: what the client of `aioverbs ping` asks its server for, and what that answers: a message each."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, cast, get_args

__all__ = ["LARGEST", "SMALLEST", "PingRefusedError", "PingRequest", "Verb", "accepted", "check_answer", "refused"]

Verb = Literal["send", "read", "write"]
SMALLEST = 8  # bytes: the number of a message
LARGEST = 64 << 20
_VERSION = 1
_LONGEST = 1_000  # bytes of what is said, of either end


class PingRefusedError(ConnectionRefusedError):
    """The other end is no server of pings, or does not do what was asked."""


@dataclass(frozen=True)
class PingRequest:
    """What goes to and fro.

    :param verb: by what: messages there and back, or reading or writing the server's memory.
    :param size: of how many bytes.
    """

    verb: Verb
    size: int

    def __post_init__(self) -> None:
        if self.verb not in get_args(Verb):
            raise ValueError(f"a ping is by send, read or write, and not by {self.verb!r}")
        if not SMALLEST <= self.size <= LARGEST:
            raise ValueError(f"a ping has from {SMALLEST} to {LARGEST:,} bytes, not {self.size:,}")

    def pack(self) -> bytes:
        """As a message."""
        return json.dumps({"aioverbs-ping": _VERSION, **asdict(self)}).encode()

    @classmethod
    def parse(cls, message: bytes) -> "PingRequest":
        """Of a message.

        :raises ValueError: it is none, or asks for what there is not.
        """
        told = _object(message)
        version = told.pop("aioverbs-ping", None)
        if version != _VERSION:
            raise ValueError("this is a server of `aioverbs ping`, and what came is no request of its version")
        if set(told) != {"verb", "size"}:
            raise ValueError(f"a request has a verb and a size, and this one {', '.join(map(repr, told)) or 'nothing'}")
        size = told["size"]
        if not isinstance(size, int) or isinstance(size, bool):
            raise ValueError(f"a number of bytes is an integer, and {size!r} is none")
        return cls(cast(Verb, told["verb"]), size)  # which is looked at there


def accepted() -> bytes:
    """The answer to a request that is done."""
    return json.dumps({"aioverbs-ping": _VERSION}).encode()


def refused(why: str) -> bytes:
    """The answer to one that is not."""
    return json.dumps({"aioverbs-ping": _VERSION, "refused": why[: _LONGEST // 8]}).encode()


def check_answer(message: bytes) -> None:
    """See that the answer to a request is that it is done.

    :raises PingRefusedError: it is something else.
    """
    try:
        told = _object(message)
    except ValueError:
        told = {}
    if told.get("aioverbs-ping") != _VERSION:
        raise PingRefusedError("who listens there is no `aioverbs ping serve` of this version")
    if "refused" in told:
        raise PingRefusedError(f"the server refuses: {told['refused']}")


def _object(message: bytes) -> dict[str, object]:
    if len(message) > _LONGEST:
        raise ValueError(f"{len(message):,} bytes are no request")
    try:
        told = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise ValueError("what came is no JSON") from error
    if not isinstance(told, dict):
        raise ValueError("what came is no object of JSON")
    return told
