"""The pages of the reference: which public names stand on which, in which order."""

from dataclasses import dataclass

__all__ = ["FIXTURES", "THEMES", "Theme"]


@dataclass(frozen=True)
class Theme:
    """A page.

    :param page: the name of its file.
    :param title: its heading.
    :param text: what stands above the names, in the form of docstrings.
    :param names: of `aioverbs.__all__`, or with all of their modules.
    :param module: whose docstring comes first, and its fixtures.
    """

    page: str
    title: str
    text: str
    names: tuple[str, ...]
    module: str | None = None


THEMES = (
    Theme(
        "devices",
        "Devices and domains",
        "A device makes domains, and a domain makes queues and regions. What a loop made belongs to that loop, and to "
        "the thread that runs it. `ResourceDomain` is what most programs need; the others are what it is made of.",
        (
            "open_device",
            "devices",
            "import_device",
            "Device",
            "ResourceDomain",
            "aioverbs._verbs.base_domain.Domain",
            "aioverbs._verbs.protection_domain.InterchangeableDomain",
            "ProtectionDomain",
            "ParentDomain",
            "ThreadDomain",
            "SharedProtectionDomain",
            "XrcDomain",
            "ThreadModel",
            "Affinity",
            "Resource",
            "ResourceInfo",
            "ResourceStatistics",
            "State",
            "DeviceInfo",
            "PortInfo",
            "DeviceAttributes",
            "PortAttributes",
            "DeviceStatistics",
            "DeviceEvent",
            "EventType",
            "Peer",
            "Refusal",
            "monitor",
            "Monitor",
            "AtomicCap",
            "GidType",
            "LinkLayer",
            "Mtu",
            "NodeType",
            "PortState",
            "TransportType",
        ),
    ),
    Theme(
        "memory",
        "Memory",
        "A device reads and writes registered memory only. Regions are made by the ``register`` of a domain; buffer "
        "pools register once and lease; allocators say where the memory of queues comes from.",
        (
            "MemoryRegion",
            "RegionSlice",
            "RemoteRegion",
            "aioverbs._memory.region.ImportedMemoryRegion",
            "MemoryWindow",
            "MwType",
            "AccessFlags",
            "Pins",
            "BufferPool",
            "LeasedBuffer",
            "Leasing",
            "BufferPoolStatistics",
            "RegistrationCache",
            "RegistrationCacheStatistics",
            "Allocator",
            "NativeAllocator",
            "DefaultAllocator",
            "HugePageAllocator",
            "NumaAllocator",
            "ArenaAllocator",
            "SharedPageAllocator",
            "SharedMemoryAllocator",
            "RecordingAllocator",
            "UseDefault",
            "USE_DEFAULT",
            "ResourceKind",
            "AllocatorStatistics",
            "AllocatorUsage",
        ),
    ),
    Theme(
        "queues",
        "Queues and the data path",
        "Requests are posted when they are called, in the order of the calls, and awaited or not. How an await waits "
        "is its completion queue's `MessageModel`.",
        (
            "QueuePair",
            "Requester",
            "aioverbs._core.data_path.data_path.Sending",
            "Operation",
            "Batch",
            "Received",
            "Message",
            "CompletionQueue",
            "MessageModel",
            "SharedReceiveQueue",
            "ReceiveRequester",
            "AddressHandle",
            "Way",
            "Endpoint",
            "AddressVector",
            "SrqAttributes",
            "aioverbs._verbs.qp_state_machine.Changes",
            "QpCapabilities",
            "QpAttributes",
            "QpAttrMask",
            "QpState",
            "QpType",
            "SendFlags",
            "SendOpcode",
            "WcFlags",
            "WcOpcode",
            "WcStatus",
            "QueuePairStatistics",
            "WorkQueueStatistics",
            "CompletionQueueStatistics",
            "SharedReceiveQueueStatistics",
        ),
    ),
    Theme(
        "connections",
        "Connections",
        "A queue pair with a handshake, messages of any size, credits, and memory that is granted to the peer.",
        (
            "connect",
            "aioverbs._connection.connect.Connecting",
            "aioverbs._connection.connect.ConnectOptions",
            "reconnecting",
            "Backoff",
            "listen",
            "ConnectionListener",
            "Connection",
            "ConnectionSettings",
            "aioverbs._connection.handshake.Offer",
            "aioverbs._connection.handshake.Capabilities",
            "Grant",
            "Granted",
            "TrafficStatistics",
            "aioverbs.addresses.Address",
            "aioverbs.addresses.written",
        ),
    ),
    Theme(
        "pools",
        "Pools and servers",
        "Many loops over one protection domain, and connections that are served by them.",
        (
            "serve",
            "Server",
            "AcceptorStatistics",
            "WorkerPool",
            "Worker",
            "current_worker",
            "StartedCall",
            "PlacementPolicy",
            "RoundRobin",
            "LeastLoaded",
            "PoolStatistics",
            "WorkerStatistics",
        ),
    ),
    Theme(
        "testing",
        "Tests of what stands on aioverbs",
        "",
        ("aioverbs._core.software.software.FaultPlan", "aioverbs.attributes.FaultRecord"),
        module="aioverbs.testing",
    ),
    Theme(
        "errors",
        "Errors",
        "Closed, broken and busy objects raise subclasses of anyio's exceptions, a failing verb an `OSError`.",
        (
            "VerbsError",
            "WorkCompletionError",
            "BatchError",
            "ClosedResourceError",
            "BrokenResourceError",
            "BusyResourceError",
            "AffinityError",
            "ConcurrentAccessError",
            "StateError",
            "TransitionError",
            "ForkedProcessError",
            "LenderClosedError",
            "DeviceNotFoundError",
            "DeviceRemovedError",
            "LibraryNotFoundError",
            "UnreachableError",
            "ConnectionRejectedError",
            "HandshakeError",
            "aioverbs._connection.handshake.Reason",
            "GrantRevokedError",
            "WorkerDiedError",
        ),
    ),
)

# Of aioverbs.testing.
FIXTURES = ("aioverbs_device", "aioverbs_ledger")
