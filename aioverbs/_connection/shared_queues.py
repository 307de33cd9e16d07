"""Completion queues and buffers shared by connections, so that a new connection registers and allocates little."""

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

_SLAB_BYTES = 8 << 20  # bytes; small enough to be registered on the event loop
_BLOCKS_PER_SLAB = 16  # at most
_CONNECTIONS_PER_CQ = 16
_UNLIMITED = 1 << 30


async def lease_block(domain: Domain, settings: ConnectionSettings) -> LeasedBuffer:
    """Lease memory for the buffers of a connection from a pool of the protection domain, made if necessary.

    :returns: a buffer of ``settings.block_size`` bytes, to be released by the caller. The domain closes the pool.
    :raises MemoryError: no memory left.
    :raises VerbsError: the device cannot register the memory.
    :raises ClosedResourceError: the domain is not open.
    """
    size = settings.block_size
    key = "buffers of connections", size
    pool = shared_resources_of(domain.base).get(key)
    if pool is None:
        count = max(1, min(_BLOCKS_PER_SLAB, _SLAB_BYTES // size))
        created = domain.buffer_pool(size, count, limit=_UNLIMITED)
        if is_large(size * count):
            await open_part(created)  # meanwhile other connections may make a pool each; the first one is kept
        else:
            open_part_now(created)
        pool = shared_resources_of(domain.base).setdefault(key, created)
        if pool is not created:
            await created.aclose()
    assert isinstance(pool, BufferPool)
    return await pool.lease()


class _QueueSet:
    """Completion queues shared by the connections of one domain and one event loop."""

    def __init__(self) -> None:
        self._all: list[CompletionQueue] = []
        self._last_index = 0  # index of the last queue with room: all are searched only before a new one is made
        self._broken: list[CompletionQueue] = []  # broken queues, each closed after its last queue pair

    def find(self, completions: int) -> CompletionQueue | None:
        """Return a queue with room for so many completions, or None.

        :param completions: number of completions that the connection can have outstanding.
        """
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
        """Close the broken queues that no queue pair uses any more. The next call retries those that are busy."""
        for cq in tuple(self._broken):
            if not cq.statistics().children:
                # retried next time; else closed with the domain
                with contextlib.suppress(AffinityError, ConcurrentAccessError):
                    lifecycle_of(cq).close_later()
                    self._broken.remove(cq)

    def add(self, cq: CompletionQueue) -> None:
        """Add a new queue."""
        self._last_index = len(self._all)
        self._all.append(cq)


def _is_usable(cq: CompletionQueue) -> bool:
    """Return whether a queue is open, and its completions are still read."""
    return cq.state is ResourceState.OPEN and dispatcher_of(cq).watched


async def completion_queue_for(domain: Domain, settings: ConnectionSettings) -> CompletionQueue:
    """Return a completion queue of the running loop with room for one more connection, made if necessary.

    :returns: an open queue that other connections share. The domain closes it, and not the caller.
    :raises ValueError: the domain's awaits do not poll, or not for so long.
    :raises VerbsError: the device has no more completion queues.
    :raises ClosedResourceError: the domain is not open.
    """
    needed = settings.completions
    queues = shared_resources_of(domain).setdefault(
        ("completions of connections", settings.spin_ns, running_loop()), _QueueSet()
    )
    assert isinstance(queues, _QueueSet)
    found = queues.find(needed)
    if found is not None:
        return found
    limit = max(needed, domain.handle.context.attributes.max_cqe)
    created = domain.completion_queue(min(needed * _CONNECTIONS_PER_CQ, limit), spin_ns=settings.spin_ns)
    open_part_now(created)  # no await here: meanwhile other connections would make a queue each
    queues.add(created)
    return created
