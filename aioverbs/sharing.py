"""Instances of one protection domain: how they know of each other, and how another process gets one.

Contexts of the software device share inside of one process, by the device itself. For RDMA devices the verbs are
``ibv_import_device`` and ``ibv_import_pd``: a context over the descriptor of another one knows its objects by their
numbers. "This is the responsibility of the application to coordinate between all ibv_context(s) that use this PD", and
this module is where that is done.
"""

import array
import asyncio
import contextlib
import errno
import fcntl
import hmac
import os
import secrets
import socket
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence

from aioverbs._core import engine
from aioverbs.errors import BrokenResourceError, ClosedResourceError, VerbsError
from aioverbs.providers import software
from aioverbs.share_message import ID_BITS, KEY_BITS, Reply, Request, device_of, share_id

__all__ = ["Given", "Share", "answer", "check_share", "in_one_process", "open_instance", "receive", "share"]

_INT = array.array("i").itemsize
_TAKEN = 8  # descriptors that are taken from a message, to be counted; what is beyond, the kernel closes

_ADVICE = {
    errno.EACCES: "the share key is another one",
    errno.ENOENT: "nothing is shared by that id any more: its last instance was closed, or it never was",
}


def _refusal(error: int, advice: str | None = None) -> VerbsError:
    return VerbsError("ibv_share_pd", error, advice or _ADVICE.get(error))


def _other_device(shared_id: int, name: str) -> VerbsError:
    advice = f"it is shared of the device with GUID {device_of(shared_id)}, and {name} is another one: a protection "
    return _refusal(errno.EXDEV, f"{advice}domain is one device's")


def check_share(shared_id: int, share_key: int) -> None:
    """See that an id and a key can be ones.

    :raises ValueError: they cannot.
    """
    for name, value, bits in (("shared_id", shared_id, ID_BITS), ("share_key", share_key, KEY_BITS)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} has {bits} bits")


def _id(context: engine.Context, number: int) -> int:
    return share_id(context.query_device().node_guid, context.name, number)


def _import_context(command: int, name: str) -> engine.Context:
    try:
        return engine.Context.import_device(command)
    except VerbsError as error:
        advice = {
            errno.EOPNOTSUPP: f"the provider of {name} does not have it: what is made on {name} stays in one context",
            errno.ENODEV: f"{name} is not here: it is another machine's, or hidden from this process",
        }.get(error.errno)
        raise VerbsError(error.verb, error.errno, advice) from None


def _check_import(context: engine.Context) -> None:
    """See that other processes can have contexts over this one's descriptor: by trying, as nothing else tells.

    :raises VerbsError: they cannot, with EOPNOTSUPP where the provider does not have it.
    """
    command = context.dup_cmd_fd()
    try:
        _import_context(command, context.name).destroy()
    finally:
        os.close(command)


def _check_device(context: engine.Context, shared_id: int) -> int:
    """The number of an id that is of this device."""
    number = shared_id & 0xFFFFFFFF
    if shared_id != _id(context, number):
        raise _other_device(shared_id, context.name)
    return number


class _Lease:
    """An instance's part in a protection domain: the last one that is left deallocates it, the others unimport it.

    All of them lock a file that has no name, each by an open file description of its own. Who leaves and gets the lock
    for itself alone is the last, and leaves a byte in the file. The lock of a process that dies goes with it.
    """

    def __init__(self, file: int) -> None:
        self._file = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            gone = os.fstat(self._file).st_size > 0
        except BlockingIOError:  # the last is just leaving
            gone = True
        except BaseException:
            os.close(self._file)
            raise
        if gone:
            os.close(self._file)
            raise _refusal(errno.ENOENT)

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


_shares: weakref.WeakKeyDictionary[engine.Context, "dict[int, Share]"] = weakref.WeakKeyDictionary()
_sharing = threading.Lock()  # a domain is shared once


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

    def tell(self, context: engine.Context) -> None:
        """Let a context open instances, until this is destroyed."""
        self._known = _shares.setdefault(context, {})
        self._known[self.number] = self

    def join(self) -> _Lease:
        """The part of a new instance.

        :raises VerbsError: with ENOENT where it is too late.
        """
        with self._opened() as file:
            return _Lease(file)

    def dup_file(self) -> int:
        """A duplicate of its file's descriptor, the caller's to close; nothing is locked by it.

        :raises VerbsError: with ENOENT where it is too late.
        """
        with self._opened() as file:
            return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        with self._lock:
            if self._file < 0:
                raise _refusal(errno.ENOENT)
            yield self._file

    def destroy(self) -> None:
        """Forget it; instances stay."""
        with self._lock:
            file, self._file = self._file, -1
        if file >= 0:
            self._known.pop(self.number, None)
            os.close(file)


