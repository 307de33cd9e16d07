"""Exceptions that aioverbs raises.

Operations on closed, broken or busy objects raise subclasses of anyio's exceptions, so that code written for anyio's
streams handles them. A verb that fails raises `VerbsError`, which is an `OSError`.
"""

import errno as _errno
import os
from collections.abc import Iterable, Mapping, Sequence

import anyio

from aioverbs._exports import publish
from aioverbs.types import QpState, QpType, WcOpcode, WcStatus

__all__ = [
    "AffinityError",
    "BatchError",
    "BorrowedObjectClosedError",
    "BrokenResourceError",
    "BusyResourceError",
    "ClosedResourceError",
    "ConcurrentAccessError",
    "ConnectionRejectedError",
    "DeviceNotFoundError",
    "DeviceRemovedError",
    "ForkedProcessError",
    "GrantRevokedError",
    "HandshakeError",
    "LibraryNotFoundError",
    "QueuePairStateError",
    "TransitionError",
    "UnreachableError",
    "VerbsError",
    "WorkCompletionError",
    "WorkerDiedError",
]

# Linux has two names for this number; the manual pages of the verbs use this one.
_ERRNO_NAMES = {**_errno.errorcode, _errno.EOPNOTSUPP: "EOPNOTSUPP"}

_ADVICE = {
    _errno.EACCES: "the process may not open the device: check the permissions of /dev/infiniband",
    _errno.EAGAIN: "the device has no more of the requested resource, or nothing is ready yet: try again later",
    _errno.EBUSY: "an object made from this one is still open: close it first",
    _errno.EINVAL: "an argument does not fit the limits of the device or port, or the state of the object",
    _errno.EHOSTUNREACH: "no host answers at the peer's address: check the links and addresses of both ends",
    _errno.EMFILE: "the process has no descriptor left: close some, or raise `ulimit -n`",
    _errno.ENFILE: "the system has no descriptor left: raise the sysctl fs.file-max",
    _errno.EIO: "the device is gone or broken: close it and open it again",
    _errno.ENETDOWN: "the network interface of the port is down: bring it up",
    _errno.ENETUNREACH: "there is no route to the peer's address: check the link, addresses and routes of this host",
    _errno.ENODEV: "the device is gone: open it again when it is back",
    _errno.ENOMEM: "memory, queue entries or locked memory ran out: check `ulimit -l` and the requested sizes",
    _errno.ENOSPC: "the device has no more of the requested resource: its attributes give the maximum",
    _errno.EOPNOTSUPP: "this device or its driver does not support it",
    _errno.EPERM: "the process lacks the privilege for this, or does not own the object",
    _errno.ETIMEDOUT: "no host answered at the peer's address in time: check the links and addresses of both ends",
}

# Verbs that make the kernel lock memory of the process: they fail with EPERM if RLIMIT_MEMLOCK is 0.
_LOCKING_VERBS = (
    "ibv_create_cq",
    "ibv_create_cq_ex",
    "ibv_create_qp",
    "ibv_create_qp_ex",
    "ibv_create_srq",
    "ibv_create_srq_ex",
    "ibv_reg_mr",
    "ibv_resize_cq",
)

# Advice for verbs that give an error number a special meaning.
_VERB_ADVICE = {
    **{(verb, _errno.EPERM): "the process may not lock memory: raise `ulimit -l`" for verb in _LOCKING_VERBS},
    ("ibv_open_device", _errno.ENOENT): "its device file is not in /dev/infiniband: a container must be given it",
    ("ibv_open_xrcd", _errno.EAGAIN): "no process has an XRC domain of this inode: pass os.O_CREAT to create one",
    ("ibv_open_xrcd", _errno.EINVAL): "an XRC domain of this inode exists already, which os.O_EXCL does not allow; or "
    "no descriptor was passed, which requires os.O_CREAT; or the flags are invalid",
    ("ibv_open_xrcd", _errno.ETIMEDOUT): "another process holds the locks of AIOVERBS_SOFT_DIRECTORY: check that none "
    "is stopped, and that other users cannot read the directory",
    ("ibv_modify_qp", _errno.ENODEV): "the network interface of its GID is down, or the device is gone",
}

