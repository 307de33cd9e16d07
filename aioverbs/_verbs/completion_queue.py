"""Completion queues: where work requests end, and how those who wait for that are woken."""

import asyncio
import contextlib
import enum
import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from aioverbs._core.data_path.data_path import CqDispatcher
from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, run_on_owner, wait_uncancelled
from aioverbs._lifecycle.resource import Resource, ResourceStatistics
from aioverbs._verbs.async_events import AsyncEventSource, EventPump
from aioverbs._verbs.capability_checks import check_completion_queue
from aioverbs.errors import AffinityError, BusyResourceError, ConcurrentAccessError, DeviceRemovedError, VerbsError

__all__ = [
    "CompletionQueue",
    "CompletionQueueStatistics",
    "CqReservation",
    "MessageModel",
    "QueueLocation",
    "dispatcher_of",
    "retry_while_busy",
]  # fmt: skip

# How long another loop may take to let go of a queue's descriptor.
_STOP_S = 10.0
# How often a verb is tried again that met another thread inside of its domain.
_TRIES = 1000
# How long an await may poll before it sleeps: about as long as a peer that slept takes to wake up and answer.
_SPIN_NS = 100_000
# One event for so many completions, or so long after the first of them, where bandwidth is what counts.
_MODERATION = (16, 16)


class MessageModel(enum.Enum):
    """How the queues of a resource domain wait, as documented for resource domains."""

    FORCE_LOW_LATENCY = "force low latency"
    """An await polls, for a while without letting go of the thread, then in each turn of its loop, until it is done."""

    LOW_LATENCY = "low latency"
    """An await polls for a while, then sleeps until the completion channel wakes its loop."""

    HIGH_BANDWIDTH = "high bandwidth"
    """What is posted in one turn of the loop goes to the device together, at its end, and completes together."""

    DEFAULT = "default"
    """An await looks once, then sleeps until the completion channel wakes its loop."""


_MODELS = {
    MessageModel.DEFAULT: 0,
    MessageModel.HIGH_BANDWIDTH: 0,
    MessageModel.LOW_LATENCY: 1,
    MessageModel.FORCE_LOW_LATENCY: 2,
}


@dataclass(frozen=True)
class QueueLocation:
    """Where a domain has its queues made.

    :param pd: the parent domain, or the protection domain that stands for it.
    :param base: the protection domain, which memory is of.
    :param owner: who may use them; None: anyone.
    :param native: whether `pd` is a parent domain, which completion queues are told of.
    :param message_model: that of a resource domain; None: each completion queue has its own.
    """

    pd: handles.ProtectionDomain
    base: handles.ProtectionDomain
    owner: Affinity | None
    native: bool
    message_model: MessageModel | None = None

    def owner_with(self, *parts: Resource | None) -> Affinity | None:
        """The owner of what is made here with other parts: the first who owns one of them, as the handles have it.

        Whoever cannot take completions, or receives, of another owner has no use for what needs them.
        """
        owners = (self.owner, *(part.owner for part in parts if part is not None))
        return next((owner for owner in owners if owner is not None), None)

    def check_message_model(self, what: str, cq: "CompletionQueue") -> None:
        """Check that a completion queue waits as the resource domain has it on which something is made.

        :param what: that which is made.
        :raises ValueError: the two message models differ.
        """
        model = self.message_model
        if model is not None and cq.message_model is not model:
            raise ValueError(
                f"the domain of the {what} has the message model {model.name}, and {cq!r} has {cq.message_model.name}: "
                f"make the completion queue on the same domain, without a model of its own"
            )


@dataclass(frozen=True)
class CompletionQueueStatistics(ResourceStatistics):
    """What a completion queue holds and has seen.

    :param depth: completions that fit; at least those that were asked for.
    :param reserved: of these, what queue pairs made on it can have at once.
    :param in_flight: work requests that are to complete here.
    :param completions: that were taken.
    :param late: of these, those of what was destroyed meanwhile, or posted by a handle.
    :param wakeups: of the loop, by the completion channel.
    :param spins: awaits that polled for a while.
    :param spins_paid: of these, those that were done by that.
    """

    depth: int
    reserved: int
    in_flight: int
    completions: int
    late: int
    wakeups: int
    spins: int
    spins_paid: int


