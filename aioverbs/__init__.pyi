"""The names that `aioverbs` exports, and the modules that define them. `_exports.py` reads this list at run time."""

from aioverbs._connection.backoff import (
    Backoff as Backoff,
)
from aioverbs._connection.connect import (
    connect as connect,
)
from aioverbs._connection.connection import (
    Connection as Connection,
)
from aioverbs._connection.grants import (
    Grant as Grant,
    RemoteGrant as RemoteGrant,
)
from aioverbs._connection.message_channel import (
    ConnectionStatistics as ConnectionStatistics,
)
from aioverbs._connection.reconnect import (
    reconnect as reconnect,
)
from aioverbs._connection.settings import (
    ConnectionSettings as ConnectionSettings,
)
from aioverbs._core.alloc.allocators import (
    USE_DEFAULT as USE_DEFAULT,
    ArenaAllocator as ArenaAllocator,
    DefaultAllocator as DefaultAllocator,
    HugePageAllocator as HugePageAllocator,
    NativeAllocator as NativeAllocator,
    NumaAllocator as NumaAllocator,
    RecordingAllocator as RecordingAllocator,
    SharedMemoryAllocator as SharedMemoryAllocator,
    SharedPageAllocator as SharedPageAllocator,
    UseDefault as UseDefault,
)
from aioverbs._core.data_path.data_path import (
    Batch as Batch,
    Destination as Destination,
    Message as Message,
    Operation as Operation,
    Received as Received,
    RegionSlice as RegionSlice,
    RemoteRegion as RemoteRegion,
)
from aioverbs._core.handles.handles import (
    Affinity as Affinity,
)
from aioverbs._lifecycle.affinity import (
    ThreadModel as ThreadModel,
)
from aioverbs._lifecycle.lifecycle import (
    ResourceInfo as ResourceInfo,
    ResourceState as ResourceState,
)
from aioverbs._lifecycle.resource import (
    Resource as Resource,
    ResourceStatistics as ResourceStatistics,
)
from aioverbs._memory.buffer_pool import (
    BufferPool as BufferPool,
    BufferPoolStatistics as BufferPoolStatistics,
    LeasedBuffer as LeasedBuffer,
)
from aioverbs._memory.region import (
    MemoryRegion as MemoryRegion,
    MemoryWindow as MemoryWindow,
)
from aioverbs._memory.registration_cache import (
    RegistrationCache as RegistrationCache,
    RegistrationCacheStatistics as RegistrationCacheStatistics,
)
from aioverbs._monitoring.monitor import (
    Monitor as Monitor,
    monitor as monitor,
)
from aioverbs._pool.call_future import (
    CallFuture as CallFuture,
)
from aioverbs._pool.placement import (
    LeastLoaded as LeastLoaded,
    PlacementPolicy as PlacementPolicy,
    RoundRobin as RoundRobin,
)
from aioverbs._pool.pool import (
    PoolStatistics as PoolStatistics,
    WorkerPool as WorkerPool,
)
from aioverbs._pool.supervisor import (
    WorkerStatistics as WorkerStatistics,
)
from aioverbs._pool.worker import (
    Worker as Worker,
    current_worker as current_worker,
)
from aioverbs._server.acceptor import (
    ServerStatistics as ServerStatistics,
)
from aioverbs._server.listener import (
    ConnectionListener as ConnectionListener,
    listen as listen,
)
from aioverbs._server.server import (
    Server as Server,
    serve as serve,
)
from aioverbs._verbs.address_handle import (
    AddressHandle as AddressHandle,
)
from aioverbs._verbs.async_events import (
    DeviceEvent as DeviceEvent,
)
from aioverbs._verbs.completion_queue import (
    CompletionQueue as CompletionQueue,
    CompletionQueueStatistics as CompletionQueueStatistics,
    MessageModel as MessageModel,
)
from aioverbs._verbs.device import (
    Device as Device,
    DeviceInfo as DeviceInfo,
    DeviceStatistics as DeviceStatistics,
    PortInfo as PortInfo,
    devices as devices,
    open_device as open_device,
)
from aioverbs._verbs.endpoint import (
    Endpoint as Endpoint,
)
from aioverbs._verbs.imported_device import (
    import_device as import_device,
)
from aioverbs._verbs.protection_domain import (
    ParentDomain as ParentDomain,
    ProtectionDomain as ProtectionDomain,
    SharedProtectionDomain as SharedProtectionDomain,
)
from aioverbs._verbs.queue_pair import (
    QueuePair as QueuePair,
    QueuePairStatistics as QueuePairStatistics,
    WorkQueueStatistics as WorkQueueStatistics,
)
from aioverbs._verbs.resource_domain import (
    ResourceDomain as ResourceDomain,
)
from aioverbs._verbs.shared_device import (
    shared_device as shared_device,
)
from aioverbs._verbs.shared_receive_queue import (
    SharedReceiveQueue as SharedReceiveQueue,
    SharedReceiveQueueStatistics as SharedReceiveQueueStatistics,
)
from aioverbs._verbs.thread_domain import (
    ThreadDomain as ThreadDomain,
)
from aioverbs._verbs.xrc_domain import (
    XrcDomain as XrcDomain,
)
from aioverbs.allocators import (
    Allocator as Allocator,
)
from aioverbs.attributes import (
    AddressVector as AddressVector,
    AllocatorStatistics as AllocatorStatistics,
    AllocatorUsage as AllocatorUsage,
    DeviceAttributes as DeviceAttributes,
    PortAttributes as PortAttributes,
    QpAttributes as QpAttributes,
    QpCapabilities as QpCapabilities,
    ResourceKind as ResourceKind,
    SrqAttributes as SrqAttributes,
)
from aioverbs.errors import (
    AffinityError as AffinityError,
    BatchError as BatchError,
    BorrowedObjectClosedError as BorrowedObjectClosedError,
    BrokenResourceError as BrokenResourceError,
    BusyResourceError as BusyResourceError,
    ClosedResourceError as ClosedResourceError,
    ConcurrentAccessError as ConcurrentAccessError,
    ConnectionRejectedError as ConnectionRejectedError,
    DeviceNotFoundError as DeviceNotFoundError,
    DeviceRemovedError as DeviceRemovedError,
    ForkedProcessError as ForkedProcessError,
    GrantRevokedError as GrantRevokedError,
    HandshakeError as HandshakeError,
    LibraryNotFoundError as LibraryNotFoundError,
    QueuePairStateError as QueuePairStateError,
    TransitionError as TransitionError,
    UnreachableError as UnreachableError,
    VerbsError as VerbsError,
    WorkCompletionError as WorkCompletionError,
    WorkerDiedError as WorkerDiedError,
)
from aioverbs.software_peers import (
    Peer as Peer,
    RejectedPeer as RejectedPeer,
)
from aioverbs.types import (
    AccessFlags as AccessFlags,
    AtomicCap as AtomicCap,
    EventType as EventType,
    GidType as GidType,
    LinkLayer as LinkLayer,
    Mtu as Mtu,
    MwType as MwType,
    NodeType as NodeType,
    PortState as PortState,
    QpAttrMask as QpAttrMask,
    QpState as QpState,
    QpType as QpType,
    SendFlags as SendFlags,
    SendOpcode as SendOpcode,
    TransportType as TransportType,
    WcFlags as WcFlags,
    WcOpcode as WcOpcode,
    WcStatus as WcStatus,
)

__all__: list[str]
__version__: str