_STATUS_ADVICE = {
    WcStatus.LOC_LEN_ERR: "a message did not fit the buffers posted for it, or exceeds the port's maximum message size",
    WcStatus.LOC_QP_OP_ERR: "the queue pair could not execute this work request: check that its port's link is up, "
    "then the opcode, flags and scatter/gather entries of the request",
    WcStatus.LOC_PROT_ERR: "the lkey, address or length of a local buffer is not in a region with this access",
    WcStatus.WR_FLUSH_ERR: "the queue pair went to the error state before this request was executed",
    WcStatus.MW_BIND_ERR: "the memory window could not be bound: check the access flags and bounds of its region",
    WcStatus.REM_INV_REQ_ERR: "the peer found the request invalid: its receive buffer is too small, or it does not "
    "allow this operation",
    WcStatus.REM_ACCESS_ERR: "the rkey, address, length or access flags do not permit this access to the remote region",
    WcStatus.REM_OP_ERR: "the peer failed to execute the request",
    WcStatus.RETRY_EXC_ERR: "the peer did not answer: check the state and address of its queue pair, and the timeout",
    WcStatus.RNR_RETRY_EXC_ERR: "the peer had no receive posted, and the RNR retries ran out: post more receives "
    "there, or raise rnr_retry",
}

_UNREACHABLE_ADVICE = {
    _errno.EADDRNOTAVAIL: "no port of an RDMA device has the source address",
    _errno.EHOSTUNREACH: "no host answers at that address in the network of an RDMA device",
    _errno.ENETUNREACH: "there is no route to that address",
    _errno.ENODEV: "no RDMA device has a route to that address; none has one to a loopback address: see `rdma link`",
    _errno.ETIMEDOUT: "the peer's connection manager did not answer",
}

# Reject reasons that a program meets: InfiniBand architecture specification, volume 1, section 12.6.7.2.
_REJECT_REASONS = {
    1: "no queue pair",
    3: "no resources",
    4: "the peer gave up, or took too long",
    8: "no program listens at that port",
    10: "the queue pair number is still in use by an earlier connection",
    28: "the listening program rejected it",
}

# By the numbers of `aioverbs._connection.handshake.Reason`.
_HANDSHAKE_REASONS = {
    1: "the two ends have no common protocol version: use compatible releases of aioverbs",
    2: "the two ends have different secrets: pass the same one to both",
    3: "the other end has reached its maximum number of connections",
    4: "a message does not follow the protocol of aioverbs connections",
    5: "the devices of the two ends are incompatible",
    6: "the other end accepts no further connections",
    7: "a device cannot be connected at the moment: try again later",
}

# Packages that contain the libraries and, of libibverbs, the providers.
_PACKAGES = {
    "libibverbs.so.1": "libibverbs1 and ibverbs-providers (Debian, Ubuntu) or libibverbs (Fedora, RHEL)",
    "librdmacm.so.1": "librdmacm1 (Debian, Ubuntu) or librdmacm (Fedora, RHEL)",
}


class VerbsError(OSError):
    """A verb failed. A verb that the device does not support fails with the ``errno`` ``EOPNOTSUPP``.

    :param verb: name of the verb, such as ``"ibv_create_qp"``.
    :param errno: error number that the verb returned or set.
    :param advice: what to do about the failure; None for the usual advice for this verb and number, if any.
    """

    verb: str
    errno: int
    advice: str | None

    def __init__(self, verb: str, errno: int, advice: str | None = None) -> None:
        self.verb = verb
        self.advice = advice if advice is not None else _VERB_ADVICE.get((verb, errno), _ADVICE.get(errno))
        super().__init__(errno, os.strerror(errno))

    def __str__(self) -> str:
        text = f"{self.verb} failed: {_ERRNO_NAMES.get(self.errno, f'error {self.errno}')} ({self.strerror})"
        return f"{text}: {self.advice}" if self.advice else text

    def __reduce__(self) -> tuple[type["VerbsError"], tuple[str, int, str | None]]:
        return type(self), (self.verb, self.errno, self.advice)


