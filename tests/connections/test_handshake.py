"""The handshake without a network: order of messages, invalid values, flipped bits."""

import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from aioverbs import AtomicCap, Endpoint, HandshakeError, Mtu, QpType
from aioverbs._connection.handshake import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    Capabilities,
    Handshake,
    MessageType,
    Offer,
    Reason,
    Reject,
    body_size,
    encode_reject,
    parse,
)

endpoints = st.builds(
    Endpoint,
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 24) - 1),
    st.integers(0, (1 << 24) - 1),
    st.sampled_from([each for each in Mtu if each]),
    max_rd_atomic=st.integers(0, 255),
    max_dest_rd_atomic=st.integers(0, 255),
    lid=st.integers(0, 0xFFFF),
)
offers = st.builds(
    Offer,
    endpoints,
    st.integers(512, 1 << 30),
    st.integers(4, 1023),
    st.integers(1, (1 << 64) - 1),
    st.sampled_from([Capabilities(bits) for bits in range(8)]),
    st.sampled_from(AtomicCap),
    st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=16),
)
secrets = st.none() | st.binary(min_size=1, max_size=80)
OFFER = Offer(Endpoint(bytes(15) + b"\1", 5, 6, Mtu.MTU_1024), 4096, 16, 1 << 20, Capabilities.ATOMICS, device="soft0")


def ends(
    near: bytes | None = None, far: bytes | None = None, versions: tuple[int, int] = (1, 1)
) -> tuple[Handshake, Handshake]:
    return Handshake(True, bytes(16), near), Handshake(False, bytes(15) + b"\1", far, versions)


def talk(near: Handshake, far: Handshake, ours: Offer = OFFER, theirs: Offer = OFFER) -> tuple[Offer, Offer]:
    """Run a handshake, and return the offer that each end received."""
    far.receive_hello(near.hello())
    near.receive_hello(far.hello())
    heard = far.receive_offer(near.offer(ours))
    answer = near.receive_offer(far.offer(theirs))
    far.receive_ready(near.ready())
    return heard, answer


@given(offers, offers, secrets)
def test_offers_are_exchanged(ours: Offer, theirs: Offer, secret: bytes | None) -> None:
    assert talk(*ends(secret, secret), ours, theirs) == (ours, theirs)


@given(offers, offers)
def test_offers_are_exchanged_in_one_round_trip(ours: Offer, theirs: Offer) -> None:
    near, far = ends()
    assert near.is_short
    hello, offer = near.hello(), near.offer(ours)
    far.receive_hello(hello)
    assert far.is_short
    assert far.receive_offer(offer) == ours
    hello, offer = far.hello(), far.offer(theirs)
    near.receive_hello(hello)
    assert near.receive_offer(offer) == theirs
    far.receive_ready(near.ready())
    assert (near.version, far.version) == (1, 1)


@pytest.mark.parametrize(("secret", "versions"), [(b"secret", (1, 1)), (None, (1, 2))])
def test_an_offer_that_depends_on_the_listener_waits_for_its_hello(
    secret: bytes | None, versions: tuple[int, int]
) -> None:
    near, far = Handshake(True, bytes(16), secret, versions), Handshake(False, b"\1" * 16, secret)
    far.receive_hello(near.hello())
    assert not near.is_short
    assert not far.is_short
    near.receive_hello(far.hello())
    assert far.receive_offer(near.offer(OFFER)) == OFFER


def test_an_early_offer_of_another_version_is_refused() -> None:
    near, far = Handshake(True, bytes(16), versions=(2, 2)), Handshake(False, b"\1" * 16, versions=(1, 3))
    hello, offer = near.hello(), near.offer(OFFER)
    far.receive_hello(hello)
    with pytest.raises(HandshakeError, match="used version 1 after both ends agreed on 2"):
        far.receive_offer(ends()[0].offer(OFFER))
    assert far.receive_offer(offer) == OFFER


