"""PURE: the handshake of a connection: encoding, validation and order of its messages. Performs no input or output.

    initiator                      listener
    HELLO  versions, nonce    ->
                              <-   HELLO  the version, nonce
    OFFER  queue pair, sizes  ->
                              <-   OFFER  queue pair, sizes
    READY                     ->

If both ends have a secret, each offer ends with a proof that its sender knows the secret: a keyed hash over all earlier
messages of both ends. The listener creates nothing for a peer before it has checked the peer's proof. Instead of its
next message, an end may send REJECT with a reason.

An initiator without a secret whose HELLO names a single version has nothing to learn from the listener's HELLO. It
sends its OFFER at once, and the listener answers both messages together, which saves a round trip:

    HELLO, OFFER              ->
                              <-   HELLO, OFFER
    READY                     ->
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
_HEADER = struct.Struct("!4sBBH")  # magic, version, kind, length of the body
HEADER_BYTES = _HEADER.size
MAX_MESSAGE_BYTES = 512
"""Size of the longest message in bytes, header included."""

_HELLO = struct.Struct(f"!BB?{NONCE_BYTES}s")  # oldest and newest version, whether a secret is required, nonce
_ENDPOINT_BYTES = 35
_OFFER = struct.Struct(f"!{_ENDPOINT_BYTES}sIHQHBB")
_MAX_NAME_BYTES = 64
_MAX_TEXT_BYTES = 200
_ROLES = (b"listener", b"initiator")
_MIN_BUFFER, _MAX_BUFFER = 512, 1 << 30


class MessageType(enum.IntEnum):
    """Types of handshake messages."""

    HELLO = 1
    OFFER = 2
    READY = 3
    REJECT = 4


class Reason(enum.IntEnum):
    """Reasons to refuse a connection."""

    VERSION = 1
    """The two ends have no version of the protocol in common."""

    SECRET = 2
    """Only one end has a secret, or the secrets differ."""

    BUSY = 3
    """The listener has reached its maximum number of connections."""

    PROTOCOL = 4
    """A message is malformed, is out of order or has impossible values."""

    DEVICE = 5
    """The devices cannot be connected to each other, or one lacks a capability."""

    CLOSING = 6
    """The listener is closing."""

    TEMPORARY = 7
    """The device cannot be connected at the moment, for a reason that may go away, such as a link that is down."""


class Capabilities(enum.IntFlag):
    """Capabilities of one end of a connection. Unknown bits are ignored."""

    ATOMICS = 1
    """The device of this end supports atomics on its memory."""

    WINDOWS = 2
    """Grants of this end are memory windows of type 2, which its device can revoke."""

    ANNOUNCES = 4
    """This end announces long messages, and reads those that the peer announces, if both ends do."""


NO_CAPABILITIES = Capabilities(0)
_KNOWN_CAPABILITIES = sum(Capabilities)


def _protocol_error(text: str) -> HandshakeError:
    """Return a `HandshakeError` with the reason PROTOCOL and the details `text`."""
    return HandshakeError(Reason.PROTOCOL, text)


def _encode(kind: MessageType, body: bytes, version: int = VERSION) -> bytes:
    """Return a handshake message as bytes: a header with the type `kind`, the version and the length, then the body."""
    return _HEADER.pack(_MAGIC, version, kind, len(body)) + body


@dataclass(frozen=True)
class Hello:
    """HELLO, the first message of each end.

    :param oldest: oldest version that the sender supports; in the listener's message, the version to use.
    :param newest: newest version that the sender supports; in the listener's message, the version to use.
    :param secret: whether the sender requires proofs of a secret.
    :param nonce: 16 bytes that were never used before.
    """

    oldest: int
    newest: int
    secret: bool
    nonce: bytes

    def pack(self) -> bytes:
        """Return the HELLO message as bytes, header included. The encoding is the same in every version."""
        return _encode(MessageType.HELLO, _HELLO.pack(self.oldest, self.newest, self.secret, self.nonce), self.oldest)

    @classmethod
    def parse_body(cls, body: bytes) -> "Hello":
        """Decode the body of a HELLO message. Ignore additional bytes, which a later version may have.

        :param body: the message without its header.
        :returns: the message as a new `Hello`.
        :raises HandshakeError: the body is not valid.
        """
        if len(body) < _HELLO.size:
            raise _protocol_error(f"HELLO must have at least {_HELLO.size} bytes, got {len(body)}")
        oldest, newest, secret, nonce = _HELLO.unpack_from(body)
        if not 1 <= oldest <= newest:
            raise _protocol_error(f"HELLO has an invalid range of versions, {oldest} to {newest}")
        return cls(oldest, newest, secret, nonce)


@dataclass(frozen=True, slots=True)
class Offer:
    """Description of one end for the other: its queue pair, sizes and capabilities.

    :param endpoint: endpoint of the queue pair, of type RC.
    :param buffer_size: size of each receive buffer in bytes, 512..2**30.
    :param depth: number of receives kept posted, 4..1023, which is the number of the peer's credits. If both ends have
        ``ANNOUNCES``, one eighth of them, rounded down, is kept for answers to announced messages instead.
    :param max_message: size of the longest message that this end accepts, in bytes, 1..2**64-1.
    :param capabilities: capabilities of this end.
    :param atomics: scope in which the device's atomics are atomic.
    :param device: name of the device, for messages and logs.
    :raises ValueError: a value is out of its range.
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
            raise ValueError(f"the queue pair of a connection must be of type RC, got {self.endpoint.qp_type.name}")
        if not _MIN_BUFFER <= self.buffer_size <= _MAX_BUFFER:
            raise ValueError(
                f"`buffer_size` must be from {_MIN_BUFFER} to {_MAX_BUFFER:,} bytes, got {self.buffer_size:,}"
            )
        if not 4 <= self.depth <= MAX_CREDITS:
            raise ValueError(f"`depth` must be from 4 to {MAX_CREDITS}, got {self.depth}")
        if not 1 <= self.max_message < 1 << 64:
            raise ValueError(f"`max_message` must be from 1 to 2**64 - 1 bytes, got {self.max_message}")

    def pack(self) -> bytes:
        """Return the body of an OFFER message as bytes, without the header of the message and without the proof.

        The name of the device is cut off after 64 bytes.
        """
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
        """Decode the body of an OFFER message.

        :param body: the message without its header.
        :param proof_bytes: length in bytes of the proof at the end of the body; 0 if there is no secret.
        :returns: a tuple of the offer and the proof, which is not checked here.
        :raises HandshakeError: the body is not valid.
        """
        if len(body) < _OFFER.size:
            raise _protocol_error(f"OFFER must have at least {_OFFER.size} bytes, got {len(body)}")
        endpoint, size, depth, max_message, capabilities, atomics, length = _OFFER.unpack_from(body)
        name, proof = body[_OFFER.size : _OFFER.size + length], body[_OFFER.size + length :]
        if len(name) != length or length > _MAX_NAME_BYTES or len(proof) != proof_bytes:
            raise _protocol_error(f"the lengths inside OFFER do not add up to its {len(body)} bytes")
        known = Capabilities(capabilities & _KNOWN_CAPABILITIES)
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
            raise _protocol_error(f"OFFER is not valid: {error}") from None
        return offer, proof


