"""Workers as seen by the functions that they run: `current_worker`."""

import asyncio
import contextlib
import importlib
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any

from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import ThreadModel, running_loop
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.device import Device
from aioverbs._verbs.protection_domain import ProtectionDomain
from aioverbs._verbs.resource_domain import ResourceDomain
from aioverbs.allocators import Allocator

__all__ = [
    "LoopFactory",
    "Setup",
    "Worker",
    "WorkerSettings",
    "cancel_tasks",
    "current_worker",
    "loop_factory",
    "worker_context",
    "worker_or_none",
]

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

# Maximum number of rounds of cancellations: a cancelled task may start further tasks.
_CANCEL_ROUNDS = 100

_local = threading.local()


class Worker:
    """Worker of a pool, for the functions that run on it. The pool makes it; `current_worker` returns it.

    Only functions that run on the worker may use its domain.

    :param number: number of the worker in its pool, 0 or higher. A worker that replaces another one has the same
        number.
    :param domain: resource domain of the worker, over the pool's protection domain.
    :param supervisor: supervisor of the pool, by which the pool recognizes its own workers; None in a worker process.
    """

    def __init__(self, number: int, domain: ResourceDomain, supervisor: object) -> None:
        self.supervisor = supervisor
        self.number = number
        self.domain = domain
        self.loop = running_loop()
        self.state: Any = None
        """Value of the context manager from the pool's `setup`; None if the pool has no setup."""

    def __repr__(self) -> str:
        return f"<Worker {self.number} of {self.domain!r}>"


def current_worker() -> Worker:
    """Return the worker on which the calling function runs.

    :raises RuntimeError: the caller does not run on a worker of a pool.
    """
    worker = worker_or_none()
    if worker is None:
        raise RuntimeError("current_worker() was called outside of a worker: use pool.run(function)")
    return worker


def worker_or_none() -> Worker | None:
    """Return the worker that the current thread belongs to; None if the thread belongs to no worker."""
    return getattr(_local, "worker", None)


Setup = Callable[[Worker], AbstractAsyncContextManager[object]]


@dataclass(frozen=True)
class WorkerSettings:
    """Settings that all workers of a pool share. They are pickled if the workers are processes.

    :param thread_model: thread model of the workers' domains.
    :param message_model: message model of the workers' domains.
    :param allocator: allocator of the memory that the provider uses for the workers' domains; None for the provider's
        own memory.
    :param loop: ``"asyncio"``, ``"uvloop"``, or a function that returns a new event loop.
    :param setup: function that takes a `Worker` and returns an async context manager, which the worker enters before it
        takes calls; None if there is no setup.
    """

    thread_model: ThreadModel
    message_model: MessageModel
    allocator: Allocator | None
    loop: str | LoopFactory
    setup: Setup | None


def loop_factory(loop: str | LoopFactory) -> LoopFactory:
    """Return a function that makes new event loops.

    :param loop: ``"asyncio"``, ``"uvloop"``, or a function that returns a new event loop; the function is returned
        unchanged.
    :returns: function without arguments that returns a new event loop.
    :raises ValueError: `loop` is any other string.
    :raises ImportError: `loop` is ``"uvloop"``, and uvloop is not installed.
    """
    match loop:
        case "asyncio":
            return asyncio.SelectorEventLoop
        case "uvloop":
            try:
                factory: LoopFactory = importlib.import_module("uvloop").new_event_loop
            except ImportError as error:
                raise ImportError("uvloop is not installed: `pip install uvloop`, or use loop='asyncio'") from error
            return factory
        case str():
            raise ValueError(f"`loop` must be 'asyncio', 'uvloop' or a function that makes event loops, got {loop!r}")
    return loop


@contextlib.asynccontextmanager
async def worker_context(
    number: int, device: Device, pd: ProtectionDomain, settings: WorkerSettings, supervisor: object = None
) -> AsyncGenerator[Worker, None]:
    """Make the current thread a worker for the duration of the block.

    At the end of the block, all other tasks on the running loop are cancelled and waited for.

    :param number: number of the worker.
    :param device: device of the pool.
    :param pd: protection domain of the worker's domain.
    :param settings: settings of all workers.
    :param supervisor: supervisor of the pool; None if it is in another process.
    :returns: async context manager that yields the `Worker`. Entering the block raises whatever
        `Device.resource_domain` and `ResourceDomain.open` raise, such as `VerbsError`, and whatever the setup raises.
        The end of the block raises whatever leaving the setup and closing the domain raise.
    """
    async with AsyncExitStack() as stack:
        domain = await stack.enter_async_context(
            device.resource_domain(
                pd,
                thread_model=settings.thread_model,
                message_model=settings.message_model,
                allocator=settings.allocator,
            )
        )
        worker = Worker(number, domain, supervisor)
        _local.worker = worker
        stack.callback(setattr, _local, "worker", None)
        if settings.setup is not None:
            worker.state = await stack.enter_async_context(settings.setup(worker))
        try:
            yield worker
        finally:
            await cancel_tasks()  # before the setup and the domain that they use are closed


async def cancel_tasks() -> None:
    """Cancel all other tasks on the running loop and wait until they have ended.

    If these start new tasks meanwhile, cancel those as well, in up to 100 rounds. Tasks that exist after that keep
    running. Exceptions that the tasks raise are not raised here.

    :raises RuntimeError: no asyncio event loop is running.
    """
    for _ in range(_CANCEL_ROUNDS):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


publish(__name__)
