"""Refilling of receive queues: messages are delivered one by one, and released memory is posted again."""

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
    """Keeps receives posted to a queue, and owns their memory.

    Released memory is posted again at once. Memory of a message that was garbage collected unreleased is posted again
    by the event loop that opened the queue, because a finalizer must not call verbs.

    :param lifecycle: lifecycle of the queue, with which the memory is deregistered.
    :param pd: protection domain of the memory.
    :param queue: receive queue.
    :param requester: object that posts the receives; it does not keep the user's object alive.
    :param depth: number of receives to keep posted.
    :param size: size of each receive, in bytes.
    :raises VerbsError: the memory cannot be registered.
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
        # Any thread takes and adds elements, by single atomic operations.
        self._free = deque(memory[each * size : (each + 1) * size] for each in range(depth))
        self.inbox = Inbox(queue, self._message, self._free.append)

    def fill(self) -> None:
        """Post all free memory; memory that cannot be posted stays free.

        If the queue pair accepts no receives in its state, is closed or is broken, return without an error. If another
        thread is changing the state, fill again when that has ended.

        :raises AffinityError: another event loop owns the queue pair.
        :raises ConcurrentAccessError: another thread is inside the domain.
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
                # Another thread is changing the state of the queue pair: fill when that has ended.
                if isinstance(error, BusyResourceError):
                    self._queue.when_resumed(self._loop, self._fill_or_retry)
                    return
                if isinstance(error, QueuePairStateError | ClosedResourceError | BrokenResourceError):
                    return
                raise

    def _message(self, received: Received) -> Message:
        """Return the message that arrived; releasing it posts its memory again."""
        return Message(received, self._release, self._collected)

    def _release(self, local: RegionSlice) -> None:
        """Post the memory of a released message again.

        Raises what `fill` raises if this memory was not posted; the message can then be released again.
        """
        self._free.append(local)
        try:
            self.fill()
        except BaseException:
            try:
                self._free.remove(local)
            except ValueError:  # this memory was posted, and must not be posted twice: some other memory was not
                self._schedule_fill()
            else:
                raise

    def _collected(self, local: RegionSlice) -> None:
        """Free the memory of a message that was garbage-collected unreleased, and post it later, from any thread."""
        self._free.append(local)
        self._schedule_fill()

    def _schedule_fill(self) -> None:
        """Have the loop that opened the queue post all free memory, from any thread; do nothing if it is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the queue is not filled any more
            self._loop.call_soon_threadsafe(self._fill_or_retry)

    def _fill_or_retry(self) -> None:
        """Post all free memory, on the loop that opened the queue; retry while another thread is inside the domain."""
        try:
            self.fill()
        except ConcurrentAccessError:  # another thread is inside the domain
            self._loop.call_soon(self._fill_or_retry)
        except AffinityError:  # the loop's ownership was taken over
            return
