"""Proofs that one side of a protocol knows a secret."""

import pytest
from hypothesis import given, strategies as st

from aioverbs._proofs import NONCE_BYTES, PROOF_BYTES, Proofs, make_nonce

NONCE = bytes(range(NONCE_BYTES))
MADE = Proofs(b"one protocol", b"the secret").make(b"client", NONCE, b"the transcript")


def is_good(
    proof: bytes = MADE,
    protocol: bytes = b"one protocol",
    secret: bytes = b"the secret",
    role: bytes = b"client",
    parts: tuple[bytes, ...] = (NONCE, b"the transcript"),
) -> bool:
    return Proofs(protocol, secret).check(proof, role, *parts)


def test_valid_proof() -> None:
    assert len(MADE) == PROOF_BYTES
    assert is_good()


@pytest.mark.parametrize("secret", [b"", b"the secre", b"the secret ", b"another secret"])
def test_proof_of_another_secret(secret: bytes) -> None:
    assert not is_good(secret=secret)


def test_a_reflected_proof_is_invalid() -> None:
    assert not is_good(role=b"server")


def test_proof_of_another_protocol() -> None:
    assert not is_good(protocol=b"another protocol")


def test_a_replayed_proof_is_invalid() -> None:
    nonce = make_nonce()
    assert nonce not in (NONCE, make_nonce())
    assert not is_good(parts=(nonce, b"the transcript"))


@pytest.mark.parametrize("proof", [b"", MADE[:-1], MADE + b"\0", bytes(PROOF_BYTES), MADE * 100_000])
def test_malformed_proofs(proof: bytes) -> None:
    assert not is_good(proof)


@given(st.integers(0, 8 * PROOF_BYTES - 1))
def test_flipped_bit(place: int) -> None:
    turned = bytearray(MADE)
    turned[place // 8] ^= 1 << place % 8
    assert not is_good(bytes(turned))


PARTS = st.lists(st.binary(max_size=12), min_size=1, max_size=4)


@given(PARTS, PARTS)
def test_boundaries_of_parts_are_authenticated(one: list[bytes], other: list[bytes]) -> None:
    proofs = Proofs(b"protocol", b"secret")
    assert proofs.check(proofs.make(*one), *other) == (one == other)


@given(st.binary(max_size=24), st.integers(0, 24), st.integers(0, 24))
def test_parts_of_the_same_bytes(data: bytes, one: int, other: int) -> None:
    proofs = Proofs(b"protocol", b"secret")
    made = proofs.make(b"role", data[:one], data[one:])
    assert proofs.check(made, b"role", data[:other], data[other:]) == (data[:one] == data[:other])
