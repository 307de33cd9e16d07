"""Instances of one protection domain, and how they know of each other.

Contexts of the software device share by the device itself: inside of one process by numbers, between processes by a
file that both have mapped. For RDMA devices the verbs are ``ibv_import_device`` and ``ibv_import_pd``: a context over
the descriptor of another one knows its objects by their numbers. "This is the responsibility of the application to
coordinate between all ibv_context(s) that use this PD", and this module is where that is done.
"""

import contextlib
import errno
import fcntl
import hmac
import os
import secrets
import threading
import weakref
from collections.abc import Iterator

from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs._sharing.messages import ID_BITS, KEY_BITS, device_of, share_id
from aioverbs.errors import VerbsError

__all__ = [
    "ImportedShare",
    "Share",
    "SoftShare",
    "check_device",
    "check_share",
    "import_context",
    "open_instance",
    "share",
    "share_error",
    "wrong_device_error",
]

_ADVICE = {
    errno.ENOMEM: "there is no memory, or no address space for as much as the machine has: see `ulimit -v`",
    errno.EMFILE: "this process has too many files open, or 240 processes have the domain already",
    errno.EACCES: "the share key is another one",
    errno.ENOENT: "nothing is shared by that id any more: its last instance was closed, or it never was",
}


def share_error(error: int, advice: str | None = None) -> VerbsError:
    """Why there is no instance."""
    return VerbsError("ibv_share_pd", error, advice or _ADVICE.get(error))


def wrong_device_error(shared_id: int, name: str) -> VerbsError:
    """What is said where it is of another device than this one.

    :param name: of this one, as a peer says that nobody has proved to be one: in printable characters here.
    """
    name = "".join(each if each.isprintable() else "?" for each in name)
    advice = f"it is shared of the device with GUID {device_of(shared_id)}, and {name} is another one: a protection "
    return share_error(errno.EXDEV, f"{advice}domain is one device's; import_device() takes that of another process")


def check_share(shared_id: int, share_key: int) -> None:
    """See that an id and a key can be ones.

    :raises TypeError: one is no integer; a float would be truncated, to what others may guess.
    :raises ValueError: one is negative, or has more bits.
    """
    for name, value, bits in (("shared_id", shared_id, ID_BITS), ("share_key", share_key, KEY_BITS)):
        if not isinstance(value, int):  # which value is not told: a key is a secret
            raise TypeError(f"{name} must be an integer of {bits} bits, not of type {type(value).__name__}")
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} has {bits} bits")


def id_of(context: handles.Context, number: int) -> int:
    """The id of what has a number on a context's device."""
    return share_id(context.query_device().node_guid, context.name, number)


def import_context(command: int, name: str) -> handles.Context:
    """A context over the descriptor of another one's commands, which stays the caller's.

    :param name: of its device, for the errors.
    """
    try:
        return handles.Context.import_device(command)
    except VerbsError as error:
        advice = {
            errno.EOPNOTSUPP: f"the provider of {name} does not have it: what is made on {name} stays in one context",
            errno.ENODEV: f"{name} is not here: it is another machine's, or hidden from this process",
        }.get(error.errno)
        raise VerbsError(error.verb, error.errno, advice) from None


def _check_import(context: handles.Context) -> None:
    """See that other processes can have contexts over this one's descriptor: by trying, as nothing else tells.

    :raises VerbsError: they cannot, with EOPNOTSUPP where the provider does not have it.
    """
    command = context.dup_cmd_fd()
    try:
        import_context(command, context.name).destroy()
    finally:
        os.close(command)


def check_device(context: handles.Context, shared_id: int) -> int:
    """The number of an id, which is to be of this device.

    :raises VerbsError: with EXDEV where it is of another one.
    """
    number = shared_id & 0xFFFFFFFF
    if shared_id != id_of(context, number):
        raise wrong_device_error(shared_id, context.name)
    return number


