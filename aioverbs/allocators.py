"""Allocators of memory for queues, doorbell records and buffers: see ``ibv_alloc_parent_domain``.

Without an allocator, a provider uses its own memory. Any object with the two methods of `Allocator` can serve as one.
The built-in allocators work in C without the GIL; their memory is zeroed, aligned and not copied by a fork.

    allocator = ArenaAllocator(NumaAllocator(0))

One allocator may serve many parent domains, in many threads, and buffers as well. In a forked child, an allocator that
was made before the fork is empty and can be used like a new one.
"""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from aioverbs._core.alloc.allocators import (
    USE_DEFAULT,
    ArenaAllocator,
    DefaultAllocator,
    HugePageAllocator,
    NativeAllocator,
    NumaAllocator,
    RecordingAllocator,
    SharedMemoryAllocator,
    SharedPageAllocator,
    UseDefault,
)
from aioverbs._exports import publish
from aioverbs.attributes import AllocatorStatistics, AllocatorUsage, ResourceKind

if TYPE_CHECKING:
    from aioverbs._core.handles.parent_domain import ParentDomain

__all__ = [
    "USE_DEFAULT",
    "Allocator",
    "AllocatorStatistics",
    "AllocatorUsage",
    "ArenaAllocator",
    "DefaultAllocator",
    "HugePageAllocator",
    "NativeAllocator",
    "NumaAllocator",
    "RecordingAllocator",
    "ResourceKind",
    "SharedMemoryAllocator",
    "SharedPageAllocator",
    "UseDefault",
]


@runtime_checkable
class Allocator(Protocol):
    """Interface of allocators, modelled on the callbacks of ``ibv_alloc_parent_domain``.

    For a parent domain, both methods are called inside a verb, by the thread that called the verb. If the domain takes
    no locks, a method that calls a verb on that domain raises `ConcurrentAccessError`. For a memory region or buffer
    pool, they are called by the thread that registers or deregisters the memory.
    """

    def allocate(
        self, size: int, alignment: int, resource_type: int, pd: "ParentDomain | None", context: object, /
    ) -> int | UseDefault | None:
        """Allocate a piece of memory and return its address.

        For a parent domain, the provider calls this during a verb. If this raises, that verb fails, with the exception
        as the cause of its `VerbsError`; a `BaseException` that is not an `Exception`, such as `KeyboardInterrupt`,
        propagates unchanged. The verb also fails if this returns anything other than an address, `USE_DEFAULT` or None,
        or if the address is in use or not aligned, or the memory there is not zero.

        For a memory region or buffer pool, the library calls this when the region or pool is opened, or when a lease
        adds a slab to the pool; opening or leasing then raises whatever this raises. Returning anything other than an
        address or None has the effect of `USE_DEFAULT`, and the address is not checked.

        :param size: size in bytes. The bytes must be zero, and must not be copied on fork: use shared anonymous memory,
            or MADV_DONTFORK.
        :param alignment: alignment in bytes, of which the address must be a multiple; the page size for a memory region
            or buffer pool.
        :param resource_type: purpose of the memory, which `ResourceKind.decode` decodes; 0 for a memory region or
            buffer pool.
        :param pd: `ParentDomain.handle` of the parent domain that the memory is for; None for a memory region or buffer
            pool.
        :param context: user-specified context of that parent domain; None for a memory region or buffer pool.
        :returns: the address, an `int`, which must be valid until it is passed to `free`; or `USE_DEFAULT`, to use
            memory of the provider, or of the library for a memory region or buffer pool; or None if there is no memory:
            then the verb fails with ENOMEM, or opening or leasing raises MemoryError.
        """

    def free(self, address: int, resource_type: int, pd: "ParentDomain | None", context: object, /) -> object:
        """Free a piece of memory. This is called once for each address that `allocate` returned.

        The result is ignored. If this raises for a parent domain, the exception is passed to ``sys.unraisablehook``,
        because the verb has succeeded. If this raises for a memory region or buffer pool, closing the region or pool
        raises the exception, and closing it again calls this again for the same address.

        :param address: address of the piece.
        :param resource_type: argument that `allocate` was called with for this piece.
        :param pd: argument that `allocate` was called with for this piece.
        :param context: argument that `allocate` was called with for this piece.
        """


def checked_allocator(allocator: Allocator | None) -> Allocator | None:
    """Return `allocator` unchanged if it is an allocator or None.

    :raises TypeError: `allocator` is neither None nor an object with the methods of `Allocator`, or it is a class.
    """
    if allocator is not None and (isinstance(allocator, type) or not isinstance(allocator, Allocator)):
        raise TypeError(f"allocator must have the methods of aioverbs.Allocator, got {allocator!r}")
    return allocator


publish(__name__)
