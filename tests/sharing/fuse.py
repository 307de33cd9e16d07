"""FUSE file whose server answers all requests needed to open the file, and none about the file afterwards."""

import contextlib
import ctypes
import os
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["silent_file"]

# From <linux/fuse.h>: opcodes, and layouts of the replies.
_LOOKUP, _FORGET, _GETATTR, _OPEN, _INIT, _INTERRUPT = 1, 2, 3, 14, 26, 36
_ROOT, _FILE = 1, 2  # node IDs of the two files
_REQUEST, _REPLY = struct.Struct("IIQQIIII"), struct.Struct("IiQ")
_ATTRIBUTES = struct.Struct("QQQQQQIIIIIIIIII")
_ENOSYS = -38
_MNT_DETACH = 2


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o644
    return _ATTRIBUTES.pack(node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _serve(channel: int) -> None:
    """Answer requests until the file system is unmounted."""
    while True:
        try:
            request = os.read(channel, 1 << 20)
        except OSError:
            return
        _, opcode, unique, node, *_ = _REQUEST.unpack_from(request)
        answers = {
            _INIT: struct.pack("IIIIHHII9I", 7, 23, 0, 0, 0, 0, 4096, 1, *[0] * 9)[:24],
            _LOOKUP: struct.pack("QQQQII", _FILE, 0, 0, 0, 0, 0) + _attributes(_FILE),
            _OPEN: struct.pack("QII", 0, 0, 0),
        }
        if opcode == _GETATTR and node == _ROOT:
            answers[_GETATTR] = struct.pack("QII", 1, 0, 0) + _attributes(_ROOT)
        answer = answers.get(opcode)
        if answer is not None:
            reply = _REPLY.pack(_REPLY.size + len(answer), 0, unique) + answer
        elif opcode not in (_GETATTR, _FORGET, _INTERRUPT):
            reply = _REPLY.pack(_REPLY.size, _ENOSYS, unique)
        else:
            continue
        with contextlib.suppress(FileNotFoundError):  # the kernel no longer waits for the answer
            os.write(channel, reply)


@contextmanager
def silent_file(folder: Path) -> Iterator[int]:
    """Provide a descriptor of the file; skip the test if this process may not mount FUSE file systems.

    :param folder: empty folder, the mount point.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        channel = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"FUSE: {error}")
    options = f"fd={channel},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    place = os.fsencode(folder)
    if libc.mount(b"test", place, b"fuse", 0, options.encode()):
        os.close(channel)
        pytest.skip(f"mounting: {os.strerror(ctypes.get_errno())}")
    server = threading.Thread(target=_serve, args=(channel,), daemon=True)
    server.start()
    try:
        descriptor = os.open(folder / "file", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            libc.umount2(place, _MNT_DETACH)
            os.close(descriptor)
    finally:
        libc.umount2(place, _MNT_DETACH)
        server.join(30)
        os.close(channel)
