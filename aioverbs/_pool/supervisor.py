"""Supervision of a pool's workers: assignment of calls, detection of deaths, and replacement."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import enum
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import CrossLoopCondition
from aioverbs._lifecycle.cross_loop import ResultSink, for_future
from aioverbs._pool.placement import Key, PlacementPolicy, rendezvous
from aioverbs._pool.worker import worker_or_none
from aioverbs.errors import BrokenResourceError, ClosedResourceError, WorkerDiedError

__all__ = [
    "Counts",
    "PendingCall",
    "Supervisor",
    "SupervisorState",
    "WorkerHandle",
    "WorkerStatistics",
    "poll_end",
    "poll_error",
]

logger = logging.getLogger("aioverbs.pool")

# Number of times that the replacement of a worker is itself replaced if it dies before it is ready. It may have been
# killed, in which case a further attempt helps; or it can never start, and the attempts must end.
_MAX_REPLACEMENTS = 2
_YOUNG_S = 1.0  # a worker that dies earlier than this after it was ready is replaced after a pause
_MIN_PAUSE_S = 0.1  # doubled with each worker in succession that dies so early
_MAX_PAUSE_S = 10.0
_JOIN_S = 1.0  # long enough: a thread that reported its end has a few instructions left


class SupervisorState(enum.Enum):
    """Treatment of calls by a supervisor."""

    OPEN = "open"
    """Calls are taken."""

    DRAINING = "draining"
    """Only calls by functions on the workers are taken, because calls in flight may wait for them."""

    STOPPED = "stopped"
    """No calls are taken, and all calls are cancelled."""


@dataclass(frozen=True)
class WorkerStatistics:
    """Counts of a worker at one moment. Totals include the workers that this one replaced. Part of `PoolStatistics`.

    :param number: number of the worker in its pool, 0 or higher.
    :param calls: number of calls that wait or are in flight.
    :param completed: number of calls that returned.
    :param failed: number of calls that raised an exception.
    :param cancelled: number of calls that were cancelled.
    :param deaths: number of workers with this number that died.
    :param ready: True if the worker takes calls; False while it starts, and after it has ended.
    :param native: True if the worker's resource domain takes no locks.
    :param shares_pd: True if the worker's protection domain is that of the pool, so that memory registered there serves
        the worker; False if the worker has a protection domain of its own.
    :param process_id: ID of the worker's process; None for a thread of this process.
    """

    number: int
    calls: int
    completed: int
    failed: int
    cancelled: int
    deaths: int
    ready: bool
    native: bool
    shares_pd: bool
    process_id: int | None


class PendingCall:
    """Call of a function that is assigned to a worker and has not ended. The caller or the pool can cancel it."""

    handle: Any
    outcome: ResultSink[Any] | None
    is_withdrawn: bool  # cancelled by the caller or by the pool
    is_cancelled_by_caller: bool
    is_cancelled_by_pool: bool

    def post(self) -> None:
        """Send the call to its worker, which must be ready.

        :raises RuntimeError: the worker's loop is closed.
        """
        raise NotImplementedError

    def withdraw(self) -> None:
        """Cancel the call on behalf of its caller. This can be called from any thread.

        It has no effect if the call has ended.
        """
        self.is_cancelled_by_caller = True
        self.revoke()

    def revoke(self) -> None:
        """Cancel the call; if it was sent to its worker, cancel it there. This can be called from any thread.

        It has no effect if the call has ended.
        """
        raise NotImplementedError

    def cancellation(self) -> BaseException:
        """Return a new exception to end the call with when it is cancelled.

        :returns: `asyncio.CancelledError` if the caller cancelled the call, even if the pool did so as well, because a
            timeout or a task group of the caller waits for that; `ClosedResourceError` if only the pool did; else
            `BrokenResourceError`.
        """
        if self.is_cancelled_by_caller:
            return asyncio.CancelledError()
        if self.is_cancelled_by_pool:
            closed: BaseException = self.handle.supervisor.closed_error()
            return closed
        return BrokenResourceError(f"{self.handle!r} cancelled the call that was sent to it")


def poll_end(call: PendingCall) -> float | None:
    """Poll the worker of a call. If the worker has ended and no event reported this, end the call.

    :returns: seconds until the next poll; None if no further poll is needed.
    """
    call.handle.poll()
    poll_interval_s: float | None = call.handle.poll_interval_s
    return poll_interval_s


def poll_error(call: PendingCall) -> BaseException | None:
    """Poll the worker of a call, which may be a replacement for the worker that the call was first assigned to.

    :returns: exception that ends the caller's wait for the call; None if the caller is to continue to wait.
    """
    error: BaseException | None = call.handle.poll_error(call)
    return error


class Counts:
    """Call counts and deaths of one worker number, over all workers that had the number."""

    def __init__(self) -> None:
        self.completed = self.failed = self.cancelled = self.deaths = 0


class WorkerHandle:
    """Supervisor's side of one worker.

    Unless a method says otherwise, the supervisor's lock guards the attributes, and callers hold the lock.

    :param supervisor: supervisor of the pool.
    :param number: number of the worker in its pool, 0 or higher.
    :param counts: counts of the worker and of the workers that it replaces.
    """

    def __init__(self, supervisor: "Supervisor", number: int, counts: Counts) -> None:
        self.supervisor = supervisor
        self.number = number
        self.counts = counts
        self.calls: set[PendingCall] = set()
        self.backlog: list[tuple[PendingCall, contextvars.Context]] = []  # calls that wait until it is ready
        self.is_ready = False
        self.has_ended = False
        self.ready_at = 0.0  # monotonic time at which it was ready, in seconds
        self.replacements_left = 0  # number of replacements if it dies before it is ready; 0 for the first workers
        self.pause_s = 0.0  # seconds to wait before it starts, because the worker that it replaces died early
        self.native = False
        self.shares_pd = True
        self.process_id: int | None = None
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ready.set_running_or_notify_cancel()  # so that no waiter can cancel it

    def __repr__(self) -> str:
        return f"<worker {self.number} of {self.supervisor.name}>"

    def start(self) -> None:
        """Start the worker after a pause of `pause_s`, without waiting for that. Call without the lock.

        The worker calls `on_ready` when it is ready, and in any case `Supervisor.on_worker_end` when it has ended.

        :raises RuntimeError: no thread can be started, or the event loop that opened a pool of processes is closed. In
            this case the caller must call `Supervisor.on_worker_end`.
        """
        raise NotImplementedError

    def make_call(self, payload: object, outcome: ResultSink[Any]) -> PendingCall:
        """Return a new call for this worker, which is not sent yet.

        :param payload: function and arguments, as the pool's backend prepared them.
        :param outcome: object that receives the result or the exception of the call.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Tell the worker to end, without waiting until it has ended.

        This can be called from any thread, without the lock, any number of times.
        """
        raise NotImplementedError

    def abandon(self) -> None:
        """Do what `stop` does, for a finalizer, so without the lock and without waiting for anything.

        :raises RuntimeError: the worker's loop is closed.
        """
        self.stop()

    @property
    def poll_interval_s(self) -> float | None:
        """Seconds between polls by a caller on the running loop; None if the caller is notified of the worker's end."""
        return None

    def poll(self) -> None:
        """End the worker if the event loop that opened the pool has ended, so that no event reports the worker's end.

        Do nothing if the worker is a thread. This can be called from any thread, without the lock.
        """

    def poll_error(self, call: PendingCall) -> BaseException | None:
        """Poll the worker, and return the exception that ends the caller's wait for a call if nothing else does.

        :param call: call of this worker.
        :returns: the exception; None if the caller is to continue to wait.
        """

    def kill(self) -> bool:
        """End the worker by force, if that is possible. Call without the lock.

        :returns: True if the worker is ended by force; False if it cannot be, because it is a thread.
        """
        raise NotImplementedError

    def join(self, timeout_s: float) -> bool:
        """Block until the thread or process of a worker that has ended is gone, which takes a short time.

        :param timeout_s: maximum time to wait, in seconds.
        :returns: True if the thread or process is gone; False if it still exists after `timeout_s`.
        """
        raise NotImplementedError

    def on_ready(self) -> None:
        """Mark the worker as ready, and send it the calls that waited for this. Call without the lock."""
        with self.supervisor.lock:
            # Set before the backlog is taken: a signal handler that sends a call here must not add it to the backlog,
            # which is never read again.
            self.is_ready = True
            self.ready_at = time.monotonic()
            backlog, self.backlog = self.backlog, []
            for call, context in backlog:
                context.run(call.post)
        self.ready.set_result(None)

    def on_done(self, call: PendingCall, result: object, error: BaseException | None) -> None:
        """Record the end of a call, and pass its result or exception to the call's ``outcome``. Call without the lock.

        Only the first report for a call has an effect.

        :param call: call of this worker.
        :param result: result of the function, if `error` is None.
        :param error: exception that the call ended with; None if the function returned.
        """
        with self.supervisor.lock:
            if call not in self.calls:
                return
            self.calls.discard(call)
            if error is None:
                self.counts.completed += 1
            elif isinstance(error, asyncio.CancelledError) or call.is_cancelled_by_pool:
                self.counts.cancelled += 1
            else:
                self.counts.failed += 1
            is_last = not self.calls and self.supervisor.state is not SupervisorState.OPEN
            outcome, call.outcome = call.outcome, None  # break the cycle: error, traceback, frame, call, outcome
        if outcome is not None:
            outcome.settle(result, error)
        if is_last:
            self.supervisor._condition.notify()

    def statistics(self) -> WorkerStatistics:
        """Return a `WorkerStatistics`: how many calls of the worker wait or are in flight, how many have completed,
        failed or been cancelled, how many workers with this number have died, and the state of the worker. The totals
        include the workers that this one replaced.
        """
        counts = self.counts
        return WorkerStatistics(
            self.number,
            len(self.calls),
            counts.completed,
            counts.failed,
            counts.cancelled,
            counts.deaths,
            self.is_ready and not self.has_ended,
            self.native,
            self.shares_pd,
            self.process_id,
        )


