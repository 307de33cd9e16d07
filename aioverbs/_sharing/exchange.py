"""Transfer of a protection domain to another process: a request over a Unix socket, a reply with descriptors.

The two processes exchange two messages:

    receiver                         owner of the protection domain
    `receive`  ---- Request ------>  `answer`
               <--- Reply --------   with descriptors, sent by SCM_RIGHTS
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Sequence

from aioverbs._core.handles import handles
from aioverbs._core.software.software import discard_descriptor
from aioverbs._lifecycle.affinity import running_loop, wait_socket_ready
from aioverbs._proofs import make_nonce
from aioverbs._providers import software
from aioverbs._providers.sysfs import device_numbers
from aioverbs._sharing.messages import Reply, Request
from aioverbs._sharing.shared_pd import (
    ImportedShare,
    Share,
    SoftShare,
    check_device,
    import_context,
    is_lock_file,
    share_error,
    wrong_device_error,
)
from aioverbs.errors import BrokenResourceError, ClosedResourceError

__all__ = ["ReceivedShare", "ReceivedSoftwareShare", "answer", "receive"]

_INT = array.array("i").itemsize
_MAX_DESCRIPTORS = 2  # descriptors of a reply

# Constants of <linux/stat.h> and <linux/fcntl.h>. `struct statx` is the same on all machines.
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC, _STATX_TYPE = 0x1000, 0x4000, 0x1
_STATX_SIZE, _STX_MODE, _STX_RDEV = 256, 28, 128


class ReceivedShare:
    """Received access to a protection domain of an RDMA device, and to the context that it belongs to.

    Returned by `receive`. The receiver calls `close`, and destroys ``share`` after the last use of the context.

    :param shared_id: ID of the protection domain.
    :param share: the share through which instances of the protection domain are opened.
    :param command: descriptor for the commands of the context (``ibv_context.cmd_fd``); `close` closes it.
    :param device: name of the device in the other process.
    """

    def __init__(self, shared_id: int, share: Share, command: int, device: str) -> None:
        self.share = share
        self._shared_id = shared_id
        self._command = command
        self._device = device

    def open_context(self, name: str | None) -> handles.Context:
        """Import the context (``ibv_import_device``) and let it open instances of the protection domain.

        :param name: must be None, because only software devices are opened by name.
        :returns: new handle of the context, which the caller destroys.
        :raises ValueError: ``name`` is not None.
        :raises LibraryNotFoundError: libibverbs cannot be loaded.
        :raises VerbsError: with EOPNOTSUPP if the provider cannot import contexts; with ENODEV if the device does not
            exist here; with EXDEV if the shared ID belongs to a device other than that of the context.
        :raises OSError: the received descriptor was closed, or no descriptor is left.
        """
        if name is not None:
            raise ValueError(f"`name` is for software devices, but the peer shares {self._device}: leave it out")
        context = import_context(self._command, self._device)
        try:
            check_device(context, self._shared_id)
            self.share.register(context)
        except BaseException:
            context.destroy()
            raise
        return context

    def close(self) -> None:
        """Close the received descriptor for the commands of the context. Call this only once.

        Imported contexts have descriptors of their own.
        """
        os.close(self._command)


class ReceivedSoftwareShare:
    """Received access to a protection domain of a software device, which is in a file that both processes map.

    Returned by `receive`. The receiver destroys ``share`` after the last use of the context.

    :param share: the share through which instances of the protection domain are opened.
    """

    def __init__(self, share: ImportedShare) -> None:
        self.share = share

    def open_context(self, name: str | None) -> handles.Context:
        """Open a context of a software device, and let it open instances of the protection domain.

        :param name: name of the device; None for ``"soft0"``.
        :returns: new handle of the context, which the caller destroys.
        :raises DeviceNotFoundError: `name` is not the name of a software device.
        :raises ValueError: the address in `name`, or an environment variable of `SoftSettings`, is invalid.
        :raises VerbsError: the device cannot be opened.
        """
        context = software.open_context() if name is None else software.open_context(name)
        self.share.register(context)
        return context

    def close(self) -> None:
        """Do nothing: the only received descriptor belongs to ``share``, which closes it."""


@contextlib.contextmanager
def _descriptors(close: Callable[[int], None]) -> Iterator[list[int]]:
    """Provide a new list to which a ``with`` block can append file descriptors. At the end of the block, the
    descriptors that are in the list are closed.

    :param close: function that closes a descriptor; `discard_descriptor` for descriptors from a peer, because closing
        them may block for as long as the peer likes.
    """
    descriptors: list[int] = []
    try:
        yield descriptors
    finally:
        for each in descriptors:
            close(each)


async def receive(sock: socket.socket, shared_id: int, share_key: int) -> ReceivedShare | ReceivedSoftwareShare:
    """Request access to a shared protection domain from the process at the other end of a socket.

    The other process calls `answer`.

    :param sock: non-blocking Unix stream socket.
    :param shared_id: ID of the protection domain, 96 bits.
    :param share_key: secret of the protection domain, 64 bits.
    :returns: the received access, which the caller closes; the caller also destroys its ``share``.
    :raises VerbsError: with the errno of the refusal if the peer refused, such as ENOENT, EACCES or EXDEV (see
        `answer`); with EACCES also if the peer does not know the key; with EPROTO if the reply is invalid, in which
        case the socket may have been closed; with EPROTONOSUPPORT if the reply has a different version.
    :raises BrokenResourceError: the peer closed the socket.
    :raises ValueError: the socket is not a Unix stream socket, or is blocking.
    :raises OSError: with EBADF if the socket is closed.
    :raises RuntimeError: no asyncio event loop is running.
    """
    _check(sock)
    request = Request.make(shared_id, share_key, make_nonce())
    await _send(sock, request.pack(), [])
    with _descriptors(discard_descriptor) as attached:
        reply = Reply.parse(await _receive(sock, Reply.SIZE, attached, _MAX_DESCRIPTORS))
        if reply.status == errno.EXDEV:
            raise wrong_device_error(shared_id, reply.device)
        if reply.status:
            raise share_error(reply.status)
        if not reply.proves(share_key, request):
            raise share_error(errno.EACCES, "the peer does not know the share key")
        soft = software.is_software(reply.device)
        expected = [_is_memory_file] if soft else [_is_device, is_lock_file]
        if len(attached) != len(expected) or not all(fits(each) for fits, each in zip(expected, attached, strict=True)):
            advice = "" if soft else f": {reply.device} may be hidden from this process"
            raise share_error(
                errno.EPROTO, f"the peer attached {len(attached)} descriptors, or not the required ones{advice}"
            )
        *commands, file = attached
        attached.clear()
    if soft:
        return ReceivedSoftwareShare(ImportedShare(shared_id, share_key, file))
    (command,) = commands
    share = Share(shared_id & 0xFFFFFFFF, share_key, reply.pd_handle, file)
    return ReceivedShare(shared_id, share, command, reply.device)


async def answer(sock: socket.socket, context: handles.Context, shared: Share | SoftShare) -> None:
    """Answer one request from the process at the other end of a socket, which calls `receive`.

    :param sock: non-blocking Unix stream socket.
    :param context: context of the protection domain.
    :param shared: the shared protection domain.
    :raises VerbsError: if the request was refused: with ENOENT, EACCES or EXDEV if its ID, key or device is wrong; with
        EPROTO if it is invalid; with EPROTONOSUPPORT if it has a different version; with EMFILE or ENOMEM if a software
        device has no descriptor or memory left. The peer receives the same errno; but if descriptors were attached to
        the request (EPROTO), the socket is closed instead.
    :raises OSError: with EMFILE if no descriptor is left for an RDMA device, which the peer receives as well; with
        EBADF if the socket is closed.
    :raises ClosedResourceError: the context is closed. The peer receives ENOENT.
    :raises BrokenResourceError: the peer closed the socket.
    :raises ValueError: the socket is not a Unix stream socket, or is blocking.
    :raises RuntimeError: no asyncio event loop is running.
    """
    _check(sock)
    refused: OSError | ClosedResourceError | None = None
    data = await _receive(sock, Request.SIZE, [], 0)
    with _descriptors(os.close) as descriptors:
        try:
            request = Request.parse(data)
            if check_device(context, request.shared_id) != shared.number:
                raise share_error(errno.ENOENT)
            if not request.proves(shared.share_key):
                raise share_error(errno.EACCES)
            shared.attach(context, descriptors)
            reply = Reply.make(request, shared.share_key, context.name, shared.pd_handle)
        except (OSError, ClosedResourceError) as error:
            refused = error
            status = error.errno if isinstance(error, OSError) else errno.ENOENT
            reply = Reply.refuse(status or errno.EIO, context.name)
        await _send(sock, reply.pack(), descriptors if refused is None else [])
    if refused is not None:
        raise refused


def _check(sock: socket.socket) -> None:
    """Check that a socket is suitable for the messages, and that this is called in an event loop.

    :raises ValueError: the socket is not a Unix stream socket, or is blocking.
    :raises RuntimeError: no asyncio event loop is running.
    """
    running_loop()
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        raise ValueError("descriptors need a Unix stream socket: make one with socket.socket(socket.AF_UNIX)")
    if sock.gettimeout() != 0:
        raise ValueError("the socket would block the event loop: call its setblocking(False)")


async def _send(sock: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send all of the data, with copies of the descriptors attached to the first byte. The caller still has to close
    `descriptors`.

    :raises BrokenResourceError: the peer closed the socket.
    :raises OSError: sending failed for another reason, such as EBADF if the socket is closed.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    remaining = memoryview(data)
    while remaining:
        try:
            sent = sock.sendmsg([remaining], rights)
        except BlockingIOError:
            await wait_socket_ready(sock, writing=True)
        except ConnectionError as error:
            raise BrokenResourceError(f"the peer is gone: {error}") from error
        else:
            remaining, rights = remaining[sent:], []


async def _receive(sock: socket.socket, size: int, descriptors: list[int], max_descriptors: int) -> bytes:
    """Receive exactly `size` bytes, and append the descriptors that come with them to the list `descriptors`.

    Data is peeked before it is consumed: when it is consumed, the kernel closes the descriptors that do not fit into
    the buffer, in this thread, and closing may block. At most `max_descriptors` are taken, because a peer could
    otherwise use up all descriptors of this process with a few messages.

    :returns: the received bytes.
    :raises VerbsError: with EPROTO if more than `max_descriptors` descriptors came, or more than this process can open.
        In this case the socket is closed, in the same separate thread as the descriptors in it.
    :raises BrokenResourceError: the peer closed the socket.
    :raises OSError: receiving failed for another reason, such as EBADF if the socket is closed.
    """
    data = b""
    # Without this the kernel would drop data sent out of band, and close its descriptors.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
    while len(data) < size:
        room = socket.CMSG_LEN((max_descriptors - len(descriptors)) * _INT) if len(descriptors) < max_descriptors else 0
        try:
            # socket.recv_fds is not used, because it ignores its flags.
            piece, ancillary, flags, _ = sock.recvmsg(size - len(data), room, socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            await wait_socket_ready(sock)
            continue
        except ConnectionError as error:
            raise BrokenResourceError(f"the peer is gone: {error}") from error
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors += array.array("i", content[: len(content) - len(content) % _INT])
        if flags & socket.MSG_CTRUNC:
            discard_descriptor(sock.detach())
            limits = f"more than {max_descriptors} descriptors, or more than this process can open (ulimit -n)"
            advice = f"the peer attached {limits}"
            raise share_error(errno.EPROTO, advice)
        if not piece:
            raise BrokenResourceError(f"the peer closed the socket after {len(data)} of {size} bytes")
        data += sock.recv(len(piece))
    return data


def _is_device(descriptor: int) -> bool:
    """Return whether a descriptor is an open RDMA device file, to which commands are sent, judging by its device
    number.

    ``ibv_import_device`` looks for the same number. The attributes are read from the kernel's cache, because `os.fstat`
    would wait for the server of a FUSE file. A descriptor opened with O_PATH is rejected: FUSE can present such a
    device even without the permission to open it.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH:
        return False
    found = ctypes.create_string_buffer(_STATX_SIZE)
    if ctypes.CDLL(None).statx(descriptor, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_TYPE, found):
        return False
    is_character_device = stat.S_ISCHR(struct.unpack_from("H", found, _STX_MODE)[0])
    return is_character_device and struct.unpack_from("II", found, _STX_RDEV) in device_numbers()


def _is_memory_file(descriptor: int) -> bool:
    """Return whether a descriptor is a memory file (memfd), judging by its seals.

    `os.fstat` is not used, because it would wait for the server of a FUSE file.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True
