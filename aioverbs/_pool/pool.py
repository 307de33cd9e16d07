"""Pools of workers: threads or processes, each with an event loop and a resource domain over one protection domain."""

import asyncio
import functools
import itertools
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, TypeVarTuple, overload

import anyio

from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, ThreadModel, running_loop, wait_uncancelled
from aioverbs._lifecycle.cross_loop import CrossLoopFuture, ResultSink
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import Resource, ResourceStatistics, check_open, open_part_now
from aioverbs._lifecycle.turns import OPENING, spend, yield_to_loop
from aioverbs._pool.backends import ProcessBackend, SocketCallFactory, ThreadBackend
from aioverbs._pool.call_future import CallFuture
from aioverbs._pool.placement import Key, PlacementPolicy, RoundRobin
from aioverbs._pool.supervisor import PendingCall, Supervisor, WorkerStatistics, poll_end, poll_error
from aioverbs._pool.worker import LoopFactory, Setup, Worker, WorkerSettings, current_worker, loop_factory
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.device import Device
from aioverbs._verbs.protection_domain import InterchangeableDomain, ProtectionDomain, base_protection_domain
from aioverbs.allocators import Allocator, checked_allocator
from aioverbs.errors import BusyResourceError

__all__ = [
    "CallFuture",
    "PoolStatistics",
    "Worker",
    "WorkerPool",
    "WorkerStatistics",
    "check_unbroken",
    "current_worker",
    "send_socket_call",
    "socket_call_factory_for",
    "wait_while_accepting_calls",
]

A = TypeVar("A")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CALLS_PER_WORKER = 16
_serials = itertools.count(1)


@dataclass(frozen=True)
class PoolStatistics(ResourceStatistics):
    """Counts of a pool, at one moment.

    :param workers: those of each worker, by its number.
    """

    workers: tuple[WorkerStatistics, ...]

    @property
    def deaths(self) -> int:
        """How many workers died."""
        return sum(worker.deaths for worker in self.workers)


