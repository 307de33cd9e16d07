"""PURE: proofs that one end of a protocol knows a secret, without revealing the secret."""

import hmac
import os

__all__ = ["NONCE_BYTES", "PROOF_BYTES", "Proofs", "make_nonce"]

NONCE_BYTES = 16
PROOF_BYTES = 32


def make_nonce() -> bytes:
    """Return a new nonce: `NONCE_BYTES` random bytes."""
    return os.urandom(NONCE_BYTES)


class Proofs:
    """Proofs for one protocol and one secret, made with HMAC-SHA-256. Each proof is `PROOF_BYTES` bytes long.

    A proof covers the name of the protocol, the role of the end that makes it, and the messages exchanged so far. It is
    therefore invalid in another protocol, and also if it is sent back to the end that made it. It cannot be replayed if
    the end that checks it contributed a nonce of its own to those messages.

    :param protocol: name of the protocol.
    :param secret: bytes that both ends know.
    """

    def __init__(self, protocol: bytes, secret: bytes) -> None:
        self._protocol = protocol
        self._secret = secret

    def make(self, role: bytes, *transcript: bytes) -> bytes:
        """Return the proof that one end sends, as `PROOF_BYTES` bytes.

        :param role: role of the end that makes the proof.
        :param transcript: the messages exchanged so far, or parts of them. Each part is hashed with its length, so that
            the proof covers the boundaries between parts as well.
        """
        parts = (self._protocol, role, *transcript)
        return hmac.digest(self._secret, b"".join(len(part).to_bytes(8) + part for part in parts), "sha256")

    def check(self, proof: bytes, role: bytes, *transcript: bytes) -> bool:
        """Return whether a proof equals the one that `make` returns for the same role and transcript. The comparison
        takes constant time.

        :param proof: proof that the other end sent.
        :param role: role of the other end.
        :param transcript: the messages, or parts of messages, that the other end passed to `make`.
        """
        return hmac.compare_digest(proof, self.make(role, *transcript))