@dataclass(frozen=True)
class Reject:
    """REJECT, the last message of an end that refuses the other end.

    :param reason: number of a `Reason`, or an unknown number.
    :param text: explanation for messages and logs.
    """

    reason: int
    text: str = ""

    def pack(self) -> bytes:
        """Return the REJECT message as bytes, header included. The encoding is the same in every version.

        The text is cut off after 200 bytes.

        :raises struct.error: the number of the reason does not fit in 16 bits.
        """
        return _encode(MessageType.REJECT, struct.pack("!H", self.reason) + self.text.encode()[:_MAX_TEXT_BYTES])

    @classmethod
    def parse_body(cls, body: bytes) -> "Reject":
        """Decode the body of a REJECT message.

        :param body: the message without its header.
        :returns: the message as a new `Reject`.
        :raises HandshakeError: the body is not valid.
        """
        if not 2 <= len(body) <= 2 + _MAX_TEXT_BYTES:
            raise _protocol_error(f"REJECT must have 2 to {2 + _MAX_TEXT_BYTES} bytes, got {len(body)}")
        return cls(int.from_bytes(body[:2]), _printable(body[2:]))

    def to_error(self) -> HandshakeError:
        """Return the `HandshakeError` to raise at the end that received this message."""
        return HandshakeError(self.reason, self.text, by_peer=True)


