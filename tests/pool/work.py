"""Functions for worker processes, which import this module."""

import asyncio
import contextlib
import contextvars
import os
import signal
import sys
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

from aioverbs import AccessFlags, RemoteRegion, Worker, WorkerPool, current_worker, open_device
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


async def fail(kind: str) -> object:
    await asyncio.sleep(0)
    match kind:
        case "own":
            raise PicklableError("there")
        case "stubborn":
            raise UnpicklableError(1, 2)
        case "lambda":
            return lambda: None
        case "returned":
            return UnpicklableError(1, 2)
    raise AssertionError(kind)


async def sleep_until_cancelled(folder: str) -> None:
    """Sleep until cancelled, and take some time to end."""
    mark(folder, "begun")
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0.02)
        mark(folder, "ended")


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