@pytest.mark.parametrize(("near", "far"), [(b"one", None), (None, b"one"), (b"one", b"two")])
def test_different_secrets_are_refused(near: bytes | None, far: bytes | None) -> None:
    with pytest.raises(HandshakeError) as caught:
        talk(*ends(near, far))
    assert caught.value.reason == Reason.SECRET
    told = Reject.parse_body(parse(encode_reject(caught.value))[2])
    assert told.reason == Reason.SECRET
    assert "one" not in told.text or "secret" in told.text
    assert (told.text == "") is (None not in (near, far))  # the reason says all that the peer may know


@pytest.mark.parametrize("confidential", [False, True])
def test_only_confidential_text_is_withheld(confidential: bool) -> None:
    error = HandshakeError(Reason.SECRET, "another end has none", confidential=confidential)
    told = Reject.parse_body(parse(encode_reject(pickle.loads(pickle.dumps(error))))[2])
    assert told.text == ("" if confidential else error.text)


def test_a_reflected_proof_is_refused() -> None:
    """A listener without the secret cannot send the initiator's own proof back."""
    near, far = ends(b"secret", b"secret")
    far.receive_hello(near.hello())
    near.receive_hello(far.hello())
    reflected = near.offer(OFFER)
    with pytest.raises(HandshakeError, match="another secret"):
        near.receive_offer(reflected)


def test_an_own_nonce_from_the_peer_is_refused() -> None:
    near = Handshake(True, bytes(16), b"secret")
    far = Handshake(False, bytes(16), b"secret")
    with pytest.raises(HandshakeError, match="repeated the nonce"):
        far.receive_hello(near.hello())


def test_a_replayed_handshake_is_refused() -> None:
    """The same messages, sent to a listener with another nonce."""
    near, far = ends(b"secret", b"secret")
    hello = near.hello()
    far.receive_hello(hello)
    near.receive_hello(far.hello())
    offer = near.offer(OFFER)
    other = Handshake(False, b"\7" * 16, b"secret")
    other.receive_hello(hello)
    other.hello()
    with pytest.raises(HandshakeError, match="another secret"):
        other.receive_offer(offer)


@pytest.mark.parametrize("versions", [(2, 3), (7, 200)])
def test_versions_without_overlap_are_refused(versions: tuple[int, int]) -> None:
    near, far = ends(versions=versions)
    with pytest.raises(HandshakeError) as caught:
        far.receive_hello(near.hello())
    assert caught.value.reason == Reason.VERSION
    assert not caught.value.by_peer
    with pytest.raises(HandshakeError) as told:
        near.receive_hello(encode_reject(caught.value))
    assert (told.value.reason, told.value.by_peer) == (Reason.VERSION, True)
    assert f"versions {1}" in str(told.value)


def test_the_newest_common_version_is_chosen() -> None:
    near, far = ends(versions=(1, 9))
    talk(near, far)
    assert (near.version, far.version) == (1, 1)


@pytest.mark.parametrize("due", range(3))
def test_messages_out_of_order_are_refused(due: int) -> None:
    near, far = ends()
    hello = near.hello()
    if due >= 1:
        far.receive_hello(hello)
        near.receive_hello(far.hello())
    if due >= 2:
        far.receive_offer(near.offer(OFFER))
    hear = (far.receive_hello, far.receive_offer, far.receive_ready)[due]
    wrong = (struct.pack("!4sBBH", b"aiov", 1, MessageType.READY, 0), hello, hello)[due]
    with pytest.raises(HandshakeError, match=", expected") as caught:
        hear(wrong)
    assert caught.value.reason == Reason.PROTOCOL


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HT",
        bytes(8),
        b"aiov\1\1\xff\xff",
        b"aiov\1\1" + (MAX_MESSAGE_BYTES - HEADER_BYTES + 1).to_bytes(2),
        b"aiov",
    ],
)
def test_invalid_headers_are_refused(head: bytes) -> None:
    with pytest.raises(HandshakeError):
        body_size(head)


def messages(secret: bytes | None) -> list[tuple[bytes, Callable[[bytes], object]]]:
    """Yield each message of a handshake, with the end that receives it, in the right state."""
    near, far = ends(secret, secret)
    first = near.hello()
    far.receive_hello(first)
    second = far.hello()
    found: list[tuple[bytes, Callable[[bytes], object]]] = [(first, ends(secret, secret)[1].receive_hello)]
    found.append((second, ends(secret, secret)[0].receive_hello))
    near.receive_hello(second)
    found.append((near.offer(OFFER), far.receive_offer))
    return found