class UnreachableError(VerbsError):
    """A peer cannot be reached: there is no route to its address, or no host answers there.

    :param verb: name of the verb, such as ``"rdma_resolve_route"``.
    :param errno: error number that the verb returned, or that its event reported.
    :param advice: what to do about the failure; None for the usual advice for that number.
    """

    def __init__(self, verb: str, errno: int, advice: str | None = None) -> None:
        super().__init__(verb, errno, advice if advice is not None else _UNREACHABLE_ADVICE.get(errno))


class ConnectionRejectedError(ConnectionRefusedError):
    """The peer rejected a connection request of the RDMA connection manager.

    :param reason: reject reason, numbered as in the InfiniBand architecture specification: 8 if no program listens at
        the port, 28 if the listening program rejected the request.
    :param private_data: private data that the program sent with the rejection; over InfiniBand and RoCE always 148
        bytes, padded with zeros.
    """

    def __init__(self, reason: int, private_data: bytes = b"") -> None:
        self.reason = reason
        self.private_data = private_data
        super().__init__(_errno.ECONNREFUSED, str(self))

    def __str__(self) -> str:
        why = _REJECT_REASONS.get(self.reason, "unknown reason")
        return f"the peer refused the connection: {why} (reason {self.reason})"

    def __reduce__(self) -> tuple[type["ConnectionRejectedError"], tuple[int, bytes]]:
        return type(self), (self.reason, self.private_data)


class HandshakeError(ConnectionRefusedError):
    """The handshake of a `Connection` failed: one of the two ends refused the other.

    :param reason: number of an `aioverbs._connection.handshake.Reason`.
    :param text: details of the refusal; may be empty.
    :param by_peer: True if the peer refused this end, False if this end refused the peer.
    :param confidential: True if the peer must not learn `text`, only the reason.
    """

    def __init__(self, reason: int, text: str = "", *, by_peer: bool = False, confidential: bool = False) -> None:
        self.reason = int(reason)
        self.text = text
        self.by_peer = by_peer
        self.confidential = confidential
        super().__init__(_errno.ECONNREFUSED, str(self))

    def __str__(self) -> str:
        refusal = "the peer refused the connection" if self.by_peer else "the peer was refused"
        why = _HANDSHAKE_REASONS.get(self.reason, f"reason {self.reason}")
        return f"{refusal}: {why}{f' ({self.text})' if self.text else ''}"

    def __reduce__(self) -> tuple[type["HandshakeError"], tuple[int, str], dict[str, bool]]:
        return type(self), (self.reason, self.text), {"by_peer": self.by_peer, "confidential": self.confidential}


