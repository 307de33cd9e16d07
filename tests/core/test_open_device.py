"""Opening RDMA devices, with functions in place of libibverbs' own and a context of the software device."""

import contextlib
import ctypes
import errno
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aioverbs import DeviceNotFoundError, LibraryNotFoundError, VerbsError
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.descriptors import descriptors, descriptors_at_first
from tests.garbage import collect_garbage

FUNCTIONS: dict[str, Any] = {
    "get_device_list": ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, use_errno=True),
    "free_device_list": ctypes.CFUNCTYPE(None, ctypes.c_void_p),
    "open_device": ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, use_errno=True),
    "import_device": ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, use_errno=True),
    "get_async_event": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, use_errno=True),
    "close_device": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p),
    "query_gid_table": ctypes.CFUNCTYPE(
        ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_size_t
    ),
}


class IbvDevice(ctypes.Structure):
    """The beginning of ``struct ibv_device``."""

    _fields_ = [
        ("ops", ctypes.c_void_p * 2),
        ("node_type", ctypes.c_int),
        ("transport_type", ctypes.c_int),
        ("name", ctypes.c_char * 64),
    ]


class IbvGidEntry(ctypes.Structure):
    """``struct ibv_gid_entry``."""

    _fields_ = [
        ("gid", ctypes.c_uint8 * 16),
        ("gid_index", ctypes.c_uint32),
        ("port_num", ctypes.c_uint32),
        ("gid_type", ctypes.c_uint32),
        ("ndev_ifindex", ctypes.c_uint32),
    ]


class Library:
    """Functions in place of libibverbs': two devices, and the calls that the functions received."""

    def __init__(self) -> None:
        self.devices = (IbvDevice(name=b"mlx5_1"), IbvDevice(name=b"mlx5_0"))
        self.list: Any = (ctypes.c_void_p * 3)(*map(ctypes.addressof, self.devices), None)
        self.context: int | None = None
        self.error = 0
        self.imported: int | None = None
        self.calls: list[tuple[str, int]] = []

    def get_device_list(self, count: int | None) -> int | None:
        assert count is None
        ctypes.set_errno(self.error)
        return ctypes.addressof(self.list) if self.list is not None else None

    def free_device_list(self, found: int) -> None:
        assert found == ctypes.addressof(self.list)
        self.calls.append(("free", 0))

    def open_device(self, device: int) -> int | None:
        self.calls.append(("open", [ctypes.addressof(each) for each in self.devices].index(device)))
        ctypes.set_errno(self.error)
        return self.context

    def import_device(self, cmd_fd: int) -> int | None:
        self.imported = cmd_fd
        ctypes.set_errno(self.error)
        return self.context

    def close_device(self, context: int) -> int:
        assert context == self.context
        self.calls.append(("close", 0))
        if self.imported is not None:
            os.close(self.imported)
        return 0


@contextlib.contextmanager
def replaced(name: str, function: Callable[..., object]) -> Iterator[None]:
    """Put a function in the place of libibverbs' own."""
    try:
        place = ctypes.c_void_p.from_address(handles.table_slot(name))
    except LibraryNotFoundError:
        pytest.skip("there is no libibverbs")
    before, callback = place.value, FUNCTIONS[name](function)
    place.value = ctypes.cast(callback, ctypes.c_void_p).value
    try:
        yield
    finally:
        place.value = before


@pytest.fixture
def library() -> Iterator[Library]:
    fake = Library()
    with contextlib.ExitStack() as stack:
        for name in ("get_device_list", "free_device_list", "open_device", "import_device", "close_device"):
            stack.enter_context(replaced(name, getattr(fake, name)))
        yield fake


@pytest.fixture
def soft() -> Iterator[software.Context]:
    context = software.Context.open()
    yield context
    context.destroy()


@pytest.fixture
def context(library: Library, soft: software.Context) -> Iterator[handles.Context]:
    """A context that the replaced functions opened: a second handle of the software device's."""
    library.context = soft.verbs_pointer
    context = handles.Context.open_device("mlx5_1")
    yield context
    context.destroy()


