"""Instances of one protection domain in several contexts and processes, and their coordination.

Contexts of the software device share through the device itself: in one process using numbers, between processes using a
file that both map. RDMA devices have the verbs ``ibv_import_device`` and ``ibv_import_pd``: a context that was imported
using the descriptor of another context can import that context's objects using their handles. The manual page says:
"This is the responsibility of the application to coordinate between all ibv_context(s) that use this PD". This module
does that.
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
from aioverbs._lifecycle import forks
from aioverbs._sharing.messages import ID_BITS, KEY_BITS, device_of, share_id
from aioverbs.errors import VerbsError

__all__ = [
    "KEY_BITS",
    "ImportedShare",
    "Share",
    "SoftShare",
    "check_device",
    "check_share",
    "import_context",
    "is_lock_file",
    "open_instance",
    "share",
    "share_error",
    "wrong_device_error",
]

_ADVICE = {
    errno.ENOMEM: "memory ran out, or the address space is too small for the machine's memory: check `ulimit -v`",
    errno.EMFILE: "this process has too many files open, or 240 processes already have the domain",
    errno.EACCES: "the share key is wrong",
    errno.ENOENT: "nothing is shared under that id: its last instance was closed, or the id is wrong",
}

_ADVICE_SHARED = "the domain is an instance of one that was shared elsewhere: share it again there"


def share_error(error: int, advice: str | None = None) -> VerbsError:
    """Return the `VerbsError` for a failed `share` or `open_instance`.

    :param error: error number.
    :param advice: what to do about the failure; None for the usual advice for this error number.
    """
    return VerbsError("ibv_share_pd", error, advice or _ADVICE.get(error))


def wrong_device_error(shared_id: int, name: str) -> VerbsError:
    """Return the `VerbsError`, with EXDEV, for a shared ID that belongs to another device.

    :param shared_id: ID of the protection domain.
    :param name: name of this device, or an unverified name that a peer sent; unprintable characters are replaced.
    """
    name = "".join(each if each.isprintable() else "?" for each in name)
    advice = f"the id belongs to the device with GUID {device_of(shared_id)}, and {name} is another one: "
    return share_error(errno.EXDEV, f"{advice}use import_device() for a device of another process")


def check_share(shared_id: int, share_key: int) -> None:
    """Check the types and ranges of a shared ID and a share key.

    :raises TypeError: one of them is not an integer. A float would be truncated, which makes a key easier to guess.
    :raises ValueError: one of them is negative, or has too many bits.
    """
    for name, value, bits in (("shared_id", shared_id, ID_BITS), ("share_key", share_key, KEY_BITS)):
        if not isinstance(value, int):  # no value in the message, because a key is a secret
            raise TypeError(f"{name} must be an integer of {bits} bits, not of type {type(value).__name__}")
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} must fit in {bits} bits")


def id_of(context: handles.Context, number: int) -> int:
    """Return the shared ID, an int, of the protection domain that has the given number on the device of a context.

    :raises VerbsError: the attributes of the device cannot be read.
    :raises ClosedResourceError: the context is closed.
    """
    return share_id(context.query_device().node_guid, context.name, number)


def import_context(command: int, name: str) -> handles.Context:
    """Import a context, using the descriptor for the commands of another context (``ibv_import_device``).

    :param command: the descriptor, which the caller still owns.
    :param name: name of the device, for error messages.
    :returns: new handle of the imported context, which the caller destroys.
    :raises VerbsError: with EOPNOTSUPP if the provider cannot import contexts; with ENODEV if the device does not exist
        here; with EINVAL if `command` is not a descriptor of an RDMA device.
    :raises OSError: `command` is not an open descriptor, or no descriptor is left.
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
    """Check that other processes can import a context, by importing it: there is no other way to find out.

    :raises VerbsError: the context cannot be imported; with EOPNOTSUPP if the provider does not support that.
    :raises OSError: no descriptor is left.
    :raises LibraryNotFoundError: libibverbs cannot be loaded.
    :raises ClosedResourceError: the context is closed.
    """
    command = context.dup_cmd_fd()
    try:
        import_context(command, context.name).destroy()
    finally:
        os.close(command)


def check_device(context: handles.Context, shared_id: int) -> int:
    """Check that a shared ID belongs to the device of a context, and return the number in it.

    :returns: the number of the protection domain, which is the lower 32 bits of the ID.
    :raises VerbsError: with EXDEV if the ID belongs to another device; or the attributes of the device cannot be read.
    :raises ClosedResourceError: the context is closed.
    """
    number = shared_id & 0xFFFFFFFF
    if shared_id != id_of(context, number):
        raise wrong_device_error(shared_id, context.name)
    return number


