"""The workers of a pool, from without: who has which calls, who died, who takes the place."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import enum
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import CrossLoopCondition
from aioverbs._lifecycle.cross_loop import ResultSink
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

_MAX_REPLACEMENTS = 2  # to replace one again that died before it was at work: it may have been killed, or can never be
_JOIN_S = 1.0  # what is left of a thread is a few instructions


class SupervisorState(enum.Enum):
    """What a crew does with calls."""

    OPEN = "open"
    """It takes them."""

    DRAINING = "draining"
    """It takes those of its own workers only, which others wait for."""

    STOPPED = "stopped"
    """It takes none, and those that it has are cancelled."""


@dataclass(frozen=True)
class WorkerStatistics:
    """Counts of a pool's worker and of those that it replaced, at one moment.

    :param calls: how many it has, under way or waiting.
    :param completed: how many returned.
    :param failed: how many raised.
    :param cancelled: how many ended by a cancellation.
    :param deaths: how often a worker of this number died.
    :param ready: whether it is at work; if not, it is being made, or gone.
    :param native: whether its resource domain takes no locks.
    :param shares_pd: whether its protection domain is the pool's, so that memory registered there serves it.
    :param process_id: of its process; None where that is this one.
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


class PendingCall(Protocol):
    """A call that a worker has."""

    handle: Any
    outcome: ResultSink[Any] | None
    is_withdrawn: bool
    is_cancelled_by_pool: bool

    def post(self) -> None:
        """Send it to the worker, which is at work."""

    def withdraw(self) -> None:
        """Have it cancelled there. From any thread."""

    def cancellation(self) -> BaseException:
        """How it ends where it is cancelled."""


def poll_end(call: PendingCall) -> float | None:
    """End a call if nothing tells of its worker's end any more; return the seconds to the next look, None for never."""
    call.handle.poll()
    poll_interval_s: float | None = call.handle.poll_interval_s
    return poll_interval_s


def poll_error(call: PendingCall) -> BaseException | None:
    """Look in the same way at the worker that has the call now; return the error that ends the wait for the call."""
    error: BaseException | None = call.handle.poll_error(call)
    return error


class Counts:
    """Of a worker and those that replace it."""

    def __init__(self) -> None:
        self.completed = self.failed = self.cancelled = self.deaths = 0


class WorkerHandle:
    """One worker of a crew, under the crew's lock where nothing else is said.

    :param number: which of the crew's it is.
    """

    def __init__(self, supervisor: "Supervisor", number: int, counts: Counts) -> None:
        self.supervisor = supervisor
        self.number = number
        self.counts = counts
        self.calls: set[PendingCall] = set()
        self.backlog: list[tuple[PendingCall, contextvars.Context]] = []  # before it is at work
        self.is_ready = False
        self.has_ended = False
        self.replacements_left = 0  # how often it may be replaced before it is at work: those of the beginning never
        self.native = False
        self.shares_pd = True
        self.process_id: int | None = None
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ready.set_running_or_notify_cancel()  # so that who waits cannot cancel it

    def __repr__(self) -> str:
        return f"<worker {self.number} of {self.supervisor.name}>"

    def start(self) -> None:
        """Begin to be: `on_ready` follows, and in any case `supervisor.ended`. Without the lock."""
        raise NotImplementedError

    def make_call(self, payload: object, outcome: ResultSink[Any]) -> PendingCall:
        """A call of its own, of what the crew's `prepare` made."""
        raise NotImplementedError

    def stop(self) -> None:
        """Have it end. From any thread, without the lock; again and again."""
        raise NotImplementedError

    @property
    def poll_interval_s(self) -> float | None:
        """Seconds between two looks of a caller that waits here for this worker; None where its end is told."""
        return None

    def poll(self) -> None:
        """Where what tells of its end is gone, end it. From any thread, without the lock."""

    def poll_error(self, call: PendingCall) -> BaseException | None:
        """Look, and return the error that ends the wait for a call here, where nothing else tells of it."""

    def kill(self) -> bool:
        """End it, whatever it does; False where nothing can. Without the lock."""
        raise NotImplementedError

    def join(self, timeout_s: float) -> bool:
        """Wait, and block, until nothing is left of one that has ended, which is soon; whether it is so."""
        raise NotImplementedError

    def on_ready(self) -> None:
        """It is at work, and gets the calls that wait for it. Without the lock."""
        with self.supervisor.lock:
            self.is_ready = True  # first: what a handler of signals sends meanwhile is not put where nobody looks again
            backlog, self.backlog = self.backlog, []
            for call, context in backlog:
                context.run(call.post)
        self.ready.set_result(None)

    def on_done(self, call: PendingCall, result: object, error: BaseException | None) -> None:
        """A call of its own has ended; the first time counts. Without the lock."""
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
            outcome, call.outcome = call.outcome, None  # or the error's traceback would hold what holds the error
        if outcome is not None:
            outcome.settle(result, error)
        if is_last:
            self.supervisor._condition.notify()

    def statistics(self) -> WorkerStatistics:
        """Its counts."""
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