def test_devices_are_listed_in_the_order_of_libibverbs(library: Library) -> None:
    assert handles.device_names() == ["mlx5_1", "mlx5_0"]
    assert library.calls == [("free", 0)]


def test_a_name_that_is_not_utf_8(library: Library, soft: software.Context) -> None:
    """Such a name is written as Python writes file names, for example of the device's files below /sys."""
    library.devices[1].name = b"r\xff"
    name = os.fsdecode(b"r\xff")
    assert handles.device_names() == ["mlx5_1", name]
    device = IbvDevice.from_address(ctypes.c_void_p.from_address(soft.verbs_pointer).value or 0)
    before, device.name = device.name, b"r\xff"
    library.context = soft.verbs_pointer
    try:
        context = handles.Context.open_device(name)
    finally:
        device.name = before
    assert context.name == name
    assert library.calls == [("free", 0), ("open", 1), ("free", 0)]
    context.destroy()


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOSYS, errno.ENOSYS), (0, errno.EIO)])
def test_a_list_that_fails(library: Library, number: int, raised: int) -> None:
    library.list, library.error = None, number
    for verb in (handles.device_names, lambda: handles.Context.open_device("mlx5_0")):
        with pytest.raises(VerbsError, match="ibv_get_device_list") as caught:
            verb()
        assert caught.value.errno == raised
    assert library.calls == []


def test_a_list_that_fails_without_a_reason_of_its_own() -> None:
    """`dlerror` returns NULL and leaves the errno of an earlier call."""
    try:
        place = ctypes.c_void_p.from_address(handles.table_slot("get_device_list"))
    except LibraryNotFoundError:
        pytest.skip("there is no libibverbs")
    before, place.value = place.value, ctypes.cast(ctypes.CDLL(None).dlerror, ctypes.c_void_p).value
    try:
        ctypes.CDLL(None).dlerror()
        os.path.exists("/no/such/file")  # leaves ENOENT
        with pytest.raises(VerbsError, match="ibv_get_device_list") as caught:
            handles.device_names()
    finally:
        place.value = before
    assert caught.value.errno == errno.EIO


def test_an_import_that_fails_without_a_reason(library: Library) -> None:
    with open(os.devnull, "rb") as file, pytest.raises(VerbsError, match="ibv_import_device") as caught:
        handles.Context.import_device(file.fileno())
    assert caught.value.errno == errno.EIO


def test_a_name_that_is_not_listed(library: Library) -> None:
    with pytest.raises(DeviceNotFoundError, match="no device 'mlx5_7'; available: mlx5_1, mlx5_0"):
        handles.Context.open_device("mlx5_7")
    assert library.calls == [("free", 0)]


@pytest.mark.parametrize(("number", "raised"), [(errno.EACCES, errno.EACCES), (0, errno.EIO)])
def test_a_device_that_cannot_be_opened(library: Library, number: int, raised: int) -> None:
    library.error = number
    before = handles.open_handles()
    with pytest.raises(VerbsError, match="ibv_open_device") as caught:
        handles.Context.open_device("mlx5_0")
    assert caught.value.errno == raised
    assert library.calls == [("open", 1), ("free", 0)]
    assert handles.open_handles() == before


def test_an_opened_device_is_closed_once(library: Library, soft: software.Context, context: handles.Context) -> None:
    assert (context.name, context.software) == ("soft0", False), "of the structure that the verb returned"
    assert context.verbs_pointer == soft.verbs_pointer
    assert library.calls == [("open", 0), ("free", 0)]
    context.destroy()
    context.destroy()
    assert library.calls == [("open", 0), ("free", 0), ("close", 0)]


