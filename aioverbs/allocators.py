"""Allocators of memory for queues, doorbell records and buffers: see ``ibv_alloc_parent_domain``.

Without an allocator a provider uses its own memory. Any object with the two methods of `Allocator` can serve as one.
The built-in allocators work in C without the GIL; their memory is zeroed, aligned and not copied by a fork.

    allocator = ArenaAllocator(NumaAllocator(0))

One allocator may serve many parent domains, in many threads, and buffers as well. In the child of a fork an allocator
that was made before is empty, and can be used like a new one.
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

    Both methods are called inside of a verb, by the thread that called the verb. If the domain takes no locks, a method
    that calls a verb on that domain raises `ConcurrentAccessError`.
    """

    def allocate(
        self, size: int, alignment: int, resource_type: int, pd: "ParentDomain | None", context: object, /
    ) -> int | UseDefault | None:
        """Allocate a piece of memory.

        If this raises, the exception becomes the cause of the verb's error; one that is no `Exception`, such as
        `KeyboardInterrupt`, is raised itself. A result of another type makes the verb fail.

        :param size: size in bytes. The bytes must be zero, and no fork may copy them: use shared anonymous memory, or
            MADV_DONTFORK.
        :param alignment: alignment in bytes; the address must be a multiple of it.
        :param resource_type: purpose of the memory; `ResourceKind.decode` decodes it.
        :param pd: `ParentDomain.handle` of the parent domain that the memory is for; None for a buffer.
        :param context: user-specified context of that parent domain; None for a buffer.
        :returns: the address, valid until `free` is called; or `USE_DEFAULT`, and the provider uses its own memory; or
            None, and the verb fails.
        """

    def free(self, address: int, resource_type: int, pd: "ParentDomain | None", context: object, /) -> object:
        """Free a piece of memory, once for each address that `allocate` returned.

        The result is ignored. If this raises, the exception is passed to ``sys.unraisablehook``, because the verb has
        succeeded.

        :param address: address of the piece.
        :param resource_type: argument of the call of `allocate`.
        :param pd: argument of the call of `allocate`.
        :param context: argument of the call of `allocate`.
        """


def checked_allocator(allocator: Allocator | None) -> Allocator | None:
    """Return an argument that has to be an allocator or None.

    :raises TypeError: the argument is neither.
    """
    if allocator is not None and (isinstance(allocator, type) or not isinstance(allocator, Allocator)):
        raise TypeError(f"allocator must have the methods of aioverbs.Allocator, not be {allocator!r}")
    return allocator


publish(__name__)
