"""PURE: proofs that an end of a protocol knows a secret, without telling it."""

import hmac
import os

__all__ = ["NONCE_BYTES", "PROOF_BYTES", "Proofs", "make_nonce"]

NONCE_BYTES = 16
PROOF_BYTES = 32


def make_nonce() -> bytes:
    """Return random bytes that no end has used before."""
    return os.urandom(NONCE_BYTES)


class Proofs:
    """Proofs of one protocol and one secret, by HMAC-SHA-256.

    A proof covers the name of the protocol, the role of the end that gives it, and what was said until then. So it is
    worth nothing in another protocol, nor when it is sent back to that end; and it is worth nothing a second time where
    the end that checks it put a nonce of its own into what was said.

    :param protocol: the protocol's name.
    :param secret: bytes that both ends know.
    """

    def __init__(self, protocol: bytes, secret: bytes) -> None:
        self._protocol = protocol
        self._secret = secret

    def make(self, role: bytes, *said: bytes) -> bytes:
        """Return the proof of the end with a role, `PROOF_BYTES` long.

        :param said: the parts of what was said, of which none can pass for the end or the beginning of another.
        """
        parts = (self._protocol, role, *said)
        return hmac.digest(self._secret, b"".join(len(part).to_bytes(8) + part for part in parts), "sha256")

    def check(self, proof: bytes, role: bytes, *said: bytes) -> bool:
        """Return whether a proof is the one that `make` returns, in a time that does not tell where it differs."""
        return hmac.compare_digest(proof, self.make(role, *said))
