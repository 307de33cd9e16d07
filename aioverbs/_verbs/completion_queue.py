"""Completion queues: waking the event loop for completions, reservations of their entries, and resizing."""

import asyncio
import contextlib
import enum
import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass

from aioverbs._core.data_path.data_path import CqDispatcher
from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, run_on_owner_within, wait_uncancelled
from aioverbs._lifecycle.resource import Resource, ResourceStatistics
from aioverbs._verbs.async_events import AsyncEventSource, EventPump
from aioverbs._verbs.capability_checks import check_completion_queue
from aioverbs._verbs.processors import usable_processors
from aioverbs.errors import AffinityError, BusyResourceError, ConcurrentAccessError, DeviceRemovedError, VerbsError

__all__ = [
    "CompletionQueue",
    "CompletionQueueStatistics",
    "CqReservation",
    "MessageModel",
    "QueueLocation",
    "dispatcher_of",
    "free_entries_of",
    "retry_while_busy",
]  # fmt: skip

# Longest time that another event loop may take to stop watching a queue's descriptor, in seconds.
_UNWATCH_S = 10.0
# Number of times that a verb is retried while another thread is inside the same domain.
_MAX_ATTEMPTS = 1000
# Default polling time of an await before it sleeps: about the time that a sleeping peer needs to wake up and answer.
_SPIN_NS = 100_000
# Completion moderation for HIGH_BANDWIDTH: one event for this many completions, or this many microseconds after the
# first.
_MODERATION = (16, 16)


class MessageModel(enum.Enum):
    """Ways in which awaits on the completion queues of a resource domain wait for completions."""

    FORCE_LOW_LATENCY = "force low latency"
    """An await polls until its operation completes: at first without yielding to the event loop, later once in each
    iteration of the loop.
    """

    LOW_LATENCY = "low latency"
    """An await polls for a while, then sleeps until the completion channel wakes its loop."""

    HIGH_BANDWIDTH = "high bandwidth"
    """Requests posted in one iteration of the loop are submitted together at the end of the iteration, and complete
    together.
    """

    DEFAULT = "default"
    """An await polls for as long as recent waits on the completion queue show that polling pays, at most until 200 us
    after the last task began to wait, then sleeps until the completion channel wakes its loop. Other tasks of the loop
    run between two polls.
    """


_MODELS = {
    MessageModel.HIGH_BANDWIDTH: 0,
    MessageModel.LOW_LATENCY: 1,
    MessageModel.FORCE_LOW_LATENCY: 2,
    MessageModel.DEFAULT: 3,
}
_LATENCY_MODELS = (MessageModel.LOW_LATENCY, MessageModel.FORCE_LOW_LATENCY)  # those that `spin_ns` applies to


