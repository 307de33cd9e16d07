"""Completion queues and buffers that connections share, so that a new connection registers and allocates little."""

import contextlib
import mmap

import anyio

from aioverbs._connection.settings import ConnectionSettings
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import lifecycle_of, open_part, open_part_now
from aioverbs._memory.buffer_pool import BufferPool, LeasedBuffer
from aioverbs._memory.region import is_large
from aioverbs._verbs.base_domain import Domain, shared_resources_of
from aioverbs._verbs.completion_queue import CompletionQueue, dispatcher_of, free_entries_of
from aioverbs.errors import AffinityError, ConcurrentAccessError

__all__ = ["completion_queue_for", "lease_block", "lease_block_now", "prepare"]

_SLAB_BYTES = 8 << 20  # bytes; small enough to be registered on the event loop
_BLOCKS_PER_SLAB = 16  # at most
_CONNECTIONS_PER_CQ = 32
_UNLIMITED = 1 << 30


async def lease_block(domain: Domain, settings: ConnectionSettings) -> LeasedBuffer:
    """Lease memory for all buffers of a connection from a pool that the connections of a protection domain share.

    If there is no pool for this size, make one. The pool is closed together with the domain. The software device pins
    no memory: there, an idle connection has touched none of its buffers, and a connection that is closed gives back the
    pages of its buffers.

    :returns: a buffer of ``settings.block_size`` bytes, to be released by the caller.
    :raises MemoryError: no memory is left.
    :raises OSError: the process cannot map that much memory.
    :raises VerbsError: the device cannot register the memory.
    :raises ClosedResourceError: the domain is not open.
    :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
    """
    pool = shared_resources_of(domain.base).get(_pool_key(settings))
    if pool is None:
        size = settings.block_size
        count = max(1, min(_BLOCKS_PER_SLAB, _SLAB_BYTES // size))
        pins = not domain.handle.context.software
        created = BufferPool(
            domain.base,
            size,
            count,
            limit=_UNLIMITED,
            alignment=64 if pins else mmap.PAGESIZE,
            gives_back_pages=not pins,
        )
        if is_large(size * count):
            await open_part(created)  # during the await, other connections may make pools; the first one is kept
        else:
            open_part_now(created)
        pool = shared_resources_of(domain.base).setdefault(_pool_key(settings), created)
        if pool is not created:
            await created.aclose()
    assert isinstance(pool, BufferPool)
    return await pool.lease()


def lease_block_now(domain: Domain, settings: ConnectionSettings) -> LeasedBuffer:
    """Lease memory as `lease_block` does, without waiting.

    :returns: a buffer of ``settings.block_size`` bytes, to be released by the caller.
    :raises anyio.WouldBlock: no buffer is free, and to register more takes long; or `prepare` was not called.
    :raises Exception: whatever `lease_block` raises.
    """
    pool = shared_resources_of(domain.base).get(_pool_key(settings))
    if pool is None:
        raise anyio.WouldBlock
    assert isinstance(pool, BufferPool)
    return pool.lease_nowait()


def _pool_key(settings: ConnectionSettings) -> tuple[str, int]:
    """Return the key of the pool from which connections with some settings lease their buffers."""
    return "buffers of connections", settings.block_size


async def prepare(domain: Domain, settings: ConnectionSettings) -> None:
    """Make the pool from which connections lease their buffers, so that the first of them does not wait for that.

    :raises Exception: whatever `lease_block` raises.
    """
    (await lease_block(domain, settings)).release()


class _QueueSet:
    """Completion queues shared by the connections of one domain and one event loop."""

    def __init__(self) -> None:
        self._all: list[CompletionQueue] = []
        self._last_index = 0  # index of the last queue with room; all are searched only before a new one is made
        self._broken: list[CompletionQueue] = []  # broken queues, each closed after its last queue pair

    def find(self, completions: int) -> CompletionQueue | None:
        """Return a usable queue that has room for one more connection; None if there is no such queue.

        If there is no such queue, broken and closed queues are removed from the set.

        :param completions: number of completions that the connection needs room for.
        """
        self._close_broken()
        for step in range(len(self._all)):
            index = (self._last_index + step) % len(self._all)
            cq = self._all[index]
            if free_entries_of(cq) >= completions and _is_usable(cq):
                self._last_index = index
                return cq
        self._broken += [cq for cq in self._all if cq.state is ResourceState.OPEN and not _is_usable(cq)]
        self._all, self._last_index = [cq for cq in self._all if _is_usable(cq)], 0
        self._close_broken()
        return None

    def _close_broken(self) -> None:
        """Close the broken queues that no queue pair uses any longer.

        A background task on the running loop does the rest of closing. A queue that the running loop may not close is
        left for the next call.
        """
        for cq in tuple(self._broken):
            if not cq.statistics().children:
                # on failure, retried by the next call, or closed together with the domain
                with contextlib.suppress(AffinityError, ConcurrentAccessError):
                    lifecycle_of(cq).abort()
                    self._broken.remove(cq)

    def add(self, cq: CompletionQueue) -> None:
        """Add a new queue to the set; `find` then tries this one first."""
        self._last_index = len(self._all)
        self._all.append(cq)


def _is_usable(cq: CompletionQueue) -> bool:
    """Return whether a queue is open and its completions are still read."""
    return cq.state is ResourceState.OPEN and dispatcher_of(cq).watched


def completion_queue_for(domain: Domain, settings: ConnectionSettings) -> CompletionQueue:
    """Return a completion queue of the running loop that has room for one more connection. Make one if necessary.

    :returns: an open queue, which other connections share. It is closed together with the domain, not by the caller.
    :raises ValueError: ``spin_ns`` of the settings is out of range, the domain's awaits do not poll, or the device
        supports no queue of the required depth.
    :raises VerbsError: the device has no completion queue left.
    :raises OSError: the process has no file descriptor left.
    :raises ClosedResourceError: the domain is not open.
    :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
    :raises RuntimeError: no asyncio event loop is running.
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
    open_part_now(created)
    queues.add(created)
    return created
