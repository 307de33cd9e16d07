"""Contexts and protection domains imported by descriptor, with functions in place of a provider's verbs."""

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from aioverbs import BusyResourceError, ClosedResourceError, LibraryNotFoundError, VerbsError
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.descriptors import descriptors, descriptors_at_first

VERB = {
    "import_device": ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, use_errno=True),
    "alloc_pd": ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, use_errno=True),
    "dealloc_pd": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, use_errno=True),
    "import_pd": ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, use_errno=True),
    "unimport_pd": ctypes.CFUNCTYPE(None, ctypes.c_void_p, use_errno=True),
}


@contextmanager
def replaced(slot: int, verb: str, function: Callable[..., object]) -> Iterator[None]:
    """Put `function` in the place of a verb."""
    place = ctypes.c_void_p.from_address(slot)
    before, callback = place.value, VERB[verb](function)
    place.value = ctypes.cast(callback, ctypes.c_void_p).value
    try:
        yield
    finally:
        place.value = before


# ---- Contexts


@pytest.fixture
def slot() -> int:
    """The address where contexts find `ibv_import_device`."""
    try:
        return handles.table_slot("import_device")
    except LibraryNotFoundError:
        pytest.skip("there is no libibverbs")


@pytest.mark.parametrize(("path", "error"), [("/dev/null", errno.ENODEV), ("/etc/passwd", errno.EINVAL)])
def test_importing_a_wrong_descriptor_fails(slot: int, path: str, error: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    before = descriptors_at_first()
    with pytest.raises(VerbsError, match="ibv_import_device") as caught:
        handles.Context.import_device(fd)
    assert caught.value.errno == error
    assert descriptors() == before
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        handles.Context.import_device(fd)


@pytest.mark.parametrize("closes", [False, True])
def test_a_failed_import_leaves_no_descriptor(slot: int, closes: bool) -> None:
    """Some failures close the descriptor and some do not, so the verb gets a duplicate of the caller's."""
    received: list[int] = []

    def fail(fd: int) -> None:
        received.append(fd)
        if closes:
            os.close(fd)
        ctypes.set_errno(errno.EOPNOTSUPP)

    fd = os.open("/dev/null", os.O_RDONLY)
    before = descriptors_at_first()
    with replaced(slot, "import_device", fail), pytest.raises(VerbsError, match="EOPNOTSUPP"):
        handles.Context.import_device(fd)
    assert received != [fd]
    assert descriptors() == before
    os.close(fd)


def test_only_exported_verbs_have_a_slot(slot: int) -> None:
    with pytest.raises(ValueError, match="ibv_poll_cq is not in the table"):
        handles.table_slot("poll_cq")


# ---- Protection domains


class FixedFileLock:
    """The file lock of an instance, with a fixed answer."""

    def __init__(self, last: bool) -> None:
        self.last = last
        self.leave_calls: list[tuple[bool, bool]] = []

    def is_last(self) -> bool:
        return self.last

    def leave(self, last: bool, failed: bool) -> None:
        self.leave_calls.append((last, failed))


class Provider:
    """A provider with imports, whose instances are domains of the software device."""

    def __init__(self, context: software.Context) -> None:
        self.calls: list[str] = []
        self.dealloc_errno = 0  # errno that dealloc_pd returns
        self._alloc, self._dealloc = (
            VERB[verb](ctypes.c_void_p.from_address(context.table_slot(verb)).value or 0)
            for verb in ("alloc_pd", "dealloc_pd")
        )

    def import_pd(self, context: int, handle: int) -> object:
        self.calls.append(f"import {handle}")
        if handle == 404:
            ctypes.set_errno(errno.ENOENT)
            return None
        return self._alloc(context)

    def unimport_pd(self, pd: int) -> None:
        self.calls.append("unimport")
        assert self._dealloc(pd) == 0

    def dealloc_pd(self, pd: int) -> object:
        self.calls.append("dealloc")
        return self.dealloc_errno or self._dealloc(pd)


@pytest.fixture
def provider(context: software.Context) -> Iterator[Provider]:
    created = Provider(context)
    with (
        replaced(context.table_slot("import_pd"), "import_pd", created.import_pd),
        replaced(context.table_slot("unimport_pd"), "unimport_pd", created.unimport_pd),
        replaced(context.table_slot("dealloc_pd"), "dealloc_pd", created.dealloc_pd),
    ):
        yield created
    assert context.counts()["pds"] == 0


def test_an_instance_among_others_is_unimported(context: software.Context, provider: Provider) -> None:
    lease = FixedFileLock(last=False)
    pd = handles.ProtectionDomain.import_pd(context, 5, lease)
    assert type(pd) is handles.ProtectionDomain
    assert pd.lease is lease
    assert pd in handles.open_handles()
    region = handles.MemoryRegion(pd, bytearray(64))
    with pytest.raises(BusyResourceError):
        pd.destroy()
    assert lease.leave_calls == []
    region.destroy()
    pd.destroy()
    assert provider.calls == ["import 5", "unimport"]
    assert lease.leave_calls == [(False, False)]
    with pytest.raises(ClosedResourceError):
        _ = pd.handle


def test_the_last_instance_is_deallocated(context: software.Context, provider: Provider) -> None:
    pd = handles.ProtectionDomain(context)
    assert pd.handle >= 0
    pd.lease = lease = FixedFileLock(last=True)
    provider.dealloc_errno = errno.EINVAL
    with pytest.raises(VerbsError, match="ibv_dealloc_pd failed: EINVAL"):
        pd.destroy()
    assert not pd.closed
    provider.dealloc_errno = 0
    pd.destroy()
    assert provider.calls == ["dealloc", "dealloc"]
    assert lease.leave_calls == [(True, True), (True, False)]


def test_objects_of_another_process_keep_only_the_domain(context: software.Context, provider: Provider) -> None:
    pd = handles.ProtectionDomain.import_pd(context, 5, FixedFileLock(last=True))
    provider.dealloc_errno = errno.EBUSY
    pd.destroy()
    assert provider.calls == ["import 5", "dealloc", "unimport"]
    provider.dealloc_errno = 0


def test_a_failed_import_leaves_the_lock(context: software.Context, provider: Provider) -> None:
    lease = FixedFileLock(last=True)
    with pytest.raises(VerbsError, match="ibv_import_pd failed: ENOENT"):
        handles.ProtectionDomain.import_pd(context, 404, lease)
    assert lease.leave_calls == []
    assert provider.calls == ["import 404"]


def test_the_software_device_does_not_support_imports(context: software.Context) -> None:
    pd = handles.ProtectionDomain(context)
    with pytest.raises(VerbsError, match="ibv_import_pd failed: EOPNOTSUPP"):
        handles.ProtectionDomain.import_pd(context, pd.handle, FixedFileLock(last=True))
    with pytest.raises(VerbsError, match="ibv_import_device failed: EOPNOTSUPP"):
        context.dup_cmd_fd()
    pd.destroy()