def _make_lock_file() -> int:
    """Return the descriptor of a new, empty file for `_InstanceLock`, to which no seals can be added.

    :raises OSError: no descriptor is left.
    """
    file = os.memfd_create("aioverbs-pd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    return file


def is_lock_file(descriptor: int) -> bool:
    """Return whether a descriptor that a peer sent is a memory file whose size no seal fixes, now or later.

    `os.fstat` is not used, because it would wait for the server of a FUSE file.
    """
    try:
        seals: int = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return seals & (fcntl.F_SEAL_SEAL | fcntl.F_SEAL_GROW) == fcntl.F_SEAL_SEAL


class _InstanceLock:
    """Lock that stands for one instance of a protection domain. It tells the last instance, which deallocates the
    domain, from the others, which only unimport it.

    All instances lock the same file, which has no name, each through an open file description of its own (``flock``):

    - Every open instance holds a shared lock.
    - An instance that leaves tries to make its lock exclusive. If that succeeds, no other instance is left: the
      instance deallocates the protection domain and makes the empty file one byte long, which marks the domain as
      ended.
    - A new instance that cannot get the shared lock, or that finds the byte, fails with ENOENT.

    The kernel releases the locks of a process that dies. Forked children replace their copies of the descriptor, which
    would otherwise keep the lock.

    :param file: descriptor of the file; the file is opened again, and the descriptor is not closed.
    :raises VerbsError: with ENOENT if the last instance was closed; with EPROTO if another process has a lease on the
        file.
    :raises OSError: with EMFILE if no descriptor is left.
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
        forks.keep_from_children(self)

    def fileno(self) -> int:
        """Return the descriptor that holds the lock; -1 after `close`."""
        return self._file

    def is_last(self) -> bool:
        """Return whether no other instance of the domain is left. This is called when this instance is destroyed.

        If the result is True, no new instance can be opened. If it is False, this instance no longer counts.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the kernel released the shared lock before the attempt
            return False
        return True

    def leave(self, last: bool, failed: bool) -> None:
        """End the instance, after the verb that deallocates or unimports the domain has been called.

        This raises nothing and does not wait, because the caller can no longer undo the verb.

        :param last: result of `is_last`. If True, the domain is marked as ended.
        :param failed: True if the verb failed; the instance then does not end, but counts again, unless another
            instance has just found itself to be the last one.
        """
        if failed:
            with contextlib.suppress(OSError):  # the kernel releases the exclusive lock before the attempt
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        if last:
            with contextlib.suppress(OSError):  # the kernel has no memory: the verb that imports the domain fails then
                os.ftruncate(self._file, 1)  # unlike a write, this needs no page
        self.close()

    def close(self) -> None:
        """Release the lock, without marking the domain as ended in the file. Call this only once."""
        file, self._file = self._file, -1
        os.close(file)


_shares: weakref.WeakKeyDictionary[handles.Context, "dict[int, Share]"] = weakref.WeakKeyDictionary()


class Share:
    """Shared protection domain of an RDMA device.

    :param number: number that identifies the protection domain, together with the GUID of the device.
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
        """Let a context open instances of the protection domain, until `destroy` is called."""
        self._known = _shares.setdefault(context, {})
        self._known[self.number] = self

    def join(self) -> _InstanceLock:
        """Return an `_InstanceLock` for a new instance. The caller closes it, or passes it to the instance.

        :raises VerbsError: with ENOENT if the last instance was closed, or if the share was destroyed; with EPROTO if
            another process has a lease on the file.
        :raises OSError: with EMFILE if no descriptor is left.
        """
        with self._opened() as file:
            return _InstanceLock(file)

    def dup_file(self) -> int:
        """Return a duplicate of the descriptor of the file that instances lock. The caller closes the duplicate, which
        holds no lock.

        :raises VerbsError: with ENOENT if the share was destroyed.
        :raises OSError: with EMFILE if no descriptor is left.
        """
        with self._opened() as file:
            return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0)

    def attach(self, context: handles.Context, descriptors: list[int]) -> None:
        """Append to `descriptors` the file descriptors that another process needs. The caller closes them, even if this
        raises.

        :param context: context of the domain's device.
        :param descriptors: list to which two new descriptors are appended: one for the context's commands, then one for
            the file that instances lock. If this raises, the first of them may already be in the list.
        :raises VerbsError: with ENOENT if the share was destroyed.
        :raises OSError: with EMFILE if no descriptor is left.
        :raises ClosedResourceError: the context is closed.
        """
        descriptors.append(context.dup_cmd_fd())
        descriptors.append(self.dup_file())

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Provide a ``with`` block with the descriptor of the file that instances lock, and keep the descriptor open
        until the end of the block.

        :raises VerbsError: with ENOENT if the share was destroyed.
        """
        with self._lock:
            if self._file < 0:
                raise share_error(errno.ENOENT)
            yield self._file

    def destroy(self) -> None:
        """Prevent further instances from being opened. Instances that are open stay open. Further calls do nothing."""
        with self._lock:
            file, self._file = self._file, -1
        if file >= 0:
            self._known.pop(self.number, None)
            os.close(file)


class SoftShare:
    """Shared protection domain of a software device.

    :param number: number that identifies the protection domain, together with the GUID of the device.
    :param share_key: secret of the protection domain, 64 bits.
    :param pd: handle of the protection domain.
    """

    pd_handle = 0

    def __init__(self, number: int, share_key: int, pd: handles.ProtectionDomain) -> None:
        self.number = number
        self.share_key = share_key
        self._pd: handles.ProtectionDomain | None = pd

    def attach(self, context: handles.Context, descriptors: list[int]) -> None:
        """Append to `descriptors` the file descriptor that another process needs. The caller closes it.

        :param context: ignored.
        :param descriptors: list to which a new descriptor of the file that contains the protection domain is appended.
            If this raises, nothing is appended.
        :raises VerbsError: with ENOENT if the share was destroyed; with EMFILE or ENOMEM if no descriptor or memory is
            left.
        :raises ClosedResourceError: the protection domain is closed.
        """
        pd = self._pd
        if pd is None:
            raise share_error(errno.ENOENT)
        descriptors.append(software.export(pd))

    def destroy(self) -> None:
        """Prevent further instances from being opened. Instances that are open stay open. Further calls do nothing."""
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
        """Let a context open instances of the protection domain, until `destroy` is called."""
        self._known = _imported.setdefault(context, {})
        self._known[self._id] = self

    def open(self, context: handles.Context, share_key: int) -> handles.ProtectionDomain:
        """Open an instance of the protection domain in this process.

        :param context: context that was passed to `register`.
        :param share_key: secret of the protection domain, 64 bits.
        :returns: new handle of the instance, which the caller destroys.
        :raises VerbsError: with ENOENT if the last instance was closed, or if `destroy` was called; with EACCES if the
            key is wrong; with EMFILE if too many processes share the domain; with ENOMEM if memory ran out; with EPROTO
            if the received file is not that of a protection domain.
        :raises ClosedResourceError: the context is closed.
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
        """Prevent further instances from being opened. Instances that are open stay open. Further calls do nothing."""
        with self._lock:
            file, self._file = self._file, -1
        if file >= 0:
            self._known.pop(self._id, None)
            os.close(file)


def _check_key(expected: int, key: int) -> None:
    """Compare a share key with the expected one, in constant time.

    :raises VerbsError: with EACCES if the keys differ.
    """
    if not hmac.compare_digest(*(each.to_bytes(KEY_BITS // 8) for each in (expected, key))):
        raise share_error(errno.EACCES)


def share(pd: handles.ProtectionDomain, share_key: int) -> tuple[int, Share | SoftShare]:
    """Share a protection domain, so that other contexts can open instances of it.

    Only one thread at a time may share the same protection domain.

    :param pd: handle of the protection domain, which must stay open during the call.
    :param share_key: secret that the other contexts have to know, 64 bits.
    :returns: a tuple of the shared ID and the share. Its ``destroy`` is called when the protection domain has been
        destroyed.
    :raises VerbsError: with EEXIST if the protection domain was shared before, or is an instance of one that was shared
        elsewhere; with EOPNOTSUPP if the provider does not support sharing; or the attributes of the device cannot be
        read.
    :raises OSError: with EMFILE if no descriptor is left.
    :raises ClosedResourceError: the protection domain or its context is closed.
    """
    context = pd.context
    device_id = id_of(context, 0)
    if context.software:
        try:
            number = software.share(pd, share_key)
        except VerbsError as error:
            if error.errno != errno.EEXIST:
                raise
            raise VerbsError(error.verb, errno.EEXIST, _ADVICE_SHARED) from None
        return device_id | number, SoftShare(number, share_key, pd)
    if pd.lease is not None:
        raise VerbsError("ibv_alloc_shpd", errno.EEXIST, _ADVICE_SHARED)
    _check_import(context)
    number = secrets.randbelow((1 << 32) - 1) + 1
    shared = Share(number, share_key, pd.handle, _make_lock_file())
    try:
        pd.lease = shared.join()
    except BaseException:
        shared.destroy()
        raise
    shared.register(context)
    return device_id | number, shared


def open_instance(context: handles.Context, shared_id: int, share_key: int) -> handles.ProtectionDomain:
    """Open another instance of a shared protection domain: see `Device.shared_protection_domain`.

    :param context: context of the domain's device.
    :param shared_id: ID of the protection domain, 96 bits.
    :param share_key: secret of the protection domain, 64 bits.
    :returns: new handle of the instance, which the caller destroys.
    :raises VerbsError: with ENOENT if the context can open no domain with that ID, for the reasons described there, or
        if the sharing or the domain has ended; with EACCES if the key is wrong; with EXDEV if the ID belongs to another
        device; with EOPNOTSUPP if the provider does not support sharing; with EPROTO if another process has a lease on
        the file of the domain, or if the file is invalid; with EMFILE if too many processes share the domain; with
        ENOMEM if memory ran out; or the attributes of the device cannot be read.
    :raises OSError: with EMFILE if no descriptor is left.
    :raises ClosedResourceError: the context is closed.
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
        advice = "this context did not import the domain: make one that did with import_device()"
        raise share_error(errno.ENOENT, advice)
    _check_key(known.share_key, share_key)
    lease = known.join()
    try:
        return handles.ProtectionDomain.import_pd(context, known.pd_handle, lease)
    except BaseException:
        lease.close()
        raise
