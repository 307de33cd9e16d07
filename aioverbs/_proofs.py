"""PURE: proofs that one end of a protocol knows a secret, which do not reveal the secret."""

import hmac
import os

__all__ = ["NONCE_BYTES", "PROOF_BYTES", "Proofs", "make_nonce"]

NONCE_BYTES = 16
PROOF_BYTES = 32


def make_nonce() -> bytes:
    """Return `NONCE_BYTES` random bytes, which no end has used before."""
    return os.urandom(NONCE_BYTES)


class Proofs:
    """Proofs for one protocol and one secret, by HMAC-SHA-256.

    A proof covers the name of the protocol, the role of the end that makes it, and the messages exchanged so far. So it
    is invalid in another protocol, and when it is sent back to the end that made it. It cannot be replayed if the end
    that checks it contributed a nonce of its own to those messages.

    :param protocol: name of the protocol.
    :param secret: bytes that both ends know.
    """

    def __init__(self, protocol: bytes, secret: bytes) -> None:
        self._protocol = protocol
        self._secret = secret

    def make(self, role: bytes, *transcript: bytes) -> bytes:
        """Return the proof of one end, `PROOF_BYTES` long.

        :param role: role of the end that makes the proof.
        :param transcript: messages exchanged so far, or parts of them. Each part is hashed with its length, so the
            boundaries between parts are covered as well.
        """
        parts = (self._protocol, role, *transcript)
        return hmac.digest(self._secret, b"".join(len(part).to_bytes(8) + part for part in parts), "sha256")

    def check(self, proof: bytes, role: bytes, *transcript: bytes) -> bool:
        """Return whether a proof equals the one that `make` returns, compared in constant time.

        :param proof: proof of the other end.
        :param role: role of the other end.
        :param transcript: as for `make`.
        """
        return hmac.compare_digest(proof, self.make(role, *transcript))
