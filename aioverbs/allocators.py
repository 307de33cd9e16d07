"""Memory for queues, doorbell records and buffers: what ``ibv_alloc_parent_domain`` calls an allocator.

Without one, a provider uses its own memory. A user's own is anything with the two methods of `Allocator`; the built-in
ones work in C without the GIL. What they return is zeroed, aligned and never copied by a fork.

    allocator = ArenaAllocator(NumaAllocator(0))

An allocator may serve many parent domains, in many threads, and buffers beside them. Made before a fork, it is empty
in the child, which can use it as if it were new.
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
    """What gives memory to providers, after the callbacks of ``ibv_alloc_parent_domain``.

    Both methods are called by the thread that calls a verb, in the middle of the verb: one that calls a verb on the
    same domain is refused where the domain takes no locks.
    """

    def allocate(
        self, size: int, alignment: int, resource_type: int, pd: "ParentDomain | None", context: object, /
    ) -> int | UseDefault | None:
        """Return the address of a piece; `USE_DEFAULT` to let the provider use its own memory; None for none.

        What it raises becomes the cause of the verb's error; what is no `Exception`, as `KeyboardInterrupt`, is raised
        itself. Anything else that it returns makes the verb fail.

        :param size: bytes. They must be zero, and no fork may copy them: shared anonymous memory, or MADV_DONTFORK.
        :param alignment: bytes; the address must be a multiple of it.
        :param resource_type: what it is for; `ResourceKind.decode` tells.
        :param pd: the core's parent domain that it is for (`ParentDomain.handle`); None for a buffer.
        :param context: that parent domain's, the "user-specified context"; None for a buffer.
        """

    def free(self, address: int, resource_type: int, pd: "ParentDomain | None", context: object, /) -> object:
        """Take a piece back, once for each address that `allocate` returned.

        What it raises goes to ``sys.unraisablehook``: the verb has succeeded.

        :param address: of the piece.
        :param resource_type: what it was asked for with.
        :param pd: likewise.
        :param context: likewise.
        """


def checked_allocator(allocator: Allocator | None) -> Allocator | None:
    """Return what a user gave for an allocator.

    :raises TypeError: it is neither one nor None.
    """
    if allocator is not None and (isinstance(allocator, type) or not isinstance(allocator, Allocator)):
        raise TypeError(f"allocator must have the methods of aioverbs.Allocator, not be {allocator!r}")
    return allocator


publish(__name__)
