"""Shared receive queues: receives used by several queue pairs."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from aioverbs._core.data_path.data_path import Message, QpWorkState, ReceiveVerbs, WorkQueue, attach, detach
from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity
from aioverbs._lifecycle.resource import HandleResource, Resource, ResourceStatistics
from aioverbs._memory.buffer_pool import BufferPool
from aioverbs._verbs.capability_checks import check_shared_receive_queue
from aioverbs._verbs.completion_queue import CompletionQueue, CqReservation, QueueLocation
from aioverbs._verbs.srq_messages import FillableQueue, SrqMessages
from aioverbs.attributes import SrqAttributes
from aioverbs.types import WcStatus

__all__ = ["ReceiveVerbs", "SharedReceiveQueue", "SharedReceiveQueueStatistics"]


@dataclass(frozen=True)
class SharedReceiveQueueStatistics(ResourceStatistics):
    """Current depth and lifetime counters of a shared receive queue, from `SharedReceiveQueue.statistics`.

    :param depth: number of slots of the queue.
    :param in_flight: number of slots in use by receives that are posted or about to be posted.
    :param queued: number of receives waiting for a slot.
    :param posted: number of receives posted so far.
    :param completed: number of receives completed so far, successfully or not.
    """

    depth: int
    in_flight: int
    queued: int
    posted: int
    completed: int


class SharedReceiveQueue(FillableQueue):
    """A shared receive queue: ``ibv_create_srq``; ``ibv_create_srq_ex`` for XRC.

    Made by the method ``shared_receive_queue`` of a domain. Datagrams that a UD queue pair receives from it begin with
    the 40 bytes of their route (GRH).

    :param domain: domain that the queue belongs to.
    :param location: verbs objects and owner with which the domain makes its queues.
    :param max_wr: minimum number of receives that can be posted at once.
    :param max_sge: maximum number of scatter/gather entries of a receive.
    :param limit: raise the event ``EventType.SRQ_LIMIT_REACHED`` once when fewer posted receives than this are left; 0
        to never raise it.
    :param xrc_domain: XRC domain whose queue pairs use the queue; requires `cq`. None for an ordinary queue.
    :param cq: completion queue of the receives of an XRC queue; None for an ordinary queue.
    :raises ValueError: only one of `xrc_domain` and `cq` is given, or the message model of `cq` differs from that of
        the resource domain; on opening: the device does not support the sizes or `limit`, `cq` lacks room for `max_wr`
        completions, or the domain, `xrc_domain` and `cq` belong to different devices or owners.
    :raises AffinityError: on opening: another event loop owns the domain and `cq`.
    :raises VerbsError: on opening: the verb failed; with EINVAL, also if `limit` exceeds the size of the queue.
    """

    def __init__(
        self,
        domain: Resource,
        location: QueueLocation,
        max_wr: int,
        max_sge: int = 1,
        limit: int = 0,
        *,
        xrc_domain: HandleResource[handles.XrcDomain] | None = None,
        cq: CompletionQueue | None = None,
    ) -> None:
        if (xrc_domain is None) != (cq is None):
            raise ValueError("`xrc_domain` and `cq` go together, for XRC: give both or neither")
        super().__init__(*(parent for parent in (domain, xrc_domain, cq) if parent is not None))
        if cq is not None:
            location.check_message_model("shared receive queue", cq)
        self._queue_location = location
        self._sizes = max_wr, max_sge, limit
        self._xrc_domain = xrc_domain
        self._cq = cq
        self._work: WorkQueue | None = None
        self._queue_pairs_by_cq: dict[CompletionQueue, int] = {}  # number of queue pairs whose receives complete there
        self._attach_lock = threading.Lock()

    def _owner(self) -> Affinity | None:
        return self._queue_location.owner_with(self._cq)

    def _open(self) -> None:
        max_wr, max_sge, limit = self._sizes
        context = self._queue_location.pd.context
        check_shared_receive_queue(context.name, context.attributes, max_wr, max_sge, limit)
        if self._cq is not None:
            self._lifecycle.hold(CqReservation(self._cq, max_wr))
        cleanup = _ReceiveCleanup()
        self._lifecycle.hold(cleanup)
        self._handle = handles.SharedReceiveQueue(
            self._queue_location.pd,
            *self._sizes,
            xrc_domain=self._xrc_domain.handle if self._xrc_domain is not None else None,
            cq=self._cq.handle if self._cq is not None else None,
            affinity=self._lifecycle.owner,
        )
        self._lifecycle.hold(self._handle)
        dispatcher = self._cq._cq_dispatcher if self._cq is not None else None
        self._work = cleanup.work = self._receives_begin(
            self._handle, self._queue_location.base, max_wr, max_sge, dispatcher
        )

    @property
    def _receive_queue(self) -> WorkQueue:
        """The `WorkQueue` through which receives are posted.

        :raises ClosedResourceError: the queue is not open.
        """
        self._check_open()
        assert self._work is not None
        return self._work

    def _attach_queue_pair(self, cq: CompletionQueue, requests: QpWorkState) -> Callable[[], None]:
        """Register a queue pair that takes its receives from this queue.

        :param cq: completion queue in which the receives of the queue pair complete.
        :param requests: `QpWorkState` of the queue pair.
        :returns: a function that unregisters the queue pair.
        :raises ValueError: the completion queue does not have room for the completions of all receives of this queue.
        :raises ClosedResourceError: this queue or the completion queue is not open.
        """
        work, dispatcher = self._receive_queue, cq._cq_dispatcher
        with self._attach_lock:
            if cq not in self._queue_pairs_by_cq:
                cq._reserve(self.depth)
            self._queue_pairs_by_cq[cq] = self._queue_pairs_by_cq.get(cq, 0) + 1
        attach(work, dispatcher, requests)

        def detach_queue_pair() -> None:
            """Unregister the queue pair.

            If no other queue pair of this queue uses the same completion queue, also release the entries that were
            reserved there.
            """
            detach(work, dispatcher, requests)
            with self._attach_lock:
                self._queue_pairs_by_cq[cq] -= 1
                if not self._queue_pairs_by_cq[cq]:
                    del self._queue_pairs_by_cq[cq]
                    cq._release(self.depth)

        return detach_queue_pair

    def messages(
        self, pool: BufferPool, low: int | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Message], None]:
        """Return an async context manager that gives an iterator over the messages arriving at the queue pairs.

        The iterator yields each message as a `Message`, in order of completion; the caller must release it.

            async with srq.messages(pool) as messages:
                async for message in messages: ...

        Inside the block, the queue is kept filled with buffers of the pool: it is filled when the block is entered, and
        again whenever fewer than `low` receives are left. Entering the block waits until the queue is full, and so
        until the pool has had enough free buffers. Releasing a message returns its buffer to the pool. Only one task
        may iterate at a time.

        After the block, receives that are still posted remain posted until the queue is closed. Messages that arrive in
        them are dropped, as are messages that the iterator had not yielded yet. The pool may be closed before the
        queue. The event loop that enters the block owns it, even if any thread may use the queue.

        :param pool: pool of the buffers to receive into, with a limit of at least as many buffers as the queue has free
            receives. While it has no free buffer, the queue is not refilled, and senders may have to wait.
        :param low: number of posted receives, 1..depth, below which the queue is refilled; None for half of the depth.
        :returns: the context manager, which is in use by one block at a time.
        :raises AffinityError: on entering or leaving, or during iteration: another event loop owns the queue or has
            entered the block; nothing was done.
        :raises ValueError: on entering: `low` is not in 1..depth, or the pool is limited to fewer buffers than fill the
            queue. On entering or during iteration: the buffers are registered without ``LOCAL_WRITE``, or on another
            protection domain.
        :raises RuntimeError: on entering: the context manager is in use, or no asyncio event loop is running;
            during iteration: another task is waiting for the next message.
        :raises ClosedResourceError: on entering: the queue or the pool is not open; during iteration: the pool was
            closed.
        :raises ConcurrentAccessError: on entering or during iteration: another thread is inside a verb on the same
            unlocked domain. An iteration can then continue.
        :raises VerbsError: on entering or during iteration: a receive cannot be posted, or the pool cannot grow.
        :raises MemoryError: on entering or during iteration: the allocator of the pool has no memory.
        :raises OSError: on entering or during iteration: the memory of the pool cannot be mapped, or the process has no
            file descriptors left.
        :raises BrokenResourceError: on entering or during iteration: the completion queues of the receives have failed.
        :raises WorkCompletionError: during iteration: a receive failed; this ends the iteration.
        """
        return SrqMessages(self, pool, low)

    @property
    def depth(self) -> int:
        """Number of receives that can be posted at once, as requested when the queue was made."""
        return self._sizes[0]

    @property
    def number(self) -> int:
        """Number of the shared receive queue (``ibv_get_srq_num``), to which XRC peers send, 0..2**24-1.

        :raises VerbsError: with EINVAL if the queue is not for XRC.
        :raises ClosedResourceError: the queue is not open.
        :raises AffinityError: another event loop owns the queue.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain.
        """
        return self.handle.number

    def query(self) -> SrqAttributes:
        """Query the sizes and current limit of the queue (``ibv_query_srq``), and return them as an `SrqAttributes`.

        :raises VerbsError: the verb failed.
        :raises ClosedResourceError: the queue is not open.
        :raises AffinityError: another event loop owns the queue; nothing was done.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was done.
        """
        return self.handle.query()

    def statistics(self) -> SharedReceiveQueueStatistics:
        """Return a `SharedReceiveQueueStatistics`: the current depth, the numbers of receives in flight and waiting for
        a slot, and the numbers of receives posted and completed so far.

        If the queue was never opened, the depth is the requested one, and the counters are 0.
        """
        work = self._work
        counts = (work.in_flight, work.queued, work.posted, work.completed) if work is not None else (0,) * 4
        return SharedReceiveQueueStatistics(len(self._lifecycle.children), self.depth, *counts)


class _ReceiveCleanup:
    """Ends the receives of a shared receive queue after it has been destroyed."""

    def __init__(self) -> None:
        self.work: WorkQueue | None = None

    def destroy(self) -> None:
        """Complete all receives that are left as if they were flushed; the device no longer uses their memory."""
        if self.work is not None:
            self.work.abandon(WcStatus.WR_FLUSH_ERR, None)


publish(__name__)
