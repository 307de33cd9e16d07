"""Worker pools: threads or processes, each with an event loop and a resource domain over one protection domain."""

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
from aioverbs._lifecycle.resource import (
    Resource,
    ResourceStatistics,
    check_open,
    close_after_error,
    lifecycle_of,
    open_part_now,
)
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
    """Counts of a pool at one moment. `WorkerPool.statistics` returns one.

    :param workers: counts of each worker, ordered by worker number.
    """

    workers: tuple[WorkerStatistics, ...]

    @property
    def deaths(self) -> int:
        """Number of workers that have died during the lifetime of the pool."""
        return sum(worker.deaths for worker in self.workers)


class WorkerPool(Resource):
    """Pool of threads or processes that run functions, each on an event loop with a resource domain of its own.

    The domains of all workers are created on one protection domain, so memory that is registered once can be used by
    the queue pairs of all workers. A function that runs on a worker gets the worker's domain from `current_worker`.

    ``async with`` opens the pool. The end of the block closes the pool, after it has waited for all calls, including
    those that `start_soon` started and nothing awaits; then it raises `BrokenResourceError` if a worker died and was
    not replaced. If the block raises an exception, the calls are cancelled instead, and if closing fails as well, that
    becomes a note on the exception.

    With `processes`, the workers do not share the lock of one interpreter. Each worker process is a new interpreter
    that imports the main module, as the processes of `multiprocessing` do. Functions, arguments and results are
    pickled, and context variables are not transferred. Only the event loop that opened the pool can close it. If the
    device cannot share its protection domain between processes, each worker has a protection domain of its own: see
    ``WorkerStatistics.shares_pd``. The workers do not use the network address of a software device, which belongs to
    this process.

    :param device: device of the workers, which must stay open as long as the pool.
    :param size: number of workers, at least 1.
    :param pd: protection domain, or parent domain over it; None if the pool is to open and close a protection domain of
        its own.
    :param thread_model: thread model of the workers' domains.
    :param message_model: message model of the workers' domains.
    :param allocator: allocator of the memory that the provider uses for the workers' domains; None for the provider's
        own memory.
    :param loop: event loops of the workers: ``"asyncio"``, ``"uvloop"``, or a function that returns a new event loop.
    :param setup: function that takes a `Worker` and returns an async context manager. Each worker enters it on its loop
        before it takes calls, and leaves it when it ends. Its value becomes the ``state`` of the `Worker`. None if the
        workers need no setup. An exception that it raises when it is left is logged, or printed by a worker process. If
        the pool is closed while a worker enters it, that is cancelled, or the worker's process is killed.
    :param placement: policy that chooses a worker for calls that name neither a worker nor a key; None for
        `RoundRobin`.
    :param on_worker_death: ``"replace"``: a worker that dies is replaced with a new one that has the same number; if it
        died within a second, after a pause of 0.1 s, which grows up to 10 s if its replacements die as soon.
        ``"fail"``: the pool is broken after the first death, and takes no more calls. In both cases the calls that the
        worker had raise `WorkerDiedError`, and the logger ``aioverbs.pool`` logs an error.
    :param drain_s: seconds that `aclose` waits for calls before it cancels them; None if there is no limit.
    :param grace_s: seconds that closing waits for cancelled calls to end, and then again for the workers to end. After
        that, processes are killed.
    :param processes: True for worker processes, False for threads.
    :raises ValueError: `size` is less than 1, or `loop` or `on_worker_death` is none of the values above.
    :raises TypeError: `pd` is not a domain, or the allocator lacks the methods of `Allocator`.
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
            raise ValueError(f"the size of a worker pool must be at least 1, got {size}")
        if on_worker_death not in ("replace", "fail"):
            raise ValueError(f"`on_worker_death` must be 'replace' or 'fail', got {on_worker_death!r}")
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

    # ---- Opening and closing

    @property
    def pd(self) -> ProtectionDomain:
        """Protection domain of the pool.

        The workers' domains are created on this domain, unless the workers are processes and the device cannot share
        the domain with them. The pool opens and closes the domain, unless it was passed to the constructor. If a parent
        domain was passed, this is the protection domain under it.
        """
        return self._pd

    def _owner(self) -> Affinity | None:
        return self._backend.owner()

    def _open(self) -> None:
        self._backend.open()
        self._supervisor.spawn()

    async def open(self) -> Self:
        """Open the pool and wait until all workers are ready for calls.

        If this fails or is cancelled before the workers are started, the pool stays unopened; after that, the pool is
        closed. Workers that enter their setup at that moment are cancelled. If a worker thread does not end, a note on
        the exception says so; the pool takes no calls then but can be closed again.

        :returns: the pool itself.
        :raises ClosedResourceError: the pool was opened before, another task closed it before all workers were ready,
            or a resource that it is made from is closed.
        :raises ForkedProcessError: the pool, or a resource that it is made from, was opened in the process that this
            one was forked from.
        :raises VerbsError: a verb failed, such as ibv_alloc_pd or ibv_alloc_parent_domain.
        :raises WorkerDiedError: a worker ended before it was ready, and no exception explains why; or a worker process
            was not ready within 60 s.
        :raises OSError: a worker cannot be started, for example because no file descriptor is left (EMFILE).
        :raises pickle.PicklingError: the workers are processes, and `setup`, `loop` or `allocator` cannot be pickled.
            `pickle` may raise other exceptions instead.
        :raises RuntimeError: no asyncio event loop is running, or no thread can be started.
        :raises Exception: whatever the `setup` of a worker raised, or the `loop` function.
        """
        if turn := spend(OPENING):
            await yield_to_loop(turn)
        # There is no await from here until the pool is open, so no other task can open it meanwhile.
        if self.state is not ResourceState.NEW:
            self._open_now()  # raises the reason
        if self._is_own_pd:
            open_part_now(self._pd)
        try:
            self._open_now()
        except BaseException as error:
            if self._is_own_pd:
                try:
                    lifecycle_of(self._pd).undo()  # so that the pool can be opened again
                except Exception as another:
                    error.add_note(f"and deallocating {self._pd!r} failed: {another}; close {self!r}")
            raise
        try:
            await asyncio.gather(*map(asyncio.wrap_future, self._supervisor.start()))
        except BaseException as error:
            await close_after_error(error, wait_uncancelled(self.stop(0)), self)
            raise
        return self

    async def drain(self) -> None:
        """Stop taking calls from outside the pool, and wait until all calls have ended.

        Functions that run on worker threads may still call the pool. If the wait is cancelled, the calls in flight
        continue, and the pool still takes no new ones. After this the pool can only be closed.

        :raises ClosedResourceError: the pool is not open.
        :raises ForkedProcessError: the pool was opened in the process that this one was forked from.
        :raises BusyResourceError: a function that runs on a worker thread of this pool called this, and would wait for
            itself. In this case nothing is changed.
        :raises RuntimeError: calls are in flight, and no asyncio event loop is running. The pool takes no new calls.
        """
        self._check_open()
        self._check_not_on_worker()
        self._supervisor.drain()
        await self._supervisor.wait_while(self._supervisor.is_busy)

    async def stop(self, deadline_s: float | None = None) -> None:
        """Drain the pool until a deadline, then cancel the remaining calls, end the workers and close the pool.

        Cancelled calls raise `ClosedResourceError`. Closing takes up to two times `grace_s` longer than the deadline. A
        pool that is closed or was never opened stays as it is, and so does, in a forked child, a pool that was opened
        before the fork.

        If this is cancelled while it waits for calls, it behaves as at the deadline: the remaining calls are cancelled,
        the pool is closed, and then the cancellation is raised.

        :param deadline_s: seconds to wait for calls before they are cancelled; None if there is no limit.
        :raises AffinityError: the workers are processes, and another event loop, which has not ended, opened the pool.
            In this case nothing is done.
        :raises BusyResourceError: a function that runs on a worker thread of this pool called this; in this case
            nothing is done. Also raised if a worker thread runs a function that does not end, in which case the thread
            is left running, or if another event loop owns a resource that was made from the pool or its protection
            domain. The pool then takes no calls but can be closed again.
        :raises VerbsError: a verb failed. The pool takes no calls but can be closed again.
        :raises ResourceWarning: if warnings are turned into errors, and resources that were made from the pool or its
            own protection domain were still open. The pool is closed.
        :raises RuntimeError: the pool is open, and no asyncio event loop is running. The pool can be closed again.
        """
        self._check_not_on_worker()
        if self.state is ResourceState.OPEN and not self.closed:
            self._lifecycle.check_owner("aclose")
            try:
                with anyio.move_on_after(deadline_s if deadline_s is not None else math.inf):
                    await self.drain()
            except BaseException as error:  # includes cancellations, which the caller must receive
                await close_after_error(error, self._close(), self)
                raise
        await self._close()

    async def _close(self) -> None:
        """Cancel the calls, end the workers, and close the pool and the protection domain that the pool opened itself.

        This raises the same exceptions as `stop`. If closing the pool fails, the protection domain stays open.
        """
        try:
            await super().aclose()
        except BaseException as error:
            if self._can_close_pd():
                await self._pd.__aexit__(type(error), error, error.__traceback__)
            raise
        if self._can_close_pd():
            await self._pd.aclose()

    def _can_close_pd(self) -> bool:
        """Return whether the pool opened its protection domain itself, and the workers no longer use it."""
        return self._is_own_pd and self.state in (ResourceState.NEW, ResourceState.CLOSED)

    def _check_not_on_worker(self) -> None:
        """Check that the caller does not run on a worker thread of this pool.

        :raises BusyResourceError: the caller runs on a worker thread of this pool.
        """
        if self._supervisor.is_on_worker():
            raise BusyResourceError(
                f"{self!r} cannot be drained or closed by a function that runs on it: do so from outside the pool"
            )

    async def aclose(self) -> None:
        """Close the pool by calling `stop` with a deadline of `drain_s` seconds, or without one if `drain_s` is None.

        This raises the same exceptions as `stop`, with the same effects. Closing a closed pool does nothing. In a
        forked child, nothing is done.
        """
        await self.stop(self._drain_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
            self._supervisor.check_unbroken()
        else:
            await close_after_error(error, self.stop(0), self)

    def __del__(self) -> None:
        if getattr(self, "_supervisor", None) is not None and self.state is ResourceState.OPEN and not self.closed:
            self._supervisor.abandon()
        super().__del__()  # last, because it raises the warning if warnings are errors

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
        """Call a function on a worker and wait for its result.

        This can be called from any asyncio event loop. On a worker thread, the function runs in a copy of the caller's
        context. A plain function is called between the tasks of the worker's loop; a coroutine function is awaited in a
        new task there.

        If the caller is cancelled, the function's task on the worker is cancelled once. The caller still waits until
        the function has ended, and then raises the cancellation, or the exception that the function raised instead.

        Calls to worker processes pass through the event loop that opened the pool. While that loop does not run, no
        result arrives, and a cancelled caller does not wait for the function. If that loop is closed, or its thread has
        ended, calls raise `WorkerDiedError`.

        :param function: plain function or coroutine function. If the workers are processes, it must be possible to
            pickle it.
        :param args: positional arguments of the function.
        :param worker: number of the worker, 0..size-1; None if `key` or the pool's `placement` is to choose the worker.
        :param key: string, bytes or integer: calls with equal keys run on the same worker. None if `worker` or the
            pool's `placement` is to choose the worker.
        :returns: the result of the function.
        :raises WorkerDiedError: the worker died before the call ended.
        :raises BrokenResourceError: a worker died before this call and was not replaced; or the function was cancelled
            on the worker, but not by the caller.
        :raises ClosedResourceError: the pool is not open or is draining, or it was closed during the call, which was
            cancelled.
        :raises ForkedProcessError: the pool was opened in the process that this one was forked from.
        :raises ValueError: the pool has no such worker, both `worker` and `key` are given, or the `placement` policy
            chose a worker that does not exist.
        :raises TypeError: `key` is not a string, bytes or an integer.
        :raises pickle.PicklingError: the workers are processes, and the function, an argument or the result cannot be
            pickled. `pickle` may raise other exceptions instead.
        :raises RuntimeError: no asyncio event loop is running; in this case the function is not called. Also raised in
            place of an exception of the function that a worker process cannot pickle, and of StopIteration.
        :raises Exception: whatever the function or the `placement` policy raised.
        """
        future: CrossLoopFuture[Any] = CrossLoopFuture(running_loop())
        call = self._send(function, args, future, worker, key)
        if call.handle.poll_interval_s is not None:
            future.watch(functools.partial(poll_error, call))  # cheaper than a lambda
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
        """Start a call as `run` does, and return a future without waiting until the call has ended.

        This can be called from any thread. A task on any loop can await `CallFuture.wait`; a thread without a loop can
        call `CallFuture.result`. If the call fails and its result is never retrieved, the logger ``aioverbs.pool`` logs
        the exception.

        :param function: plain function or coroutine function. If the workers are processes, it must be possible to
            pickle it.
        :param args: positional arguments of the function.
        :param worker: number of the worker, 0..size-1; None if `key` or the pool's `placement` is to choose the worker.
        :param key: string, bytes or integer: calls with equal keys run on the same worker. None if `worker` or the
            pool's `placement` is to choose the worker.
        :returns: future of the call. `CallFuture.wait` and `CallFuture.result` return what `run` returns, and raise
            what `run` raises after the call was sent, such as `WorkerDiedError`.
        :raises ClosedResourceError: the pool is not open, or is draining.
        :raises BrokenResourceError: a worker died before this call and was not replaced.
        :raises ForkedProcessError: the pool was opened in the process that this one was forked from.
        :raises ValueError: the pool has no such worker, both `worker` and `key` are given, or the `placement` policy
            chose a worker that does not exist.
        :raises TypeError: `key` is not a string, bytes or an integer.
        :raises pickle.PicklingError: the workers are processes, and the function or an argument cannot be pickled.
            `pickle` may raise other exceptions instead.
        :raises Exception: whatever the `placement` policy raised.
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
        """Send a call to a worker. This raises the same exceptions as `start_soon`.

        :param function: function to call.
        :param args: positional arguments of the function.
        :param outcome: object that receives the result or the exception of the call.
        :param worker: number of the worker; None if `key` or the pool's `placement` is to choose the worker.
        :param key: key that chooses the worker; None if there is none.
        :returns: the pending call, whose method ``withdraw`` cancels it.
        """
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
        """Call a function on the workers once for each item, and return the results in the order of the items.

        The first call that fails cancels the others. When all have ended, the exception of the first is raised, with a
        note for each other call that failed. If this is cancelled, all its calls are cancelled.

        :param function: plain function or coroutine function that takes an item. If the workers are processes, it must
            be possible to pickle it.
        :param items: iterable of the items, which is advanced only when a call can start.
        :param limit: maximum number of calls in flight at the same time, at least 1; None for 16 calls per worker.
        :param key: function that returns the key of an item, as for `run`; None if the pool's `placement` is to choose
            the workers.
        :returns: list of the results.
        :raises ValueError: `limit` is less than 1.
        :raises RuntimeError: no asyncio event loop is running.
        :raises Exception: whatever the first failing call, `items` or `key` raised. `run` lists the exceptions that
            calls raise.
        """
        concurrency = limit if limit is not None else _CALLS_PER_WORKER * self._supervisor.size
        if concurrency < 1:
            raise ValueError(f"`limit` must be at least 1, got {limit}")
        numbered_items = enumerate(items)
        results: dict[int, Any] = {}
        errors: list[Exception] = []

        async def call_items() -> None:
            try:
                for number, item in numbered_items:
                    results[number] = None  # reserves the item's place in the order
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

    # ---- Properties and statistics

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._supervisor.size

    @property
    def grace_s(self) -> float:
        """Seconds that closing waits for cancelled calls to end, and then again for the workers to end."""
        return self._grace_s

    @property
    def processes(self) -> bool:
        """True if the workers are processes, False if they are threads."""
        return isinstance(self._backend, ProcessBackend)

    def statistics(self) -> PoolStatistics:
        """Return a `PoolStatistics` with the current `WorkerStatistics` of each worker: how many calls wait or are in
        flight, how many have completed, failed or been cancelled, and how many workers have died.
        """
        return PoolStatistics(len(self._lifecycle.children), self._supervisor.statistics())


