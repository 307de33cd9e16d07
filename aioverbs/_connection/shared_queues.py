"""What connections have in common: completion queues and buffers, so that making one registers and allocates little."""

import contextlib

from aioverbs._connection.settings import ConnectionSettings
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import lifecycle_of, open_part, open_part_now
from aioverbs._memory.buffer_pool import BufferPool, LeasedBuffer
from aioverbs._memory.region import is_large
from aioverbs._verbs.base_domain import Domain, shared_resources_of
from aioverbs._verbs.completion_queue import CompletionQueue, dispatcher_of
from aioverbs.errors import AffinityError, ConcurrentAccessError

__all__ = ["completion_queue_for", "lease_block"]

_SLAB_BYTES = 8 << 20  # bytes: below what is registered beside the loop
_BLOCKS_PER_SLAB = 16  # of a slab, at most
_CONNECTIONS_PER_CQ = 16  # connections of a completion queue
_UNLIMITED = 1 << 30


async def lease_block(domain: Domain, settings: ConnectionSettings) -> LeasedBuffer:
    """Memory for the buffers of a connection, of a pool of the protection domain.

    :raises MemoryError: there is none.
    :raises VerbsError: the device cannot register it.
    """
    size = settings.block_size
    key = "buffers of connections", size
    pool = shared_resources_of(domain.base).get(key)
    if pool is None:
        count = max(1, min(_BLOCKS_PER_SLAB, _SLAB_BYTES // size))
        created = domain.buffer_pool(size, count, limit=_UNLIMITED)
        if is_large(size * count):
            await open_part(created)  # meanwhile others come, and make one each
        else:
            open_part_now(created)
        pool = common_of(domain.base).setdefault(key, created)
        if pool is not created:
            await created.aclose()
    assert isinstance(pool, BufferPool)
    return await pool.lease()


class _QueueSet:
    """The completion queues of a domain and a loop."""

    def __init__(self) -> None:
        self._all: list[CompletionQueue] = []
        self._last_index = 0  # where there was room the last time: all are looked at only when one more is made
        self._broken: list[CompletionQueue] = []  # until the last queue pair of each is gone

    def find(self, completions: int) -> CompletionQueue | None:
        """One with so much room."""
        self._close_broken()
        for step in range(len(self._all)):
            index = (self._last_index + step) % len(self._all)
            cq = self._all[index]
            statistics = cq.statistics()
            if statistics.depth - statistics.reserved >= completions and _is_usable(cq):
                self._last_index = index
                return cq
        self._broken += [cq for cq in self._all if cq.state is ResourceState.OPEN and not _is_usable(cq)]
        self._all, self._last_index = [cq for cq in self._all if _is_usable(cq)], 0
        self._close_broken()
        return None

    def _close_broken(self) -> None:
        for cq in tuple(self._broken):
            if not cq.statistics().children:
                with contextlib.suppress(AffinityError, ConcurrentAccessError):  # the next time, or with the domain
                    lifecycle_of(cq).close_later()
                    self._broken.remove(cq)

    def add(self, cq: CompletionQueue) -> None:
        """One more."""
        self._last_index = len(self._all)
        self._all.append(cq)


def _is_usable(cq: CompletionQueue) -> bool:
    return cq.state is ResourceState.OPEN and dispatcher_of(cq).watched


async def completion_queue_for(domain: Domain, settings: ConnectionSettings) -> CompletionQueue:
    """A completion queue of the running loop's, with room for one more connection.

    :raises ValueError: its awaits do not poll, or not so long.
    :raises VerbsError: the device has no more.
    """
    needed = settings.completions
    queues = common_of(domain).setdefault(("completions of connections", settings.spin_ns, running_loop()), _QueueSet())
    assert isinstance(queues, _QueueSet)
    found = queues.find(needed)
    if found is not None:
        return found
    limit = max(needed, domain.handle.context.attributes.max_cqe)
    created = domain.completion_queue(min(needed * _CONNECTIONS_PER_CQ, limit), spin_ns=settings.spin_ns)
    open_part_now(created)  # without an await, in which others would make one each
    queues.add(created)
    return created
