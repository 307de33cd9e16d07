"""What aioverbs raises.

Closed, broken and busy objects raise subclasses of anyio's exceptions, so that code written for anyio's streams
handles them; a verb that fails raises an `OSError`.
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

# Where Linux has two names for one number, the one that the verbs' documents use.
_ERRNO_NAMES = {**_errno.errorcode, _errno.EOPNOTSUPP: "EOPNOTSUPP"}

_ADVICE = {
    _errno.EACCES: "the process may not open the device: see the permissions of /dev/infiniband",
    _errno.EAGAIN: "the device has no more of what was asked for, or nothing is ready yet",
    _errno.EBUSY: "something made from this object is still there: close that first",
    _errno.EINVAL: "an argument does not fit the device's limits, its port or the object's state",
    _errno.EHOSTUNREACH: "no host answers at the peer's address: see the links and the addresses of both ends",
    _errno.EIO: "the device is gone or broken: close it and open it again",
    _errno.ENETDOWN: "the network interface of the port is down: bring it up",
    _errno.ENETUNREACH: "there is no route to the peer's address: see the link, the addresses and the routes here",
    _errno.ENODEV: "the device is gone: open it again when it is back",
    _errno.ENOMEM: "memory, queue entries or locked memory ran out: see `ulimit -l` and the sizes asked for",
    _errno.ENOSPC: "the device has no more of these: see its attributes for the maximum",
    _errno.EOPNOTSUPP: "this device or its driver does not have it",
    _errno.EPERM: "the process may not do this: it needs a privilege or the object's owner",
    _errno.ETIMEDOUT: "no host answered at the peer's address in time: see the links and the addresses of both ends",
}

# Verbs by which the kernel locks memory of the process: EPERM says that it may lock none.
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

# Where a verb's error number means something of its own.
_VERB_ADVICE = {
    **{(verb, _errno.EPERM): "the process may lock no memory: raise `ulimit -l`" for verb in _LOCKING_VERBS},
    ("ibv_open_device", _errno.ENOENT): "its file is not in /dev/infiniband: a container has to be given it",
    ("ibv_open_xrcd", _errno.EAGAIN): "no process has an XRC domain of this inode: os.O_CREAT makes one",
    ("ibv_open_xrcd", _errno.EINVAL): "an XRC domain of this inode is there already, which os.O_EXCL refuses; or no "
    "descriptor was given, which needs os.O_CREAT; or other flags",
    ("ibv_open_xrcd", _errno.ETIMEDOUT): "another process has not given back the locks of AIOVERBS_SOFT_DIRECTORY: see "
    "whether one is stopped, and whether strangers may read the directory",
    ("ibv_modify_qp", _errno.ENODEV): "the network interface of its GID is down, or the device is gone",
}

_STATUS_ADVICE = {
    WcStatus.LOC_LEN_ERR: "a message did not fit the buffers posted for it, or exceeds what the port can carry",
    WcStatus.LOC_QP_OP_ERR: "the queue pair could not carry this work request out: see whether its port's link is up, "
    "then the request's opcode, flags and entries",
    WcStatus.LOC_PROT_ERR: "the lkey, address or length of a local buffer does not lie in a region registered for this",
    WcStatus.WR_FLUSH_ERR: "the queue pair went to the error state before this was carried out",
    WcStatus.MW_BIND_ERR: "the memory window could not be bound: see its region's access flags and bounds",
    WcStatus.REM_INV_REQ_ERR: "the peer found the request invalid: its receive is too small, or it does not allow this",
    WcStatus.REM_ACCESS_ERR: "the rkey, address, length or access flags do not permit this on the remote region",
    WcStatus.REM_OP_ERR: "the peer could not carry the request out",
    WcStatus.RETRY_EXC_ERR: "the peer did not answer: see its queue pair's state and address, and the timeout",
    WcStatus.RNR_RETRY_EXC_ERR: "the peer had no receive posted for as long as it was asked to wait",
}

_UNREACHABLE_ADVICE = {
    _errno.EADDRNOTAVAIL: "no port of an RDMA device has the address that it is to come from",
    _errno.EHOSTUNREACH: "no host answers at that address in the network of an RDMA device",
    _errno.ENETUNREACH: "there is no route to that address",
    _errno.ENODEV: "no RDMA device leads to that address, as none does to a loopback address: see `rdma link`",
    _errno.ETIMEDOUT: "the peer's connection manager did not answer",
}

# Reasons of the InfiniBand architecture, volume 1, chapter 12.6.7.2, that a program meets.
_REJECT_REASONS = {
    1: "no queue pair",
    3: "no resources",
    4: "it gave up, or took too long",
    8: "nobody listens at that port",
    10: "it takes the queue pair for one of an old connection",
    28: "the program there refused it",
}

# As `aioverbs._connection.handshake.Reason` has them.
_HANDSHAKE_REASONS = {
    1: "the two ends speak no common version: use releases of aioverbs that do",
    2: "the two ends need the same secret",
    3: "the other end has as many connections as it may",
    4: "what it said is not what a connection begins with",
    5: "the devices of the two ends do not fit together",
    6: "the other end takes no more connections",
    7: "a device cannot be connected now, which may pass: try again later",
}

_PACKAGES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "pyverbs": "python3-pyverbs"}


class VerbsError(OSError):
    """A verb failed. ``errno`` says how; a verb that the device does not have fails with ``EOPNOTSUPP``.

    :param verb: the verb's name, as ``"ibv_create_qp"``.
    :param errno: the error number that it gave.
    :param advice: what to do about it; without it, what the number usually means.
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
    """There is no way to a peer, or nobody there answers."""

    def __init__(self, verb: str, errno: int, advice: str | None = None) -> None:
        super().__init__(verb, errno, advice if advice is not None else _UNREACHABLE_ADVICE.get(errno))


