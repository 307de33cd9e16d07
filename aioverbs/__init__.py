"""RDMA for asyncio: devices, and the domains that keep what is made on them to one event loop and its thread.

The compiled core (`aioverbs._core`, private) is loaded when the first of the names that need it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .attributes import DeviceAttributes, PortAttributes, QpAttributes, QpCapabilities
from .errors import (
    AffinityError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    DeviceNotFoundError,
    ForkedProcessError,
    LenderClosedError,
    LibraryNotFoundError,
    VerbsError,
    WorkCompletionError,
)
from .types import (
    AccessFlags,
    AtomicCap,
    EventType,
    LinkLayer,
    Mtu,
    MwType,
    NodeType,
    PortState,
    QpAttrMask,
    QpState,
    QpType,
    SendFlags,
    SendOpcode,
    TransportType,
    WcFlags,
    WcOpcode,
    WcStatus,
)

if TYPE_CHECKING:
    from .affinity import Affinity, ThreadModel
    from .allocators import (
        USE_DEFAULT,
        Allocator,
        AllocatorStatistics,
        AllocatorUsage,
        ArenaAllocator,
        DefaultAllocator,
        HugePageAllocator,
        NativeAllocator,
        NumaAllocator,
        RecordingAllocator,
        ResourceKind,
        SharedPageAllocator,
        UseDefault,
    )
    from .buffers import BufferPool, BufferPoolStatistics, LeasedBuffer, Leasing
    from .completion import CompletionQueue, CompletionQueueStatistics, MessageModel
    from .device import Device, DeviceInfo, DeviceStatistics, PortInfo, devices, open_device
    from .events import DeviceEvent
    from .imported_device import import_device
    from .life import ResourceInfo, State
    from .memory import MemoryRegion, RegionSlice, RemoteRegion
    from .protection_domain import ParentDomain, ProtectionDomain, SharedProtectionDomain
    from .queue_pair import QueuePair, QueuePairAddress, QueuePairStatistics, SharedReceiveQueue
    from .registration_cache import RegistrationCache, RegistrationCacheStatistics
    from .resource import Resource, ResourceStatistics
    from .resource_domain import ResourceDomain
    from .thread_domain import ThreadDomain
    from .xrc_domain import XrcDomain

__all__ = [
    "USE_DEFAULT",
    "AccessFlags",
    "Affinity",
    "AffinityError",
    "Allocator",
    "AllocatorStatistics",
    "AllocatorUsage",
    "ArenaAllocator",
    "AtomicCap",
    "BrokenResourceError",
    "BufferPool",
    "BufferPoolStatistics",
    "BusyResourceError",
    "ClosedResourceError",
    "CompletionQueue",
    "CompletionQueueStatistics",
    "ConcurrentAccessError",
    "DefaultAllocator",
    "Device",
    "DeviceAttributes",
    "DeviceEvent",
    "DeviceInfo",
    "DeviceNotFoundError",
    "DeviceStatistics",
    "EventType",
    "ForkedProcessError",
    "HugePageAllocator",
    "LeasedBuffer",
    "Leasing",
    "LenderClosedError",
    "LibraryNotFoundError",
    "LinkLayer",
    "MemoryRegion",
    "MessageModel",
    "Mtu",
    "MwType",
    "NativeAllocator",
    "NodeType",
    "NumaAllocator",
    "ParentDomain",
    "PortAttributes",
    "PortInfo",
    "PortState",
    "ProtectionDomain",
    "QpAttrMask",
    "QpAttributes",
    "QpCapabilities",
    "QpState",
    "QpType",
    "QueuePair",
    "QueuePairAddress",
    "QueuePairStatistics",
    "RecordingAllocator",
    "RegionSlice",
    "RegistrationCache",
    "RegistrationCacheStatistics",
    "RemoteRegion",
    "Resource",
    "ResourceDomain",
    "ResourceInfo",
    "ResourceKind",
    "ResourceStatistics",
    "SendFlags",
    "SendOpcode",
    "SharedPageAllocator",
    "SharedProtectionDomain",
    "SharedReceiveQueue",
    "State",
    "ThreadDomain",
    "ThreadModel",
    "TransportType",
    "UseDefault",
    "VerbsError",
    "WcFlags",
    "WcOpcode",
    "WcStatus",
    "WorkCompletionError",
    "XrcDomain",
    "devices",
    "import_device",
    "open_device",
]

# Where the names are that load the compiled core: importing the package is to cost next to nothing.
_LAZY = {
    "Affinity": "affinity",
    "Allocator": "allocators",
    "AllocatorStatistics": "allocators",
    "AllocatorUsage": "allocators",
    "ArenaAllocator": "allocators",
    "BufferPool": "buffers",
    "BufferPoolStatistics": "buffers",
    "CompletionQueue": "completion",
    "CompletionQueueStatistics": "completion",
    "DefaultAllocator": "allocators",
    "Device": "device",
    "DeviceEvent": "events",
    "DeviceInfo": "device",
    "DeviceStatistics": "device",
    "HugePageAllocator": "allocators",
    "LeasedBuffer": "buffers",
    "Leasing": "buffers",
    "MemoryRegion": "memory",
    "MessageModel": "completion",
    "NativeAllocator": "allocators",
    "NumaAllocator": "allocators",
    "ParentDomain": "protection_domain",
    "PortInfo": "device",
    "ProtectionDomain": "protection_domain",
    "QueuePair": "queue_pair",
    "QueuePairAddress": "queue_pair",
    "QueuePairStatistics": "queue_pair",
    "RecordingAllocator": "allocators",
    "RegionSlice": "memory",
    "RegistrationCache": "registration_cache",
    "RegistrationCacheStatistics": "registration_cache",
    "RemoteRegion": "memory",
    "Resource": "resource",
    "ResourceDomain": "resource_domain",
    "ResourceInfo": "life",
    "ResourceKind": "allocators",
    "ResourceStatistics": "resource",
    "SharedPageAllocator": "allocators",
    "SharedProtectionDomain": "protection_domain",
    "SharedReceiveQueue": "queue_pair",
    "State": "life",
    "ThreadDomain": "thread_domain",
    "ThreadModel": "affinity",
    "USE_DEFAULT": "allocators",
    "UseDefault": "allocators",
    "XrcDomain": "xrc_domain",
    "devices": "device",
    "import_device": "imported_device",
    "open_device": "device",
}

__version__: str

if not TYPE_CHECKING:  # or every misspelt name would pass for anything

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version  # here, because it costs more than the package itself

            return version("aioverbs")
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_LAZY[name]}", __name__), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})
