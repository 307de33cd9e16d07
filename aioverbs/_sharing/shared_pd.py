"""Instances of one protection domain in several contexts and processes, and their coordination.

Contexts of the software device share through the device itself: in one process by numbers, between processes by a file
that both map. RDMA devices have the verbs ``ibv_import_device`` and ``ibv_import_pd``: a context that was imported by
the descriptor of another one can import its objects by their handles. The manual page says: "This is the responsibility
of the application to coordinate between all ibv_context(s) that use this PD". This module does that.
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
    errno.ENOMEM: "memory ran out, or the address space is too small for the machine's memory: check `ulimit -v`",
    errno.EMFILE: "this process has too many files open, or 240 processes have the domain already",
    errno.EACCES: "the share key is wrong",
    errno.ENOENT: "nothing is shared by that id: its last instance was closed, or the id is wrong",
}


def share_error(error: int, advice: str | None = None) -> VerbsError:
    """Return the error of a failed `share` or `open_instance`; without advice, with the usual one for its number.

    :param error: error number.
    :param advice: what to do about the failure; None: the usual advice.
    """
    return VerbsError("ibv_share_pd", error, advice or _ADVICE.get(error))


def wrong_device_error(shared_id: int, name: str) -> VerbsError:
    """Return the error for a shared ID that belongs to another device.

    :param shared_id: ID of the protection domain.
    :param name: name of this device, or an unverified one that a peer sent; unprintable characters are replaced.
    """
    name = "".join(each if each.isprintable() else "?" for each in name)
    advice = f"the id belongs to the device with GUID {device_of(shared_id)}, and {name} is another one: "
    return share_error(errno.EXDEV, f"{advice}use import_device() for a device of another process")


def check_share(shared_id: int, share_key: int) -> None:
    """Check the types and ranges of an ID and a key.

    :raises TypeError: one of them is not an integer. A float would be truncated, which makes a key easier to guess.
    :raises ValueError: one of them is negative, or has too many bits.
    """
    for name, value, bits in (("shared_id", shared_id, ID_BITS), ("share_key", share_key, KEY_BITS)):
        if not isinstance(value, int):  # no value in the message, because a key is a secret
            raise TypeError(f"{name} must be an integer of {bits} bits, not of type {type(value).__name__}")
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} must fit in {bits} bits")


def id_of(context: handles.Context, number: int) -> int:
    """Return the shared ID for a number on the device of a context.

    :raises VerbsError: the attributes of the device cannot be read.
    :raises ClosedResourceError: the context is closed.
    """
    return share_id(context.query_device().node_guid, context.name, number)


def import_context(command: int, name: str) -> handles.Context:
    """Import a context by the descriptor for the commands of another one: ``ibv_import_device``.

    :param command: descriptor, which the caller still owns.
    :param name: name of the device, for error messages.
    :returns: handle of the context, which the caller destroys.
    :raises VerbsError: EOPNOTSUPP: the provider cannot import contexts; ENODEV: the device does not exist here.
    :raises LibraryNotFoundError: libibverbs cannot be loaded.
    """
    try:
        return handles.Context.import_device(command)
    except VerbsError as error:
        advice = {
            errno.EOPNOTSUPP: f"the provider of {name} does not support it: objects of {name} stay in one context",
            errno.ENODEV: f"{name} does not exist here: it belongs to another machine, or is hidden from this process",
        }.get(error.errno)
        raise VerbsError(error.verb, error.errno, advice) from None


def _check_import(context: handles.Context) -> None:
    """Check that other processes can import a context. Importing it is the only way to find out.

    :raises VerbsError: the context cannot be imported; EOPNOTSUPP: the provider does not support that.
    """
    command = context.dup_cmd_fd()
    try:
        import_context(command, context.name).destroy()
    finally:
        os.close(command)


def check_device(context: handles.Context, shared_id: int) -> int:
    """Return the number in a shared ID after checking that the ID belongs to the device of a context.

    :returns: lower 32 bits of the ID.
    :raises VerbsError: EXDEV: the ID belongs to another device.
    :raises ClosedResourceError: the context is closed.
    """
    number = shared_id & 0xFFFFFFFF
    if shared_id != id_of(context, number):
        raise wrong_device_error(shared_id, context.name)
    return number


class _InstanceLock:
    """Lock that counts one instance of a protection domain: the last one deallocates, all others unimport.

    All instances lock one nameless file, each through an open file description of its own (``flock``):

    - Every open instance holds a shared lock.
    - An instance that leaves tries to make its lock exclusive. If that succeeds, no other instance is left: the
      instance deallocates the protection domain, and writes one byte to the file, which marks it as ended.
    - A new instance that cannot get the shared lock, or finds the byte, fails with ENOENT.

    The kernel releases the lock of a process that dies.

    :param file: descriptor of the file; it is opened again and not closed.
    :raises VerbsError: ENOENT: the last instance was closed; EPROTO: another process has a lease on the file.
    """

    def __init__(self, file: int) -> None:
        try:
            self._file = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except BlockingIOError:  # without O_NONBLOCK, open() would wait for the lease
            raise share_error(errno.EPROTO, "another process has a lease (F_SETLEASE) on the file") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            has_ended = os.fstat(self._file).st_size > 0
        except BlockingIOError:  # the last instance is leaving
            has_ended = True
        except BaseException:
            os.close(self._file)
            raise
        if has_ended:
            os.close(self._file)
            raise share_error(errno.ENOENT)

    def is_last(self) -> bool:
        """Return whether no other instance is left. If so, no new one can join; if not, this instance has left."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the kernel released the shared lock before the attempt
            return False
        return True

    def leave(self, last: bool, failed: bool) -> None:
        """End the instance after its verb was called.

        :param last: result of `is_last`.
        :param failed: True if the verb failed; then this is an instance again.
        """
        if failed:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            return
        if last:
            os.write(self._file, b"\0")
        self.close()

    def close(self) -> None:
        """Release the lock without a mark in the file."""
        os.close(self._file)