def said(hear: Callable[[bytes], object], data: bytes) -> None:
    """Check that a message is accepted or raises HandshakeError, and nothing else."""
    try:
        hear(data)
    except HandshakeError as error:
        told = parse(encode_reject(error))[0]
    else:
        return
    assert told is MessageType.REJECT


@given(st.binary(max_size=MAX_MESSAGE_BYTES + 16), st.sampled_from([None, b"secret"]))
def test_arbitrary_bytes_raise_only_handshake_errors(data: bytes, secret: bytes | None) -> None:
    for hear in (*ends(secret, secret), ends()[0]):
        for method in (hear.receive_hello, hear.receive_ready):
            said(method, data)
            said(method, struct.pack("!4sBBH", b"aiov", 1, len(data) % 6, min(len(data), 400)) + data[:400])


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_flipped_bits_and_cut_messages(secret: bytes | None) -> None:
    """With a secret, every changed bit of an offer is detected. Only HandshakeError is raised."""
    for at in range(3):
        message, _ = messages(secret)[at]
        changed = [
            message[:place] + bytes([message[place] ^ 1 << bit]) + message[place + 1 :]
            for place in range(len(message))
            for bit in range(8)
        ]
        changed += [message[:length] for length in range(len(message))]
        changed.append(message + b"\0")
        for each in changed:
            _, hear = messages(secret)[at]
            if secret is not None and at == 2:
                with pytest.raises(HandshakeError):
                    hear(each)
            else:
                said(hear, each)


@given(st.integers(0, 0xFFFF), st.text(st.characters(codec="utf-8")))
def test_reject_round_trip(reason: int, text: str) -> None:
    body = parse(Reject(reason, text).pack())[2]
    heard = Reject.parse_body(body)
    assert heard.reason == reason
    assert heard.text.isprintable()
    error = heard.to_error()
    assert error.by_peer
    assert str(error)


def test_text_of_the_peer_is_made_printable() -> None:
    """No text of the peer ends a line or controls a terminal."""
    told = replace(OFFER, device="[/x]\x1b[2J\n2026 CRITICAL")
    heard, _ = Offer.parse_body(told.pack(), 0)
    assert heard.device == "[/x]?[2J?2026 CRITICAL"


@pytest.mark.parametrize(
    "change",
    [{"buffer_size": 511}, {"buffer_size": (1 << 30) + 1}, {"depth": 3}, {"depth": 1024}, {"max_message": 0}],
)
def test_invalid_offers(change: dict[str, int]) -> None:
    fields = {"endpoint": OFFER.endpoint, "buffer_size": 4096, "depth": 16, "max_message": 1, **change}
    with pytest.raises(ValueError, match="got"):
        Offer(**fields)  # type: ignore[arg-type]


def test_offers_need_an_rc_queue_pair() -> None:
    with pytest.raises(ValueError, match="type RC"):
        Offer(Endpoint(bytes(16), 1, 1, Mtu.MTU_256, qp_type=QpType.UD), 4096, 16, 1)


@pytest.mark.parametrize(("nonce", "secret"), [(b"short", None), (bytes(16), b"")])
def test_invalid_arguments_of_a_handshake(nonce: bytes, secret: bytes | None) -> None:
    with pytest.raises(ValueError, match=r"nonce|secret"):
        Handshake(True, nonce, secret)


def test_random_messages_of_a_dishonest_end() -> None:
    """Messages in any order, some cut or changed: each is accepted or refused."""
    chance = random.Random(8)
    for _ in range(300):
        near, far = ends(b"s", b"s")
        pool = [near.hello(), Reject(3, "no").pack()]
        for _ in range(6):
            data = bytearray(chance.choice(pool))
            if chance.random() < 0.5:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            hear = chance.choice([far.receive_hello, far.receive_ready])
            said(hear, bytes(data))
            if far.version is not None:
                pool.append(far.hello())