def _printable(data: bytes) -> str:
    """Decode text that the peer sent, and return it with each unprintable character replaced by ``?``.

    Otherwise the peer could write lines into logs or control a terminal.
    """
    text = data.decode(errors="replace")
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


def body_size(header: bytes) -> int:
    """Return the number of bytes that follow the header of a handshake message.

    :param header: the header, `HEADER_BYTES` bytes.
    :raises HandshakeError: the header is not valid, or the whole message is longer than `MAX_MESSAGE_BYTES`.
    """
    if len(header) != HEADER_BYTES:
        raise _protocol_error(f"a header must have {HEADER_BYTES} bytes, got {len(header)}")
    magic, _, _, size = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise _protocol_error("the peer does not speak the protocol of aioverbs connections")
    if HEADER_BYTES + size > MAX_MESSAGE_BYTES:
        raise _protocol_error(f"a message may have at most {MAX_MESSAGE_BYTES} bytes, got {HEADER_BYTES + size}")
    assert isinstance(size, int)
    return size


def parse(data: bytes) -> tuple[MessageType, int, bytes]:
    """Divide a handshake message into its parts.

    :param data: one whole message, header included.
    :returns: a tuple of the type, the version and the body, which is not decoded.
    :raises HandshakeError: the header or the length of the message is not valid, or the type is unknown.
    """
    size = body_size(data[:HEADER_BYTES])
    if len(data) != HEADER_BYTES + size:
        raise _protocol_error(f"the message must have {HEADER_BYTES + size} bytes, got {len(data)}")
    _, version, kind, _ = _HEADER.unpack_from(data)
    try:
        return MessageType(kind), version, data[HEADER_BYTES:]
    except ValueError:
        raise _protocol_error(f"unknown type of message: {kind}") from None


