"""RDMA for asyncio: devices, and the domains that keep what is made on them to one event loop and its thread.

The compiled core (`aioverbs._core`, private) is loaded when the first of the names that need it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .attributes import (
    AddressVector,
    DeviceAttributes,
    PortAttributes,
    QpAttributes,
    QpCapabilities,
    SrqAttributes,
)
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
    GrantRevokedError,
    HandshakeError,
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
    from .acceptor import AcceptorStatistics
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
        SharedMemoryAllocator,
        SharedPageAllocator,
        UseDefault,
    )
    from .backoff import Backoff
    from .buffers import BufferPool, BufferPoolStatistics, LeasedBuffer, Leasing
    from .completion import CompletionQueue, CompletionQueueStatistics, MessageModel
    from .connection import Connection
    from .connection_settings import ConnectionSettings
    from .device import Device, DeviceInfo, DeviceStatistics, PortInfo, devices, open_device
    from .endpoint import Endpoint
    from .establishing import connect
    from .events import DeviceEvent
    from .grants import Grant, Granted
    from .imported_device import import_device
    from .life import ResourceInfo, State
    from .memory import MemoryRegion, MemoryWindow, Pins, RegionSlice, RemoteRegion
    from .monitoring import Monitor, monitor
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
    from .reconnecting import reconnecting
    from .registration_cache import RegistrationCache, RegistrationCacheStatistics
    from .resource import Resource, ResourceStatistics
    from .resource_domain import ResourceDomain
    from .server import ConnectionListener, Server, listen, serve
    from .shared_receive_queue import ReceiveRequester, SharedReceiveQueue, SharedReceiveQueueStatistics
    from .thread_domain import ThreadDomain
    from .traffic import TrafficStatistics
    from .xrc_domain import XrcDomain

__all__ = [
    "USE_DEFAULT",
    "AcceptorStatistics",
    "AccessFlags",
    "AddressHandle",
    "AddressVector",
    "Affinity",
    "AffinityError",
    "Allocator",
    "AllocatorStatistics",
    "AllocatorUsage",
    "ArenaAllocator",
    "AtomicCap",
    "Backoff",
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
    "Connection",
    "ConnectionListener",
    "ConnectionRejectedError",
    "ConnectionSettings",
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
    "Grant",
    "GrantRevokedError",
    "Granted",
    "HandshakeError",
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
    "Monitor",
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
    "Server",
    "SharedMemoryAllocator",
    "SharedPageAllocator",
    "SharedProtectionDomain",
    "SharedReceiveQueue",
    "SharedReceiveQueueStatistics",
    "SrqAttributes",
    "StartedCall",
    "State",
    "StateError",
    "ThreadDomain",
    "ThreadModel",
    "TrafficStatistics",
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
    "connect",
    "current_worker",
    "devices",
    "import_device",
    "listen",
    "monitor",
    "open_device",
    "reconnecting",
    "serve",
]

# Where the names are that load the compiled core: importing the package is to cost next to nothing.
_LAZY = {
    "AcceptorStatistics": "acceptor",
    "AddressHandle": "address_handle",
    "Affinity": "affinity",
    "Allocator": "allocators",
    "AllocatorStatistics": "allocators",
    "AllocatorUsage": "allocators",
    "ArenaAllocator": "allocators",
    "Backoff": "backoff",
    "Batch": "queue_pair",
    "BufferPool": "buffers",
    "BufferPoolStatistics": "buffers",
    "CompletionQueue": "completion",
    "CompletionQueueStatistics": "completion",
    "Connection": "connection",
    "ConnectionListener": "server",
    "ConnectionSettings": "connection_settings",
    "DefaultAllocator": "allocators",
    "Device": "device",
    "DeviceEvent": "events",
    "DeviceInfo": "device",
    "DeviceStatistics": "device",
    "Endpoint": "endpoint",
    "Grant": "grants",
    "Granted": "grants",
    "HugePageAllocator": "allocators",
    "LeasedBuffer": "buffers",
    "Leasing": "buffers",
    "LeastLoaded": "placement",
    "MemoryRegion": "memory",
    "MemoryWindow": "memory",
    "Message": "queue_pair",
    "MessageModel": "completion",
    "Monitor": "monitoring",
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
    "Server": "server",
    "SharedMemoryAllocator": "allocators",
    "SharedPageAllocator": "allocators",
    "SharedProtectionDomain": "protection_domain",
    "SharedReceiveQueue": "shared_receive_queue",
    "SharedReceiveQueueStatistics": "shared_receive_queue",
    "StartedCall": "pool",
    "State": "life",
    "ThreadDomain": "thread_domain",
    "ThreadModel": "affinity",
    "TrafficStatistics": "traffic",
    "USE_DEFAULT": "allocators",
    "UseDefault": "allocators",
    "Way": "address_handle",
    "WorkQueueStatistics": "queue_pair",
    "Worker": "pool",
    "WorkerPool": "pool",
    "WorkerStatistics": "pool",
    "XrcDomain": "xrc_domain",
    "connect": "establishing",
    "current_worker": "pool",
    "devices": "device",
    "import_device": "imported_device",
    "listen": "server",
    "monitor": "monitoring",
    "open_device": "device",
    "reconnecting": "reconnecting",
    "serve": "server",
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
