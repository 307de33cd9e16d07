"""Group commit: flushes that arrive while a sync of their volume runs share the next sync.

A flush covers the writes that completed before the flush was requested. A sync that is already running may miss some of
them, so a flush never joins a running sync: it waits for the next one, together with all other flushes that arrive
meanwhile. There is at most one sync at a time for each volume, however many clients flush.

    flush A   |--- sync 1 (A) ---|
    flush B      |-- waiting ---|--- sync 2 (B, C) ---|
    flush C           |-- wait -|

Sessions on all worker loops call this class. A lock guards its few fields and is never held during a sync.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

from storage_server.cancelling import wait_uncancelled
from storage_server.errors import DiskError

__all__ = ["Commits"]

_QUICK_SYNC_S = 0.02  # limit for a sync on a client's event loop; disks sometimes take longer


class Commits:
    """Group commit of one volume.

    :param sync: blocking function that makes all earlier writes durable.
    :param executor: runs `sync` when the event loop must not block.
    :param observe: called after each sync with its duration in seconds and the number of flushes that shared it.
    :param clock: time source for these durations, in seconds.
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
        self._waiting: list[Future[None]] = []  # flushes for the next sync
        self._last_sync_s = self._previous_sync_s = 0.0  # durations of the last two syncs
        self._failure: OSError | None = None

    async def flush(self) -> None:
        """Return once all writes that completed before the call are durable.

        If the call is cancelled, it raises only after the sync has ended, since the sync uses the volume's memory.

        :raises DiskError: the disk failed, now or before. After a failure, the disk may have lost any of its unsynced
            data, and it reports that only once. Therefore no later flush of the volume succeeds until the server is
            restarted.
        """
        done: Future[None] = Future()
        with self._lock:
            is_first = not self._busy
            self._busy = True
            if not is_first:
                self._waiting.append(done)
        if is_first:
            self._executor.submit(self._commit, [done])
        await wait_uncancelled(asyncio.wrap_future(done))

    def flush_here(self) -> bool:
        """Sync in the calling thread if no sync is running and the last syncs were quick.

        This is for a loop that serves no other client: running the sync in a thread would add a large part of the
        sync's cost.

        :returns: whether the sync was done.
        :raises DiskError: the disk failed, now or before; see `flush`.
        """
        with self._lock:
            if self._busy or min(self._last_sync_s, self._previous_sync_s) >= _QUICK_SYNC_S:
                return False
            self._busy = True
        try:
            self._sync_once(1, self._sync)
        finally:
            self._finish_sync()
        return True

    def _commit(self, group: list[Future[None]]) -> None:
        """Run one sync for a group of flushes, then start the next sync if flushes arrived meanwhile.

        :param group: futures of the flushes; each gets None or the sync's exception.
        """
        failure: Exception | None = None
        try:
            self._sync_once(len(group), self._sync)
        except Exception as error:
            failure = error
        self._finish_sync()  # before the waiting flushes are notified: their callers may call `flush_here`
        for done in group:
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

    def _finish_sync(self) -> None:
        """Mark the sync as ended. If flushes are waiting, start a sync for them in a thread."""
        with self._lock:
            group, self._waiting = self._waiting, []
            self._busy = bool(group)
        if group:
            self._executor.submit(self._commit, group)

    def exclusively(self, sync: Callable[[], None]) -> None:
        """Run another function as the sync, in the calling thread. The caller must ensure that no flush runs at the
        same time.

        :param sync: blocking function.
        :raises DiskError: the disk failed, now or before.
        """
        self._sync_once(0, sync)

    def _sync_once(self, count: int, sync: Callable[[], None]) -> None:
        """Run a sync, measure its duration and remember a failure. After a failure, no further sync is run.

        :param count: number of flushes that share the sync.
        :param sync: blocking function.
        :raises DiskError: the disk failed, now or before.
        """
        if self._failure is None:
            started = self._clock()
            try:
                sync()
            except OSError as error:
                self._failure = error
            self._previous_sync_s, self._last_sync_s = self._last_sync_s, self._clock() - started
            self._observe(self._last_sync_s, count)
        if self._failure is not None:
            raise DiskError(
                f"the disk failed: {self._failure}. Unflushed data may be lost. Repair the disk, "
                "then restart the server"
            ) from self._failure