def _death_error(handle: WorkerHandle, reason: str, cause: BaseException | None) -> WorkerDiedError:
    """One for each who is told: each has a traceback of its own."""
    died = WorkerDiedError(handle.number, reason)
    died.__cause__ = cause
    return died


class Supervisor:
    """All workers of a pool. Thread-safe.

    :param name: of the pool, for people.
    :param hire: makes a worker, which is not started.
    :param replaces: whether who dies is replaced; if not, the crew fails.
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
        self._forks = forks.count  # when they were hired
        # Guards the workers, their calls and the stage. A signal's handler or a finalizer may run inside of a section
        # and begin another one, in the same thread: so a section calls no function of the user's, and what it looks at
        # is looked at by one operation, or is copied by one. In a child of a fork it is a new one.
        self.lock = threading.RLock()
        forks.renew_lock_in_children(self)
        self._condition = CrossLoopCondition()  # rings when something is over that a stop waits for
        self.state = SupervisorState.OPEN
        self.broken: WorkerDiedError | None = None
        self._spawn_worker = spawn
        self._policy = policy
        self._replaces_dead = replaces
        self._handles: list[WorkerHandle] = []
        self._ended_handles: list[WorkerHandle] = []  # threads and processes that may be about to end
        self._numbers = tuple(range(size))
        self.size = size

    def _renew_lock(self) -> None:
        self.lock = threading.RLock()

    # ---- Calls

    def send(self, payload: object, outcome: ResultSink[Any], worker: int | None, key: Key | None) -> PendingCall:
        """Give a call to one of them.

        :param payload: what to do, as their kind takes it.
        :raises ClosedResourceError: no more calls are taken.
        :raises BrokenResourceError: a worker died and was not replaced.
        :raises ValueError: there is no such worker.
        """
        self._check_state()  # before a policy is asked in vain
        number = self._choose_worker(worker, key)
        with self.lock:
            self._check_state()
            handle = self._handles[number]
            call = handle.make_call(payload, outcome)
            handle.calls.add(call)
            if not handle.is_ready:
                handle.backlog.append((call, contextvars.copy_context()))
                return call
        try:
            call.post()
        except RuntimeError:  # its loop is closed, and that will be told of
            handle.on_done(call, None, WorkerDiedError(handle.number, "its event loop was closed"))
        return call

    def withdraw_backlogged(self, call: PendingCall) -> bool:
        """Cancel a call that no worker has begun to look at; whether it was one. From any thread."""
        with self.lock:  # so that it is either in the backlog still, or was posted
            handle: WorkerHandle = call.handle
            rest = [(other, context) for other, context in handle.backlog if other is not call]
            if len(rest) == len(handle.backlog):
                return False
            handle.backlog[:] = rest
        handle.on_done(call, None, call.cancellation())
        return True

    def check_unbroken(self) -> None:
        """See that nobody died who was not replaced.

        :raises BrokenResourceError: somebody did.
        """
        if self.broken is not None:
            raise BrokenResourceError(f"{self.name} is broken: {self.broken}") from self.broken

    def accepts_calls(self) -> bool:
        """Whether anybody may call."""
        return self.state is SupervisorState.OPEN and self.broken is None

    def is_on_worker(self) -> bool:
        """Whether this is called by one of them."""
        current = worker_or_none()
        return current is not None and current.supervisor is self

    def _check_state(self) -> None:
        if self.state is not SupervisorState.OPEN and (
            self.state is SupervisorState.STOPPED or not self.is_on_worker()
        ):
            raise ClosedResourceError(f"{self.name} takes no more calls: it is being closed, or was")
        if self.broken is not None:
            self.check_unbroken()

    def _choose_worker(self, worker: int | None, key: Key | None) -> int:
        if worker is not None:
            if key is not None:
                raise ValueError("a call goes to a worker or where its key belongs: give one of both")
            if not 0 <= worker < self.size:
                raise ValueError(f"{self.name} has the workers 0 to {self.size - 1}, and no {worker}")
            return worker
        if key is not None:
            return rendezvous(key, self._numbers)
        worker = self._policy.choose(self._numbers, [len(handle.calls) for handle in self._handles])
        if worker not in self._numbers:
            raise ValueError(f"{self._policy!r} chose worker {worker!r}: {self.name} has 0 to {self.size - 1}")
        return worker

    # ---- Deaths

    @property
    def inherited(self) -> bool:
        """Whether its workers are those of the process that this one was forked from."""
        return self._forks != forks.count

    def on_worker_end(
        self, handle: WorkerHandle, reason: str, cause: BaseException | None, *, is_replaceable: bool = True
    ) -> None:
        """A worker is no more: of its own accord, or because it was told to. From any thread.

        In the child of a fork nothing is done: what ended there is the child's copy of what waits for a worker.

        :param reason: how it ended, for people.
        :param is_replaceable: whether another one could take its place.
        """
        if self.inherited:
            return
        successor: WorkerHandle | None = None
        with self.lock:
            is_death = self.state is not SupervisorState.STOPPED
            handle.has_ended = True
            self._ended_handles = [*self._unjoined(0), handle]
            if is_death:
                handle.counts.deaths += 1
                if self._replaces_dead and is_replaceable and (handle.is_ready or handle.replacements_left):
                    successor = self._replace(handle)
                elif self.broken is None:
                    self.broken = _death_error(handle, reason, cause)
            calls = list(handle.calls)
        if is_death and (handle.is_ready or handle.counts.deaths > 1):  # else who opens the pool hears of it
            replaced = ", and is replaced" if successor is not None else ""
            logger.error("%s: %s%s", self.name, _death_error(handle, reason, cause), replaced)
        for call in calls:
            handle.on_done(call, None, _death_error(handle, reason, cause))
        if successor is not None:
            self._start(successor)
        if not handle.ready.done():
            handle.ready.set_exception(cause if cause is not None else _death_error(handle, reason, cause))
        self._condition.notify()

    def _replace(self, handle: WorkerHandle) -> WorkerHandle:
        """Who takes the place, and the calls that did not begin. Under the lock."""
        successor = self._handles[handle.number] = self._spawn_worker(self, handle.number, handle.counts)
        successor.replacements_left = _MAX_REPLACEMENTS if handle.is_ready else handle.replacements_left - 1
        for call, context in handle.backlog:
            call.handle = successor
            handle.calls.discard(call)
            successor.calls.add(call)
            successor.backlog.append((call, context))
        handle.backlog.clear()
        return successor

    # ---- Beginning and ending

    def spawn(self) -> None:
        """Have all of them, to be started."""
        self._forks = forks.count
        self._handles = [self._spawn_worker(self, number, Counts()) for number in self._numbers]

    def start(self) -> list["concurrent.futures.Future[None]"]:
        """Start all of them; futures that tell when they are at work, or why not."""
        handles = tuple(self._handles)
        for handle in handles:
            self._start(handle)
        return [handle.ready for handle in handles]

    def _start(self, handle: WorkerHandle) -> None:
        try:
            handle.start()
        except (OSError, RuntimeError) as error:  # no more threads, processes, descriptors
            self.on_worker_end(handle, f"it could not be started: {error}", error)

    def drain(self) -> None:
        """Take no more calls."""
        with self.lock:
            if self.state is SupervisorState.OPEN:
                self.state = SupervisorState.DRAINING
        self._condition.notify()

    async def wait_while(self, condition: Callable[[], bool]) -> None:
        """Wait as long as a condition of the crew holds.

        :param condition: `is_busy`, `has_workers` or `accepts_calls`.
        """

        def holds() -> bool:
            for handle in self._live_handles():
                handle.poll()
            return condition()

        await self._condition.wait_while(holds, poll_s=next((handle.poll_interval_s for handle in self._handles), None))

    def is_busy(self) -> bool:
        """Whether there are calls."""
        with self.lock:
            return any(handle.calls for handle in self._handles)

    def has_workers(self) -> bool:
        """Whether a worker is."""
        with self.lock:
            return any(not handle.has_ended for handle in self._handles)

    def cancel(self) -> None:
        """Take no more calls, and cancel those that there are."""
        with self.lock:
            self.state = SupervisorState.STOPPED
            calls = [call for handle in self._handles for call in tuple(handle.calls)]
            for call in calls:
                call.is_cancelled_by_pool = True
            waiting = [(handle, call) for handle in self._handles for call, _ in tuple(handle.backlog)]
            for handle in self._handles:
                handle.backlog.clear()
        for handle, call in waiting:
            handle.on_done(call, None, self.closed_error())
        for call in calls:
            call.withdraw()
        self._condition.notify()

    def closed_error(self) -> ClosedResourceError:
        """Why a call was cancelled."""
        return ClosedResourceError(f"{self.name} was closed before this call was over, and cancelled it")

    def stop(self) -> None:
        """Have all of them end. From any thread."""
        for handle in self._live_handles():
            handle.stop()

    def kill(self) -> list[str]:
        """End all that can be; what is left, and what it does."""
        return [f"{handle!r} with {len(handle.calls)} calls" for handle in self._live_handles() if not handle.kill()]

    def _unjoined(self, timeout_s: float) -> list[WorkerHandle]:
        return [handle for handle in self._ended_handles if not handle.join(timeout_s)]

    def join(self) -> None:
        """Wait, and block, until nothing is left of those that have ended."""
        with self.lock:
            self._ended_handles = self._unjoined(_JOIN_S)

    def _live_handles(self) -> Iterable[WorkerHandle]:
        with self.lock:
            return [handle for handle in self._handles if not handle.has_ended]

    def abandon(self) -> None:
        """Nobody knows it any more. For a finalizer: no lock."""
        self.state = SupervisorState.STOPPED
        for handle in self._handles:
            with contextlib.suppress(RuntimeError):  # it has ended
                handle.stop()

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Counts of all of them."""
        with self.lock:
            return tuple(handle.statistics() for handle in self._handles)


publish(__name__)
