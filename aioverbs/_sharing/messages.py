"""PURE: messages with which one process gets access to a protection domain of another process.

The process that wants access sends a `Request`; the other one answers with a `Reply` that has descriptors attached.
Both prove that they know the share key, without revealing it.
"""

import errno
import hashlib
import struct
from dataclasses import dataclass
from typing import ClassVar

from aioverbs._proofs import NONCE_BYTES, PROOF_BYTES, Proofs
from aioverbs.errors import VerbsError

__all__ = ["ID_BITS", "KEY_BITS", "Reply", "Request", "device_of", "share_id"]

KEY_BITS = 64
ID_BITS = 96  # GUID of the device, then a number of 32 bits

_MAGIC = b"aioverbs"
_VERSION = 1
_HEAD = struct.Struct("!8sHH")  # magic, version, status
_NAME = 64  # maximum length of device names in libibverbs, bytes


def share_id(guid: bytes, name: str, number: int) -> int:
    """Return the ID of a shared protection domain, an int of 96 bits: the GUID of its device, then its number.

    :param guid: node GUID of the device, 8 bytes. If it is zero, as for some virtual functions, a hash of `name` is
        used in its place.
    :param name: name of the device.
    :param number: number of the protection domain, 1..2**32-1.
    """
    if not any(guid):
        guid = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(guid) << 32 | number


def device_of(shared_id: int) -> str:
    """Return the device GUID in a shared ID, in the notation of RDMA tools, such as ``0002:c903:0000:1234``."""
    digits = f"{shared_id >> 32:016x}"
    return ":".join(digits[place : place + 4] for place in range(0, 16, 4))