@dataclass(frozen=True, slots=True)
class QueueLocation:
    """Verbs objects and owner with which a domain makes its queues; returned by `queue_location_of`.

    :param pd: the parent domain, or the protection domain if there is no native parent domain.
    :param base: the protection domain that memory is registered on.
    :param owner: event loop and thread that own the queues; None if any thread may use them.
    :param native: whether `pd` is a parent domain, on which completion queues must then be created.
    :param message_model: message model of the resource domain; None if each completion queue chooses its own.
    """

    pd: handles.ProtectionDomain
    base: handles.ProtectionDomain
    owner: Affinity | None
    native: bool
    message_model: MessageModel | None = None

    def owner_with(self, *parts: Resource | None) -> Affinity | None:
        """Return the owner of a new queue: that of the domain, or else that of the first of `parts` that has one.

        All resources of a queue must have one owner. If they do not, creating the handle of the queue fails, so it does
        not matter which of the owners is returned.

        :param parts: completion queues and shared receive queues that the new queue uses; None for each one it lacks.
        :returns: the `Affinity` that is the owner; None if neither the domain nor any of the parts has an owner, so
            that any thread may use the new queue.
        """
        owners = (self.owner, *(part.owner for part in parts if part is not None))
        return next((owner for owner in owners if owner is not None), None)

    def check_message_model(self, what: str, cq: "CompletionQueue") -> None:
        """Check that a completion queue has the message model of the resource domain, if that has one.

        :param what: kind of the resource that is being made, for the error message.
        :param cq: completion queue to check.
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
    """Current depth and lifetime counters of a completion queue, from `CompletionQueue.statistics`.

    :param depth: number of completions that fit; at least the requested number.
    :param reserved: number of entries reserved by the queues that use this completion queue.
    :param in_flight: number of work requests in flight that will complete in this queue.
    :param completions: number of completions polled so far.
    :param late: number of completions polled so far whose queue had already been destroyed, or that belong to requests
        posted through a low-level handle.
    :param wakeups: number of times that the completion channel woke the loop.
    :param spins: number of waits that polled before sleeping. With DEFAULT, a wait lasts from the last suspension of a
        task, or from when the task began to poll before it, until the next completion that a task waits for; otherwise,
        each await is a wait.
    :param spins_paid: number of waits that ended while polling.
    """

    depth: int
    reserved: int
    in_flight: int
    completions: int
    late: int
    wakeups: int
    spins: int
    spins_paid: int


class _ChannelWatcher:
    """Watcher of a completion channel and of the device's events, on the event loop that opened the queue.

    It holds no reference to the `CompletionQueue`, so that the queue can be garbage collected.

    :param dispatcher: dispatcher of the completions of the queue.
    :param channel: completion channel of the queue.
    :raises OSError: the process has no file descriptors left.
    :raises RuntimeError: no asyncio event loop is running.
    """

    def __init__(self, dispatcher: CqDispatcher, channel: handles.CompletionChannel) -> None:
        self._dispatcher = dispatcher
        self._home = dispatcher.home
        self._loop = asyncio.get_running_loop()
        self._fd = channel.fileno()
        self._pump = EventPump.of(dispatcher.handle.context)
        self._watcher = self._pump.watch(self._on_failure)
        self._loop.add_reader(self._fd, dispatcher.readable)
        self._watching = True

    def _on_failure(self, element: handles.Handle | None) -> None:
        """Fail all work requests in flight whose completions go to the watched queue. This runs on the watcher's loop.

        Completions that are already in the queue are dispatched first. If another thread is inside a verb on the
        domain, schedule another attempt. After `stop`, do nothing.

        :param element: handle of the failed completion queue, or None if the device is lost. Failures of completion
            queues other than the watched one are ignored.
        """
        # The device was lost or this completion queue failed: no request still in flight will complete, except for
        # completions that are already in the queue. Polling such a queue fails on some devices and succeeds on others.
        if not self._watching or (element is not None and element is not self._dispatcher.handle):
            return
        try:
            self._dispatcher.drain()
        except ConcurrentAccessError:
            self._loop.call_soon(self._on_failure, element)
            return
        except VerbsError as error:
            if element is not None:
                self._dispatcher.broke(error)
                return
        if element is None:
            self._dispatcher.broke(DeviceRemovedError("the device was lost (DEVICE_FATAL)"), gone=True)
        else:
            self._dispatcher.broke(VerbsError("ibv_get_async_event", errno.EIO, "the queue lost completions (CQ_ERR)"))

    async def stop(self) -> None:
        """Stop watching the channel and the device, and acknowledge the events received from the channel.

        If another thread is inside the domain in each of 1,000 attempts, the events stay unacknowledged. A cancellation
        is raised only after all of this.

        Nothing undoes this. If closing the queue fails afterwards, or the caller's loop ends during this call, the
        queue is open but not watched: it refuses requests as if it had failed, and can only be closed.

        :raises BusyResourceError: the loop that watches the channel's descriptor does not respond within 10 s.
        :raises RuntimeError: no asyncio event loop is running.
        """
        await wait_uncancelled(self._stop())

    async def _stop(self) -> None:
        """Do what `stop` does; a cancellation ends this."""
        await self._unwatch()
        await retry_while_busy(self._dispatcher.acknowledge)

    async def _unwatch(self) -> None:
        """Call `_remove` on the loop that watches the descriptor, or here if that loop or its thread has ended.

        If this raises, that loop still watches the descriptor.

        :raises BusyResourceError: that loop does not respond within 10 s.
        """
        if self._home.owns():
            self._remove()
            return
        try:
            await run_on_owner_within(_UNWATCH_S, self._home, self._remove)
        except AffinityError:  # the owning loop is closed
            self._remove()
        except TimeoutError:
            raise BusyResourceError(
                f"{self._dispatcher.handle!r} is watched by {self._loop!r}, which does not respond: run or close it, "
                "or end what blocks it"
            ) from None

    def _remove(self) -> None:
        """Stop watching the descriptor and the device, and make the dispatcher stop waking its loop."""
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._fd)
            self._pump.unwatch(self._watcher)
        self._dispatcher.let_go()


class CompletionQueue(AsyncEventSource[handles.CompletionQueue]):
    """A completion queue: ``ibv_create_cq_ex`` on a parent domain, ``ibv_create_cq`` elsewhere, with a completion
    channel.

    The event loop that opens the queue watches the channel's descriptor, polls completions and wakes the tasks that
    await them. Each queue pair reserves as many entries as it can have requests in flight, so that the completion queue
    cannot overflow. Made by the ``completion_queue`` of a domain.

    :param domain: domain that the completion queue belongs to.
    :param location: verbs objects and owner with which the domain makes its queues.
    :param depth: minimum number of completions that fit.
    :param comp_vector: index of the device's completion vector (interrupt) that signals new completions.
    :param message_model: how awaits on this queue wait; None for the model of the resource domain, or DEFAULT on
        another domain. Queue pairs of a resource domain accept only completion queues with the domain's message model.
    :param spin_ns: how long an await polls before it sleeps, in nanoseconds, 0..10**9; for FORCE_LOW_LATENCY and
        LOW_LATENCY only. The awaits in one iteration of the loop share this time. None for 100,000.
    :raises ValueError: `depth` is less than 1, or `spin_ns` is out of range or does not apply to the message model; on
        opening: the device does not support `depth` or `comp_vector`.
    :raises AffinityError: on opening: another event loop owns the domain.
    :raises RuntimeError: on opening: no asyncio event loop is running.
    :raises OSError: on opening: the process has no file descriptors left.
    :raises VerbsError: on opening: the verb failed.
    """

    def __init__(
        self,
        domain: Resource,
        location: QueueLocation,
        depth: int,
        comp_vector: int = 0,
        message_model: MessageModel | None = None,
        spin_ns: int | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"`depth` must be at least 1, got {depth}")
        model = MessageModel(message_model or location.message_model or MessageModel.DEFAULT)
        if spin_ns is not None and model not in _LATENCY_MODELS:
            names = " or ".join(each.name for each in _LATENCY_MODELS)
            raise ValueError(f"`spin_ns` requires the message model {names}, got {model.name}: leave it out")
        if spin_ns is not None and not 0 <= spin_ns <= 10**9:
            raise ValueError(f"`spin_ns` must be 0 to 1,000,000,000, got {spin_ns}")
        super().__init__(domain)
        self._queue_location = location
        self._depth = depth
        self._comp_vector = comp_vector
        self._spin_ns = spin_ns if spin_ns is not None else _SPIN_NS
        self._dispatcher: CqDispatcher | None = None
        # Guards `_reserved`, `_resizing_to` and the update of `_depth`. No section under this lock calls a verb, and so
        # none calls an allocator. Reentrant, because a signal handler may interrupt a section and enter another one.
        self._reservation_lock = threading.RLock()
        self._reserved = 0
        self._resizing_to: list[int] = []  # depths of resizes in progress: the queue may hold no more than these
        self._moderated = False
        self.message_model = model

    def _owner(self) -> Affinity | None:
        return self._queue_location.owner

    def _open(self) -> None:
        pd, owner = self._queue_location.pd, self._queue_location.owner
        self._check(pd.context, self._depth)
        # A completion channel wakes one loop, even if any thread may use the queue.
        home = owner if owner is not None and owner.bound else Affinity.of_running_loop()
        channel = handles.CompletionChannel(pd.context, affinity=owner)
        self._lifecycle.hold(channel)
        single_threaded = self._queue_location.native and owner is not None and owner.bound
        self._handle = handles.CompletionQueue(
            pd.context,
            self._depth,
            channel,
            comp_vector=self._comp_vector,
            extended=single_threaded,
            single_threaded=single_threaded,
            parent_domain=pd if self._queue_location.native else None,
            affinity=owner,
        )
        self._lifecycle.hold(self._handle)
        self._depth = self._handle.cqe
        if self.message_model is MessageModel.HIGH_BANDWIDTH:
            self._moderate(self._handle)
        loop = asyncio.get_running_loop()
        self._dispatcher = CqDispatcher(
            self._handle, loop, home, _MODELS[self.message_model], self._spin_ns, usable_processors
        )
        self._lifecycle.drain = _ChannelWatcher(self._dispatcher, channel).stop

    def _check(self, context: handles.Context, depth: int) -> None:
        """Check a depth and this queue's completion vector against the limits of the device.

        :raises ValueError: the device does not support the depth or the completion vector.
        :raises VerbsError: the device cannot be queried.
        """
        check_completion_queue(context.name, context.attributes, depth, self._comp_vector, context.num_comp_vectors)

    def _moderate(self, handle: handles.CompletionQueue) -> None:
        """Turn on completion moderation, so that one event reports several completions.

        If the provider does not support it, change nothing.

        :raises VerbsError: the verb failed with an error other than EOPNOTSUPP.
        """
        try:
            handle.modify(*_MODERATION)
        except VerbsError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        else:
            self._moderated = True

    @property
    def _cq_dispatcher(self) -> CqDispatcher:
        """The `CqDispatcher`, which polls this queue and wakes the tasks that await its completions.

        :raises ClosedResourceError: the queue is not open.
        """
        self._check_open()
        assert self._dispatcher is not None
        return self._dispatcher

    @property
    def moderated(self) -> bool:
        """Whether the device moderates completion events: False before opening, and without HIGH_BANDWIDTH."""
        return self._moderated

    def statistics(self) -> CompletionQueueStatistics:
        """Return a `CompletionQueueStatistics`: the current depth, the numbers of reserved entries and of work requests
        in flight, and the numbers of completions, wakeups and waits that polled so far.

        If the queue was never opened, the depth is the requested one, and the counters are 0.
        """
        counts = (0,) * 6
        if (cq := self._dispatcher) is not None:
            counts = (cq.in_flight, cq.completions, cq.late, cq.wakeups, cq.spins, cq.spins_paid)
        return CompletionQueueStatistics(len(self._lifecycle.children), self._depth, self._reserved, *counts)

    def resize(self, depth: int) -> None:
        """Change the minimum number of completions that the queue can hold: ``ibv_resize_cq``.

        Completions that are in the queue are kept.

        :param depth: new minimum number of completions.
        :raises ValueError: `depth` is less than 1, less than the number of entries that are reserved, or more than the
            device supports.
        :raises VerbsError: the verb failed; the queue is unchanged.
        :raises ClosedResourceError: the queue is not open.
        :raises AffinityError: another event loop owns the queue; nothing was done.
        :raises ConcurrentAccessError: another verb of the domain is in progress, for example because an allocator
            calls this method during a verb; nothing was done.
        """
        handle, owner = self.handle, self._lifecycle.owner
        if owner is not None:
            owner.check(handle, "ibv_resize_cq")
        with self._reservation_lock:
            if depth < max(self._reserved, 1):
                raise ValueError(
                    f"`depth` must be at least {max(self._reserved, 1)} for the queues on {self!r}, got {depth}"
                )
            self._resizing_to.append(depth)
        try:  # outside the lock: the verb may call an allocator
            self._check(handle.context, depth)
            handle.resize(depth)
        finally:
            with self._reservation_lock:
                self._resizing_to.remove(depth)
                self._depth = handle.cqe  # concurrent resizes each store the depth as of now

    def _reserve(self, completions: int) -> None:
        """Reserve entries for the completions of a queue pair or shared receive queue.

        :param completions: number of entries to reserve.
        :raises ValueError: not that many unreserved entries are left; none is reserved then.
        """
        with self._reservation_lock:
            if self._reserved + completions > min([self._depth, *self._resizing_to]):
                raise ValueError(
                    f"{self!r} holds {self._depth} completions, {self._reserved} of them reserved; {completions} more "
                    "do not fit: make it deeper, resize() it, or ask for fewer requests (QpCapabilities)"
                )
            self._reserved += completions

    def _release(self, completions: int) -> None:
        """Release entries that `_reserve` reserved.

        :param completions: number of entries to release.
        """
        with self._reservation_lock:
            self._reserved -= completions


class CqReservation:
    """Entries that a queue has reserved in a completion queue. The queue's lifecycle releases them on closing.

    :param cq: the completion queue.
    :param completions: number of entries to reserve.
    :raises ValueError: the completion queue does not have that many unreserved entries left.
    """

    __slots__ = ("_completions", "_cq")

    def __init__(self, cq: CompletionQueue, completions: int) -> None:
        cq._reserve(completions)
        self._cq = cq
        self._completions = completions

    def destroy(self) -> None:
        """Release the entries."""
        self._cq._release(self._completions)


async def retry_while_busy(verb: Callable[[], object]) -> bool:
    """Call a verb, repeatedly if necessary, until no other thread is inside a verb on the same unlocked domain.

    Between two attempts, other tasks on the loop run. A ConcurrentAccessError that the verb raises leads to the next
    attempt; all other exceptions propagate unchanged.

    :param verb: function that calls the verb; its result is dropped.
    :returns: True if the verb was executed; False if another thread was inside the domain in each of 1,000 attempts.
    """
    for _ in range(_MAX_ATTEMPTS):
        with contextlib.suppress(ConcurrentAccessError):
            verb()
            return True
        await asyncio.sleep(0)
    return False


def free_entries_of(cq: CompletionQueue) -> int:
    """Return the number of entries of a completion queue that no queue has reserved."""
    return cq._depth - cq._reserved


def dispatcher_of(cq: CompletionQueue) -> CqDispatcher:
    """Return the `CqDispatcher` of a completion queue, for use by other packages in the library.

    :raises ClosedResourceError: the queue is not open.
    """
    return cq._cq_dispatcher


publish(__name__)
