"""Baselines in C: baselines.c and wake_up.c, compiled when needed and called by ctypes, which releases the GIL."""

import asyncio
import ctypes
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from aioverbs import MemoryRegion
from aioverbs._core.handles import handles
from tests.native.build import COMMON, KINDS

__all__ = ["Baseline", "baseline", "compiled", "waker"]

HERE = Path(__file__).resolve().parent

_SIGNATURES: dict[str, tuple[object, ...]] = {
    "baseline_open": (
        ctypes.c_void_p,  # the result
        *(ctypes.c_void_p,) * 4,
        ctypes.c_uint64,
        *(ctypes.c_uint32,) * 2,
    ),
    "baseline_close": (ctypes.c_int, ctypes.c_void_p),
    "baseline_idle_polls": (ctypes.c_uint64, ctypes.c_void_p),
    "baseline_writes": (
        ctypes.c_int64,
        *(ctypes.c_void_p, ctypes.c_uint32),
        *(ctypes.c_uint64,) * 3,
        ctypes.c_int,
    ),
    "baseline_window": (
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_uint64,
        ctypes.c_int,
    ),
    "baseline_batches": (
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_uint64,
        ctypes.c_int,
    ),
    "baseline_round_robin": (ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int),
    "baseline_copies": (ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32, *(ctypes.c_uint64,) * 3),
    "waker_start": (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64),
    "waker_ask": (None, ctypes.c_void_p),
    "waker_stop": (None, ctypes.c_void_p),
}


def compiled(target: Path, *sources: str, flags: Sequence[str] = ()) -> str:
    """Compile a program (or, by flags, a library) from these files; return its path."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    every = [*COMMON, *KINDS["bench"], *shlex.split(os.environ.get("CFLAGS", "")), *flags]
    subprocess.run([*compiler, *every, *(str(HERE / name) for name in sources), "-o", str(target)], check=True)
    return str(target)


def library(folder: Path, loader: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """Compile the baselines into a folder with the flags of the other C benchmarks, and load them."""
    target = folder / "baselines.so"
    if not target.exists():
        compiled(target, "wake_up.c", "baselines.c", flags=("-fPIC", "-shared"))
    loaded = loader(str(target), use_errno=True)
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="aioverbs-baselines-")


@cache
def _releasing() -> ctypes.CDLL:
    return library(Path(_folder().name))


@cache
def _holding() -> ctypes.CDLL:
    """Load the library without releasing the GIL, for calls that are shorter than releasing it."""
    return library(Path(_folder().name), ctypes.PyDLL)


class Baseline:
    """Queue pairs in C, each connected to itself.

    Methods run a number of operations; they return the nanoseconds for all.

    Methods are coroutines only to be contenders like those in Python: they block the loop.
    """

    def __init__(self, pointer: int, extended: bool) -> None:
        self._pointer = pointer
        self._extended = extended

    @property
    def idle_polls(self) -> int:
        """Return the number of polls that found nothing."""
        return int(_releasing().baseline_idle_polls(self._pointer))

    def _call(self, function: str, *arguments: int) -> float:
        took = getattr(_releasing(), function)(self._pointer, *arguments)
        if took < 0:
            raise RuntimeError(f"{function}{arguments} failed")
        return float(took)

    async def writes(self, length: int, operations: int, *, offset: int = 0, stride: int = 0) -> float:
        """Write repeatedly: post and poll one write at a time."""
        return self._call("baseline_writes", length, offset, stride, operations, self._extended)

    async def window(self, length: int, window: int, operations: int) -> float:
        """Read, with `window` reads in flight."""
        return self._call("baseline_window", length, window, operations, self._extended)

    async def batches(self, length: int, size: int, batches: int) -> float:
        """Post batches of writes: one list, one doorbell, one completion."""
        return self._call("baseline_batches", length, size, batches, self._extended)

    async def round_robin(self, length: int, operations: int) -> float:
        """Write on all queue pairs in turn."""
        return self._call("baseline_round_robin", length, operations, self._extended)

    async def copies(self, length: int, operations: int, *, offset: int = 0, stride: int = 0) -> float:
        """Copy with memcpy from one region to the other."""
        return self._call("baseline_copies", length, offset, stride, operations)


@contextmanager
def baseline(
    context: handles.Context,
    local: MemoryRegion,
    remote: MemoryRegion,
    *,
    count: int = 1,
    depth: int = 128,
    extended: bool = False,
) -> Iterator[Baseline]:
    """Open queue pairs in C, on an open context and open regions.

    :param extended: poll by ``ibv_start_poll`` and its relatives instead of by ``ibv_poll_cq``.
    """
    table = context.table_slot("close_device")  # the first member of the table
    addresses = (context.verbs_pointer, table, local.address, remote.address)
    pointer = _releasing().baseline_open(*addresses, min(len(local), len(remote)), count, depth)
    if not pointer:
        error = ctypes.get_errno()
        raise OSError(error, f"baseline_open: {os.strerror(error)}")
    try:
        yield Baseline(pointer, extended)
    finally:
        error = _releasing().baseline_close(pointer)
        if error:
            raise OSError(error, f"baseline_close: {os.strerror(error)}")


class Waker:
    """A thread that makes an eventfd readable on request, and the loop that the eventfd wakes."""

    def __init__(self, pointer: int, eventfd: int) -> None:
        self._ask, self._pointer, self._eventfd = _holding().waker_ask, pointer, eventfd
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def readable(self) -> None:
        """Handle a readable eventfd: the reader callback of the loop."""
        os.eventfd_read(self._eventfd)
        assert self._waiter is not None
        self._waiter.set_result(None)

    async def wake_ups(self, operations: int) -> float:
        """Request a wake-up and sleep until it comes, repeatedly; return the nanoseconds for all."""
        begin = time.perf_counter_ns()
        for _ in range(operations):
            self._waiter = self._loop.create_future()
            self._ask(self._pointer)
            await self._waiter
        return time.perf_counter_ns() - begin


@contextmanager
def waker(delay_ns: int = 0) -> Iterator[Waker]:
    """Open a `Waker` for the running loop.

    :param delay_ns: delay from request to wake-up, in nanoseconds.
    """
    eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    pointer = _releasing().waker_start(eventfd, delay_ns)
    if not pointer:
        raise OSError(ctypes.get_errno(), "no thread for the wake-ups")
    loop = asyncio.get_running_loop()
    bare = Waker(pointer, eventfd)
    loop.add_reader(eventfd, bare.readable)
    try:
        yield bare
    finally:
        loop.remove_reader(eventfd)
        _releasing().waker_stop(pointer)
        os.close(eventfd)
