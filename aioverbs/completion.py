"""Completion queues: what is under way, and who waits for it."""

import asyncio
import contextlib
import enum
import errno
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import anyio

from aioverbs._core import engine
from aioverbs.affinity import Affinity, Bell, run_on_owner, to_the_end
from aioverbs.errors import (
    AffinityError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    VerbsError,
    WorkCompletionError,
)
from aioverbs.events import Eventful, EventPump
from aioverbs.memory import RegionSlice
from aioverbs.resource import Resource, ResourceStatistics
from aioverbs.types import WcStatus

__all__ = ["CompletionQueue", "CompletionQueueStatistics", "MessageModel", "Placement", "Work"]

# How many completions are taken in one turn of the loop, at most.
_TURN = 256

# How long another loop may take to let go of a queue's descriptor.
_STOP_S = 10.0
# How often a verb is tried again that met another thread inside of its domain.
_TRIES = 1000

_numbers = itertools.count(1)  # of work requests: none is ever used again


class MessageModel(enum.Enum):
    """What the queues of a resource domain are good at, as documented for resource domains."""

    FORCE_LOW_LATENCY = "force low latency"
    """The provider is forced to optimise for low latency."""

    LOW_LATENCY = "low latency"
    """The provider is asked to optimise for low latency."""

    HIGH_BANDWIDTH = "high bandwidth"
    """The provider is asked to optimise for high bandwidth."""

    DEFAULT = "default"
    """The provider does as it usually does."""


@dataclass(frozen=True)
class Placement:
    """Where a domain has its queues made.

    :param pd: the parent domain, or the protection domain that stands for it.
    :param owner: who may use them; None: anyone.
    :param native: whether `pd` is a parent domain, which completion queues are told of.
    """

    pd: engine.ProtectionDomain
    owner: Affinity | None
    native: bool


class Work:
    """A work request that was posted: what it needs until it is done, and who waits for it.

    It keeps its memory until it completes, whatever became of who waits.
    """

    __slots__ = ("future", "loop", "memory", "number", "poster")

    def __init__(self, poster: object, memory: Iterable[RegionSlice]) -> None:
        self.number = next(_numbers)
        self.poster = poster
        self.memory = tuple(memory)
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def done(self, error: BaseException | None) -> None:
        """It is over; from any thread, once."""
        for part in self.memory:
            part.pins.discard(self)
        with contextlib.suppress(RuntimeError):  # nobody waits on a loop that is closed
            self.loop.call_soon_threadsafe(self._tell, error)

    def _tell(self, error: BaseException | None) -> None:
        if self.future.done():  # nobody waits any more
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


@dataclass(frozen=True)
class CompletionQueueStatistics(ResourceStatistics):
    """What a completion queue holds and has seen.

    :param depth: completions that fit; at least those that were asked for.
    :param under_way: work requests that are to complete here.
    :param completions: that were taken.
    :param events: that woke the loop.
    """

    depth: int
    under_way: int
    completions: int
    events: int


