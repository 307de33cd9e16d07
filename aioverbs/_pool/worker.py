"""A pool's worker from within: what the functions that run there find."""

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

# Tasks that start others when they are cancelled are cancelled so often.
_CANCEL_ROUNDS = 100

_local = threading.local()


class Worker:
    """Where a function of a pool runs: see `current_worker`. What belongs to it is used by its functions only.

    :param number: from 0 on; one that replaces another has its number.
    :param domain: its resource domain, over the pool's protection domain.
    """

    def __init__(self, number: int, domain: ResourceDomain, supervisor: object) -> None:
        self.supervisor = supervisor
        self.number = number
        self.domain = domain
        self.loop = running_loop()
        self.state: Any = None
        """What the pool's `setup` made for it; None where it has none."""

    def __repr__(self) -> str:
        return f"<Worker {self.number} of {self.domain!r}>"


def current_worker() -> Worker:
    """The worker of whose loop this is called.

    :raises RuntimeError: it is called from elsewhere.
    """
    worker = worker_or_none()
    if worker is None:
        raise RuntimeError("this is not called by a worker: use pool.run(function) to have it called by one")
    return worker


def worker_or_none() -> Worker | None:
    """The worker of whose thread this is called, if it is one's."""
    return getattr(_local, "worker", None)


Setup = Callable[[Worker], AbstractAsyncContextManager[object]]


@dataclass(frozen=True)
class WorkerSettings:
    """What the workers of a pool have in common. It goes to other processes, where these are workers."""

    thread_model: ThreadModel
    message_model: MessageModel
    allocator: Allocator | None
    loop: str | LoopFactory
    setup: Setup | None


def loop_factory(loop: str | LoopFactory) -> LoopFactory:
    """What makes event loops: asyncio's, uvloop's, or the function that is given.

    :raises ValueError: it is another name.
    :raises ImportError: uvloop is not installed.
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
            raise ValueError(f"loop is 'asyncio', 'uvloop' or a function that makes event loops, not {loop!r}")
    return loop


@contextlib.asynccontextmanager
async def worker_context(
    number: int, device: Device, pd: ProtectionDomain, settings: WorkerSettings, supervisor: object = None
) -> AsyncGenerator[Worker, None]:
    """Be a worker on the running loop, which is its own: until the end of the block, where its tasks are cancelled.

    :param crew: that it is one of, in this process.
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
            await cancel_tasks()  # they use what is closed next


async def cancel_tasks() -> None:
    """Cancel all other tasks of the running loop, and wait for their ends."""
    for _ in range(_CANCEL_ROUNDS):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


publish(__name__)