class ConnectionRejectedError(ConnectionRefusedError):
    """The peer refused a connection.

    :param reason: why, as a number of the InfiniBand architecture: 8 where nobody listens, 28 where a program said so.
    :param private_data: what that program said with it; over InfiniBand and RoCE 148 bytes, filled up with zeros.
    """

    def __init__(self, reason: int, private_data: bytes = b"") -> None:
        self.reason = reason
        self.private_data = private_data
        super().__init__(_errno.ECONNREFUSED, str(self))

    def __str__(self) -> str:
        why = _REJECT_REASONS.get(self.reason, "for a reason that has no name here")
        return f"the peer refused the connection: {why} (reason {self.reason})"

    def __reduce__(self) -> tuple[type["ConnectionRejectedError"], tuple[int, bytes]]:
        return type(self), (self.reason, self.private_data)


class HandshakeError(ConnectionRefusedError):
    """Two ends did not become a connection: one of them refused the other.

    :param reason: why, as `aioverbs._connection.handshake.Reason` has it.
    :param text: what there is to say beyond that.
    :param by_peer: whether it was the other end that refused.
    """

    def __init__(self, reason: int, text: str = "", *, by_peer: bool = False) -> None:
        self.reason = int(reason)
        self.text = text
        self.by_peer = by_peer
        super().__init__(_errno.ECONNREFUSED, str(self))

    def __str__(self) -> str:
        who = "the peer refused the connection" if self.by_peer else "the peer was refused"
        why = _HANDSHAKE_REASONS.get(self.reason, f"reason {self.reason}")
        return f"{who}: {why}{f' ({self.text})' if self.text else ''}"

    def __reduce__(self) -> tuple[type["HandshakeError"], tuple[int, str], dict[str, bool]]:
        return type(self), (self.reason, self.text), {"by_peer": self.by_peer}


class GrantRevokedError(PermissionError):
    """The peer has taken back what it granted. Nothing was asked of it, and the connection goes on."""

    def __init__(self, message: str) -> None:
        super().__init__(_errno.EACCES, message)


class WorkCompletionError(Exception):
    """A work request ended with another status than success.

    :param status: why it ended.
    :param opcode: what it was, where that is known: a completion with an error does not carry it.
    :param vendor_err: the device's own code, for its vendor.
    :param qp_num: the number of the queue pair that it was posted to.
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
    """Requests of a batch failed. Its status and the rest is that of the first one that did.

    :param errors: of each request in its order: None where it succeeded, `WorkCompletionError` where it did not; those
        after the first one were flushed, and did nothing. `VerbsError` where it was never posted.
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
        return f"request {self.index} of {len(self.errors)} in a batch, and {others} others: {self.errors[self.index]}"


class ClosedResourceError(anyio.ClosedResourceError):
    """The object was closed in this process."""


