"""PURE: the message that requests pings from the server of `aioverbs ping`, and its answer."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, cast, get_args

__all__ = [
    "LARGEST",
    "SMALLEST",
    "PingRefusedError",
    "PingRequest",
    "Verb",
    "check_answer",
    "pack_accepted",
    "pack_refused",
]

Verb = Literal["send", "read", "write"]
SMALLEST = 8  # bytes; each message contains its number in 8 bytes
LARGEST = 64 << 20
_VERSION = 1
_MAX_MESSAGE = 1_000  # bytes of a request or an answer


class PingRefusedError(ConnectionRefusedError):
    """The peer is not a ping server, or refused the request."""


@dataclass(frozen=True)
class PingRequest:
    """Verb and size of the pings that a client requests.

    :param verb: ``"send"`` for messages that the server sends back; ``"read"`` or ``"write"`` to access its memory.
    :param size: size of each ping, from 8 bytes to 64 MiB.
    :raises ValueError: an argument is invalid.
    """

    verb: Verb
    size: int

    def __post_init__(self) -> None:
        if self.verb not in get_args(Verb):
            raise ValueError(f"`verb` must be send, read or write, got {self.verb!r}")
        if not SMALLEST <= self.size <= LARGEST:
            raise ValueError(f"`size` must be from {SMALLEST} to {LARGEST:,} bytes, got {self.size:,}")

    def pack(self) -> bytes:
        """Return the request encoded as bytes: the first message that the client of `aioverbs ping` sends."""
        return json.dumps({"aioverbs-ping": _VERSION, **asdict(self)}).encode()

    @classmethod
    def parse(cls, message: bytes) -> "PingRequest":
        """Decode the first message that a client sent: the bytes that `pack` returned there.

        :param message: the message.
        :returns: the request that the message contains.
        :raises ValueError: the message is not a request of this version, or a field is invalid.
        """
        fields = _parse_object(message)
        version = fields.pop("aioverbs-ping", None)
        if version != _VERSION:
            raise ValueError(f"expected a request of `aioverbs ping` version {_VERSION}")
        if set(fields) != {"verb", "size"}:
            found = ", ".join(map(repr, fields)) or "no fields"
            raise ValueError(f"a request has the fields 'verb' and 'size', got {found}")
        size = fields["size"]
        if not isinstance(size, int) or isinstance(size, bool):
            raise ValueError(f"`size` must be an integer, got {size!r}")
        return cls(cast(Verb, fields["verb"]), size)  # __post_init__ checks the verb


def pack_accepted() -> bytes:
    """Return, as bytes, the message with which the server of `aioverbs ping` accepts a `PingRequest`.

    The client passes it to `check_answer`.
    """
    return json.dumps({"aioverbs-ping": _VERSION}).encode()


def pack_refused(reason: str) -> bytes:
    """Return, as bytes, the message with which the server of `aioverbs ping` refuses a `PingRequest`.

    The client passes it to `check_answer`, which then raises `PingRefusedError`.

    :param reason: text for the message of that exception, of which at most the first 125 characters are sent.
    """
    return json.dumps({"aioverbs-ping": _VERSION, "refused": reason[: _MAX_MESSAGE // 8]}).encode()


def check_answer(message: bytes) -> None:
    """Check that the server's answer, from `pack_accepted` or `pack_refused`, accepts the request.

    :param message: the answer.
    :raises PingRefusedError: the server refused the request, or the message is not an answer of this version.
    """
    try:
        fields = _parse_object(message)
    except ValueError:
        fields = {}
    if fields.get("aioverbs-ping") != _VERSION:
        raise PingRefusedError("the server is not `aioverbs ping serve` of this version")
    if "refused" in fields:
        raise PingRefusedError(f"the server refused the request: {fields['refused']}")


def _parse_object(message: bytes) -> dict[str, object]:
    """Decode a request or an answer, which is a JSON object, and return its fields as a dict.

    :raises ValueError: the message has more than 1,000 bytes, or is not a JSON object.
    """
    if len(message) > _MAX_MESSAGE:
        raise ValueError(f"a request has at most {_MAX_MESSAGE:,} bytes, got {len(message):,}")
    try:
        fields = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise ValueError("expected JSON") from error
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, got {type(fields).__name__}")
    return fields