def _proofs(share_key: int) -> Proofs:
    """Return a `Proofs` object that makes and checks the proofs of this protocol for a share key."""
    return Proofs(b"aioverbs sharing", share_key.to_bytes(KEY_BITS // 8))


def _parse_head(data: bytes, size: int, kind: str) -> int:
    """Check the size and the header of a message, and return the status in it: 0 or an errno.

    :param data: the message.
    :param size: size that the message must have, in bytes.
    :param kind: name of this kind of message, for the error.
    :raises VerbsError: with EPROTO if the size or the header is wrong; with EPROTONOSUPPORT if the message has a
        different version.
    """
    if len(data) != size:
        raise VerbsError("ibv_share_pd", errno.EPROTO, f"a {kind} has {size} bytes, not {len(data)}")
    magic, version, status = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise VerbsError("ibv_share_pd", errno.EPROTO, f"the peer sent data that is not a {kind} of this protocol")
    if version != _VERSION:
        advice = f"the peer speaks version {version} of the protocol, not {_VERSION}: use the same version of aioverbs"
        raise VerbsError("ibv_share_pd", errno.EPROTONOSUPPORT, advice)
    assert isinstance(status, int)
    return status


@dataclass(frozen=True)
class Request:
    """Request for access to a shared protection domain.

    :param shared_id: ID of the protection domain, 96 bits.
    :param nonce: 16 bytes that were never used before.
    :param proof: proof that the sender knows the share key.
    """

    shared_id: int
    nonce: bytes
    proof: bytes

    SIZE: ClassVar[int] = _HEAD.size + ID_BITS // 8 + NONCE_BYTES + PROOF_BYTES

    @classmethod
    def make(cls, shared_id: int, share_key: int, nonce: bytes) -> "Request":
        """Return a new `Request`, including its proof.

        :param shared_id: ID of the protection domain, 96 bits.
        :param share_key: secret of the protection domain, 64 bits.
        :param nonce: 16 bytes that were never used before.
        """
        proof = _proofs(share_key).make(b"request", shared_id.to_bytes(ID_BITS // 8), nonce)
        return cls(shared_id, nonce, proof)

    def pack(self) -> bytes:
        """Return the request encoded as ``SIZE`` bytes, which `parse` decodes."""
        return _HEAD.pack(_MAGIC, _VERSION, 0) + self.shared_id.to_bytes(ID_BITS // 8) + self.nonce + self.proof

    @classmethod
    def parse(cls, data: bytes) -> "Request":
        """Decode a request and return it as a new `Request`. The caller must check its proof with `proves`.

        :raises VerbsError: with EPROTO if the request is invalid; with EPROTONOSUPPORT if it has a different version.
        """
        if _parse_head(data, cls.SIZE, "request"):
            raise VerbsError("ibv_share_pd", errno.EPROTO, "a request has no status")
        body = data[_HEAD.size :]
        shared_id, rest = body[: ID_BITS // 8], body[ID_BITS // 8 :]
        return cls(int.from_bytes(shared_id), rest[:NONCE_BYTES], rest[NONCE_BYTES:])

    def proves(self, share_key: int) -> bool:
        """Return whether the proof shows that the sender of the request knows the share key."""
        return _proofs(share_key).check(self.proof, b"request", self.shared_id.to_bytes(ID_BITS // 8), self.nonce)


@dataclass(frozen=True)
class Reply:
    """Reply to a request for access.

    :param status: 0 if descriptors are attached: for an RDMA device, those for the context's commands and of the file
        with which the instances coordinate; for a software device, that of the file that contains the protection
        domain. If the request is refused, the errno of the refusal.
    :param device: name of the device.
    :param pd_handle: number of the protection domain in the kernel; 0 for a software device.
    :param proof: proof that the sender knows the share key and replies to this request.
    """

    status: int
    device: str
    pd_handle: int
    proof: bytes

    SIZE: ClassVar[int] = _HEAD.size + _NAME + 4 + PROOF_BYTES

    @classmethod
    def make(cls, request: Request, share_key: int, device: str, pd_handle: int) -> "Reply":
        """Return a new `Reply`, complete with the reply's proof, that grants a request. The caller has checked the
        proof of the request.

        :param request: the request.
        :param share_key: secret of the protection domain, 64 bits.
        :param device: name of the device.
        :param pd_handle: number of the protection domain in the kernel; 0 for a software device.
        """
        body = cls(0, device, pd_handle, b"")._body()
        return cls(0, device, pd_handle, _proofs(share_key).make(b"reply", request.nonce, body))

    @classmethod
    def refuse(cls, status: int, device: str) -> "Reply":
        """Return a new `Reply` that refuses a request. It has no valid proof.

        :param status: errno of the refusal.
        :param device: name of the device.
        """
        return cls(status, device, 0, bytes(PROOF_BYTES))

    def _body(self) -> bytes:
        """Return the encoded fields that the proof covers, as bytes: the name of the device, cut off after 64 bytes,
        and the number of the protection domain in the kernel.
        """
        return self.device.encode()[:_NAME].ljust(_NAME, b"\0") + self.pd_handle.to_bytes(4)

    def pack(self) -> bytes:
        """Return the reply encoded as ``SIZE`` bytes, which `parse` decodes."""
        return _HEAD.pack(_MAGIC, _VERSION, self.status) + self._body() + self.proof

    @classmethod
    def parse(cls, data: bytes) -> "Reply":
        """Decode a reply and return it as a new `Reply`. If its status is 0, the caller must check its proof with
        `proves`.

        :raises VerbsError: with EPROTO if the reply is invalid; with EPROTONOSUPPORT if it has a different version.
        """
        status = _parse_head(data, cls.SIZE, "reply")
        body = data[_HEAD.size :]
        name, handle, proof = body[:_NAME], body[_NAME : _NAME + 4], body[_NAME + 4 :]
        device = name.rstrip(b"\0").decode(errors="replace")
        return cls(status, device, int.from_bytes(handle), proof)

    def proves(self, share_key: int, request: Request) -> bool:
        """Return whether the proof shows that the sender of the reply knows the share key and replied to this
        request."""
        return _proofs(share_key).check(self.proof, b"reply", request.nonce, self._body())
