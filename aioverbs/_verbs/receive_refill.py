"""Refilling of receive queues: messages are delivered one by one, and memory of released ones is posted again."""

import asyncio
import contextlib
from collections import deque

from aioverbs._core.data_path.data_path import (
    Inbox,
    Message,
    QueuePairVerbs,
    Received,
    RegionSlice,
    WorkQueue,
    close_inbox,
    receive_into,
)
from aioverbs._core.handles import handles
from aioverbs._lifecycle.lifecycle import Lifecycle
from aioverbs._memory.region import register_queue_memory
from aioverbs.errors import (
    AffinityError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    QueuePairStateError,
)

__all__ = ["Refiller"]


class Refiller:
    """Keeps receives posted to the receive queue of a queue pair, and owns their memory.

    When a message is released, its memory is posted again at once. If a message is garbage collected without being
    released, the event loop that opened the queue pair posts its memory, because a finalizer must not call verbs.

    :param lifecycle: lifecycle of the queue pair; the memory is deregistered when the queue pair is closed.
    :param pd: protection domain of the memory.
    :param queue: receive queue.
    :param requester: object that posts the receives; it does not keep the user's `QueuePair` alive.
    :param depth: number of receives to keep posted.
    :param size: size of each receive, in bytes.
    :raises VerbsError: the memory cannot be registered.
    :raises OSError: the memory cannot be mapped.
    :raises RuntimeError: no asyncio event loop is running.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        pd: handles.ProtectionDomain,
        queue: WorkQueue,
        requester: QueuePairVerbs,
        depth: int,
        size: int,
    ) -> None:
        memory = register_queue_memory(lifecycle, pd, depth * size)
        self._queue = queue
        self._requester = requester
        self._loop = asyncio.get_running_loop()
        # Any thread takes and adds elements, with single atomic operations.
        self._free = deque(memory[each * size : (each + 1) * size] for each in range(depth))
        self.inbox = Inbox(queue, self._message, self._free.append)

    def fill(self) -> None:
        """Post receives into all memory that is free; memory that cannot be posted stays free.

        If the queue pair is closed, broken, or in a state in which it accepts no receives, return without an exception;
        a broken queue pair also ends the iteration over the messages. If another thread is changing the state of the
        queue pair, schedule another call for when the change has ended.

        :raises AffinityError: another event loop owns the queue pair.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain.
        :raises VerbsError: a receive cannot be posted.
        """
        while True:
            try:
                local = self._free.popleft()
            except IndexError:
                return
            try:
                _ = receive_into(self._requester, self.inbox, local)  # its result goes to the inbox
            except BaseException as error:
                self._free.appendleft(local)
                if isinstance(error, BrokenResourceError):
                    close_inbox(self.inbox, error)
                # Another thread is changing the state of the queue pair: fill when the change has ended.
                if isinstance(error, BusyResourceError):
                    self._queue.when_resumed(self._loop, self._fill_or_retry)
                    return
                if isinstance(error, QueuePairStateError | ClosedResourceError | BrokenResourceError):
                    return
                raise

    def _message(self, received: Received) -> Message:
        """Return a `Message` for a completed receive; releasing the message posts its memory again."""
        return Message(received, self._release, self._collected)

    def _release(self, local: RegionSlice) -> None:
        """Post the memory of a released message again.

        If this memory cannot be posted, the exceptions of `fill` are raised, and the message can be released once more.
        If only other free memory cannot be posted, no exception is raised, and another attempt is scheduled.
        """
        self._free.append(local)
        try:
            self.fill()
        except BaseException:
            try:
                self._free.remove(local)
            except ValueError:  # this memory was posted and must not be posted twice; other memory was not posted
                self._schedule_fill()
            else:
                raise

    def _collected(self, local: RegionSlice) -> None:
        """Free the memory of a message that was garbage collected without being released, and schedule posting it.

        Can be called from any thread.
        """
        self._free.append(local)
        self._schedule_fill()

    def _schedule_fill(self) -> None:
        """Schedule `_fill_or_retry` on the loop that opened the queue pair; do nothing if that loop is closed.

        Can be called from any thread.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed: the queue is no longer filled
            self._loop.call_soon_threadsafe(self._fill_or_retry)

    def _fill_or_retry(self) -> None:
        """Call `fill` on the loop that opened the queue pair; retry later if another thread is inside a verb.

        Do nothing if another loop has taken over the queue pair.

        :raises VerbsError: a receive cannot be posted.
        """
        try:
            self.fill()
        except ConcurrentAccessError:  # another thread is inside a verb on the domain
            self._loop.call_soon(self._fill_or_retry)
        except AffinityError:  # the loop's ownership was taken over
            return
