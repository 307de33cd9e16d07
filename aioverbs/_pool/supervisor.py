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
from aioverbs._lifecycle.affinity import Bell
from aioverbs._lifecycle.cross_loop import Outcome
from aioverbs._pool.placement import Key, PlacementPolicy, rendezvous
from aioverbs._pool.worker import worker_here
from aioverbs.errors import BrokenResourceError, ClosedResourceError, WorkerDiedError

__all__ = ["Counts", "Crew", "Hand", "Job", "Stage", "WorkerStatistics"]

logger = logging.getLogger("aioverbs.pool")

_TRIES = 2  # to replace one again that died before it was at work: it may have been killed, or can never be
_JOIN_S = 1.0  # what is left of a thread is a few instructions


class Stage(enum.Enum):
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


class Job(Protocol):
    """A call that a worker has."""

    hand: Any
    outcome: Outcome[Any] | None
    is_withdrawn: bool
    is_stopped: bool

    def post(self) -> None:
        """Send it to the worker, which is at work."""

    def withdraw(self) -> None:
        """Have it cancelled there. From any thread."""

    def cancellation(self) -> BaseException:
        """How it ends where it is cancelled."""


class Counts:
    """Of a worker and those that replace it."""

    def __init__(self) -> None:
        self.completed = self.failed = self.cancelled = self.deaths = 0


class Hand:
    """One worker of a crew, under the crew's lock where nothing else is said.

    :param number: which of the crew's it is.
    """

    def __init__(self, crew: "Crew", number: int, counts: Counts) -> None:
        self.crew = crew
        self.number = number
        self.counts = counts
        self.jobs: set[Job] = set()
        self.backlog: list[tuple[Job, contextvars.Context]] = []  # before it is at work
        self.is_ready = False
        self.is_gone = False
        self.tries = 0  # how often it may be replaced before it is at work: those of the beginning never
        self.native = False
        self.shares_pd = True
        self.process_id: int | None = None
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ready.set_running_or_notify_cancel()  # so that who waits cannot cancel it

    def __repr__(self) -> str:
        return f"<worker {self.number} of {self.crew.name}>"

    def start(self) -> None:
        """Begin to be: `came_up` follows, and in any case `crew.ended`. Without the lock."""
        raise NotImplementedError

    def job(self, payload: object, outcome: Outcome[Any]) -> Job:
        """A call of its own, of what the crew's `prepare` made."""
        raise NotImplementedError

    def stop(self) -> None:
        """Have it end. From any thread, without the lock; again and again."""
        raise NotImplementedError

    def look(self) -> None:
        """Where what tells of its end is gone, end it. From any thread, without the lock."""

    def kill(self) -> bool:
        """End it, whatever it does; False where nothing can. Without the lock."""
        raise NotImplementedError

    def join(self, timeout_s: float) -> bool:
        """Wait, and block, until nothing is left of one that has ended, which is soon; whether it is so."""
        raise NotImplementedError

    def came_up(self) -> None:
        """It is at work, and gets the calls that wait for it. Without the lock."""
        with self.crew.lock:
            self.is_ready = True  # first: what a handler of signals sends meanwhile is not put where nobody looks again
            backlog, self.backlog = self.backlog, []
            for job, context in backlog:
                context.run(job.post)
        self.ready.set_result(None)

    def over(self, job: Job, result: object, error: BaseException | None) -> None:
        """A call of its own has ended; the first time counts. Without the lock."""
        with self.crew.lock:
            if job not in self.jobs:
                return
            self.jobs.discard(job)
            if error is None:
                self.counts.completed += 1
            elif isinstance(error, asyncio.CancelledError) or job.is_stopped:
                self.counts.cancelled += 1
            else:
                self.counts.failed += 1
            is_last = not self.jobs and self.crew.stage is not Stage.OPEN
            outcome, job.outcome = job.outcome, None  # or the error's traceback would hold what holds the error
        if outcome is not None:
            outcome.settle(result, error)
        if is_last:
            self.crew.bell.ring()

    def statistics(self) -> WorkerStatistics:
        """Its counts."""
        counts = self.counts
        return WorkerStatistics(
            self.number,
            len(self.jobs),
            counts.completed,
            counts.failed,
            counts.cancelled,
            counts.deaths,
            self.is_ready and not self.is_gone,
            self.native,
            self.shares_pd,
            self.process_id,
        )


