"""PURE: what two ends of a connection tell each other before it is one, and its validation. No input or output.

    initiator                      listener
    HELLO  versions, nonce    ->
                              <-   HELLO  the version, nonce
    OFFER  its queue pair, …  ->
                              <-   OFFER  its queue pair, …
    READY                     ->

Where both have a secret each offer ends with a proof that its sender knows it: a keyed hash over all that was said
until then, by both. The listener makes nothing for a peer before it has seen that one's. Instead of its next message
each may send a REFUSAL with its reason.
"""

import enum
import struct
from dataclasses import dataclass

from aioverbs._connection.credits import MAX_CREDITS
from aioverbs._proofs import NONCE_BYTES, PROOF_BYTES, Proofs
from aioverbs._verbs.endpoint import Endpoint
from aioverbs.errors import HandshakeError
from aioverbs.types import AtomicCap, QpType

__all__ = [
    "HEADER_BYTES",
    "MAX_MESSAGE_BYTES",
    "VERSION",
    "Capabilities",
    "Handshake",
    "Hello",
    "MessageType",
    "Offer",
    "Reason",
    "Reject",
    "body_size",
    "encode_reject",
    "parse",
]

VERSION = 1
_OLDEST = 1
_MAGIC = b"aiov"
_HEADER = struct.Struct("!4sBBH")  # magic, version, kind, bytes that follow
HEADER_BYTES = _HEADER.size
MAX_MESSAGE_BYTES = 512
"""No message is longer, head included."""

_HELLO = struct.Struct(f"!BB?{NONCE_BYTES}s")  # oldest and newest version, whether a secret is wanted, nonce
_ENDPOINT_BYTES = 35
_OFFER = struct.Struct(f"!{_ENDPOINT_BYTES}sIHQHBB")
_MAX_NAME_BYTES = 64
_MAX_TEXT_BYTES = 200
_ROLES = (b"listener", b"initiator")
_MIN_BUFFER, _MAX_BUFFER = 512, 1 << 30


class MessageType(enum.IntEnum):
    """The kinds of messages."""

    HELLO = 1
    OFFER = 2
    READY = 3
    REJECT = 4


class Reason(enum.IntEnum):
    """Why one end refuses the other."""

    VERSION = 1
    """They have no version in common."""

    SECRET = 2
    """One of them has a secret and the other has none, or another one."""

    BUSY = 3
    """It has as many connections as it may."""

    PROTOCOL = 4
    """What was said is none of these messages, or not the one that is due, or cannot be."""

    DEVICE = 5
    """Their devices do not fit together, or this one's has not what it takes."""

    CLOSING = 6
    """It takes no more connections."""

    TEMPORARY = 7
    """Its device cannot be connected now, for a cause that may pass, as a link that is down."""


class Capabilities(enum.IntFlag):
    """What an end can do for the other. Bits that are not known here are left out."""

    ATOMICS = 1
    """Its memory takes atomics."""

    WINDOWS = 2
    """What it grants is revoked by the device, by memory windows of type 2."""


NO_CAPABILITIES = Capabilities(0)


def _protocol_error(text: str) -> HandshakeError:
    return HandshakeError(Reason.PROTOCOL, text)


def _encode(kind: MessageType, body: bytes, version: int = VERSION) -> bytes:
    return _HEADER.pack(_MAGIC, version, kind, len(body)) + body


@dataclass(frozen=True)
class Hello:
    """The first message of each end.

    :param oldest: the oldest version that it speaks; of the listener's: the one that both are to.
    :param newest: the newest.
    :param secret: whether it wants proofs.
    :param nonce: 16 bytes that were never used before.
    """

    oldest: int
    newest: int
    secret: bool
    nonce: bytes

    def pack(self) -> bytes:
        """Its bytes. They are of the same form in every version."""
        return _encode(MessageType.HELLO, _HELLO.pack(self.oldest, self.newest, self.secret, self.nonce), self.oldest)

    @classmethod
    def parse_body(cls, body: bytes) -> "Hello":
        """From what follows the head. A later version's may be longer."""
        if len(body) < _HELLO.size:
            raise _protocol_error(f"a hello of {len(body)} bytes is too short")
        oldest, newest, secret, nonce = _HELLO.unpack_from(body)
        if not 1 <= oldest <= newest:
            raise _protocol_error(f"versions from {oldest} to {newest} cannot be")
        return cls(oldest, newest, secret, nonce)


