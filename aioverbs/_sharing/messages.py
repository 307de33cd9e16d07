"""What two processes tell each other when one gives the other its way to a protection domain. Pure: no input or output.

The one that wants it sends a `Request`, the other answers with a `Reply`, to which the descriptors are attached. Both
prove that they know the share key, without telling it.
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
ID_BITS = 96  # the device's GUID, then a number

_MAGIC = b"aioverbs"
_VERSION = 1
_HEAD = struct.Struct("!8sHH")  # magic, version, status
_NAME = 64  # as libibverbs has it for the names of devices


def share_id(guid: bytes, name: str, number: int) -> int:
    """The number by which a protection domain is shared: it tells the device as well.

    :param guid: the 8 bytes of the device's node GUID. Virtual functions may have none: then `name` stands for it.
    :param number: 32 bits, not 0.
    """
    if not any(guid):
        guid = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(guid) << 32 | number


def device_of(shared_id: int) -> str:
    """The GUID of the device that something was shared of, as tools print it."""
    digits = f"{shared_id >> 32:016x}"
    return ":".join(digits[place : place + 4] for place in range(0, 16, 4))


def _proofs(share_key: int) -> Proofs:
    return Proofs(b"aioverbs sharing", share_key.to_bytes(KEY_BITS // 8))


def _parse_head(data: bytes, size: int, kind: str) -> int:
    """The status of a message.

    :raises VerbsError: with EPROTO where it is none, with EPROTONOSUPPORT where it is of another version.
    """
    if len(data) != size:
        raise VerbsError("ibv_share_pd", errno.EPROTO, f"a {kind} has {size} bytes, not {len(data)}")
    magic, version, status = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise VerbsError("ibv_share_pd", errno.EPROTO, f"the peer sent something else than a {kind}")
    if version != _VERSION:
        advice = f"the peer shares protection domains by version {version}, this is {_VERSION}: use the same aioverbs"
        raise VerbsError("ibv_share_pd", errno.EPROTONOSUPPORT, advice)
    assert isinstance(status, int)
    return status


@dataclass(frozen=True)
class Request:
    """What the one sends that wants an instance.

    :param shared_id: of what.
    :param nonce: 16 bytes that were never used before.
    :param proof: that it knows the key.
    """

    shared_id: int
    nonce: bytes
    proof: bytes

    SIZE: ClassVar[int] = _HEAD.size + ID_BITS // 8 + NONCE_BYTES + PROOF_BYTES

    @classmethod
    def make(cls, shared_id: int, share_key: int, nonce: bytes) -> "Request":
        """A request with its proof."""
        proof = _proofs(share_key).make(b"request", shared_id.to_bytes(ID_BITS // 8), nonce)
        return cls(shared_id, nonce, proof)

    def pack(self) -> bytes:
        """Its bytes."""
        return _HEAD.pack(_MAGIC, _VERSION, 0) + self.shared_id.to_bytes(ID_BITS // 8) + self.nonce + self.proof

    @classmethod
    def parse(cls, data: bytes) -> "Request":
        """The request that these bytes are.

        :raises VerbsError: with EPROTO where they are none, with EPROTONOSUPPORT where it is of another version.
        """
        if _parse_head(data, cls.SIZE, "request"):
            raise VerbsError("ibv_share_pd", errno.EPROTO, "a request has no status")
        body = data[_HEAD.size :]
        shared_id, rest = body[: ID_BITS // 8], body[ID_BITS // 8 :]
        return cls(int.from_bytes(shared_id), rest[:NONCE_BYTES], rest[NONCE_BYTES:])

    def proves(self, share_key: int) -> bool:
        """Whether who made it knows the key."""
        return _proofs(share_key).check(self.proof, b"request", self.shared_id.to_bytes(ID_BITS // 8), self.nonce)


@dataclass(frozen=True)
class Reply:
    """What the one answers that has the protection domain.

    :param status: 0 where the descriptors are attached: that of the context's commands, and that of the file by which
        the instances know of each other; of a software device, that of the file that the domain is in. Else the errno
        of the refusal.
    :param device: the name of its device.
    :param pd_handle: the domain's number in the kernel; of a software device, 0.
    :param proof: that it knows the key, and answers this request.
    """

    status: int
    device: str
    pd_handle: int
    proof: bytes

    SIZE: ClassVar[int] = _HEAD.size + _NAME + 4 + PROOF_BYTES

    @classmethod
    def make(cls, request: Request, share_key: int, device: str, pd_handle: int) -> "Reply":
        """The answer to a request that proved the key."""
        body = cls(0, device, pd_handle, b"")._body()
        return cls(0, device, pd_handle, _proofs(share_key).make(b"reply", request.nonce, body))

    @classmethod
    def refuse(cls, status: int, device: str) -> "Reply":
        """The answer to one that does not get anything."""
        return cls(status, device, 0, bytes(PROOF_BYTES))

    def _body(self) -> bytes:
        return self.device.encode()[:_NAME].ljust(_NAME, b"\0") + self.pd_handle.to_bytes(4)

    def pack(self) -> bytes:
        """Its bytes."""
        return _HEAD.pack(_MAGIC, _VERSION, self.status) + self._body() + self.proof

    @classmethod
    def parse(cls, data: bytes) -> "Reply":
        """The reply that these bytes are.

        :raises VerbsError: with EPROTO where they are none, with EPROTONOSUPPORT where it is of another version.
        """
        status = _parse_head(data, cls.SIZE, "reply")
        body = data[_HEAD.size :]
        name, handle, proof = body[:_NAME], body[_NAME : _NAME + 4], body[_NAME + 4 :]
        device = name.rstrip(b"\0").decode(errors="replace")
        return cls(status, device, int.from_bytes(handle), proof)

    def proves(self, share_key: int, request: Request) -> bool:
        """Whether who made it knows the key, and made it for this request."""
        return _proofs(share_key).check(self.proof, b"reply", request.nonce, self._body())