# ---- Calls with a socket, for servers


def socket_call_factory_for(pool: WorkerPool, function: Callable[..., Any], *args: object) -> SocketCallFactory:
    """Return a factory of calls that pass a socket and a callback to a function on a worker of a pool.

    :param pool: pool whose workers run the calls.
    :param function: function that a worker calls with a socket, a callback that takes a bool, and `args`.
    :param args: further positional arguments of the function.
    :returns: function that takes the socket and the callback of one call, and returns the payload of that call for
        `send_socket_call`.
    :raises pickle.PicklingError: the workers are processes, and the function or an argument cannot be pickled. `pickle`
        may raise other exceptions instead.
    """
    return pool._backend.socket_call_factory(function, args)


def send_socket_call(pool: WorkerPool, payload: object, outcome: ResultSink[Any], key: Key | None) -> PendingCall:
    """Send a call with a socket and a callback to a worker.

    This raises the same exceptions as `WorkerPool.start_soon`. In this case the socket is neither sent nor
    closed.

    :param pool: pool for which the payload was made.
    :param payload: payload of the call, from a factory that `socket_call_factory_for` returned.
    :param outcome: object that receives the result or the exception of the call.
    :param key: string, bytes or integer that chooses the worker; None if the pool's `placement` is to choose it.
    :returns: the pending call, whose method ``withdraw`` cancels it.
    """
    check_open(pool)
    return pool._supervisor.send(payload, outcome, None, key)