@dataclass(frozen=True)
class Offer:
    """What an end brings into the connection.

    :param endpoint: of its queue pair, of type RC.
    :param buffer_size: bytes of each of its receives.
    :param depth: how many of these it keeps posted: the peer's credits.
    :param max_message: the longest message that it takes, in bytes.
    :param capabilities: what it can do.
    :param atomics: how far its atomics are atomic.
    :param device: the name of its device, for people.
    """

    endpoint: Endpoint
    buffer_size: int
    depth: int
    max_message: int
    capabilities: Capabilities = NO_CAPABILITIES
    atomics: AtomicCap = AtomicCap.NONE
    device: str = ""

    def __post_init__(self) -> None:
        if self.endpoint.qp_type is not QpType.RC:
            raise ValueError(f"a connection's queue pair is of type RC, not {self.endpoint.qp_type.name}")
        if not _MIN_BUFFER <= self.buffer_size <= _MAX_BUFFER:
            raise ValueError(f"buffers have from {_MIN_BUFFER} to {_MAX_BUFFER:,} bytes, not {self.buffer_size:,}")
        if not 4 <= self.depth <= MAX_CREDITS:
            raise ValueError(f"receives are from 4 to {MAX_CREDITS}, not {self.depth}")
        if not 1 <= self.max_message < 1 << 64:
            raise ValueError(f"the longest message has from 1 to 2**64 - 1 bytes, not {self.max_message}")

    def pack(self) -> bytes:
        """Its bytes, without head and proof."""
        name = self.device.encode()[:_MAX_NAME_BYTES]
        return (
            _OFFER.pack(
                bytes(self.endpoint),
                self.buffer_size,
                self.depth,
                self.max_message,
                self.capabilities,
                self.atomics,
                len(name),
            )
            + name
        )

    @classmethod
    def parse_body(cls, body: bytes, proof_bytes: int) -> tuple["Offer", bytes]:
        """From what follows the head: the offer, and its proof."""
        if len(body) < _OFFER.size:
            raise _protocol_error(f"an offer of {len(body)} bytes is too short")
        endpoint, size, depth, max_message, capabilities, atomics, length = _OFFER.unpack_from(body)
        name, proof = body[_OFFER.size : _OFFER.size + length], body[_OFFER.size + length :]
        if len(name) != length or length > _MAX_NAME_BYTES or len(proof) != proof_bytes:
            raise _protocol_error(f"an offer of {len(body)} bytes has not the length that it tells")
        known = Capabilities(capabilities & (Capabilities.ATOMICS | Capabilities.WINDOWS))
        try:
            offer = cls(
                Endpoint.from_bytes(endpoint),
                size,
                depth,
                max_message,
                known,
                AtomicCap(atomics),
                _printable(name),
            )
        except ValueError as error:
            raise _protocol_error(f"an offer that cannot be: {error}") from None
        return offer, proof


@dataclass(frozen=True)
class Reject:
    """The last message of an end that does not want the other.

    :param reason: why; a number that is not known here stays one.
    :param text: for people.
    """

    reason: int
    text: str = ""

    def pack(self) -> bytes:
        """Its bytes. They are of the same form in every version."""
        return _encode(MessageType.REJECT, struct.pack("!H", self.reason) + self.text.encode()[:_MAX_TEXT_BYTES])

    @classmethod
    def parse_body(cls, body: bytes) -> "Reject":
        """From what follows the head."""
        if not 2 <= len(body) <= 2 + _MAX_TEXT_BYTES:
            raise _protocol_error(f"a refusal of {len(body)} bytes cannot be")
        return cls(int.from_bytes(body[:2]), _printable(body[2:]))

    def to_error(self) -> HandshakeError:
        """What is raised at the end that was refused."""
        return HandshakeError(self.reason, self.text, by_peer=True)


def _printable(data: bytes) -> str:
    """Text of the other end's for people: neither lines of a log nor a terminal are its to write."""
    return "".join(each if each.isprintable() else "?" for each in data.decode(errors="replace"))


def body_size(header: bytes) -> int:
    """How many bytes follow a head.

    :raises HandshakeError: it is none, or its message would be too long.
    """
    if len(header) != HEADER_BYTES:
        raise _protocol_error(f"a head has {HEADER_BYTES} bytes, not {len(header)}")
    magic, _, _, size = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise _protocol_error("this is no end of a connection of aioverbs")
    if HEADER_BYTES + size > MAX_MESSAGE_BYTES:
        raise _protocol_error(f"a message of {HEADER_BYTES + size} bytes is too long")
    assert isinstance(size, int)
    return size