class GrantRevokedError(PermissionError):
    """The peer has revoked the grant. No request was sent and the connection stays open.

    :param message: description of the grant and its peer.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_errno.EACCES, message)


class WorkCompletionError(Exception):
    """A work request completed with an error.

    :param status: status of the work completion.
    :param opcode: opcode of the work request; None if unknown, as a completion with an error does not carry the opcode.
    :param vendor_err: error code of the device, which only its vendor documents.
    :param qp_num: number of the queue pair that the work request was posted to.
    """

    def __init__(self, status: WcStatus, opcode: WcOpcode | None, vendor_err: int, qp_num: int) -> None:
        super().__init__(status, opcode, vendor_err, qp_num)
        self.status = status
        self.opcode = opcode
        self.vendor_err = vendor_err
        self.qp_num = qp_num

    def __str__(self) -> str:
        what = "a work request" if self.opcode is None else self.opcode.name
        text = f"{what} on queue pair {self.qp_num} ended with {self.status.name} (vendor error {self.vendor_err:#x})"
        advice = _STATUS_ADVICE.get(self.status)
        return f"{text}: {advice}" if advice else text


class BatchError(WorkCompletionError):
    """At least one request of a batch failed.

    ``index`` is the position of the first request that failed. ``status``, ``opcode``, ``vendor_err`` and ``qp_num``
    are those of its completion; if that request was never posted, ``status`` is ``GENERAL_ERR``.

    :param errors: one entry for each request, in posting order: None if the request succeeded, a `WorkCompletionError`
        if it completed with an error, a `VerbsError` if it was never posted. Requests after the first failed one were
        flushed and had no effect. At least one entry is not None.
    """

    def __init__(self, errors: Sequence[WorkCompletionError | VerbsError | None]) -> None:
        self.errors = tuple(errors)
        self.index = next(index for index, error in enumerate(self.errors) if error is not None)
        first = self.errors[self.index]
        if isinstance(first, WorkCompletionError):
            super().__init__(first.status, first.opcode, first.vendor_err, first.qp_num)
        else:
            super().__init__(WcStatus.GENERAL_ERR, None, 0, 0)
        self.args = (self.errors,)

    def __str__(self) -> str:
        others = sum(error is not None for error in self.errors) - 1
        failed = f"request {self.index} of {len(self.errors)} in a batch failed"
        return f"{failed}{f', and {others} others' if others else ''}: {self.errors[self.index]}"


class ClosedResourceError(anyio.ClosedResourceError):
    """The object is not open: it was closed in this process, or was never opened."""


class ForkedProcessError(ClosedResourceError):
    """The object was opened in the parent process, before this process was forked from it.

    :param what: representation of the object.
    """

    def __init__(self, what: str = "this object") -> None:
        super().__init__(what)

    def __str__(self) -> str:
        return f"{self.args[0]} was opened before the fork: open the device again in this process"


class BorrowedObjectClosedError(ClosedResourceError, VerbsError):
    """A pyverbs object was closed before the aioverbs object that was made from it. Nothing was done.

    The aioverbs object can only be closed now. Close aioverbs objects before the pyverbs objects below them.

    :param what: representation of the aioverbs object that was used.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        advice = "close objects of aioverbs before the pyverbs objects that they were made from"
        VerbsError.__init__(self, "any verb", _errno.ENODEV, advice)

    def __str__(self) -> str:
        return f"{self.what} uses a pyverbs object that was closed: {self.advice}"

    def __reduce__(self) -> tuple[type["BorrowedObjectClosedError"], tuple[str]]:  # type: ignore[override]
        return type(self), (self.what,)


class BrokenResourceError(anyio.BrokenResourceError):
    """The object still exists but can no longer be used: its device, peer, owner or queue pair state is lost."""


class DeviceRemovedError(BrokenResourceError):
    """The device was removed from the system: close the device and everything that was made from it."""


class BusyResourceError(anyio.BusyResourceError):
    """The object is in use: an object made from it is still open, or another call is in flight.

    :param message: description of the object and what uses it.
    """

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


class WorkerDiedError(BrokenResourceError):
    """A worker of a pool ended before it returned the result of a call. The call may have been executed in part.

    :param worker: number of the worker in its pool, 0 or higher.
    :param how: how the worker ended, such as its exit code or signal.
    :param replaced: True if the pool starts a new worker with the same number. If False, the pool takes no more calls.
    """

    def __init__(self, worker: int, how: str, replaced: bool) -> None:
        super().__init__(worker, how, replaced)
        self.worker = worker
        self.how = how
        self.replaced = replaced

    def __str__(self) -> str:
        outcome = "a new worker replaces it" if self.replaced else "it is not replaced"
        return f"worker {self.worker} of the pool died: {self.how}; {outcome}"