class _InstanceLock:
    """An instance's part in a protection domain: the last one that is left deallocates it, the others unimport it.

    All of them lock a file that has no name, each by an open file description of its own. Who leaves and gets the lock
    for itself alone is the last, and leaves a byte in the file. The lock of a process that dies goes with it.
    """

    def __init__(self, file: int) -> None:
        try:
            self._file = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except BlockingIOError:  # else it would wait for that
            raise share_error(errno.EPROTO, "another process has a lease (F_SETLEASE) on the file") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            has_ended = os.fstat(self._file).st_size > 0
        except BlockingIOError:  # the last is just leaving
            has_ended = True
        except BaseException:
            os.close(self._file)
            raise
        if has_ended:
            os.close(self._file)
            raise share_error(errno.ENOENT)

    def is_last(self) -> bool:
        """Whether no other instance is left; nobody joins any more then. Otherwise it is none any more itself."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the shared lock was given up for the try
            return False
        return True

    def leave(self, last: bool, failed: bool) -> None:
        """After what `is_last` demands; where that failed, it is an instance again."""
        if failed:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            return
        if last:
            os.write(self._file, b"\0")
        self.close()

    def close(self) -> None:
        """Leave without a word."""
        os.close(self._file)


_shares: weakref.WeakKeyDictionary[handles.Context, "dict[int, Share]"] = weakref.WeakKeyDictionary()
_sharing = threading.Lock()  # a domain is shared once


def _renew_lock() -> None:
    global _sharing
    _sharing = threading.Lock()  # who held it is not here


os.register_at_fork(after_in_child=_renew_lock)


class Share:
    """A protection domain of an RDMA device as its contexts know it that may open instances.

    :param number: by which it is known, with the device's GUID.
    :param pd_handle: its number in the kernel.
    :param file: the descriptor of the file that its instances lock; this closes it.
    """

    def __init__(self, number: int, share_key: int, pd_handle: int, file: int) -> None:
        self.number = number
        self.share_key = share_key
        self.pd_handle = pd_handle
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[int, Share] = {}

    def register(self, context: handles.Context) -> None:
        """Let a context open instances, until this is destroyed."""
        self._known = _shares.setdefault(context, {})
        self._known[self.number] = self

    def join(self) -> _InstanceLock:
        """The part of a new instance.

        :raises VerbsError: with ENOENT where it is too late.
        """
        with self._opened() as file:
            return _InstanceLock(file)

    def dup_file(self) -> int:
        """A duplicate of its file's descriptor, the caller's to close; nothing is locked by it.

        :raises VerbsError: with ENOENT where it is too late.
        """
        with self._opened() as file:
            return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0)

    def attach(self, context: handles.Context, descriptors: list[int]) -> None:
        """Add what another process needs to the list, whose owner closes it.

        :raises VerbsError: with ENOENT where it is too late.
        """
        descriptors.append(context.dup_cmd_fd())
        descriptors.append(self.dup_file())

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        with self._lock:
            if self._file < 0:
                raise share_error(errno.ENOENT)
            yield self._file

    def destroy(self) -> None:
        """Forget it; instances stay."""
        with self._lock:
            file, self._file = self._file, -1
        if file >= 0:
            self._known.pop(self.number, None)
            os.close(file)


class SoftShare:
    """A protection domain of a software device that other processes may open instances of.

    :param number: by which it is known, with the device's GUID.
    """

    pd_handle = 0

    def __init__(self, number: int, share_key: int, pd: handles.ProtectionDomain) -> None:
        self.number = number
        self.share_key = share_key
        self._pd: handles.ProtectionDomain | None = pd

    def attach(self, context: handles.Context, descriptors: list[int]) -> None:
        """Add what another process needs to the list, whose owner closes it.

        :raises VerbsError: with ENOENT where it is too late, with EMFILE or ENOMEM.
        """
        pd = self._pd
        if pd is None:
            raise share_error(errno.ENOENT)
        descriptors.append(software.export(pd))

    def destroy(self) -> None:
        """Forget it; instances stay."""
        self._pd = None


_imported: weakref.WeakKeyDictionary[handles.Context, "dict[int, ImportedShare]"] = weakref.WeakKeyDictionary()


class ImportedShare:
    """A protection domain of another process' software device.

    :param file: the descriptor of the file that it is in; this closes it.
    """

    def __init__(self, shared_id: int, share_key: int, file: int) -> None:
        self._id = shared_id
        self._share_key = share_key
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[int, ImportedShare] = {}

    def register(self, context: handles.Context) -> None:
        """Let a context open instances, until this is destroyed."""
        self._known = _imported.setdefault(context, {})
        self._known[self._id] = self

    def open(self, context: handles.Context, share_key: int) -> handles.ProtectionDomain:
        """An instance of it in this process.

        :raises VerbsError: with ENOENT where its last instance went, with EACCES where the key is another one.
        """
        _check_key(self._share_key, share_key)
        with self._lock:
            if self._file < 0:
                raise share_error(errno.ENOENT)
            try:
                return software.import_shared(context, self._file, share_key)
            except VerbsError as error:
                raise share_error(error.errno) from None

    def destroy(self) -> None:
        """Forget it; instances stay."""
        with self._lock:
            file, self._file = self._file, -1
        if file >= 0:
            self._known.pop(self._id, None)
            os.close(file)


def _check_key(expected: int, key: int) -> None:
    if not hmac.compare_digest(*(each.to_bytes(KEY_BITS // 8) for each in (expected, key))):
        raise share_error(errno.EACCES)


def share(pd: handles.ProtectionDomain, share_key: int) -> tuple[int, Share | SoftShare]:
    """Let other contexts have instances of a protection domain: the id, and what is to be destroyed before the domain.

    :raises VerbsError: with EEXIST where it is shared already, with EOPNOTSUPP where the provider cannot.
    """
    context = pd.context
    if context.software:
        number = software.share(pd, share_key)
        return id_of(context, number), SoftShare(number, share_key, pd)
    _check_import(context)
    number = secrets.randbelow((1 << 32) - 1) + 1
    shared_id = id_of(context, number)
    with _sharing:
        if pd.lease is not None:
            raise VerbsError("ibv_alloc_shpd", errno.EEXIST)
        shared = Share(number, share_key, pd.handle, os.memfd_create("aioverbs-pd", os.MFD_CLOEXEC))
        try:
            pd.lease = shared.join()
        except BaseException:
            shared.destroy()
            raise
    shared.register(context)
    return shared_id, shared


def open_instance(context: handles.Context, shared_id: int, share_key: int) -> handles.ProtectionDomain:
    """A further instance of what was shared: see `Device.shared_protection_domain`."""
    imported = _imported.get(context, {}).get(shared_id)
    if imported is not None:
        return imported.open(context, share_key)
    number = check_device(context, shared_id)
    if context.software:
        try:
            return software.open_shared(context, number, share_key)
        except VerbsError as error:
            raise share_error(error.errno) from None
    known = _shares.get(context, {}).get(number)
    if known is None:
        _check_import(context)
        advice = "this context does not have it; import_device() makes one that does, from its process or in this one"
        raise share_error(errno.ENOENT, advice)
    _check_key(known.share_key, share_key)
    lease = known.join()
    try:
        return handles.ProtectionDomain.import_pd(context, known.pd_handle, lease)
    except BaseException:
        lease.close()
        raise