def parse(data: bytes) -> tuple[MessageType, int, bytes]:
    """The kind, the version and the body of a message.

    :raises HandshakeError: it is none.
    """
    size = body_size(data[:HEADER_BYTES])
    if len(data) != HEADER_BYTES + size:
        raise _protocol_error(f"a message of {len(data)} bytes is to have {HEADER_BYTES + size}")
    _, version, kind, _ = _HEADER.unpack_from(data)
    try:
        return MessageType(kind), version, data[HEADER_BYTES:]
    except ValueError:
        raise _protocol_error(f"there is no message of kind {kind}") from None


class Handshake:
    """One end's part: the messages in their order, and what is to be found in those of the other.

    What cannot be raises `HandshakeError`; then `error_of_reject` that error is to be sent, unless it was the peer's.

    :param initiator: whether it is the end that asked for the connection.
    :param nonce: 16 random bytes.
    :param secret: that both are to know; None: none.
    :param versions: the oldest and the newest that it speaks.
    """

    def __init__(
        self, initiator: bool, nonce: bytes, secret: bytes | None = None, versions: tuple[int, int] = (_OLDEST, VERSION)
    ) -> None:
        if secret is not None and not secret:
            raise ValueError("a secret has one byte at least; None is for no secret")
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        self._initiator = initiator
        self._nonce = nonce
        self._proofs = Proofs(b"aioverbs connection", secret) if secret is not None else None
        self._versions = versions
        self._transcript = b""  # by both, in its order
        self.version: int | None = None

    # ---- What this end says

    def hello(self) -> bytes:
        """The hello."""
        oldest, newest = self._versions
        if not self._initiator:
            assert self.version is not None
            oldest = newest = self.version
        return self._record(Hello(oldest, newest, self._proofs is not None, self._nonce).pack())

    def offer(self, offer: Offer) -> bytes:
        """The offer, with its proof."""
        assert self.version is not None
        body = offer.pack()
        proof = self._proofs.make(_ROLES[self._initiator], self._transcript, body) if self._proofs is not None else b""
        return self._record(_encode(MessageType.OFFER, body + proof, self.version))

    def ready(self) -> bytes:
        """The initiator's last word."""
        assert self.version is not None
        return _encode(MessageType.READY, b"", self.version)

    # ---- What it hears

    def receive_hello(self, data: bytes) -> None:
        """The peer's hello."""
        _, body = self._expect(data, MessageType.HELLO)
        hello = Hello.parse_body(body)
        oldest, newest = self._versions
        common = min(hello.newest, newest)
        if common < max(hello.oldest, oldest) or (self._initiator and hello.oldest != hello.newest):
            raise HandshakeError(
                Reason.VERSION,
                f"the peer speaks versions {hello.oldest} to {hello.newest}, this end {oldest} to {newest}",
            )
        if hello.secret != (self._proofs is not None):
            one, other = ("the peer", "this end") if hello.secret else ("this end", "the peer")
            raise HandshakeError(Reason.SECRET, f"{one} wants a secret and {other} has none")
        if hello.nonce == self._nonce:
            raise _protocol_error("the peer repeats the nonce of this end")
        self.version = common
        self._transcript += data

    def receive_offer(self, data: bytes) -> Offer:
        """The peer's offer, which proves that it knows the secret."""
        version, body = self._expect(data, MessageType.OFFER)
        offer, proof = Offer.parse_body(body, PROOF_BYTES if self._proofs is not None else 0)
        if version != self.version:
            raise _protocol_error(f"the peer speaks version {version} after both agreed on {self.version}")
        signed, role = body[: len(body) - len(proof)], _ROLES[not self._initiator]
        if self._proofs is not None and not self._proofs.check(proof, role, self._transcript, signed):
            raise HandshakeError(Reason.SECRET, "the peer has another secret")
        self._transcript += data
        return offer

    def receive_ready(self, data: bytes) -> None:
        """The initiator's last word."""
        _, body = self._expect(data, MessageType.READY)
        if body:
            raise _protocol_error(f"{len(body)} bytes follow where nothing is to")

    # ---- How

    def _record(self, data: bytes) -> bytes:
        self._transcript += data
        return data

    def _expect(self, data: bytes, expected: MessageType) -> tuple[int, bytes]:
        kind, version, body = parse(data)
        if kind is MessageType.REJECT:
            raise Reject.parse_body(body).to_error()
        if kind is not expected:
            raise _protocol_error(f"the peer says {kind.name} where {expected.name} is due")
        return version, body


def encode_reject(error: HandshakeError) -> bytes:
    """What the peer is told by an end that gives up because of this.

    Of a secret it is not told more than that.
    """
    text = "the secrets differ" if error.reason == Reason.SECRET and "another" in error.text else error.text
    return Reject(error.reason, text).pack()
