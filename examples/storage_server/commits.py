"""Group commit: flushes of a volume that come while one is under way wait for one more, together.

What a flush promises is about what was written before it was asked for. A sync that has begun by then may have missed
some of that, so a flush never joins one that runs: it waits for the next, with all others that came meanwhile. However
many clients flush, the disk is asked for one sync at a time.

Sessions of all of a pool's loops come here. A lock guards the few fields, and is never held during a sync.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

from storage_server.cancelling import to_its_end
from storage_server.errors import DiskError

__all__ = ["Commits"]

_SHORT_S = 0.02  # for one client's loop; disks take longer now and then


class Commits:
    """The flushes of a volume.

    :param sync: makes durable what was written before it was called; it blocks.
    :param executor: where that is done if a loop cannot wait for it.
    :param observe: is told of each sync: how long it took, in seconds, and how many flushes it was for.
    :param clock: by which that is measured.
    """

    def __init__(
        self,
        sync: Callable[[], None],
        executor: Executor,
        observe: Callable[[float, int], object] = lambda *_: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sync = sync
        self._executor = executor
        self._observe = observe
        self._clock = clock
        self._lock = threading.Lock()
        self._busy = False
        self._waiting: list[Future[None]] = []  # for the next sync
        self._lasted_s = self._lasted_before_s = 0.0  # the last two syncs
        self._failure: OSError | None = None

    async def flush(self) -> None:
        """Return when all that was written before this was called is durable.

        Where it is cancelled it ends when the sync does: until then what is made durable is in use.

        :raises DiskError: the disk failed, now or before. A disk that failed once may have lost any of what it was
            given, and says so only once: so no later flush of the volume succeeds, until the server is started again.
        """
        done: Future[None] = Future()
        with self._lock:
            leads = not self._busy
            self._busy = True
            if not leads:
                self._waiting.append(done)
        if leads:
            self._executor.submit(self._commit, [done])
        await to_its_end(asyncio.wrap_future(done))

    def flush_here(self) -> bool:
        """The same in this thread, where the disk is quick and asked by nobody else: whether that was done.

        For a loop that nobody else has a use for. A thread would cost a good part of a sync.

        :raises DiskError: as `flush`.
        """
        with self._lock:
            if self._busy or min(self._lasted_s, self._lasted_before_s) >= _SHORT_S:
                return False
            self._busy = True
        try:
            self._sync_once(1, self._sync)
        finally:
            self._over()
        return True

    def _commit(self, group: list[Future[None]]) -> None:
        """One sync, for all of these; those that came meanwhile get the next."""
        failure: Exception | None = None
        try:
            self._sync_once(len(group), self._sync)
        except Exception as error:
            failure = error
        self._over()  # before who waited is told: he may want to flush here
        for done in group:
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

    def _over(self) -> None:
        """A sync is: those that came meanwhile get the next, in a thread."""
        with self._lock:
            group, self._waiting = self._waiting, []
            self._busy = bool(group)
        if group:
            self._executor.submit(self._commit, group)

    def exclusively(self, sync: Callable[[], None]) -> None:
        """Another kind of sync, by who knows that nobody flushes.

        :raises DiskError: the disk failed, now or before.
        """
        self._sync_once(0, sync)

    def _sync_once(self, count: int, sync: Callable[[], None]) -> None:
        if self._failure is None:
            began = self._clock()
            try:
                sync()
            except OSError as error:
                self._failure = error
            self._lasted_before_s, self._lasted_s = self._lasted_s, self._clock() - began
            self._observe(self._lasted_s, count)
        if self._failure is not None:
            raise DiskError(
                f"the disk failed: {self._failure}; what was not flushed before may be lost. Start the server again "
                "when the disk is well"
            ) from self._failure