class CompletionQueue(Eventful[engine.CompletionQueue]):
    """A completion queue: ``ibv_create_cq_ex`` on a parent domain, ``ibv_create_cq`` elsewhere, with a channel.

    The loop that opens it is woken by the channel's descriptor, takes what is completed and tells who waits. Made by
    the `completion_queue` of a domain.

    :param depth: how many completions it holds at least.
    :param comp_vector: which of the device's interrupt vectors signals it.
    """

    def __init__(self, domain: Resource, placement: Placement, depth: int, comp_vector: int = 0) -> None:
        if depth < 1:
            raise ValueError(f"a completion queue holds 1 completion at least, not {depth}")
        super().__init__(domain)
        self._placement = placement
        self._depth = self._holds = depth
        self._comp_vector = comp_vector
        self._channel: engine.CompletionChannel | None = None
        self._driver: Affinity | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches it
        self._under_way: dict[int, Work] = {}
        self._completions = 0
        self._events = 0
        self._unacknowledged = 0  # events that were taken
        self._error: VerbsError | None = None  # that it broke by
        self._bell = Bell()  # something is not under way any more

    def _owner(self) -> Affinity | None:
        return self._placement.owner

    def _open(self) -> None:
        pd, owner = self._placement.pd, self._placement.owner
        # What wakes a loop is that loop's, even where anybody may use the queue.
        self._driver = owner if owner is not None and owner.bound else Affinity.of_running_loop()
        self._channel = engine.CompletionChannel(pd.context, affinity=owner)
        self._life.hold(self._channel)
        alone = self._placement.native and owner is not None and owner.bound
        self._handle = engine.CompletionQueue(
            pd.context,
            self._depth,
            self._channel,
            comp_vector=self._comp_vector,
            extended=alone,
            single_threaded=alone,
            parent_domain=pd if self._placement.native else None,
            affinity=owner,
        )
        self._life.hold(self._handle)
        self._holds = self._handle.cqe
        self._handle.request_notify()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._readable)
        self._pump = EventPump.of(pd.context)
        self._watcher = self._pump.watch(self._lost)
        self._life.drain = self._stop

    def statistics(self) -> CompletionQueueStatistics:
        """What it holds and has seen."""
        return CompletionQueueStatistics(
            len(self._life.children), self._holds, len(self._under_way), self._completions, self._events
        )

    # ---- Work. Entries of `_under_way` are added by who posts and removed by the loop that takes completions: single
    # operations of a dictionary, whatever the threads.

    def _add(self, work: Work) -> None:
        """Before it is posted: from here on its completion has somebody to go to.

        :raises BrokenResourceError: nothing completes here any more.
        :raises ClosedResourceError: its memory was given back.
        """
        try:
            for part in work.memory:
                part.pins.add(work)
        except ClosedResourceError:
            self._withdraw(work)
            raise
        self._under_way[work.number] = work
        if not self._watched:  # looked at last: who breaks it says so first
            self._withdraw(work)
            raise self._broken_by(self._error)

    def _withdraw(self, work: Work) -> None:
        """It was not posted."""
        self._under_way.pop(work.number, None)
        for part in work.memory:
            part.pins.discard(work)
        self._bell.ring()

    def _under_way_of(self, poster: object) -> list[Work]:
        """What a poster has under way here."""
        return [work for work in tuple(self._under_way.values()) if work.poster is poster]

    async def _settled(self, poster: object) -> None:
        """Until a poster has nothing under way here."""
        await self._bell.wait_while(lambda: self._under_way_of(poster))

    def _abandon(self, poster: object) -> None:
        """The poster is destroyed: what it had under way completes no more."""
        for work in self._under_way_of(poster):
            self._under_way.pop(work.number, None)
            work.done(BrokenResourceError(f"{poster!r} was closed before this was done"))

    @property
    def _watched(self) -> bool:
        """Whether a loop still takes what completes."""
        driver = self._driver
        return self._error is None and driver is not None and driver.loop is self._loop and not driver.orphaned

    # ---- The loop that opened it

    def _readable(self) -> None:
        if self._loop is None:
            return  # it was to be called again, and let go of meanwhile
        assert self._channel is not None
        assert self._handle is not None
        try:
            while self._channel.get_event() is not None:
                self._events += 1
                self._unacknowledged += 1
            self._acknowledge()
            # Armed before it is drained: what completes in between is either taken now or an event.
            self._handle.request_notify()
            self._drain()
        except ConcurrentAccessError:  # a thread is inside of a domain that any may use: in a moment it is not
            asyncio.get_running_loop().call_soon(self._readable)
        except VerbsError as error:
            self._broken(error)

    def _acknowledge(self) -> None:
        assert self._handle is not None
        if self._unacknowledged:
            self._handle.ack_events(self._unacknowledged)
            self._unacknowledged = 0

    def _drain(self) -> None:
        # Until there is nothing: only then a broken queue says so, and it may never wake anybody again.
        assert self._handle is not None
        left = _TURN
        while taken := self._handle.poll(left):
            self._completions += len(taken)
            for completion in taken:
                work = self._under_way.pop(completion.wr_id, None)
                if work is None:
                    continue  # of a poster that is gone
                if completion.status is WcStatus.SUCCESS:
                    work.done(None)
                else:
                    work.done(WorkCompletionError(completion.status, None, completion.vendor_err, completion.qp_num))
            self._bell.ring()
            left -= len(taken)
            if not left:  # others' turn first
                asyncio.get_running_loop().call_soon(self._readable)
                return

    def _lost(self) -> None:
        # The device is gone: beyond what it completed before, nothing that is under way completes any more.
        if self._loop is None:
            return
        try:
            self._drain()
        except ConcurrentAccessError:
            self._loop.call_soon(self._lost)
            return
        except VerbsError as error:
            self._broken(error)
            return
        self._broken(VerbsError("ibv_get_async_event", errno.EIO, "the device was lost (DEVICE_FATAL)"))

    def _broken_by(self, error: VerbsError | None) -> BrokenResourceError:
        broken = BrokenResourceError(f"{self!r} is broken: {error or 'no loop watches it any more'}")
        broken.__cause__ = error
        return broken

    def _broken(self, error: VerbsError) -> None:
        self._error = error
        self._remove_reader()
        while self._under_way:
            _, work = self._under_way.popitem()
            work.done(self._broken_by(error))
        self._bell.ring()

    async def _stop(self) -> None:
        await to_the_end(self._let_go())
        for _ in range(_TRIES):
            with contextlib.suppress(ConcurrentAccessError):  # a thread is inside of a domain that any may use
                self._acknowledge()
                return
            await asyncio.sleep(0)

    async def _let_go(self) -> None:
        assert self._driver is not None
        # A loop that is gone wakes nothing any more.
        with anyio.move_on_after(_STOP_S) as scope, contextlib.suppress(AffinityError):
            await run_on_owner(self._driver, self._remove_reader)
        if scope.cancelled_caught:
            raise BusyResourceError(f"{self!r} is watched by {self._loop!r}, which does not answer: run or close that")

    def _remove_reader(self) -> None:
        assert self._channel is not None
        if self._loop is None:
            return
        self._loop.remove_reader(self._channel.fileno())
        self._pump.unwatch(self._watcher)
        self._loop = None