def _died(hand: Hand, how: str, cause: BaseException | None) -> WorkerDiedError:
    """One for each who is told: each has a traceback of its own."""
    died = WorkerDiedError(hand.number, how)
    died.__cause__ = cause
    return died


class Crew:
    """All workers of a pool. Thread-safe.

    :param name: of the pool, for people.
    :param hire: makes a worker, which is not started.
    :param replaces: whether who dies is replaced; if not, the crew fails.
    """

    def __init__(
        self,
        name: str,
        size: int,
        hire: Callable[["Crew", int, Counts], Hand],
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
        self.bell = Bell()  # rings when something is over that a stop waits for
        self.stage = Stage.OPEN
        self.broken: WorkerDiedError | None = None
        self._hire = hire
        self._policy = policy
        self._replaces = replaces
        self._hands: list[Hand] = []
        self._gone: list[Hand] = []  # threads and processes that may be about to end
        self._numbers = tuple(range(size))
        self.size = size

    def _renew_lock(self) -> None:
        self.lock = threading.RLock()

    # ---- Calls

    def send(self, payload: object, outcome: Outcome[Any], worker: int | None, key: Key | None) -> Job:
        """Give a call to one of them.

        :param payload: what to do, as their kind takes it.
        :raises ClosedResourceError: no more calls are taken.
        :raises BrokenResourceError: a worker died and was not replaced.
        :raises ValueError: there is no such worker.
        """
        self._check_stage()  # before a policy is asked in vain
        number = self._place(worker, key)
        with self.lock:
            self._check_stage()
            hand = self._hands[number]
            job = hand.job(payload, outcome)
            hand.jobs.add(job)
            if not hand.is_ready:
                hand.backlog.append((job, contextvars.copy_context()))
                return job
        try:
            job.post()
        except RuntimeError:  # its loop is closed, and that will be told of
            hand.over(job, None, WorkerDiedError(hand.number, "its event loop was closed"))
        return job

    def withdraw(self, job: Job) -> bool:
        """Cancel a call that no worker has begun to look at; whether it was one. From any thread."""
        with self.lock:  # so that it is either in the backlog still, or was posted
            hand: Hand = job.hand
            rest = [(other, context) for other, context in hand.backlog if other is not job]
            if len(rest) == len(hand.backlog):
                return False
            hand.backlog[:] = rest
        hand.over(job, None, job.cancellation())
        return True

    def check(self) -> None:
        """See that nobody died who was not replaced.

        :raises BrokenResourceError: somebody did.
        """
        if self.broken is not None:
            raise BrokenResourceError(f"{self.name} is broken: {self.broken}") from self.broken

    def takes_calls(self) -> bool:
        """Whether anybody may call."""
        return self.stage is Stage.OPEN and self.broken is None

    def is_here(self) -> bool:
        """Whether this is called by one of them."""
        here = worker_here()
        return here is not None and here.crew is self

    def _check_stage(self) -> None:
        if self.stage is not Stage.OPEN and (self.stage is Stage.STOPPED or not self.is_here()):
            raise ClosedResourceError(f"{self.name} takes no more calls: it is being closed, or was")
        if self.broken is not None:
            self.check()

    def _place(self, worker: int | None, key: Key | None) -> int:
        if worker is not None:
            if key is not None:
                raise ValueError("a call goes to a worker or where its key belongs: give one of both")
            if not 0 <= worker < self.size:
                raise ValueError(f"{self.name} has the workers 0 to {self.size - 1}, and no {worker}")
            return worker
        if key is not None:
            return rendezvous(key, self._numbers)
        worker = self._policy.choose(self._numbers, [len(hand.jobs) for hand in self._hands])
        if worker not in self._numbers:
            raise ValueError(f"{self._policy!r} chose worker {worker!r}: {self.name} has 0 to {self.size - 1}")
        return worker

    # ---- Deaths

    @property
    def inherited(self) -> bool:
        """Whether its workers are those of the process that this one was forked from."""
        return self._forks != forks.count

    def ended(self, hand: Hand, how: str, cause: BaseException | None, *, can_follow: bool = True) -> None:
        """A worker is no more: of its own accord, or because it was told to. From any thread.

        In the child of a fork nothing is done: what ended there is the child's copy of what waits for a worker.

        :param how: how it ended, for people.
        :param can_follow: whether another one could take its place.
        """
        if self.inherited:
            return
        successor: Hand | None = None
        with self.lock:
            is_death = self.stage is not Stage.STOPPED
            hand.is_gone = True
            self._gone = [*self._lingering(0), hand]
            if is_death:
                hand.counts.deaths += 1
                if self._replaces and can_follow and (hand.is_ready or hand.tries):
                    successor = self._replace(hand)
                elif self.broken is None:
                    self.broken = _died(hand, how, cause)
            jobs = list(hand.jobs)
        if is_death and (hand.is_ready or hand.counts.deaths > 1):  # else who opens the pool hears of it
            replaced = ", and is replaced" if successor is not None else ""
            logger.error("%s: %s%s", self.name, _died(hand, how, cause), replaced)
        for job in jobs:
            hand.over(job, None, _died(hand, how, cause))
        if successor is not None:
            self._start(successor)
        if not hand.ready.done():
            hand.ready.set_exception(cause if cause is not None else _died(hand, how, cause))
        self.bell.ring()

    def _replace(self, hand: Hand) -> Hand:
        """Who takes the place, and the calls that did not begin. Under the lock."""
        successor = self._hands[hand.number] = self._hire(self, hand.number, hand.counts)
        successor.tries = _TRIES if hand.is_ready else hand.tries - 1
        for job, context in hand.backlog:
            job.hand = successor
            hand.jobs.discard(job)
            successor.jobs.add(job)
            successor.backlog.append((job, context))
        hand.backlog.clear()
        return successor

    # ---- Beginning and ending

    def hire(self) -> None:
        """Have all of them, to be started."""
        self._forks = forks.count
        self._hands = [self._hire(self, number, Counts()) for number in self._numbers]

    def start(self) -> list["concurrent.futures.Future[None]"]:
        """Start all of them; futures that tell when they are at work, or why not."""
        hands = tuple(self._hands)
        for hand in hands:
            self._start(hand)
        return [hand.ready for hand in hands]

    def _start(self, hand: Hand) -> None:
        try:
            hand.start()
        except (OSError, RuntimeError) as error:  # no more threads, processes, descriptors
            self.ended(hand, f"it could not be started: {error}", error)

    def drain(self) -> None:
        """Take no more calls."""
        with self.lock:
            if self.stage is Stage.OPEN:
                self.stage = Stage.DRAINING
        self.bell.ring()

    def is_busy(self) -> bool:
        """Whether there are calls."""
        for hand in self._living():
            hand.look()
        with self.lock:
            return any(hand.jobs for hand in self._hands)

    def is_there(self) -> bool:
        """Whether a worker is."""
        with self.lock:
            return any(not hand.is_gone for hand in self._hands)

    def cancel(self) -> None:
        """Take no more calls, and cancel those that there are."""
        with self.lock:
            self.stage = Stage.STOPPED
            jobs = [job for hand in self._hands for job in tuple(hand.jobs)]
            for job in jobs:
                job.is_stopped = True
            waiting = [(hand, job) for hand in self._hands for job, _ in tuple(hand.backlog)]
            for hand in self._hands:
                hand.backlog.clear()
        for hand, job in waiting:
            hand.over(job, None, self.stopped())
        for job in jobs:
            job.withdraw()
        self.bell.ring()

    def stopped(self) -> ClosedResourceError:
        """Why a call was cancelled."""
        return ClosedResourceError(f"{self.name} was closed before this call was over, and cancelled it")

    def stop(self) -> None:
        """Have all of them end. From any thread."""
        for hand in self._living():
            hand.stop()

    def kill(self) -> list[str]:
        """End all that can be; what is left, and what it does."""
        return [f"{hand!r} with {len(hand.jobs)} calls" for hand in self._living() if not hand.kill()]

    def _lingering(self, timeout_s: float) -> list[Hand]:
        return [hand for hand in self._gone if not hand.join(timeout_s)]

    def join(self) -> None:
        """Wait, and block, until nothing is left of those that have ended."""
        with self.lock:
            self._gone = self._lingering(_JOIN_S)

    def _living(self) -> Iterable[Hand]:
        with self.lock:
            return [hand for hand in self._hands if not hand.is_gone]

    def abandon(self) -> None:
        """Nobody knows it any more. For a finalizer: no lock."""
        self.stage = Stage.STOPPED
        for hand in self._hands:
            with contextlib.suppress(RuntimeError):  # it has ended
                hand.stop()

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Counts of all of them."""
        with self.lock:
            return tuple(hand.statistics() for hand in self._hands)


publish(__name__)