class ForkedProcessError(ClosedResourceError):
    """The object was opened before a fork, in the parent process."""

    def __init__(self, what: str = "this object") -> None:
        super().__init__(what)

    def __str__(self) -> str:
        return f"{self.args[0]} was opened before fork: open the device again in this process"


class BorrowedObjectClosedError(ClosedResourceError, VerbsError):
    """The user closed an object of pyverbs before what aioverbs made from it. Nothing was done.

    Close what aioverbs made first; now it can only be closed.

    :param what: the object of aioverbs that was used.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        advice = "close what aioverbs made from a pyverbs object before that object"
        VerbsError.__init__(self, "any verb", _errno.ENODEV, advice)

    def __str__(self) -> str:
        return f"{self.what} stands on a pyverbs object that was closed: {self.advice}"

    def __reduce__(self) -> tuple[type["BorrowedObjectClosedError"], tuple[str]]:  # type: ignore[override]
        return type(self), (self.what,)


class BrokenResourceError(anyio.BrokenResourceError):
    """The object still exists, but what it stands for is lost: the device, the peer or the queue pair's state."""


class DeviceRemovedError(BrokenResourceError):
    """The device was taken away: close what was made from it."""


class BusyResourceError(anyio.BusyResourceError):
    """The object is in use: something made from it is still open, or another call is under way."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


class WorkerDiedError(BrokenResourceError):
    """A pool's worker died before a call that it had was over: how much of that was done is not known.

    :param worker: its number.
    :param how: how it ended.
    """

    def __init__(self, worker: int, how: str) -> None:
        super().__init__(worker, how)
        self.worker = worker
        self.how = how

    def __str__(self) -> str:
        return f"worker {self.worker} of the pool died: {self.how}"


class QueuePairStateError(RuntimeError):
    """A queue pair is in a state that has no such requests, as one that is not connected yet. Nothing was done."""


class AffinityError(RuntimeError):
    """A bound object was used from another thread or another event loop than its owner. Nothing was done."""


class ConcurrentAccessError(RuntimeError):
    """A verb was called while another one was under way on the same unlocked object. Nothing was done."""


class TransitionError(ValueError):
    """A queue pair cannot go from its state to that one, or not with those attributes. Nothing was done.

    :param qp_type: its type.
    :param state: the state that it is in.
    :param wanted: the one that it was to go to.
    :param missing: the attributes that must be given.
    :param unexpected: those that were given and are none of this transition.
    :param wrong: those that have a value that cannot be, and why.
    :param reachable: the states that it can go to from the one that it is in.

    ``subject`` is the queue pair as text, where it is known.
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
            brought = " (a remote endpoint brings what is of the peer)" if "dest_qp_num" in self.missing else ""
            parts.append(f"missing: {', '.join(self.missing)}{brought}")
        if self.unexpected:
            parts.append(f"none of this transition: {', '.join(self.unexpected)}")
        parts += [f"{name}: {why}" for name, why in self.wrong.items()]
        if not parts:
            ways = ", ".join(state.name for state in self.reachable) or "none"
            parts.append(f"there is no such transition, from {self.state.name} are those to {ways}")
        where = f"of type {self.qp_type.name} from {self.state.name} to {self.wanted.name}"
        return f"{self.subject} {where}: {'; '.join(parts)}"


class DeviceNotFoundError(LookupError):
    """There is no such device.

    :param name: the device that was asked for.
    :param available: the names of those that are there.
    """

    def __init__(self, name: str, available: Iterable[str] = ()) -> None:
        self.name = name
        self.available = tuple(available)
        super().__init__(name, self.available)

    def __str__(self) -> str:
        return f"there is no device {self.name!r}; here are: {', '.join(self.available) or 'none'}"


class LibraryNotFoundError(OSError):
    """A library that RDMA devices need cannot be loaded. The software device needs none.

    :param library: its name, as ``"libibverbs.so.1"`` or ``"pyverbs"``.
    :param reason: what the loader said.
    """

    def __init__(self, library: str, reason: str = "") -> None:
        self.library = library
        self.reason = reason
        self.package = _PACKAGES.get(library, library)
        super().__init__(_errno.ENOENT, str(self))

    def __str__(self) -> str:
        text = f"{self.library} cannot be loaded: on Debian and Ubuntu, install the package {self.package}"
        return f"{text} ({self.reason})" if self.reason else text

    def __reduce__(self) -> tuple[type["LibraryNotFoundError"], tuple[str, str]]:
        return type(self), (self.library, self.reason)


publish(__name__)