async def wait_while_accepting_calls(pool: WorkerPool) -> None:
    """Wait until a pool no longer takes calls from outside, because it is draining, closing, closed or broken.

    :raises RuntimeError: the pool still takes calls, and no asyncio event loop is running.
    """
    await pool._supervisor.wait_while(pool._supervisor.accepts_calls)


def check_unbroken(pool: WorkerPool) -> None:
    """Check that a pool is not broken by the death of a worker.

    :raises BrokenResourceError: a worker of the pool died and was not replaced.
    """
    pool._supervisor.check_unbroken()


async def _end_workers(supervisor: Supervisor, grace_s: float) -> None:
    """Cancel all calls of a pool, whether they wait or run, and end all workers.

    :param supervisor: supervisor of the pool.
    :param grace_s: seconds to wait for the calls to end, and then again for the workers to end. Processes that are
        still running after that are killed.
    :raises BusyResourceError: a worker thread does not end. Threads cannot be ended by force, so it is left running;
        this can be called again.
    :raises RuntimeError: a worker has not ended yet, and no asyncio event loop is running.
    """
    supervisor.cancel()
    try:
        with anyio.move_on_after(grace_s):  # no second cancellation: it could interrupt cleanup
            await supervisor.wait_while(supervisor.is_busy)
    finally:  # even if the end of the loop cancels this: the workers then end when their calls have ended
        supervisor.stop()
    with anyio.move_on_after(grace_s):
        await supervisor.wait_while(supervisor.has_workers)
    supervisor.join()
    if unended := supervisor.kill():
        raise BusyResourceError(
            f"{supervisor.name} cannot be closed because these workers have not ended: {', '.join(unended)}; "
            "close it again when their functions have returned"
        )
    await supervisor.wait_while(supervisor.has_workers)
    supervisor.join()


publish(__name__)