_shares: weakref.WeakKeyDictionary[handles.Context, "dict[int, Share]"] = weakref.WeakKeyDictionary()
_sharing = threading.Lock()  # a protection domain is shared at most once


def _renew_lock() -> None:
    """Replace the lock in a forked child."""
    global _sharing
    _sharing = threading.Lock()  # a thread that held the old lock does not exist in the child


os.register_at_fork(after_in_child=_renew_lock)


class Share:
    """Shared protection domain of an RDMA device.

    :param number: number that, with the GUID of the device, identifies the protection domain.
    :param share_key: secret of the protection domain, 64 bits.
    :param pd_handle: handle of the protection domain in the kernel.
    :param file: descriptor of the file that instances lock; `destroy` closes it.
    """

    def __init__(self, number: int, share_key: int, pd_handle: int, file: int) -> None:
        self.number = number
        self.share_key = share_key
        self.pd_handle = pd_handle
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[int, Share] = {}

    def register(self, context: handles.Context) -> None:
        """Let a context open instances, until `destroy` is called."""
        self._known = _shares.setdefault(context, {})
        self._known[self.number] = self

    def join(self) -> _InstanceLock:
        """Return the lock of a new instance, which the caller closes, or passes to the instance.

        :raises VerbsError: ENOENT: the last instance was closed, or the share was destroyed; EPROTO: another process
            has a lease on the file.
        """
        with self._opened() as file:
            return _InstanceLock(file)

    def dup_file(self) -> int:
        """Return a duplicate of the file's descriptor, which the caller closes. The duplicate holds no lock.

        :raises VerbsError: ENOENT: the share was destroyed.
        """
        with self._opened() as file:
            return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0)

    def attach(self, context: handles.Context, descriptors: list[int]) -> None:
        """Append the file descriptors that another process needs. The caller closes them.

        :param context: context of the domain's device.
        :param descriptors: list that receives the descriptors: of the context's command file and of the share's file.
        :raises VerbsError: ENOENT: the share was destroyed. The list may have the first descriptor then.
        :raises ClosedResourceError: the context is closed.
        """
        descriptors.append(context.dup_cmd_fd())
        descriptors.append(self.dup_file())

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Provide the descriptor of the file for a block, and keep it open meanwhile.

        :raises VerbsError: ENOENT: the share was destroyed.
        """
        with self._lock:
            if self._file < 0:
                raise share_error(errno.ENOENT)
            yield self._file

    def destroy(self) -> None:
        """Let no further instances be opened. Open instances stay."""
        with self._lock:
            file, self._file = self._file, -1
        if file >= 0:
            self._known.pop(self.number, None)
            os.close(file)


class SoftShare:
    """Shared protection domain of a software device.

    :param number: number that, with the GUID of the device, identifies the protection domain.
    :param share_key: secret of the protection domain, 64 bits.
    :param pd: handle of the protection domain.
    """

    pd_handle = 0

    def __init__(self, number: int, share_key: int, pd: handles.ProtectionDomain) -> None:
        self.number = number
        self.share_key = share_key
        self._pd: handles.ProtectionDomain | None = pd

    def attach(self, context: handles.Context, descriptors: list[int]) -> None:
        """Append the descriptor that another process needs to a list. The caller closes it.

        :param context: ignored.
        :param descriptors: list that receives the descriptor of the file that contains the protection domain.
        :raises VerbsError: ENOENT: the share was destroyed; EMFILE or ENOMEM: no descriptor or memory is left.
        """
        pd = self._pd
        if pd is None:
            raise share_error(errno.ENOENT)
        descriptors.append(software.export(pd))

    def destroy(self) -> None:
        """Let no further instances be opened. Open instances stay."""
        self._pd = None


_imported: weakref.WeakKeyDictionary[handles.Context, "dict[int, ImportedShare]"] = weakref.WeakKeyDictionary()


class ImportedShare:
    """Shared protection domain of a software device in another process.

    :param shared_id: ID of the protection domain.
    :param share_key: secret of the protection domain, 64 bits.
    :param file: descriptor of the file that contains the protection domain; `destroy` closes it.
    """

    def __init__(self, shared_id: int, share_key: int, file: int) -> None:
        self._id = shared_id
        self._share_key = share_key
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[int, ImportedShare] = {}

    def register(self, context: handles.Context) -> None:
        """Let a context open instances, until `destroy` is called."""
        self._known = _imported.setdefault(context, {})
        self._known[self._id] = self

    def open(self, context: handles.Context, share_key: int) -> handles.ProtectionDomain:
        """Open an instance in this process.

        :param context: context that `register` was called with.
        :param share_key: secret of the protection domain, 64 bits.
        :returns: handle of the instance, which the caller destroys.
        :raises VerbsError: ENOENT: the last instance was closed, or `destroy` was called; EACCES: the key is wrong.
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
        """Let no further instances be opened. Open instances stay."""
        with self._lock:
            file, self._file = self._file, -1
        if file >= 0:
            self._known.pop(self._id, None)
            os.close(file)


