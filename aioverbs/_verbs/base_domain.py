"""What every domain that protects memory makes: queues and regions."""

import functools
from typing import TYPE_CHECKING

from aioverbs._core.handles import handles
from aioverbs._lifecycle.resource import HandleResource
from aioverbs._memory.buffer_pool import BufferPool
from aioverbs._memory.region import LentMemoryRegion, MemoryRegion, MemoryWindow
from aioverbs._memory.registration_cache import RegistrationCache
from aioverbs._verbs.address_handle import AddressHandle
from aioverbs._verbs.completion_queue import CompletionQueue, MessageModel, QueueLocation
from aioverbs._verbs.endpoint import Endpoint
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs._verbs.shared_receive_queue import SharedReceiveQueue
from aioverbs._verbs.thread_domain import ThreadDomainBudget
from aioverbs._verbs.xrc_domain import XrcDomain
from aioverbs.allocators import Allocator
from aioverbs.attributes import AddressVector, QpCapabilities
from aioverbs.types import AccessFlags, MwType, QpType

if TYPE_CHECKING:
    from pyverbs.mr import MR
    from typing_extensions import Buffer

__all__ = ["Domain", "check_caller", "common_of", "queue_location_of"]


class Domain(HandleResource[handles.ProtectionDomain]):
    """What protection, parent and resource domains have in common: what takes the one takes the others."""

    _context: handles.Context
    _budget: ThreadDomainBudget

    @property
    def base(self) -> "Domain":
        """The protection domain that protects memory here."""
        raise NotImplementedError

    @property
    def cache(self) -> RegistrationCache:
        """The registrations that its protection domain keeps: see `RegistrationCache`."""
        return self.base.cache

    def _queue_location(self) -> QueueLocation:
        """Where its queues are made."""
        raise NotImplementedError

    @functools.cached_property
    def _common(self) -> dict[object, object]:
        """Resources that were made from it for all who need such a thing, by what they are for; closed with it."""
        return {}

    def completion_queue(
        self,
        depth: int,
        *,
        comp_vector: int = 0,
        message_model: MessageModel | None = None,
        spin_ns: int | None = None,
    ) -> CompletionQueue:
        """A completion queue, to be opened: see `CompletionQueue`."""
        return CompletionQueue(self, self._queue_location(), depth, comp_vector, message_model, spin_ns)

    def queue_pair(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue | None = None,
        capabilities: QpCapabilities | None = None,
        *,
        qp_type: QpType = QpType.RC,
        srq: SharedReceiveQueue | None = None,
        port: int = 1,
        gid_index: int | None = None,
        receive_depth: int = 0,
        receive_size: int = 0,
    ) -> QueuePair:
        """A queue pair, to be opened: see `QueuePair`.

        :param port: the device's port that it sends from.
        :param gid_index: which of the port's GIDs it sends from; None: see `QueuePair`.
        """
        if qp_type is QpType.XRC_RECV:
            raise ValueError(
                "a queue pair of type XRC_RECV has no protection domain: make it by XrcDomain.queue_pair()"
            )
        return QueuePair(
            self,
            self._queue_location(),
            send_cq,
            recv_cq,
            capabilities,
            qp_type=qp_type,
            srq=srq,
            port=port,
            gid_index=gid_index,
            receive_depth=receive_depth,
            receive_size=receive_size,
        )

    def shared_receive_queue(
        self,
        max_wr: int,
        max_sge: int = 1,
        limit: int = 0,
        *,
        xrc_domain: XrcDomain | None = None,
        cq: CompletionQueue | None = None,
    ) -> SharedReceiveQueue:
        """A shared receive queue, to be opened: see `SharedReceiveQueue`."""
        return SharedReceiveQueue(self, self._queue_location(), max_wr, max_sge, limit, xrc_domain=xrc_domain, cq=cq)

    def register(
        self,
        memory: "Buffer | int",
        access: AccessFlags = AccessFlags.LOCAL_WRITE,
        allocator: Allocator | None = None,
    ) -> MemoryRegion:
        """A memory region, to be opened: see `MemoryRegion`.

        :param memory: an object with the buffer protocol, or how many bytes to allocate.
        :param access: what may be done to it; peers that may write imply ``LOCAL_WRITE``, which is to be given, too.
        :param allocator: where to allocate those bytes.
        """
        return MemoryRegion(self.base, self.base.handle, memory, access, allocator)

    def memory_window(self, mw_type: MwType = MwType.TYPE_2) -> MemoryWindow:
        """A memory window, to be opened: see `MemoryWindow`."""
        return MemoryWindow(self.base, self.base.handle, mw_type)

    def address_handle(
        self, to: Endpoint | AddressVector, *, port: int = 1, gid_index: int | None = None
    ) -> AddressHandle:
        """The way that datagrams take to a port, to be opened: see `AddressHandle`.

        :param to: a queue pair's endpoint, or just a path.
        :param port: the device's port that they are sent from, to an endpoint.
        :param gid_index: which of the port's GIDs they are sent from, to an endpoint; None: see `QueuePair`.
        """
        return AddressHandle(self.base, self.base.handle, to, port, gid_index)

    def adopt_memory_region(self, mr: "MR", access: AccessFlags) -> MemoryRegion:
        """A memory region that the user registered with pyverbs on the `PD` that was adopted, to be opened.

        The user keeps it, and closes it when this is closed; used after that, this raises `BorrowedObjectClosedError`.

        Opening raises `TypeError` where it is something else, `ValueError` where it is closed or of another domain.

        :param mr: an open `pyverbs.mr.MR`, of any kind.
        :param access: what it was registered for, which it does not tell: `MemoryRegion.buffer` is read-only without
            ``LOCAL_WRITE``.
        """
        return LentMemoryRegion(self.base, self.base.handle, mr, access)

    def buffer_pool(
        self,
        size: int,
        count: int,
        *,
        limit: int | None = None,
        allocator: Allocator | None = None,
        access: AccessFlags = AccessFlags.LOCAL_WRITE,
        alignment: int = 64,
    ) -> BufferPool:
        """A pool of registered buffers, to be opened: see `BufferPool`."""
        return BufferPool(self.base, size, count, limit=limit, allocator=allocator, access=access, alignment=alignment)


def check_caller(domain: Domain, what: str) -> None:
    """See that a domain's owner calls, where it is one loop's: before anything begins that ends with queues made on it.

    :raises AffinityError: another loop, or none, is running here.
    """
    owner = domain.owner
    if owner is not None and owner.bound:
        owner.check(domain, what)


def queue_location_of(domain: Domain) -> QueueLocation:
    """Where a domain's queues are made."""
    return domain._queue_location()


def common_of(domain: Domain) -> dict[object, object]:
    """Resources that were made from a domain for all who need such a thing, by what they are for; closed with it."""
    return domain._common