class _Watch:
    """What has a queue's home loop woken by its channel and told of a lost device. It does not know the user's object,
    which may be forgotten."""

    def __init__(self, dispatcher: CqDispatcher, channel: handles.CompletionChannel) -> None:
        self._dispatcher = dispatcher
        self._home = dispatcher.home
        self._loop = asyncio.get_running_loop()
        self._fd = channel.fileno()
        self._pump = EventPump.of(dispatcher.handle.context)
        self._watcher = self._pump.watch(self._broken)
        self._loop.add_reader(self._fd, dispatcher.readable)
        self._watching = True

    def _broken(self, element: handles.Handle | None) -> None:
        # The device is gone, or this queue broke, and beyond what was completed before nothing that is under way
        # completes any more. Some devices fail when such a queue is polled, others go on as if nothing was.
        if not self._watching or (element is not None and element is not self._dispatcher.handle):
            return
        try:
            self._dispatcher.drain()
        except ConcurrentAccessError:
            self._loop.call_soon(self._broken, element)
            return
        except VerbsError as error:
            if element is not None:
                self._dispatcher.broke(error)
                return
        if element is None:
            self._dispatcher.broke(DeviceRemovedError("the device was lost (DEVICE_FATAL)"), gone=True)
        else:
            self._dispatcher.broke(VerbsError("ibv_get_async_event", errno.EIO, "it has lost completions (CQ_ERR)"))

    async def stop(self) -> None:
        """Let go of the loop, and acknowledge what it was woken by."""
        await wait_uncancelled(self._let_go())
        await retry_while_busy(self._dispatcher.acknowledge)

    async def _let_go(self) -> None:
        with anyio.move_on_after(_STOP_S) as scope:
            try:
                await run_on_owner(self._home, self._remove)
            except AffinityError:  # that loop is gone, and nobody is there
                self._remove()
        if scope.cancelled_caught:
            raise BusyResourceError(
                f"{self._dispatcher.handle!r} is watched by {self._loop!r}, which does not answer: run or close that"
            )

    def _remove(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._fd)
            self._pump.unwatch(self._watcher)
        self._dispatcher.let_go()