def _death_error(handle: WorkerHandle, reason: str, cause: BaseException | None, replaced: bool) -> WorkerDiedError:
    """Return a new `WorkerDiedError` for the death of a worker.

    Each receiver gets an exception object of its own, because raising it adds a traceback.

    :param handle: handle of the worker.
    :param reason: text that says how the worker ended.
    :param cause: exception that ended the worker; None if unknown.
    :param replaced: True if a new worker takes the place of the dead one.
    """
    died = WorkerDiedError(handle.number, reason, replaced)
    died.__cause__ = cause
    return died


class Supervisor:
    """Manager of all workers of a pool. Any thread may use it.

    :param name: name of the pool in messages.
    :param size: number of workers.
    :param spawn: function that takes a supervisor, a worker number and counts, and returns the handle of a new worker
        that is not started yet.
    :param policy: policy that chooses a worker for calls that name neither a worker nor a key.
    :param replaces: True to replace a worker that dies; False to mark the pool as broken.
    """

    def __init__(
        self,
        name: str,
        size: int,
        spawn: Callable[["Supervisor", int, Counts], WorkerHandle],
        policy: PlacementPolicy,
        *,
        replaces: bool,
    ) -> None:
        self.name = name
        self._forks = forks.count  # fork count when the workers were made
        # Guards the workers, their calls and the state. The lock is reentrant, because a signal handler or a finalizer
        # may run inside of a locked section, in the same thread, and enter another one. So a locked section calls no
        # function of the user, and reads or copies each collection by one atomic operation. In the child of a fork the
        # lock is replaced by a new one.
        self.lock = threading.RLock()
        forks.renew_lock_in_children(self)
        self._condition = CrossLoopCondition()  # notified of every end that closing waits for
        self.state = SupervisorState.OPEN
        self.broken: WorkerDiedError | None = None
        self._spawn_worker = spawn
        self._policy = policy
        self._replaces_dead = replaces
        self._handles: list[WorkerHandle] = []
        self._ended_handles: list[WorkerHandle] = []  # ended, but their threads may still be exiting
        self._numbers = tuple(range(size))
        self.size = size

    def _renew_lock(self) -> None:
        """Replace the lock with a new one in a forked child."""
        self.lock = threading.RLock()

    # ---- Calls

    def send(self, payload: object, outcome: ResultSink[Any], worker: int | None, key: Key | None) -> PendingCall:
        """Assign a call to a worker and send it, or keep it until the worker is ready.

        If the worker's loop has just been closed, the call ends with `WorkerDiedError`.

        :param payload: function and arguments, as the pool's backend prepared them.
        :param outcome: object that receives the result or the exception of the call.
        :param worker: number of the worker, 0..size-1; None if `key` or the policy is to choose the worker.
        :param key: string, bytes or integer: calls with equal keys go to the same worker. None if `worker` or the
            policy is to choose the worker.
        :returns: the pending call, whose method ``withdraw`` cancels it.
        :raises ClosedResourceError: the pool no longer takes calls, or only from functions on its workers.
        :raises BrokenResourceError: a worker died and was not replaced.
        :raises ValueError: there is no such worker, both `worker` and `key` are given, or the policy chose a worker
            that does not exist.
        :raises TypeError: `key` is not a string, bytes or an integer.
        :raises Exception: whatever the policy raised.
        """
        self._check_state()  # here as well, so that the policy is not called for nothing
        number = self._choose_worker(worker, key)
        with self.lock:
            self._check_state()
            handle = self._handles[number]
            call = handle.make_call(payload, outcome)
            handle.calls.add(call)
            if not handle.is_ready:
                handle.backlog.append((call, contextvars.copy_context()))
                return call
        try:  # noqa: SIM105 - contextlib.suppress would allocate for each call
            call.post()
        except RuntimeError:  # the worker's loop is closed: `on_worker_end` will end the call
            pass
        return call

    def withdraw_backlogged(self, call: PendingCall) -> bool:
        """Cancel a call that waits for its worker to become ready. This can be called from any thread.

        :returns: True if the call was waiting, in which case it has now ended with the exception that its method
            ``cancellation`` returned; False if it was already sent or had ended.
        """
        with self.lock:  # so that the call is either still in the backlog, or was posted
            handle: WorkerHandle = call.handle
            rest = [(other, context) for other, context in handle.backlog if other is not call]
            if len(rest) == len(handle.backlog):
                return False
            handle.backlog[:] = rest
        handle.on_done(call, None, call.cancellation())
        return True

    def check_unbroken(self) -> None:
        """Check that no worker has died without being replaced.

        :raises BrokenResourceError: a worker died and was not replaced.
        """
        if self.broken is not None:
            raise BrokenResourceError(f"{self.name} is broken: {self.broken}") from self.broken

    def accepts_calls(self) -> bool:
        """Return whether calls from outside the pool are taken: the pool is not draining, stopped or broken."""
        return self.state is SupervisorState.OPEN and self.broken is None

    def is_on_worker(self) -> bool:
        """Return whether the caller runs on a worker thread of this supervisor."""
        current = worker_or_none()
        return current is not None and current.supervisor is self

    def _check_state(self) -> None:
        """Check that the pool takes calls from the caller.

        :raises ClosedResourceError: the pool is stopped; or it is draining, and the caller does not run on one of its
            worker threads.
        :raises BrokenResourceError: a worker died and was not replaced.
        """
        if self.state is not SupervisorState.OPEN and (
            self.state is SupervisorState.STOPPED or not self.is_on_worker()
        ):
            raise ClosedResourceError(f"{self.name} takes no more calls: it is closing or closed")
        if self.broken is not None:
            self.check_unbroken()

    def _choose_worker(self, worker: int | None, key: Key | None) -> int:
        """Return the number of the worker for a call.

        :param worker: number that the caller chose; None if `key` or the policy is to choose.
        :param key: key of the call; None if `worker` or the policy is to choose.
        :raises ValueError: there is no such worker, both arguments are given, or the policy chose a worker that does
            not exist.
        :raises TypeError: `key` is not a string, bytes or an integer.
        :raises Exception: whatever the policy raised.
        """
        if worker is not None:
            if key is not None:
                raise ValueError(f"`worker` and `key` are mutually exclusive, got {worker} and {key!r}: pass only one")
            if not 0 <= worker < self.size:
                raise ValueError(f"`worker` must be in 0..{self.size - 1} for {self.name}, got {worker}")
            return worker
        if key is not None:
            return rendezvous(key, self._numbers)
        worker = self._policy.choose(self._numbers, [len(handle.calls) for handle in self._handles])
        if worker not in self._numbers:
            raise ValueError(
                f"{self._policy!r} chose worker {worker!r}, but {self.name} has the workers 0..{self.size - 1}"
            )
        return worker

    # ---- Deaths

    @property
    def inherited(self) -> bool:
        """True if the workers belong to the process that this one was forked from."""
        return self._forks != forks.count

    def on_worker_end(
        self, handle: WorkerHandle, reason: str, cause: BaseException | None, *, is_replaceable: bool = True
    ) -> None:
        """Handle the end of a worker, whether it was told to end or died.

        This can be called from any thread, without the lock. A worker that ends before the supervisor is STOPPED has
        died: it is replaced, or the pool is marked as broken. Calls that were sent to the worker end with
        `WorkerDiedError`; calls that still waited for it move to its replacement, or end in the same way if there is
        none.

        If the end was reported before, nothing is done. The same applies in a forked child: what has ended there is not
        the worker, but the child's copy of the task or thread that waits for it.

        :param handle: handle of the worker.
        :param reason: text that says how the worker ended, for messages.
        :param cause: exception that ended the worker, which is logged if the worker was told to end; None if unknown.
        :param is_replaceable: False if no other worker can take its place.
        """
        if self.inherited:
            return
        successor: WorkerHandle | None = None
        with self.lock:
            if handle.has_ended:  # the owner's loop and a caller on another one have both found that it ended
                return
            is_death = self.state is not SupervisorState.STOPPED
            handle.has_ended = True
            self._ended_handles = [*(each for each in self._ended_handles if not each.join(0)), handle]
            if is_death:
                handle.counts.deaths += 1
                if self._replaces_dead and is_replaceable and (handle.is_ready or handle.replacements_left):
                    successor = self._replace(handle)
                elif self.broken is None:
                    self.broken = _death_error(handle, reason, cause, False)
            calls = list(handle.calls)
        death_error = functools.partial(_death_error, handle, reason, cause, successor is not None)
        if is_death and (handle.is_ready or handle.counts.deaths > 1):  # else `start` reports it
            logger.error("%s: %s", self.name, death_error())
        elif not is_death and handle.is_ready and cause is not None:
            logger.error("%s: an exception ended %r while the pool was being closed", self.name, handle, exc_info=cause)
        for call in calls:
            handle.on_done(call, None, death_error())
        if successor is not None:
            self._start(successor)
        if not handle.ready.done():
            if cause is not None and not isinstance(cause, asyncio.CancelledError):  # this would cancel `open`
                handle.ready.set_exception(for_future(cause))
            elif is_death:
                handle.ready.set_exception(death_error())
            else:
                handle.ready.set_exception(ClosedResourceError(f"{self.name} was closed while it was being opened"))
        self._condition.notify()

    def _replace(self, handle: WorkerHandle) -> WorkerHandle:
        """Make a new worker that takes the place of a dead one, and move waiting calls to it. The caller must hold the
        lock.

        :param handle: handle of the dead worker.
        :returns: handle of the new worker, which is not started yet.
        """
        successor = self._handles[handle.number] = self._spawn_worker(self, handle.number, handle.counts)
        successor.replacements_left = _MAX_REPLACEMENTS if handle.is_ready else handle.replacements_left - 1
        if not handle.is_ready or time.monotonic() < handle.ready_at + _YOUNG_S:
            successor.pause_s = min(max(2 * handle.pause_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
        for call, context in handle.backlog:
            call.handle = successor
            handle.calls.discard(call)
            successor.calls.add(call)
            successor.backlog.append((call, context))
        handle.backlog.clear()
        return successor

    # ---- Starting and ending

    def spawn(self) -> None:
        """Make the handles of all workers, without starting the workers."""
        self._forks = forks.count
        self._handles = [self._spawn_worker(self, number, Counts()) for number in self._numbers]

    def start(self) -> list["concurrent.futures.Future[None]"]:
        """Start all workers, without waiting until they are ready.

        :returns: list with a future for each worker, ordered by number. Each future completes when the worker is ready
            or, if the worker ends before that, with the exception that ended the worker. If no exception is known, or
            the worker was cancelled, it completes with a `ClosedResourceError` if the worker was told to end, else with
            a `WorkerDiedError`.
        """
        handles = tuple(self._handles)
        for handle in handles:
            self._start(handle)
        return [handle.ready for handle in handles]

    def _start(self, handle: WorkerHandle) -> None:
        """Start a worker. If that fails, handle the failure as the end of the worker."""
        try:
            handle.start()
        except (OSError, RuntimeError) as error:  # out of threads, processes or descriptors
            self.on_worker_end(handle, f"it could not be started: {error}", error)

    def drain(self) -> None:
        """Stop taking calls from outside the pool. Functions on worker threads may still call it."""
        with self.lock:
            if self.state is SupervisorState.OPEN:
                self.state = SupervisorState.DRAINING
        self._condition.notify()

    async def wait_while(self, condition: Callable[[], bool]) -> None:
        """Wait while a condition of the supervisor is true, and poll the workers meanwhile if that is needed.

        :param condition: `is_busy`, `has_workers` or `accepts_calls`.
        :raises RuntimeError: the condition is true when this is called, and no asyncio event loop is running.
        """

        def holds() -> bool:
            for handle in self._live_handles():
                handle.poll()
            return condition()

        await self._condition.wait_while(holds, poll_s=next((handle.poll_interval_s for handle in self._handles), None))

    def is_busy(self) -> bool:
        """Return whether any call is waiting or in flight."""
        with self.lock:
            return any(handle.calls for handle in self._handles)

    def has_workers(self) -> bool:
        """Return whether there is a worker that has not ended."""
        with self.lock:
            return any(not handle.has_ended for handle in self._handles)

    def cancel(self) -> None:
        """Stop taking calls and cancel all calls, without waiting for those that are already running to end."""
        with self.lock:
            self.state = SupervisorState.STOPPED
            calls = [call for handle in self._handles for call in tuple(handle.calls)]
            for call in calls:
                call.is_cancelled_by_pool = True
            waiting = [(handle, call) for handle in self._handles for call, _ in tuple(handle.backlog)]
            for handle in self._handles:
                handle.backlog.clear()
        for handle, call in waiting:
            handle.on_done(call, None, call.cancellation())
        for call in calls:
            call.revoke()
        self._condition.notify()

    def closed_error(self) -> ClosedResourceError:
        """Return a new `ClosedResourceError` for a call that was cancelled because the pool was closed."""
        return ClosedResourceError(f"{self.name} was closed before this call ended, which cancelled the call")

    def stop(self) -> None:
        """Tell all workers to end, without waiting until they have ended. This can be called from any thread."""
        for handle in self._live_handles():
            handle.stop()

    def kill(self) -> list[str]:
        """End all worker processes by force. Threads cannot be ended this way.

        :returns: list of strings, each of which describes a worker that is still running and its number of unfinished
            calls.
        """
        return [f"{handle!r} with {len(handle.calls)} calls" for handle in self._live_handles() if not handle.kill()]

    def join(self) -> None:
        """Block until the threads and processes of all ended workers are gone, for at most 1 s per worker.

        A further call waits again for those that still exist, and for all of them if an exception ended this call.
        """
        with self.lock:
            ended = tuple(self._ended_handles)
        # Without the lock, which a worker that ends may still need.
        gone = [handle for handle in ended if handle.join(_JOIN_S)]
        with self.lock:
            self._ended_handles = [handle for handle in self._ended_handles if handle not in gone]

    def _live_handles(self) -> Iterable[WorkerHandle]:
        """Return a list of the handles of the workers that have not ended."""
        with self.lock:
            return [handle for handle in self._handles if not handle.has_ended]

    def abandon(self) -> None:
        """Tell all workers to end because the pool object is being garbage-collected.

        A finalizer calls this, so it takes no lock and does not wait.
        """
        self.state = SupervisorState.STOPPED
        for handle in self._handles:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                handle.abandon()

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Return a tuple with the current `WorkerStatistics` of each worker, such as its numbers of calls, ordered by
        worker number.
        """
        with self.lock:
            return tuple(handle.statistics() for handle in self._handles)


publish(__name__)
