"""Functions for worker processes, which import this module."""

import asyncio
import contextlib
import contextvars
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

from aioverbs import AccessFlags, RemoteRegion, Worker, WorkerPool, current_worker, open_device
from aioverbs._pool import process_protocol
from tests.pace import patience
from tests.waiting import until

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="none")
ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


def describe_worker() -> tuple[int, int, str, bool]:
    """Return the process ID, worker number, type of the event loop, and whether it owns the domain."""
    worker = current_worker()
    owner = worker.domain.owner
    assert owner is not None
    return os.getpid(), worker.number, type(asyncio.get_running_loop()).__module__.partition(".")[0], owner.owns()


def describe_worker_for_item(_: object) -> tuple[int, int, str, bool]:
    """Do the same as a function for `map`."""
    return describe_worker()


async def describe_worker_later() -> tuple[int, int, str, bool]:
    await asyncio.sleep(0.001)
    return describe_worker()


async def write(data: bytes) -> bytes:
    """Write data from one half of a buffer to the other by queue pairs of the worker, and return the other half."""
    domain = current_worker().domain
    async with (
        domain.register(8192, ACCESS) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        region.buffer[: len(data)] = data
        await near.write(region[: len(data)], region.remote()[4096 : 4096 + len(data)])
        return bytes(region.buffer[4096 : 4096 + len(data)])


async def write_to_remote(remote: RemoteRegion, data: bytes) -> None:
    """Write data to memory of the pool's process, by queue pairs of the worker."""
    domain = current_worker().domain
    async with (
        domain.register(64) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        region.buffer[: len(data)] = data
        await near.write(region[: len(data)], remote[: len(data)])


def variable() -> str:
    return VARIABLE.get()


class PicklableError(Exception):
    """Exception that can be pickled and unpickled."""


class UnpicklableError(Exception):
    """Exception that can be pickled, but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class TextlessError(Exception):
    """Exception that cannot be pickled, and has no text."""

    def __reduce__(self) -> str:
        raise TextlessError

    def __str__(self) -> str:
        raise TextlessError


class DisguisedError(Exception):
    """Exception that is unpickled as a string."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("one",)


class RaisesWhenPickled:
    def __reduce__(self) -> str:
        raise PickyError


def raise_picky_error() -> None:
    raise PickyError


class RaisesWhenUnpickled:
    def __reduce__(self) -> tuple[object, ...]:
        return raise_picky_error, ()


class PickyError(Exception):
    """Exception that takes no notes."""

    def add_note(self, note: str, /) -> None:
        raise AttributeError("the note cannot be added")


async def fail(kind: str) -> object:
    await asyncio.sleep(0)
    match kind:
        case "own":
            raise PicklableError("there")
        case "stubborn":
            raise UnpicklableError(1, 2)
        case "textless":
            raise TextlessError
        case "disguised":
            raise DisguisedError("one")
        case "picky":
            raise PickyError
        case "picky, pickling":
            return RaisesWhenPickled()
        case "picky, unpickling":
            return RaisesWhenUnpickled()
        case "lambda":
            return lambda: None
        case "returned":
            return UnpicklableError(1, 2)
    raise AssertionError(kind)


def return_without_memory() -> None:
    """Make sending the result fail for lack of memory."""

    def encode_once(frame_type: process_protocol.FrameType, number: int, payload: bytes = b"") -> bytes:
        process_protocol.encode_frame = encode_frame
        raise MemoryError("no memory for the frame")

    encode_frame = process_protocol.encode_frame
    process_protocol.encode_frame = encode_once


async def sleep_until_cancelled(folder: str) -> None:
    """Sleep until cancelled, and take some time to end."""
    mark(folder, "begun")
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0.02)
        mark(folder, "ended")


async def end_on_mark(folder: str) -> None:
    """Sleep until cancelled, and then take until there is a mark to end, or until cancelled again."""
    mark(folder, "begun")
    try:
        await asyncio.sleep(30)
    finally:
        mark(folder, "ending")
        await until(Path(folder, "end").exists)


async def wait_for_mark(folder: str, what: str) -> str:
    """Wait for a mark, and return its name."""
    mark(folder, "begun")
    await until(Path(folder, what).exists)
    return what


def mark(folder: str, what: str) -> None:
    Path(folder, what).touch()


async def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(30)


def block(seconds: float, folder: str | None = None) -> None:
    if folder is not None:
        mark(folder, "blocking")
    time.sleep(seconds)


def kill_own_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def close_socket(sock: socket.socket, _: object) -> str:
    sock.close()
    return "closed"


def exit_worker() -> None:
    sys.exit(3)


async def exit_worker_later() -> None:
    await asyncio.sleep(0)
    exit_worker()


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(30)


def fork_and_die(folder: str) -> None:
    """Fork a child, which lives until its mark is removed or 10 s have passed, and kill the worker."""
    mark(folder, "child")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads, which is tested here
        child = os.fork()
    if child:
        kill_own_process()
    end = time.monotonic() + patience(10)
    while Path(folder, "child").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os._exit(0)


def count_sockets() -> int:
    """Return the number of sockets of this process."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


def watches_its_pool() -> bool:
    """Return whether a pidfd is in an epoll set of this process."""
    links = {path.name: str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    watched = "".join(Path("/proc/self/fdinfo", each).read_text() for each in links if "eventpoll" in links[each])
    return any(f"tfd: {each:>8}" in watched for each in links if "pidfd" in links[each])


def fork_a_child_that_exits() -> None:
    """Fork a child that unwinds its copy of the loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads, which is tested here
        child = os.fork()
    if not child:
        sys.exit(0)
    os.waitpid(child, 0)


@contextlib.asynccontextmanager
async def setup(worker: Worker) -> AsyncIterator[str]:
    yield f"of {worker.number}"


@contextlib.asynccontextmanager
async def failing_setup(worker: Worker) -> AsyncIterator[None]:
    if worker.number == 1:
        raise PicklableError("not this one")
    yield


def state() -> object:
    return current_worker().state


async def open_inner_pool(size: int) -> list[int]:
    """Use a process pool inside of a worker process."""
    async with open_device("soft0") as device, WorkerPool(device, size, processes=True) as pool:
        return [each[1] for each in [await pool.run(describe_worker) for _ in range(size)]]
