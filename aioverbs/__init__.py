"""RDMA for asyncio: devices, and the domains that keep what is made on them to one event loop and its thread.

The compiled core (`aioverbs._core`, private) is loaded when the first of the names that need it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .attributes import DeviceAttributes, PortAttributes, QpAttributes, QpCapabilities
from .errors import (
    AffinityError,
    BatchError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    ConnectionRejectedError,
    DeviceNotFoundError,
    DeviceRemovedError,
    ForkedProcessError,
    LenderClosedError,
    LibraryNotFoundError,
    StateError,
    TransitionError,
    UnreachableError,
    VerbsError,
    WorkCompletionError,
    WorkerDiedError,
)
from .types import (
    AccessFlags,
    AtomicCap,
    EventType,
    GidType,
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
    from .address_handle import AddressHandle, Way
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
    from .endpoint import Endpoint
    from .events import DeviceEvent
    from .imported_device import import_device
    from .life import ResourceInfo, State
    from .memory import MemoryRegion, MemoryWindow, Pins, RegionSlice, RemoteRegion
    from .peers import Peer, Refusal
    from .placement import LeastLoaded, PlacementPolicy, RoundRobin
    from .pool import PoolStatistics, StartedCall, Worker, WorkerPool, WorkerStatistics, current_worker
    from .protection_domain import ParentDomain, ProtectionDomain, SharedProtectionDomain
    from .queue_pair import (
        Batch,
        Message,
        Operation,
        QueuePair,
        QueuePairStatistics,
        Received,
        Requester,
        WorkQueueStatistics,
    )
    from .registration_cache import RegistrationCache, RegistrationCacheStatistics
    from .resource import Resource, ResourceStatistics
    from .resource_domain import ResourceDomain
    from .shared_receive_queue import ReceiveRequester, SharedReceiveQueue, SharedReceiveQueueStatistics
    from .thread_domain import ThreadDomain
    from .xrc_domain import XrcDomain

__all__ = [
    "USE_DEFAULT",
    "AccessFlags",
    "AddressHandle",
    "Affinity",
    "AffinityError",
    "Allocator",
    "AllocatorStatistics",
    "AllocatorUsage",
    "ArenaAllocator",
    "AtomicCap",
    "Batch",
    "BatchError",
    "BrokenResourceError",
    "BufferPool",
    "BufferPoolStatistics",
    "BusyResourceError",
    "ClosedResourceError",
    "CompletionQueue",
    "CompletionQueueStatistics",
    "ConcurrentAccessError",
    "ConnectionRejectedError",
    "DefaultAllocator",
    "Device",
    "DeviceAttributes",
    "DeviceEvent",
    "DeviceInfo",
    "DeviceNotFoundError",
    "DeviceRemovedError",
    "DeviceStatistics",
    "Endpoint",
    "EventType",
    "ForkedProcessError",
    "GidType",
    "HugePageAllocator",
    "LeasedBuffer",
    "Leasing",
    "LeastLoaded",
    "LenderClosedError",
    "LibraryNotFoundError",
    "LinkLayer",
    "MemoryRegion",
    "MemoryWindow",
    "Message",
    "MessageModel",
    "Mtu",
    "MwType",
    "NativeAllocator",
    "NodeType",
    "NumaAllocator",
    "Operation",
    "ParentDomain",
    "Peer",
    "Pins",
    "PlacementPolicy",
    "PoolStatistics",
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
    "QueuePairStatistics",
    "ReceiveRequester",
    "Received",
    "RecordingAllocator",
    "Refusal",
    "RegionSlice",
    "RegistrationCache",
    "RegistrationCacheStatistics",
    "RemoteRegion",
    "Requester",
    "Resource",
    "ResourceDomain",
    "ResourceInfo",
    "ResourceKind",
    "ResourceStatistics",
    "RoundRobin",
    "SendFlags",
    "SendOpcode",
    "SharedPageAllocator",
    "SharedProtectionDomain",
    "SharedReceiveQueue",
    "SharedReceiveQueueStatistics",
    "StartedCall",
    "State",
    "StateError",
    "ThreadDomain",
    "ThreadModel",
    "TransitionError",
    "TransportType",
    "UnreachableError",
    "UseDefault",
    "VerbsError",
    "Way",
    "WcFlags",
    "WcOpcode",
    "WcStatus",
    "WorkCompletionError",
    "WorkQueueStatistics",
    "Worker",
    "WorkerDiedError",
    "WorkerPool",
    "WorkerStatistics",
    "XrcDomain",
    "current_worker",
    "devices",
    "import_device",
    "open_device",
]

# Where the names are that load the compiled core: importing the package is to cost next to nothing.
_LAZY = {
    "AddressHandle": "address_handle",
    "Affinity": "affinity",
    "Allocator": "allocators",
    "AllocatorStatistics": "allocators",
    "AllocatorUsage": "allocators",
    "ArenaAllocator": "allocators",
    "Batch": "queue_pair",
    "BufferPool": "buffers",
    "BufferPoolStatistics": "buffers",
    "CompletionQueue": "completion",
    "CompletionQueueStatistics": "completion",
    "DefaultAllocator": "allocators",
    "Device": "device",
    "DeviceEvent": "events",
    "DeviceInfo": "device",
    "DeviceStatistics": "device",
    "Endpoint": "endpoint",
    "HugePageAllocator": "allocators",
    "LeasedBuffer": "buffers",
    "Leasing": "buffers",
    "LeastLoaded": "placement",
    "MemoryRegion": "memory",
    "MemoryWindow": "memory",
    "Message": "queue_pair",
    "MessageModel": "completion",
    "NativeAllocator": "allocators",
    "NumaAllocator": "allocators",
    "Operation": "queue_pair",
    "ParentDomain": "protection_domain",
    "Peer": "peers",
    "Pins": "memory",
    "PlacementPolicy": "placement",
    "PoolStatistics": "pool",
    "PortInfo": "device",
    "ProtectionDomain": "protection_domain",
    "QueuePair": "queue_pair",
    "QueuePairStatistics": "queue_pair",
    "ReceiveRequester": "shared_receive_queue",
    "Received": "queue_pair",
    "RecordingAllocator": "allocators",
    "Refusal": "peers",
    "RegionSlice": "memory",
    "RegistrationCache": "registration_cache",
    "RegistrationCacheStatistics": "registration_cache",
    "RemoteRegion": "memory",
    "Requester": "queue_pair",
    "Resource": "resource",
    "ResourceDomain": "resource_domain",
    "ResourceInfo": "life",
    "ResourceKind": "allocators",
    "ResourceStatistics": "resource",
    "RoundRobin": "placement",
    "SharedPageAllocator": "allocators",
    "SharedProtectionDomain": "protection_domain",
    "SharedReceiveQueue": "shared_receive_queue",
    "SharedReceiveQueueStatistics": "shared_receive_queue",
    "StartedCall": "pool",
    "State": "life",
    "ThreadDomain": "thread_domain",
    "ThreadModel": "affinity",
    "USE_DEFAULT": "allocators",
    "UseDefault": "allocators",
    "Way": "address_handle",
    "WorkQueueStatistics": "queue_pair",
    "Worker": "pool",
    "WorkerPool": "pool",
    "WorkerStatistics": "pool",
    "XrcDomain": "xrc_domain",
    "current_worker": "pool",
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
