"""RDMA for asyncio.

The ground floor stands: the compiled verbs seam and the software device (`aioverbs._core`, private), and here what
they raise and name. Devices, domains and awaitable verbs come on top of it.
"""

from typing import TYPE_CHECKING

from .errors import (
    AffinityError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    DeviceNotFoundError,
    ForkedProcessError,
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

__all__ = [
    "AccessFlags",
    "AffinityError",
    "AtomicCap",
    "BrokenResourceError",
    "BusyResourceError",
    "ClosedResourceError",
    "ConcurrentAccessError",
    "DeviceNotFoundError",
    "EventType",
    "ForkedProcessError",
    "LibraryNotFoundError",
    "LinkLayer",
    "Mtu",
    "MwType",
    "NodeType",
    "PortState",
    "QpAttrMask",
    "QpState",
    "QpType",
    "SendFlags",
    "SendOpcode",
    "TransportType",
    "VerbsError",
    "WcFlags",
    "WcOpcode",
    "WcStatus",
    "WorkCompletionError",
]

__version__: str

if not TYPE_CHECKING:  # or every misspelt name would pass for a string

    def __getattr__(name: str) -> str:
        if name == "__version__":
            from importlib.metadata import version  # here, because it costs more than the package itself

            return version("aioverbs")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
