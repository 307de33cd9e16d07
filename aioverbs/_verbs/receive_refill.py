"""Receive queues that are kept full: messages come one by one, each in memory that goes back when it is read."""

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
    """Keeps receives posted, and their memory.

    What was released is posted again at once. What was forgotten is posted again by the loop that opened the queue: a
    finalizer calls no verbs.

    :param life: of the queue, as long as which the memory is registered.
    :param pd: the protection domain of the memory.
    :param queue: that the receives go to.
    :param requester: what posts them, apart from the user's object.
    :param depth: how many.
    :param size: bytes of each.
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
        whole = register_queue_memory(lifecycle, pd, depth * size)
        self._queue = queue
        self._requester = requester
        self._loop = asyncio.get_running_loop()
        # Taken from and added to by single operations, whatever the thread.
        self._free = deque(whole[each * size : (each + 1) * size] for each in range(depth))
        self.inbox = Inbox(queue, self._message, self._free.append)

    def fill(self) -> None:
        """Post what is free; nothing where the queue is in a state that takes none."""
        while True:
            try:
                local = self._free.popleft()
            except IndexError:
                return
            try:
                _ = receive_into(self._requester, self.inbox, local)  # which goes to the inbox
            except BaseException as error:
                self._free.appendleft(local)
                if isinstance(error, BrokenResourceError):
                    close_inbox(self.inbox, error)
                if isinstance(error, BusyResourceError):  # another thread changes its state: when that is over
                    self._queue.when_resumed(self._loop, self._fill_by_and_by)
                    return
                if isinstance(error, QueuePairStateError | ClosedResourceError | BrokenResourceError):
                    return
                raise

    def _message(self, received: Received) -> Message:
        return Message(received, self._release, self._forgotten)

    def _release(self, local: RegionSlice) -> None:
        self._free.append(local)
        try:
            self.fill()
        except BaseException:
            try:
                self._free.remove(local)
            except ValueError:  # it was posted, which must not be done twice: another one was not
                self._call_later()
            else:
                raise

    def _forgotten(self, local: RegionSlice) -> None:
        self._free.append(local)
        self._call_later()

    def _call_later(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody fills it any more
            self._loop.call_soon_threadsafe(self._fill_by_and_by)

    def _fill_by_and_by(self) -> None:
        try:
            self.fill()
        except ConcurrentAccessError:  # a thread is inside of a domain that any may use
            self._loop.call_soon(self._fill_by_and_by)
        except AffinityError:  # somebody took over what the loop owned
            return