class WorkerPool(Resource):
    """Threads or processes that run functions, each on an event loop with a resource domain of its own.

    All domains are over one protection domain, so that memory that is registered once serves the queue pairs of all.
    A worker's functions find its domain by `current_worker`.

    ``async with`` opens it. At the end of the block it waits for all calls, those that were started and that nobody
    awaits included; where the block raises, it cancels them.

    :param size: how many workers.
    :param pd: the protection domain, or a parent domain over it; None: one of its own, which is `pd`.
    :param thread_model: that of the workers' domains.
    :param message_model: that of the workers' domains.
    :param allocator: where the provider takes memory from for the workers' domains; None: from its own.
    :param loop: what event loops the workers have: ``"asyncio"``, ``"uvloop"``, or a function that makes one.
    :param setup: what each worker enters before it takes calls, and leaves at its end, on its loop: an async context
        manager that is made for it, whose value becomes the ``state`` of its `Worker`.
    :param placement: which worker gets the calls that name neither a worker nor a key; None: one after the other.
    :param on_worker_death: whether a worker that dies is replaced, by a new one with its number; or the pool fails,
        and takes no more calls. Calls that the worker had raise `WorkerDiedError` in any case, and the logger
        ``aioverbs.pool`` has it as an error.
    :param drain_s: for how many seconds closing waits for calls before it cancels them; None: for as long as they take.
    :param grace_s: for how many seconds closing waits for what it cancelled, and then for the workers' ends; processes
        are killed after that.
    :param processes: whether the workers are processes, so that they do not share an interpreter's lock. They are new
        interpreters, that import the main module as those of `multiprocessing` do. Functions, arguments and what comes
        back go by pickle; context variables stay here. The loop that opens the pool closes it. Where the device cannot
        share its protection domain between processes each worker has one of its own: `WorkerStatistics.shares_pd`
        tells. A software device's address, if it has one, stays this process's.
    :raises ImportError: uvloop is not installed.
    """

    def __init__(
        self,
        device: Device,
        size: int,
        *,
        pd: InterchangeableDomain | None = None,
        thread_model: ThreadModel = ThreadModel.SINGLE,
        message_model: MessageModel = MessageModel.DEFAULT,
        allocator: Allocator | None = None,
        loop: str | LoopFactory = "asyncio",
        setup: Setup | None = None,
        placement: PlacementPolicy | None = None,
        on_worker_death: Literal["replace", "fail"] = "replace",
        drain_s: float | None = None,
        grace_s: float = 10.0,
        processes: bool = False,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool has one worker or more, not {size}")
        if on_worker_death not in ("replace", "fail"):
            raise ValueError(f"on_worker_death is 'replace' or 'fail', not {on_worker_death!r}")
        loop_factory(loop)
        self._device = device
        self._is_own_pd = pd is None
        self._pd = base_protection_domain("worker pool", pd) if pd is not None else device.protection_domain()
        super().__init__(pd if pd is not None else self._pd)
        self._lifecycle.label = str(next(_serials))
        settings = WorkerSettings(
            ThreadModel(thread_model), MessageModel(message_model), checked_allocator(allocator), loop, setup
        )
        self._drain_s = drain_s
        self._grace_s = grace_s
        policy = placement if placement is not None else RoundRobin()
        name = f"{type(self).__name__} {self._lifecycle.label}"
        self._backend = (ProcessBackend if processes else ThreadBackend)(device, self._pd, settings)
        self._supervisor = supervisor = Supervisor(
            name, size, self._backend.spawn, policy, replaces=on_worker_death == "replace"
        )
        self._lifecycle.drain = lambda: wait_uncancelled(_end_workers(supervisor, grace_s))

    # ---- Life

    @property
    def pd(self) -> ProtectionDomain:
        """The protection domain of all workers."""
        return self._pd

    def _owner(self) -> Affinity | None:
        return self._backend.owner()

    def _open(self) -> None:
        self._backend.open()
        self._supervisor.spawn()

    async def open(self) -> Self:
        """Open it, and have all workers ready for calls.

        :raises ClosedResourceError: it was opened before, or one of those that it is made from is closed.
        :raises VerbsError: a worker's domain could not be made.
        """
        if turn := spend(OPENING):
            await yield_to_loop(turn)
        # From here to where it is open there is no await, in which another one could open it.
        if self.state is not ResourceState.NEW:
            self._open_now()  # which says why it cannot be
        if self._is_own_pd:
            open_part_now(self._pd)
        try:
            self._open_now()
        except BaseException:
            if self._is_own_pd:
                await wait_uncancelled(self._pd.aclose())
            raise
        try:
            for ready in self._supervisor.start():
                await asyncio.wrap_future(ready)
        except BaseException:
            await wait_uncancelled(self.stop(0))
            raise
        return self

    async def drain(self) -> None:
        """Take no more calls, but those of functions that run here, and wait until all are over.

        Where this is cancelled the calls go on. What follows is to close it.

        :raises BusyResourceError: a function of the pool itself asks for this.
        """
        self._check_open()
        self._check_not_on_worker()
        self._supervisor.drain()
        await self._supervisor.wait_while(self._supervisor.is_busy)

    async def stop(self, deadline_s: float | None = None) -> None:
        """Close it: `drain` it for so long at most, then cancel the calls that are left, which raise
        `ClosedResourceError`, and end the workers. A cancellation of this is such a deadline, too.

        :param deadline_s: seconds; None: for as long as the calls take.
        :raises AffinityError: its workers are processes, and another loop opened it; nothing was done.
        :raises BusyResourceError: a thread is inside of a function that does not end; it is still there, and the pool
            takes no calls, and can be closed again. Or a function of the pool itself asks for this.
        """
        self._check_not_on_worker()
        if self.state is ResourceState.OPEN and not self.closed:
            self._lifecycle.check_owner("aclose")
            try:
                with anyio.move_on_after(deadline_s if deadline_s is not None else math.inf):
                    await self.drain()
            except BaseException as error:  # who cancelled is to see that
                await self._close_after_error(error)
                raise
        await self._close()

    async def _close(self) -> None:
        try:
            await super().aclose()
        except BaseException as error:
            if self._can_close_pd():
                await self._pd.__aexit__(type(error), error, error.__traceback__)
            raise
        if self._can_close_pd():
            await self._pd.aclose()

    async def _close_after_error(self, error: BaseException) -> None:
        try:
            await self._close()
        except Exception as another:
            error.add_note(f"and closing {self!r} failed: {type(another).__name__}: {another}")

    def _can_close_pd(self) -> bool:
        """Whether a protection domain of its own is to be closed."""
        return self._is_own_pd and self.state in (ResourceState.NEW, ResourceState.CLOSED)

    def _check_not_on_worker(self) -> None:
        if self._supervisor.is_on_worker():
            raise BusyResourceError(f"{self!r} waits for the functions that run there: have it closed from without")

    async def aclose(self) -> None:
        """Close it: `stop` it after `drain_s` seconds."""
        await self.stop(self._drain_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
            self._supervisor.check_unbroken()
            return
        try:
            await self.stop(0)
        except Exception as another:
            error.add_note(f"and closing {self!r} failed: {type(another).__name__}: {another}")

    def __del__(self) -> None:
        super().__del__()
        if getattr(self, "_supervisor", None) is not None and self.state is ResourceState.OPEN and not self.closed:
            self._supervisor.abandon()

    # ---- Calls

    @overload
    async def run(
        self,
        function: Callable[[*Ts], Coroutine[Any, Any, T]],
        /,
        *args: *Ts,
        worker: int | None = None,
        key: Key | None = None,
    ) -> T: ...
    @overload
    async def run(
        self,
        function: Callable[[*Ts], T],
        /,
        *args: *Ts,
        worker: int | None = None,
        key: Key | None = None,
    ) -> T: ...
    async def run(
        self, function: Callable[[*Ts], Any], /, *args: *Ts, worker: int | None = None, key: Key | None = None
    ) -> Any:
        """Call a function on a worker, from any asyncio event loop; what it returns or raises comes back.

        Context variables go with it. A plain function is called between the worker's tasks, a coroutine function is
        awaited in one of its own. A cancellation goes there, too, once, and is raised here when the function has ended,
        or what that raised on its way out.

        Calls go to processes, and come back, by the loop that opened the pool. While that stands still nothing comes
        back, and a cancellation does not wait for it; where it is gone, calls raise `WorkerDiedError`.

        :param worker: the number of the worker; None: the pool's `placement` chooses one.
        :param key: a text, bytes or a number: calls with the same key go to the same worker.
        :raises WorkerDiedError: the worker died meanwhile.
        :raises BrokenResourceError: one died before and was not replaced, or something there cancelled the function.
        :raises ClosedResourceError: the pool is not open, or was closed meanwhile and cancelled the function.
        :raises ForkedProcessError: it was opened in the process that this one was forked from.
        :raises RuntimeError: no asyncio event loop is running.
        """
        future: CrossLoopFuture[Any] = CrossLoopFuture(running_loop())
        call = self._send(function, args, future, worker, key)
        if call.handle.poll_interval_s is not None:
            future.watch(functools.partial(poll_error, call))  # a lambda would cost each call an object
        return await future.wait(call.withdraw)

    @overload
    def start_soon(
        self,
        function: Callable[[*Ts], Coroutine[Any, Any, T]],
        /,
        *args: *Ts,
        worker: int | None = None,
        key: Key | None = None,
    ) -> CallFuture[T]: ...
    @overload
    def start_soon(
        self,
        function: Callable[[*Ts], T],
        /,
        *args: *Ts,
        worker: int | None = None,
        key: Key | None = None,
    ) -> CallFuture[T]: ...
    def start_soon(
        self, function: Callable[[*Ts], Any], /, *args: *Ts, worker: int | None = None, key: Key | None = None
    ) -> CallFuture[Any]:
        """Start a call as `run` does, from any thread, and do not wait for it.

        Its end can be awaited, waited for by a thread without a loop, or forgotten, in which case an error is logged.
        """
        future: CallFuture[Any] = CallFuture()
        call = self._send(function, args, future, worker, key)
        future.on_sent(call.withdraw, functools.partial(poll_end, call) if self.processes else None)
        return future

    def _send(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        outcome: ResultSink[Any],
        worker: int | None,
        key: Key | None,
    ) -> PendingCall:
        self._check_open()
        return self._supervisor.send(self._backend.make_payload(function, args), outcome, worker, key)

    @overload
    async def map(
        self,
        function: Callable[[A], Coroutine[Any, Any, T]],
        items: Iterable[A],
        *,
        limit: int | None = None,
        key: Callable[[A], Key] | None = None,
    ) -> list[T]: ...
    @overload
    async def map(
        self,
        function: Callable[[A], T],
        items: Iterable[A],
        *,
        limit: int | None = None,
        key: Callable[[A], Key] | None = None,
    ) -> list[T]: ...
    async def map(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        limit: int | None = None,
        key: Callable[[Any], Key] | None = None,
    ) -> list[Any]:
        """Call a function for each item, on all workers; the results, in the order of the items.

        The first call that fails cancels the others, and what it raised is raised, with notes of what others raised.

        :param limit: how many calls there are at most at a time; None: 16 for each worker. Items are asked for as they
            are needed.
        :param key: makes an item's key, as `run` takes it; None: the pool's `placement` chooses.
        """
        concurrency = limit if limit is not None else _CALLS_PER_WORKER * self._supervisor.size
        if concurrency < 1:
            raise ValueError(f"limit is 1 or more, not {limit}")
        numbered_items = enumerate(items)
        results: dict[int, Any] = {}
        errors: list[Exception] = []

        async def call_items() -> None:
            try:
                for number, item in numbered_items:
                    results[number] = None  # its place
                    results[number] = await self.run(function, item, key=key(item) if key is not None else None)
            except Exception as error:
                errors.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for _ in range(concurrency):
                group.start_soon(call_items)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and another call raised {type(other).__name__}: {other}")
            raise errors[0]
        return list(results.values())

    # ---- Looking

    @property
    def size(self) -> int:
        """How many workers it has."""
        return self._supervisor.size

    @property
    def grace_s(self) -> float:
        """For how many seconds closing waits for what it cancelled."""
        return self._grace_s

    @property
    def processes(self) -> bool:
        """Whether the workers are processes."""
        return isinstance(self._backend, ProcessBackend)

    def statistics(self) -> PoolStatistics:
        """Its counts as they are now."""
        return PoolStatistics(len(self._lifecycle.children), self._supervisor.statistics())


# ---- Sockets, which servers give to workers


def socket_call_factory_for(pool: WorkerPool, function: Callable[..., Any], *args: object) -> SocketCallFactory:
    """Makes calls of a function with a socket, with what it is to tell on its way, and with arguments.

    :raises PicklingError: it cannot go to processes; or another error.
    """
    return pool._backend.socket_call_factory(function, args)


def send_socket_call(pool: WorkerPool, payload: object, outcome: ResultSink[Any], key: Key | None) -> PendingCall:
    """Send such a call. It raises what `WorkerPool.run` does."""
    check_open(pool)
    return pool._supervisor.send(payload, outcome, None, key)


async def wait_while_accepting_calls(pool: WorkerPool) -> None:
    """Until a pool takes no more calls."""
    await pool._supervisor.wait_while(pool._supervisor.accepts_calls)


def check_unbroken(pool: WorkerPool) -> None:
    """See that a pool has not failed.

    :raises BrokenResourceError: a worker died and was not replaced.
    """
    pool._supervisor.check_unbroken()


async def _end_workers(supervisor: Supervisor, grace_s: float) -> None:
    """Cancel what is left, and have all workers end."""
    supervisor.cancel()
    with anyio.move_on_after(grace_s):  # without a second cancellation, which may do harm
        await supervisor.wait_while(supervisor.is_busy)
    supervisor.stop()
    with anyio.move_on_after(grace_s):
        await supervisor.wait_while(supervisor.has_workers)
    supervisor.join()
    if unended := supervisor.kill():
        raise BusyResourceError(f"{supervisor.name} cannot be closed, these do not end: {', '.join(unended)}")
    await supervisor.wait_while(supervisor.has_workers)
    supervisor.join()


publish(__name__)
