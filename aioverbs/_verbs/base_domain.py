"""Base class of protection, parent and resource domains: factories of queues, memory regions and address handles."""

import functools
from typing import TYPE_CHECKING

from aioverbs._core.handles import handles
from aioverbs._lifecycle.resource import HandleResource
from aioverbs._memory.buffer_pool import BufferPool
from aioverbs._memory.region import AdoptedMemoryRegion, MemoryRegion, MemoryWindow
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

__all__ = ["Domain", "check_caller", "queue_location_of", "shared_resources_of"]


class Domain(HandleResource[handles.ProtectionDomain]):
    """Base class of protection, parent and resource domains, which can be used interchangeably.

    Methods that return a resource do not open it: open it with ``async with``, or with ``open`` and ``aclose``.
    """

    _context: handles.Context
    _budget: ThreadDomainBudget

    @property
    def base(self) -> "Domain":
        """Protection domain on which memory is registered: this domain itself, or the one that it is built on."""
        raise NotImplementedError

    @property
    def cache(self) -> RegistrationCache:
        """Registration cache of the protection domain: see `RegistrationCache`."""
        return self.base.cache

    def _queue_location(self) -> QueueLocation:
        """Return the `QueueLocation`: the verbs objects and the owner with which this domain makes its queues.

        Subclasses implement this.

        :raises ClosedResourceError: the domain is not open.
        """
        raise NotImplementedError

    @functools.cached_property
    def _shared_resources(self) -> dict[object, object]:
        """Dictionary of resources that several users of this domain share; each user chooses the keys of its own.

        The resources are closed together with the domain.
        """
        return {}

    def completion_queue(
        self,
        depth: int,
        *,
        comp_vector: int = 0,
        message_model: MessageModel | None = None,
        spin_ns: int | None = None,
    ) -> CompletionQueue:
        """Return a new completion queue, to be opened: see `CompletionQueue`.

        :param depth: minimum number of completions that fit.
        :param comp_vector: index of the device's completion vector (interrupt) that signals new completions.
        :param message_model: how awaits on the queue wait; None for the model of the resource domain, or DEFAULT on
            another domain.
        :param spin_ns: how long an await polls before it sleeps, in nanoseconds, 0..10**9; for FORCE_LOW_LATENCY and
            LOW_LATENCY only. None for 100,000.
        :raises ValueError: `depth` is less than 1, or `spin_ns` is out of range or does not apply to the message
            model; on opening: the device does not support `depth` or `comp_vector`.
        :raises ClosedResourceError: the domain is not open.
        :raises AffinityError: on opening: another event loop owns the domain.
        :raises RuntimeError: on opening: no asyncio event loop is running.
        :raises OSError: on opening: the process has no file descriptors left.
        :raises VerbsError: on opening: the verb failed.
        """
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
        """Return a new queue pair, to be opened: see `QueuePair`.

        :param send_cq: completion queue of the send queue.
        :param recv_cq: completion queue of the receive queue; None to use `send_cq` for both.
        :param capabilities: depths and sizes of the queues; None for the defaults of `QpCapabilities`.
        :param qp_type: RC, UC, UD or XRC_SEND.
        :param srq: shared receive queue to use; None to use a receive queue of its own.
        :param port: number of the device port to send from.
        :param gid_index: index of the port's GID to send from; None to have one chosen as described in `QueuePair`.
        :param receive_depth: number of receives that the queue pair keeps posted for `QueuePair.messages`; 0 to keep
            none posted.
        :param receive_size: size of each of these receives, in bytes; 0 if `receive_depth` is 0.
        :raises ValueError: `qp_type` is XRC_RECV, for which `XrcDomain.queue_pair` is used; or the message model of a
            completion queue differs from that of the resource domain; or `receive_depth` or `receive_size` is negative;
            or only one of them is given, or both are given for a queue pair without a receive queue of its own. On
            opening: the device does not support the capabilities, the completion queues lack room, the port or GID
            index does not exist, or the domain and the queues belong to different devices or owners.
        :raises ClosedResourceError: the domain is not open.
        :raises AffinityError: on opening: another event loop owns the domain and the queues.
        :raises RuntimeError: on opening with `receive_depth`: no asyncio event loop is running.
        :raises OSError: on opening with `receive_depth`: the process cannot map that much memory.
        :raises VerbsError: on opening: the verb failed, or the memory of the receives cannot be registered.
        """
        if qp_type is QpType.XRC_RECV:
            raise ValueError(
                "a queue pair of type XRC_RECV has no protection domain: make it with XrcDomain.queue_pair()"
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
        """Return a new shared receive queue, to be opened: see `SharedReceiveQueue`.

        :param max_wr: maximum number of receives posted at once.
        :param max_sge: maximum number of scatter/gather entries of a receive.
        :param limit: raise the event ``EventType.SRQ_LIMIT_REACHED`` once when fewer posted receives than this are
            left; 0 to never raise it.
        :param xrc_domain: XRC domain of an XRC shared receive queue; None for an ordinary one.
        :param cq: completion queue of an XRC shared receive queue; None for an ordinary one.
        :raises ValueError: only one of `xrc_domain` and `cq` is given, or the message model of `cq` differs from that
            of the resource domain; on opening: the device does not support the sizes or `limit`, `cq` lacks room, or
            the domain, `xrc_domain` and `cq` belong to different devices or owners.
        :raises ClosedResourceError: the domain is not open.
        :raises AffinityError: on opening: another event loop owns the domain and `cq`.
        :raises VerbsError: on opening: the verb failed; with EINVAL, also if `limit` exceeds the size of the queue.
        """
        return SharedReceiveQueue(self, self._queue_location(), max_wr, max_sge, limit, xrc_domain=xrc_domain, cq=cq)

    def register(
        self,
        memory: "Buffer | int",
        access: AccessFlags = AccessFlags.LOCAL_WRITE,
        allocator: Allocator | None = None,
    ) -> MemoryRegion:
        """Return a new memory region, to be opened: see `MemoryRegion`.

        `MemoryRegion.open` lists the exceptions that opening raises.

        :param memory: object with the buffer protocol, or the number of bytes to allocate.
        :param access: allowed operations; ``REMOTE_WRITE`` and ``REMOTE_ATOMIC`` require ``LOCAL_WRITE`` as well.
        :param allocator: allocator of the bytes, if `memory` is a number; None for the default allocator.
        :raises ValueError: `memory` has no bytes, or is a number less than 1; or `allocator` is given and `memory` is
            not a number.
        :raises TypeError: `memory` has no buffer protocol, or `allocator` lacks the methods of `Allocator`.
        :raises ClosedResourceError: the domain is not open.
        :raises VerbsError: on opening: the verb failed, for example with EOPNOTSUPP for the access flags.
        """
        return MemoryRegion(self.base, self.base.handle, memory, access, allocator)

    def memory_window(self, mw_type: MwType = MwType.TYPE_2) -> MemoryWindow:
        """Return a new memory window, to be opened: see `MemoryWindow`.

        :param mw_type: ``TYPE_1`` or ``TYPE_2``.
        :raises ClosedResourceError: the domain is not open.
        :raises VerbsError: on opening: the verb failed; with EOPNOTSUPP if the provider has no memory windows.
        """
        return MemoryWindow(self.base, self.base.handle, mw_type)

    def address_handle(
        self, to: Endpoint | AddressVector, *, port: int = 1, gid_index: int | None = None
    ) -> AddressHandle:
        """Return a new address handle, to be opened: see `AddressHandle`. It holds the path of datagrams to a port.

        :param to: endpoint of a UD queue pair, or a path.
        :param port: number of the device port to send from; used if `to` is an endpoint.
        :param gid_index: index of the port's GID to send from; used if `to` is an endpoint. None to have
            one chosen as described in `QueuePair`.
        :raises ClosedResourceError: the domain is not open.
        :raises ValueError: on opening: the port or the GID index does not exist, the port has no GID, no path leads
            from the port to the endpoint, or the ``dgid`` of the path is not 16 bytes long.
        :raises OverflowError: on opening: a number in the path does not fit in its field.
        :raises VerbsError: on opening: the verb failed, for example because the next hop did not answer.
        """
        return AddressHandle(self.base, self.base.handle, to, port, gid_index)

    def adopt_memory_region(self, mr: "MR", access: AccessFlags) -> MemoryRegion:
        """Return a memory region over a pyverbs ``MR`` of the adopted ``PD``, to be opened.

        The user continues to own the ``MR`` and must close it after this region. If the user closes it first, every
        later use of this region raises `BorrowedObjectClosedError`.

        :param mr: an open `pyverbs.mr.MR` or an instance of a subclass.
        :param access: flags that the ``MR`` was registered with, which pyverbs does not expose: `MemoryRegion.buffer`
            is read-only if they lack ``LOCAL_WRITE``.
        :raises TypeError: on opening: `mr` is not an ``MR``.
        :raises ValueError: on opening: `mr` is closed, belongs to another protection domain, or covers the whole
            address space.
        :raises ClosedResourceError: the domain is not open.
        """
        return AdoptedMemoryRegion(self.base, self.base.handle, mr, access)

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
        """Return a new pool of registered buffers, to be opened: see `BufferPool`.

        `BufferPool.open` lists the exceptions that opening raises.

        :param size: size of each buffer, in bytes.
        :param count: number of buffers in a slab, the unit in which the pool registers memory.
        :param limit: maximum number of buffers that the pool grows to; None for one slab.
        :param allocator: allocator of the memory; None for the default allocator.
        :param access: access flags that the memory is registered with.
        :param alignment: alignment of each buffer, in bytes: a power of two, at most the page size.
        :raises ValueError: an argument is out of range, or `limit` is less than `count`.
        :raises TypeError: `allocator` lacks the methods of `Allocator`.
        :raises ClosedResourceError: on opening: the domain is not open.
        :raises VerbsError: on opening: the memory cannot be registered.
        """
        return BufferPool(self.base, size, count, limit=limit, allocator=allocator, access=access, alignment=alignment)


def check_caller(domain: Domain, what: str) -> None:
    """Check that the running event loop may use a domain. A domain that is not bound to one loop passes the check.

    Call this before starting work that will later create queues on the domain.

    :param domain: domain to check.
    :param what: operation to name in the error.
    :raises AffinityError: the domain is bound to an event loop, and another loop or none is running.
    :raises ConcurrentAccessError: a verb on the domain is in progress.
    :raises ForkedProcessError: the domain was opened before a fork, in the parent process.
    """
    owner = domain.owner
    if owner is not None and owner.bound:
        owner.check(domain, what)


def queue_location_of(domain: Domain) -> QueueLocation:
    """Return the `QueueLocation` of a domain: the verbs objects and the owner with which it makes its queues.

    :raises ClosedResourceError: the domain is not open.
    """
    return domain._queue_location()


def shared_resources_of(domain: Domain) -> dict[object, object]:
    """Return the dictionary of resources that several users of a domain share; users may add resources to it.

    Each user chooses the keys of its own resources. The resources are closed together with the domain.
    """
    return domain._shared_resources