def share(pd: engine.ProtectionDomain, share_key: int) -> tuple[int, Share | None]:
    """Let other contexts have instances of a protection domain: the id, and what is to be destroyed before the domain.

    :raises VerbsError: with EEXIST where it is shared already, with EOPNOTSUPP where the provider cannot.
    """
    context = pd.context
    if context.software:
        return _id(context, pd.share(share_key)), None
    _check_import(context)
    with _sharing:
        if pd.lease is not None:
            raise VerbsError("ibv_alloc_shpd", errno.EEXIST)
        number = secrets.randbelow((1 << 32) - 1) + 1
        made = Share(number, share_key, pd.handle, os.memfd_create("aioverbs-pd", os.MFD_CLOEXEC))
        try:
            pd.lease = made.join()
        except BaseException:
            made.destroy()
            raise
    made.tell(context)
    return _id(context, number), made


def open_instance(context: engine.Context, shared_id: int, share_key: int) -> engine.ProtectionDomain:
    """A further instance of what was shared: see `Device.shared_protection_domain`."""
    number = _check_device(context, shared_id)
    if context.software:
        try:
            return engine.ProtectionDomain.open_shared(context, number, share_key)
        except VerbsError as error:
            raise _refusal(error.errno) from None
    known = _shares.get(context, {}).get(number)
    if known is None:
        _check_import(context)
        advice = "this context does not have it; import_device() makes one that does, from its process or in this one"
        raise _refusal(errno.ENOENT, advice)
    if not hmac.compare_digest(*(key.to_bytes(KEY_BITS // 8) for key in (known.share_key, share_key))):
        raise _refusal(errno.EACCES)
    lease = known.join()
    try:
        return engine.ProtectionDomain.import_pd(context, known.pd_handle, lease)
    except BaseException:
        lease.close()
        raise


# ---- Between processes: a request, a reply with descriptors


class Given:
    """What a process was given: the way into another one's context, and a protection domain there.

    :param command: the descriptor of that context's commands; `close` closes it.
    :param device: what its device is called there.
    """

    def __init__(self, shared_id: int, share: Share, command: int, device: str) -> None:
        self.share = share
        self._shared_id = shared_id
        self._command = command
        self._device = device

    def open_context(self) -> engine.Context:
        """A context over that one, which may open instances.

        :raises LibraryNotFoundError: libibverbs cannot be loaded.
        :raises VerbsError: with EOPNOTSUPP where the provider cannot, with EXDEV where it is of another device than it
            was said to be.
        """
        context = _import_context(self._command, self._device)
        try:
            _check_device(context, self._shared_id)
            self.share.tell(context)
        except BaseException:
            context.destroy()
            raise
        return context

    def close(self) -> None:
        """Its context has a descriptor of its own."""
        os.close(self._command)


@contextlib.contextmanager
def _descriptors() -> Iterator[list[int]]:
    """A list of descriptors; those that are in it at the end are closed."""
    held: list[int] = []
    try:
        yield held
    finally:
        for each in held:
            os.close(each)


async def receive(sock: socket.socket, shared_id: int, share_key: int) -> Given:
    """Ask the process at the other end of a socket, where `answer` is called.

    :raises VerbsError: with ENOENT, EACCES or EXDEV where it refuses; with EPROTO or EPROTONOSUPPORT where it says
        something else.
    :raises BrokenResourceError: it went.
    :raises ValueError: the socket is none of the Unix domain, no stream, or blocking.
    """
    _check_socket(sock)
    _check_hardware(shared_id)
    request = Request.make(shared_id, share_key, os.urandom(16))
    await _send(sock, request.pack(), [])
    with _descriptors() as attached:
        reply = Reply.parse(await _receive(sock, Reply.SIZE, attached))
        if reply.status == errno.EXDEV:
            raise _other_device(shared_id, reply.device)
        if reply.status:
            raise _refusal(reply.status)
        if not reply.proves(share_key, request):
            raise _refusal(errno.EACCES, "the peer does not know the share key")
        kinds = [stat.S_IFMT(os.fstat(each).st_mode) for each in attached]
        if kinds != [stat.S_IFCHR, stat.S_IFREG]:
            raise _refusal(errno.EPROTO, f"the peer attached {len(kinds)} descriptors, or others than it should have")
        command, file = attached
        attached.clear()
    return Given(shared_id, Share(shared_id & 0xFFFFFFFF, share_key, reply.pd_handle, file), command, reply.device)


async def answer(sock: socket.socket, context: engine.Context, shared: Share) -> None:
    """Answer one request of the process at the other end of a socket, which calls `receive`.

    :raises VerbsError: with ENOENT, EACCES, EXDEV, EPROTO or EPROTONOSUPPORT where it was refused.
    :raises BrokenResourceError: it went.
    :raises ValueError: the socket is none of the Unix domain, no stream, or blocking.
    """
    _check_socket(sock)
    refusal: VerbsError | ClosedResourceError | None = None
    with _descriptors() as attached:
        data = await _receive(sock, Request.SIZE, attached)
        strays = len(attached)
    with _descriptors() as given:
        try:
            request = Request.parse(data)
            if strays:
                raise _refusal(errno.EPROTO, f"the peer attached {strays} descriptors to its request")
            if _check_device(context, request.shared_id) != shared.number:
                raise _refusal(errno.ENOENT)
            if not request.proves(shared.share_key):
                raise _refusal(errno.EACCES)
            given += [context.dup_cmd_fd()]
            given += [shared.dup_file()]
            reply = Reply.make(request, shared.share_key, context.name, shared.pd_handle)
        except (VerbsError, ClosedResourceError) as error:
            refusal = error
            reply = Reply.refuse(error.errno if isinstance(error, VerbsError) else errno.ENOENT, context.name)
        await _send(sock, reply.pack(), given if refusal is None else [])
    if refusal is not None:
        raise refusal


def _check_hardware(shared_id: int) -> None:
    for name in software.names():
        context = software.open_context(name)
        try:
            ours = shared_id == _id(context, shared_id & 0xFFFFFFFF)
        finally:
            context.destroy()
        if ours:
            raise in_one_process(name)


def in_one_process(name: str) -> VerbsError:
    """What is said of the software device."""
    advice = f"{name} is in each process another device: its protection domains are shared inside of one"
    return VerbsError("ibv_import_device", errno.EOPNOTSUPP, advice)


def _check_socket(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        raise ValueError("descriptors go over stream sockets of the Unix domain: socket.socket(socket.AF_UNIX)")
    if sock.gettimeout() != 0:
        raise ValueError("the socket would block the event loop: call its setblocking(False)")


async def _send(sock: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """All of it, the descriptors with the first byte."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    left = memoryview(data)
    while left:
        try:
            sent = sock.sendmsg([left], rights)
        except BlockingIOError:
            await _ready(sock, writing=True)
        except ConnectionError as error:
            raise BrokenResourceError(f"the peer is gone: {error}") from error
        else:
            left, rights = left[sent:], []


async def _receive(sock: socket.socket, size: int, descriptors: list[int]) -> bytes:
    """So many bytes, and not one more; the descriptors that came with them are put into the list.

    :raises VerbsError: with EPROTO where there were more than are taken, or more than this process may have.
    """
    data = b""
    room = socket.CMSG_LEN(_TAKEN * _INT)
    while len(data) < size:
        try:
            # Not socket.recv_fds: that one forgets the flags.
            piece, ancillary, flags, _ = sock.recvmsg(size - len(data), room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            await _ready(sock, writing=False)
            continue
        except ConnectionError as error:
            raise BrokenResourceError(f"the peer is gone: {error}") from error
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors += array.array("i", content[: len(content) - len(content) % _INT])
        if flags & socket.MSG_CTRUNC:
            raise _refusal(errno.EPROTO, "more descriptors were attached than this process can take")
        if not piece:
            raise BrokenResourceError(f"the peer closed the socket after {len(data)} of {size} bytes")
        data += piece
    return data


async def _ready(sock: socket.socket, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add(sock.fileno(), wake)
    try:
        await ready
    finally:
        remove(sock.fileno())