class QueuePairStateError(RuntimeError):
    """The state of the queue pair does not allow this request, for example before it is connected. Nothing was done."""


class AffinityError(RuntimeError):
    """An object was used from a thread or event loop other than the one that owns the object. Nothing was done."""


class ConcurrentAccessError(RuntimeError):
    """A verb was called while another verb was in flight on the same unlocked object. Nothing was done."""


class TransitionError(ValueError):
    """A queue pair cannot make the requested state transition, at least not with these attributes. Nothing was done.

    ``subject`` is the representation of the queue pair, or ``"a queue pair"`` if unknown.

    :param qp_type: type of the queue pair.
    :param state: current state of the queue pair.
    :param wanted: requested state.
    :param missing: names of attributes that the transition requires and the caller did not pass.
    :param unexpected: names of attributes that the caller passed and the transition does not allow.
    :param wrong: names of attributes with invalid values, each with the reason why the value is invalid.
    :param reachable: states that can be reached from the current one.
    """

    def __init__(
        self,
        qp_type: QpType,
        state: QpState,
        wanted: QpState,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        wrong: Mapping[str, str] | None = None,
        reachable: tuple[QpState, ...] = (),
    ) -> None:
        super().__init__(qp_type, state, wanted, missing, unexpected, wrong, reachable)
        self.qp_type = qp_type
        self.state = state
        self.wanted = wanted
        self.missing = missing
        self.unexpected = unexpected
        self.wrong = dict(wrong or {})
        self.reachable = reachable
        self.subject = "a queue pair"

    def __str__(self) -> str:
        parts = []
        if self.missing:
            hint = (
                " (pass the remote endpoint to set those that describe the peer)"
                if "dest_qp_num" in self.missing
                else ""
            )
            parts.append(f"attributes are missing: {', '.join(self.missing)}{hint}")
        if self.unexpected:
            parts.append(f"not allowed in this transition: {', '.join(self.unexpected)}")
        parts += [f"{name}: {why}" for name, why in self.wrong.items()]
        if not parts:
            states = ", ".join(state.name for state in self.reachable) or "none"
            parts.append(f"there is no such transition; reachable from {self.state.name}: {states}")
        where = f"of type {self.qp_type.name} from {self.state.name} to {self.wanted.name}"
        return f"cannot move {self.subject} {where}: {'; '.join(parts)}"


class DeviceNotFoundError(LookupError):
    """No RDMA or software device has the requested name.

    :param name: requested name.
    :param available: names of the devices that exist.
    """

    def __init__(self, name: str, available: Iterable[str] = ()) -> None:
        self.name = name
        self.available = tuple(available)
        super().__init__(name, self.available)

    def __str__(self) -> str:
        return f"there is no device {self.name!r}; available: {', '.join(self.available) or 'none'}"


class LibraryNotFoundError(OSError):
    """A library that RDMA devices need cannot be loaded, or is too old. The software device needs none.

    :param library: name of the library, ``"libibverbs.so.1"`` or ``"librdmacm.so.1"``.
    :param reason: error message of the dynamic loader; may be empty.
    :param outdated: whether the library was found, but lacks a function.
    """

    def __init__(self, library: str, reason: str = "", outdated: bool = False) -> None:
        self.library = library
        self.reason = reason
        self.outdated = outdated
        super().__init__(_errno.ENOENT, str(self))

    def __str__(self) -> str:
        text = f"{self.library} cannot be loaded: install {_PACKAGES.get(self.library, self.library)}"
        if self.outdated:
            text = f"{self.library} is too old: install rdma-core 44 or newer"
        return f"{text} ({self.reason})" if self.reason else text

    def __reduce__(self) -> tuple[type["LibraryNotFoundError"], tuple[str, str, bool]]:
        return type(self), (self.library, self.reason, self.outdated)


publish(__name__)