def test_the_gid_table(context: handles.Context) -> None:
    def query(pointer: int, entries: int, count: int, flags: int, size: int) -> int:
        assert (pointer, count, flags, size) == (context.verbs_pointer, 3, 0, ctypes.sizeof(IbvGidEntry))
        for position in range(2):
            entry = IbvGidEntry.from_address(entries + position * size)
            entry.gid[:] = range(position, 16 + position)
            entry.port_num, entry.gid_index, entry.gid_type = 1 + position, 7, 2
        return 2

    with replaced("query_gid_table", query):
        found = context.query_gid_table(3)
    assert found == [(1, 7, bytes(range(16)), 2), (2, 7, bytes(range(1, 17)), 2)]


def test_a_gid_table_that_cannot_be_read(context: handles.Context) -> None:
    with (
        replaced("query_gid_table", lambda *_: -errno.EINVAL),
        pytest.raises(VerbsError, match="ibv_query_gid_table failed: EINVAL"),
    ):
        context.query_gid_table(3)


class Lender(ctypes.Structure):
    """Object of a user who owns a context."""

    _fields_ = (("pointer", ctypes.c_void_p),)


def adopt(lender: Lender) -> handles.Context:
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return handles.Context.adopt(new_capsule(ctypes.addressof(lender), b"ibv_context *", None), lender)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_events_of_a_borrowed_context_are_read_without_blocking(soft: software.Context, blocking: bool) -> None:
    """The descriptor is the lender's: it may make it blocking again, and finds it afterwards as it was."""
    found = []

    def get_async_event(context: int, event: int) -> int:
        found.append(os.get_blocking(soft.async_fd))
        ctypes.set_errno(errno.EAGAIN)
        return -1

    before = os.get_blocking(soft.async_fd)
    os.set_blocking(soft.async_fd, blocking)
    try:
        with replaced("get_async_event", get_async_event):
            context = adopt(Lender(soft.verbs_pointer))  # copies the table
            for _ in range(2):
                assert context.get_async_event() is None
                os.set_blocking(soft.async_fd, blocking)
            assert context.get_async_event() is None
            context.destroy()
        assert (found, os.get_blocking(soft.async_fd)) == ([False] * 3, blocking)
    finally:
        os.set_blocking(soft.async_fd, before)


class TestContextThatCannotBeCompleted:
    """The verb succeeded, but the handle cannot be completed: there is no memory for the device's name."""

    @pytest.fixture(autouse=True)
    def unreadable(self, library: Library, soft: software.Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        def fail(name: bytes) -> str:
            if name == b"soft0":
                raise MemoryError
            return known(name)

        known = os.fsdecode
        library.context = soft.verbs_pointer
        handles_before, descriptors_before = handles.open_handles(), descriptors_at_first()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsdecode", fail)
            yield
        collect_garbage()
        assert (handles.open_handles(), descriptors()) == (handles_before, descriptors_before)

    def test_opened(self, library: Library) -> None:
        with pytest.raises(MemoryError):
            handles.Context.open_device("mlx5_0")
        assert library.calls == [("open", 1), ("free", 0), ("close", 0)]

    def test_imported(self, library: Library) -> None:
        fd = os.open("/dev/null", os.O_RDONLY)
        with pytest.raises(MemoryError):
            handles.Context.import_device(fd)
        assert library.calls == [("close", 0)]
        os.close(fd)

    def test_adopted(self, library: Library, soft: software.Context) -> None:
        lender = Lender(soft.verbs_pointer)
        with pytest.raises(MemoryError):
            adopt(lender)
        assert library.calls == [], "the context is the lender's"
        released = weakref.ref(lender)
        del lender
        collect_garbage()
        assert released() is None


def test_libibverbs_is_not_asked_about_the_software_device(soft: software.Context) -> None:
    def query(*_: int) -> int:
        raise AssertionError("its functions crash on contexts of others")

    with replaced("query_gid_table", query), pytest.raises(VerbsError, match="EOPNOTSUPP"):
        soft.query_gid_table(3)


def test_only_verbs_of_the_tables_have_a_slot() -> None:
    with pytest.raises(ValueError, match="ibv_reg_dmabuf_mr is not in the table"), replaced("reg_dmabuf_mr", print):
        pass