def _check_key(expected: int, key: int) -> None:
    """Check a share key, in constant time.

    :raises VerbsError: EACCES: the key is wrong.
    """
    if not hmac.compare_digest(*(each.to_bytes(KEY_BITS // 8) for each in (expected, key))):
        raise share_error(errno.EACCES)


def share(pd: handles.ProtectionDomain, share_key: int) -> tuple[int, Share | SoftShare]:
    """Let other contexts open instances of a protection domain.

    :param pd: handle of the protection domain.
    :param share_key: secret that other contexts have to know, 64 bits.
    :returns: the shared ID, and the share, which has to be destroyed before the protection domain.
    :raises VerbsError: EEXIST: the protection domain is shared already; EOPNOTSUPP: the provider does not support it.
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
    """Open a further instance of a shared protection domain: see `Device.shared_protection_domain`.

    :param context: context of the domain's device.
    :param shared_id: ID of the protection domain, 96 bits.
    :param share_key: secret of the protection domain, 64 bits.
    :returns: handle of the instance, which the caller destroys.
    :raises VerbsError: ENOENT: nothing is shared by that ID in this context; EACCES: the key is wrong; EXDEV: the ID
        belongs to another device; EOPNOTSUPP: the provider does not support it.
    """
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
        advice = "this context did not import the domain: make one that did by import_device()"
        raise share_error(errno.ENOENT, advice)
    _check_key(known.share_key, share_key)
    lease = known.join()
    try:
        return handles.ProtectionDomain.import_pd(context, known.pd_handle, lease)
    except BaseException:
        lease.close()
        raise