class Handshake:
    """One end of the handshake: encodes its messages, and checks the peer's messages and their order.

    Methods raise `HandshakeError` if a message from the peer is not acceptable. The caller then sends the result of
    `encode_reject` for that error, unless the peer itself sent the rejection.

    :param initiator: whether this end requested the connection.
    :param nonce: 16 random bytes.
    :param secret: the shared secret; None for no secret.
    :param versions: oldest and newest version that this end supports.
    :raises ValueError: the secret is empty or the nonce is not 16 bytes long.
    """

    def __init__(
        self, initiator: bool, nonce: bytes, secret: bytes | None = None, versions: tuple[int, int] = (_OLDEST, VERSION)
    ) -> None:
        if secret is not None and not secret:
            raise ValueError("`secret` must have at least 1 byte; pass None for no secret")
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"`nonce` must have {NONCE_BYTES} bytes, got {len(nonce)}")
        self._initiator = initiator
        self._nonce = nonce
        self._proofs = Proofs(b"aioverbs connection", secret) if secret is not None else None
        self._versions = versions
        self._transcript = b""  # HELLO and OFFER messages of both ends, in order
        self.version: int | None = None
        self.is_short = initiator and secret is None and versions[0] == versions[1]
        """Whether each end sends its HELLO and its OFFER together. The listener knows after `receive_hello`."""

    # ---- Messages of this end

    def hello(self) -> bytes:
        """Return this end's encoded HELLO message. The listener must call `receive_hello` first."""
        oldest, newest = self._versions
        if not self._initiator:
            assert self.version is not None
            oldest = newest = self.version
        return self._record(Hello(oldest, newest, self._proofs is not None, self._nonce).pack())

    def offer(self, offer: Offer) -> bytes:
        """Return this end's encoded OFFER message, with its proof if there is a secret.

        The initiator must call `receive_hello` first, unless `is_short` is True; the listener `receive_offer`.

        :param offer: the offer to encode.
        """
        version = self._versions[1] if self.is_short and self._initiator else self.version
        assert version is not None
        body = offer.pack()
        proof = self._proofs.make(_ROLES[self._initiator], self._transcript, body) if self._proofs is not None else b""
        return self._record(_encode(MessageType.OFFER, body + proof, version))

    def ready(self) -> bytes:
        """Return the encoded READY message, the last one of the initiator."""
        assert self.version is not None
        return _encode(MessageType.READY, b"", self.version)

    # ---- Messages of the peer

    def receive_hello(self, data: bytes) -> None:
        """Check the peer's HELLO message, and set the attribute `version` to the version that both ends will use.

        :param data: the whole message.
        :raises HandshakeError: the two ends have no common version, only one end has a secret, the peer sent REJECT, or
            the message is not valid.
        """
        _, body = self._expect(data, MessageType.HELLO)
        hello = Hello.parse_body(body)
        oldest, newest = self._versions
        common = min(hello.newest, newest)
        if common < max(hello.oldest, oldest) or (self._initiator and hello.oldest != hello.newest):
            raise HandshakeError(
                Reason.VERSION,
                f"the peer supports versions {hello.oldest} to {hello.newest}, this end {oldest} to {newest}",
            )
        if hello.secret != (self._proofs is not None):
            one, other = ("the peer", "this end") if hello.secret else ("this end", "the peer")
            raise HandshakeError(Reason.SECRET, f"{one} requires a secret and {other} has none")
        if hello.nonce == self._nonce:
            raise _protocol_error("the peer repeated the nonce of this end")
        self.version = common
        if not self._initiator:
            self.is_short = not hello.secret and hello.oldest == hello.newest
        self._transcript += data

    def receive_offer(self, data: bytes) -> Offer:
        """Check the peer's OFFER message and its proof.

        :param data: the whole message.
        :returns: the peer's offer.
        :raises HandshakeError: the secrets differ, the peer sent REJECT, or the message is not valid.
        """
        version, body = self._expect(data, MessageType.OFFER)
        offer, proof = Offer.parse_body(body, PROOF_BYTES if self._proofs is not None else 0)
        if version != self.version:
            raise _protocol_error(f"the peer used version {version} after both ends agreed on {self.version}")
        signed, role = body[: len(body) - len(proof)], _ROLES[not self._initiator]
        if self._proofs is not None and not self._proofs.check(proof, role, self._transcript, signed):
            raise HandshakeError(Reason.SECRET, "the peer has another secret", confidential=True)
        self._transcript += data
        return offer

    def receive_ready(self, data: bytes) -> None:
        """Check the initiator's READY message. If this method returns, the handshake is complete.

        :param data: the whole message.
        :raises HandshakeError: the peer sent REJECT, or the message is not valid.
        """
        _, body = self._expect(data, MessageType.READY)
        if body:
            raise _protocol_error(f"READY must have no bytes, got {len(body)}")

    # ---- Internals

    def _record(self, data: bytes) -> bytes:
        """Add a message of this end to the messages that the proofs cover, and return that message unchanged."""
        self._transcript += data
        return data

    def _expect(self, data: bytes, expected: MessageType) -> tuple[int, bytes]:
        """Check that a message from the peer is of the expected type.

        :param data: the whole message.
        :param expected: type that the message must have.
        :returns: the version and the body of the message.
        :raises HandshakeError: the peer sent REJECT or a message of another type, or the message is not valid.
        """
        kind, version, body = parse(data)
        if kind is MessageType.REJECT:
            raise Reject.parse_body(body).to_error()
        if kind is not expected:
            raise _protocol_error(f"the peer sent {kind.name}, expected {expected.name}")
        return version, body


def encode_reject(error: HandshakeError) -> bytes:
    """Return, as bytes, the REJECT message with which an end refuses its peer because of `error`.

    If the error is confidential, the message contains no text: the peer learns only the reason.
    """
    return Reject(error.reason, "" if error.confidential else error.text).pack()