class CompletionQueue(AsyncEventSource[handles.CompletionQueue]):
    """A completion queue: ``ibv_create_cq_ex`` on a parent domain, ``ibv_create_cq`` elsewhere, with a channel.

    The loop that opens it is woken by the channel's descriptor, takes what is completed and tells who waits. Queue
    pairs reserve as much of it as they can have under way, so that it cannot overflow. Made by the ``completion_queue``
    of a domain.

    :param depth: how many completions it holds at least.
    :param comp_vector: which of the device's interrupt vectors signals it.
    :param message_model: how awaits of what completes here wait; None: as its resource domain has it, else DEFAULT.
        Queue pairs of a resource domain take only completion queues with the domain's message model.
    :param spin_ns: how many nanoseconds an await polls before it sleeps, for FORCE_LOW_LATENCY and LOW_LATENCY; the
        awaits of one turn of the loop share them. None: 100,000.
    """

    def __init__(
        self,
        domain: Resource,
        placement: QueueLocation,
        depth: int,
        comp_vector: int = 0,
        message_model: MessageModel | None = None,
        spin_ns: int | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"a completion queue holds 1 completion at least, not {depth}")
        model = MessageModel(message_model or placement.message_model or MessageModel.DEFAULT)
        if spin_ns is not None and not _MODELS[model]:
            raise ValueError(f"spin_ns is for awaits that poll, and {model.name} has none of those: leave it out")
        if spin_ns is not None and not 0 <= spin_ns <= 10**9:
            raise ValueError(f"spin_ns is from 0 to 1,000,000,000 nanoseconds, not {spin_ns}")
        super().__init__(domain)
        self._queue_location = placement
        self._depth = depth
        self._comp_vector = comp_vector
        self._spin_ns = spin_ns if spin_ns is not None else _SPIN_NS
        self._dispatcher: CqDispatcher | None = None
        # Under the lock, whose sections call no verb, and so no allocator: a signal's handler that comes into one may
        # begin another one.
        self._reserving = threading.RLock()
        self._reserved = 0
        self._shrinking: list[int] = []  # what it is being resized to: it may hold no more already
        self._moderated = False
        self.message_model = model

    def _owner(self) -> Affinity | None:
        return self._queue_location.owner

    def _open(self) -> None:
        pd, owner = self._queue_location.pd, self._queue_location.owner
        self._check(pd.context, self._depth)
        # What wakes a loop is that loop's, even where anybody may use the queue.
        home = owner if owner is not None and owner.bound else Affinity.of_running_loop()
        channel = handles.CompletionChannel(pd.context, affinity=owner)
        self._lifecycle.hold(channel)
        alone = self._queue_location.native and owner is not None and owner.bound
        self._handle = handles.CompletionQueue(
            pd.context,
            self._depth,
            channel,
            comp_vector=self._comp_vector,
            extended=alone,
            single_threaded=alone,
            parent_domain=pd if self._queue_location.native else None,
            affinity=owner,
        )
        self._lifecycle.hold(self._handle)
        self._depth = self._handle.cqe
        if self.message_model is MessageModel.HIGH_BANDWIDTH:
            self._moderate(self._handle)
        loop = asyncio.get_running_loop()
        self._dispatcher = CqDispatcher(self._handle, loop, home, _MODELS[self.message_model], self._spin_ns)
        self._lifecycle.drain = _Watch(self._dispatcher, channel).stop

    def _check(self, context: handles.Context, depth: int) -> None:
        check_completion_queue(context.name, context.attributes, depth, self._comp_vector, context.num_comp_vectors)

    def _moderate(self, handle: handles.CompletionQueue) -> None:
        try:
            handle.modify(*_MODERATION)
        except VerbsError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        else:
            self._moderated = True

    @property
    def _cq_dispatcher(self) -> CqDispatcher:
        """The dispatcher of its completions.

        :raises ClosedResourceError: it is not open.
        """
        self._check_open()
        assert self._dispatcher is not None
        return self._dispatcher

    @property
    def moderated(self) -> bool:
        """Whether the device moderates its events, as it does for HIGH_BANDWIDTH where it can."""
        return self._moderated

    def statistics(self) -> CompletionQueueStatistics:
        """What it holds and has seen."""
        of = self._dispatcher
        seen = (of.in_flight, of.completions, of.late, of.wakeups, of.spins, of.spins_paid) if of else (0,) * 6
        return CompletionQueueStatistics(len(self._lifecycle.children), self._depth, self._reserved, *seen)

    def resize(self, depth: int) -> None:
        """Change how many completions it holds at least: ``ibv_resize_cq``. Those that are in it stay.

        :raises ValueError: queue pairs have reserved more, or the device has not so many.
        :raises VerbsError: the device cannot; it is as it was.
        :raises AffinityError: another event loop owns it; nothing was done.
        :raises ConcurrentAccessError: a verb of its domain is under way, as where its allocator asks; likewise.
        """
        handle, owner = self.handle, self._lifecycle.owner
        if owner is not None:
            owner.check(handle, "ibv_resize_cq")
        with self._reserving:
            if depth < max(self._reserved, 1):
                raise ValueError(f"the queue pairs on {self!r} need {self._reserved} completions, and {depth} are less")
            self._shrinking.append(depth)
        try:  # without the lock: allocators are called there
            self._check(handle.context, depth)
            handle.resize(depth)
        finally:
            with self._reserving:
                self._shrinking.remove(depth)
                self._depth = handle.cqe  # of several at once each leaves what it is by then

    def _reserve(self, completions: int) -> None:
        """Keep room for so many completions, for a queue that is made on it.

        :raises ValueError: so much is not left.
        """
        with self._reserving:
            if self._reserved + completions > min([self._depth, *self._shrinking]):
                raise ValueError(
                    f"{self!r} holds {self._depth} completions, {self._reserved} of them for others, and {completions} "
                    "more could come: make it deeper, resize() it, or ask for fewer (QpCapabilities)"
                )
            self._reserved += completions

    def _release(self, completions: int) -> None:
        """Give back what was reserved."""
        with self._reserving:
            self._reserved -= completions


class CqReservation:
    """What a queue reserves in completion queues; its life holds this, which gives it back at the end."""

    def __init__(self) -> None:
        self._reserved: list[tuple[CompletionQueue, int]] = []

    def reserve(self, cq: CompletionQueue | None, completions: int) -> None:
        """Keep room for so many completions; nothing where there is no such queue.

        :raises ValueError: so much is not left.
        """
        if cq is not None:
            cq._reserve(completions)
            self._reserved.append((cq, completions))

    def destroy(self) -> None:
        """Give it back."""
        for cq, completions in self._reserved:
            cq._release(completions)


async def retry_while_busy(verb: Callable[[], object]) -> bool:
    """Call a verb of a domain that any thread may use, until no other thread is inside of it; whether it was called."""
    for _ in range(_TRIES):
        with contextlib.suppress(ConcurrentAccessError):
            verb()
            return True
        await asyncio.sleep(0)
    return False


def dispatcher_of(cq: CompletionQueue) -> CqDispatcher:
    """The dispatcher of a queue's completions.

    :raises ClosedResourceError: it is not open.
    """
    return cq._cq_dispatcher


publish(__name__)
