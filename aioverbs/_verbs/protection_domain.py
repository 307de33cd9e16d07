"""Protection domains, parent domains over them, and protection domains shared with other contexts."""

import errno
import secrets
import socket
import threading
from typing import TYPE_CHECKING

from aioverbs._core.handles import handles, parent_domain as core
from aioverbs._core.software import software
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import Resource
from aioverbs._memory.region import ImportedMemoryRegion
from aioverbs._memory.registration_cache import RegistrationCache
from aioverbs._providers import hardware
from aioverbs._sharing import exchange, shared_pd
from aioverbs._verbs.base_domain import Domain
from aioverbs._verbs.completion_queue import QueueLocation
from aioverbs._verbs.thread_domain import ThreadDomain, ThreadDomainBudget
from aioverbs.allocators import (
    Allocator,
    NativeAllocator,
    SharedMemoryAllocator,
    SharedPageAllocator,
    checked_allocator,
)
from aioverbs.errors import ClosedResourceError, VerbsError

if TYPE_CHECKING:
    from pyverbs.pd import PD

__all__ = [
    "DomainShare",
    "InterchangeableDomain",
    "ParentDomain",
    "ProtectionDomain",
    "SharedProtectionDomain",
    "base_protection_domain",
    "share_domain",
    "with_base",
]

# Errors of providers without parent domains: some do not know the attributes and answer EINVAL.
_NO_PARENT_DOMAIN = {errno.EOPNOTSUPP, errno.EINVAL}


class InterchangeableDomain(Domain):
    """A protection domain, or a domain "completely interchangeable" with one: a parent or resource domain over it."""

    @property
    def base(self) -> "ProtectionDomain":
        """Protection domain on which memory is registered: this domain itself, or the one that it is built on."""
        raise NotImplementedError

    @property
    def shared_memory(self) -> NativeAllocator:
        """Allocator of memory for regions that other processes can use if they have an instance of this domain.

            async with pd.share(key), pd.register(1 << 30, access, pd.shared_memory) as region: ...

        On a software device this is a `SharedMemoryAllocator`; the keys of memory from another source are valid only in
        the process that registered it. On an RDMA device this is a `SharedPageAllocator`, but memory from any source
        can be used.

        :raises VerbsError: on a software device: with EINVAL if the domain is not shared, with ENOMEM or EMFILE if the
            memory cannot be mapped.
        :raises ClosedResourceError: the domain is not open.
        """
        return self.base._shared_allocator()

    def import_memory_region(self, key: int) -> ImportedMemoryRegion:
        """Return a memory region, to be opened, for memory that another process registered on its instance of this
        domain.

        This process can then use the memory in its own work requests, to send from, to receive into and as the local
        buffer of reads and writes: see `ImportedMemoryRegion`. Peers do not need this; they use the key of the memory
        to access it through queue pairs of either process.

        :param key: `MemoryRegion.rkey` in the other process, 0..2**32-1.
        :raises TypeError: `key` is not an integer.
        :raises ValueError: `key` is not in 0..2**32-1.
        :raises ClosedResourceError: the domain is not open.
        :raises VerbsError: on opening: with ENOENT if no region of the domain has that key, with EFAULT if the memory
            of the region is not from `shared_memory`, with EOPNOTSUPP if this is an RDMA device.
        """
        return ImportedMemoryRegion(self.base, self.base.handle, key)

    def share(self, share_key: int) -> "SharedProtectionDomain":
        """Return a `SharedProtectionDomain`, to be opened, which shares this domain with other contexts of the device.

        :param share_key: secret that other contexts need to open the domain, 0..2**64-1.
        :raises TypeError: `share_key` is not an integer.
        :raises ValueError: `share_key` does not fit in 64 bits.
        :raises ClosedResourceError: on opening: the domain is not open.
        :raises VerbsError: on opening: with EOPNOTSUPP if the provider does not implement sharing, with EEXIST if the
            domain is already shared with another key, or is an instance of a domain that was shared elsewhere.
        :raises OSError: on opening on an RDMA device: with EMFILE if no file descriptor is left.
        """
        return SharedProtectionDomain(self.base, share_key)

    def parent_domain(
        self,
        td: ThreadDomain | None = None,
        allocator: Allocator | None = None,
        context: object = None,
        *,
        require_native: bool = False,
    ) -> "ParentDomain":
        """Return a parent domain over this domain, to be opened: see `ParentDomain`.

        :param td: thread domain whose event loop is to own the resources created on the parent domain; None to let any
            thread use them.
        :param allocator: allocator of the memory of queues; None for the provider's own.
        :param context: opaque user data, passed to the allocator.
        :param require_native: True if opening must raise `VerbsError` when the provider has no parent domains or `td`
            is not native; False to continue without native ones.
        :raises TypeError: `td` is not a thread domain, or `allocator` lacks the methods of `Allocator`.
        :raises ClosedResourceError: on opening: this domain or `td` is not open.
        :raises ValueError: on opening: `td` is native and belongs to another device.
        :raises AffinityError: on opening: another event loop owns `td`.
        :raises ConcurrentAccessError: on opening: another verb is in progress on an object of the owner of `td`.
        :raises VerbsError: on opening: the verb failed; with EOPNOTSUPP, also if `require_native` cannot be met.
        """
        return ParentDomain(self, td, allocator, context, require_native=require_native)


def base_protection_domain(what: str, pd: object) -> "ProtectionDomain":
    """Return the protection domain that a domain is built on; for a protection domain, return that domain.

    :param what: kind of the resource that is being made, for the error message.
    :param pd: a protection domain, or a domain interchangeable with one.
    :raises TypeError: `pd` is an object of another type.
    """
    if not isinstance(pd, InterchangeableDomain):
        raise TypeError(f"a {what} requires a protection domain, got {pd!r}")
    return pd.base


def check_same_device(other: Resource, context: handles.Context, base: "ProtectionDomain") -> None:
    """Check that a resource and a protection domain belong to the same device.

    The provider refuses a native thread domain of another device as well. One that is not native has no verbs object.

    :param other: the resource.
    :param context: open context of its device.
    :param base: the protection domain.
    :raises ValueError: they belong to different devices.
    """
    if context is not base._context:
        raise ValueError(f"{other!r} belongs to a different device than {base!r}: make both from one device")


def with_base(pd: Resource) -> tuple[Resource, ...]:
    """Return a tuple of the parents that a resource made from a domain must have.

    This is the domain itself and, if that is a parent or resource domain, the protection domain that it is built on:
    the verbs require that a protection domain is closed after all parent domains over it, including those that were
    made from another parent domain.
    """
    return (pd, pd.base) if isinstance(pd, InterchangeableDomain) and pd.base is not pd else (pd,)


class ProtectionDomain(InterchangeableDomain):
    """A protection domain: ``ibv_alloc_pd``. Any event loop may use it.

    Made by `Device.protection_domain`; `Device.adopt_protection_domain` and `Device.shared_protection_domain` make one
    from a protection domain that already exists. These methods list the exceptions that opening raises.
    """

    def __init__(
        self,
        device: Resource,
        context: handles.Context,
        budget: ThreadDomainBudget,
        shared: tuple[int, int] | None = None,
        lent: "PD | None" = None,
    ) -> None:
        super().__init__(device)
        self._context = context
        self._budget = budget
        self._shared = shared
        self._user_pd = lent  # pyverbs PD owned by the user
        self._cache = RegistrationCache(self)
        self._sharing = _Sharing()

    def _open(self) -> None:
        if self._user_pd is not None:
            self._handle = hardware.adopt_protection_domain(self._context, self._user_pd)
        elif self._shared is not None:
            self._handle = shared_pd.open_instance(self._context, *self._shared)
        else:
            self._handle = handles.ProtectionDomain(self._context)
        self._lifecycle.hold(self._sharing)  # destroyed after the handle: an open domain stays shared if that fails
        self._lifecycle.hold(self._handle)

    @property
    def base(self) -> "ProtectionDomain":
        """This protection domain."""
        return self

    @property
    def cache(self) -> RegistrationCache:
        """Cache of the memory registrations on this domain: see `RegistrationCache`."""
        return self._cache

    def _queue_location(self) -> QueueLocation:
        return QueueLocation(self.handle, self.handle, None, native=False)

    def _shared_allocator(self) -> NativeAllocator:
        """Return the allocator that is the value of `shared_memory`. The first call makes it.

        :raises VerbsError: as for `shared_memory`.
        :raises ClosedResourceError: the domain is not open.
        """
        return self._sharing.allocator(self.handle)


def _shared_memory(handle: handles.ProtectionDomain) -> NativeAllocator:
    """Return a new allocator of memory that other processes can use if they have an instance of the domain.

    On a software device this is a `SharedMemoryAllocator`; on an RDMA device, a `SharedPageAllocator`.

    :raises VerbsError: on a software device: with EINVAL if the domain is not shared, with ENOMEM or EMFILE if the
        memory cannot be mapped.
    """
    if not handle.context.software:
        return SharedPageAllocator()
    try:
        return SharedMemoryAllocator(software.shared_area(handle))
    except VerbsError as error:
        if error.errno == errno.EINVAL:
            raise VerbsError(error.verb, error.errno, "the domain is not shared: open share() first") from None
        raise shared_pd.share_error(error.errno) from None


class DomainShare:
    """Access of other contexts and processes to a protection domain; returned by `share_domain`.

    It has no reference to the `ProtectionDomain`, which refers to it.

    :param pd: handle of the protection domain.
    :param shared_id: ID of the shared domain, 96 bits.
    :param share_key: secret that other contexts need to open the domain, 64 bits.
    :param share: the share.
    """

    def __init__(
        self,
        pd: handles.ProtectionDomain,
        shared_id: int,
        share_key: int,
        share: shared_pd.Share | shared_pd.SoftShare,
    ) -> None:
        self.id = shared_id
        self.key = share_key
        self._pd = pd
        self._share = share

    async def send(self, socket: socket.socket) -> None:
        """Answer a request for access from the process at the other end of a socket: `SharedProtectionDomain.send`."""
        await exchange.answer(socket, self._pd.context, self._share)

    def destroy(self) -> None:
        """Prevent further instances from being opened. Instances that are open stay open."""
        self._share.destroy()


class _Sharing:
    """The one share of a protection domain and its one allocator of shared memory, each made by its first use and
    destroyed after the domain.

    No verb ends the sharing of a domain that can still be used, so sharing it again returns the same share.
    """

    def __init__(self) -> None:
        # Held while either is being made, because several threads may use the domain. It is reentrant, because a signal
        # handler may do so in the middle of that.
        self._lock = threading.RLock()
        self._share: DomainShare | None = None
        self._allocator: NativeAllocator | None = None

    def share(self, pd: handles.ProtectionDomain, share_key: int | None) -> DomainShare:
        """Share the protection domain, or return the share that exists: see `share_domain`.

        :param pd: handle of the protection domain.
        """
        with self._lock:
            if self._share is None:
                key = secrets.randbits(shared_pd.KEY_BITS) if share_key is None else share_key
                shared_id, share = shared_pd.share(pd, key)
                self._share = DomainShare(pd, shared_id, key, share)
            elif share_key is not None and share_key != self._share.key:
                raise VerbsError(
                    "ibv_alloc_shpd",
                    errno.EEXIST,
                    "the domain is shared with another key until it is closed: use that key, or another domain; if a "
                    "pool of worker processes has shared it, open share() before the pool",
                )
            return self._share

    def allocator(self, pd: handles.ProtectionDomain) -> NativeAllocator:
        """Return the allocator that is the value of `InterchangeableDomain.shared_memory`. The first call makes it.

        :param pd: handle of the protection domain. If it was destroyed, no allocator is made for a software device.
        """
        with self._lock:
            if self._allocator is None:
                allocator = _shared_memory(pd)
                if self._allocator is None:  # no signal handler has made one meanwhile
                    self._allocator = allocator
            return self._allocator

    def destroy(self) -> None:
        """Destroy the share, if there is one, and stop a `SharedMemoryAllocator` from allocating more, even if the user
        still refers to it. The protection domain has been destroyed; it can be opened again only if its opening, or
        that of the resource that it is a part of, failed.

        Pieces that are allocated stay valid; the memory is released when the last of them is freed. The allocator of an
        RDMA device goes on, because it does not depend on the domain.
        """
        with self._lock:
            share, self._share = self._share, None
            allocator, self._allocator = self._allocator, None
        if isinstance(allocator, SharedMemoryAllocator):
            allocator.close()
        if share is not None:
            share.destroy()


def share_domain(pd: ProtectionDomain, share_key: int | None = None) -> DomainShare:
    """Share a protection domain until it is closed, and return its `DomainShare`; if it is shared, return the same one.

    Any number of event loops may do so at once. Call this only while a resource that is made from the domain is being
    opened: closing the domain waits for that.

    :param pd: protection domain, which must be open.
    :param share_key: secret that other contexts need to open the domain, 64 bits; None for the key of the share that
        exists, or a random one.
    :raises ClosedResourceError: the protection domain is not open.
    :raises VerbsError: with EOPNOTSUPP if the provider does not implement sharing, with EEXIST if the domain is already
        shared with another key, or is an instance of a domain that was shared elsewhere.
    :raises OSError: on an RDMA device: with EMFILE if no file descriptor is left.
    """
    return pd._sharing.share(pd.handle, share_key)


class SharedProtectionDomain(Resource):
    """Protection domain that is shared with other contexts of its device: ``ibv_alloc_shpd``.

    Made by `ProtectionDomain.share`.

    No verb ends the sharing, so closing this object ends only `send`: instances can still be opened with the id and
    the key, until the last instance in any process is closed; on an RDMA device, the context that shared the domain can
    do so until it closes the domain. The domain is destroyed together with the last instance. If the domain is shared
    again with the same key, it has the same id; another key is refused. A pool of worker processes shares its domain as
    well, with a random key if the domain is not shared before.

    Other processes receive the domain through `send`. On an RDMA device they import the context (``ibv_import_device``)
    and the domain (``ibv_import_pd``). On the software device they map the file that holds the domain; in this process,
    other contexts of the device can open the domain without `send`.

    While a region that was registered on one instance is open, the queue pairs of all instances can access it with its
    keys. On the software device, other processes can do so only if its memory comes from
    `ProtectionDomain.shared_memory`. Memory windows can be used only with the instance that they were created on.
    Closing a region waits until other instances have finished accessing it. On the software device, at most 240
    processes can use a domain at once, and each can have at most 65,536 regions and windows on it.

    :param pd: protection domain to share.
    :param share_key: secret that other contexts need to open the domain, 0..2**64-1.
    :raises TypeError: `share_key` is not an integer.
    :raises ValueError: `share_key` does not fit in 64 bits.
    :raises ClosedResourceError: on opening: the protection domain is not open.
    :raises VerbsError: on opening: with EOPNOTSUPP if the provider does not implement sharing, with EEXIST if the
        domain is already shared with another key, or is an instance of a domain that was shared elsewhere.
    :raises OSError: on opening on an RDMA device: with EMFILE if no file descriptor is left.
    """

    def __init__(self, pd: ProtectionDomain, share_key: int) -> None:
        shared_pd.check_share(0, share_key)
        super().__init__(pd)
        self._pd = pd
        self._share_key = share_key
        self._domain_share: DomainShare | None = None

    def _open(self) -> None:
        self._domain_share = share_domain(self._pd, self._share_key)

    async def send(self, socket: socket.socket) -> None:
        """Give the process at the other end of a socket access to the domain, by answering one request from it.

        The other process must call `import_device`. That process gets access to more than the domain: on an RDMA device
        it gets the context's descriptor, through which it can access everything made from this device; on the software
        device it gets all memory of `ProtectionDomain.shared_memory`. After a cancellation, or an exception other than
        the `VerbsError` of an informed peer, the socket can no longer be used.

        The request proves that its author knows the key. It does not prove that its author is the process at the other
        end of this socket: a process that receives requests for the domain could forward one and would be given access.
        Verify by other means which process is at the other end, for example with SO_PEERCRED or the permissions of the
        socket's directory.

        :param socket: connected non-blocking stream socket of the Unix domain. The caller continues to own the socket
            and must not read or write it during the call.
        :raises VerbsError: the peer was rejected and informed: with ENOENT, EACCES or EXDEV if the request contains
            a wrong id, key or device; with EPROTO or EPROTONOSUPPORT if the request is malformed or has a different
            version; with EMFILE or ENOMEM if a software device has no file descriptor or memory left. Also with EPROTO,
            without informing the peer, if the request carried file descriptors: the socket is closed in this case.
        :raises OSError: on an RDMA device: with EMFILE if no file descriptor is left; the peer is not informed.
        :raises ValueError: `socket` is blocking or not a Unix stream socket.
        :raises BrokenResourceError: the peer closed the connection.
        :raises RuntimeError: no asyncio event loop is running.
        :raises ClosedResourceError: the shared protection domain is not open.
        """
        self._check_open()
        assert self._domain_share is not None
        await self._domain_share.send(socket)

    @property
    def id(self) -> int:
        """Id of the shared domain, to be passed to `Device.shared_protection_domain` or `import_device`: 0..2**96-1.

        The id identifies the device as well. It remains available after this object is closed, because other instances
        of the domain may still be open.

        :raises ClosedResourceError: the shared protection domain was never opened.
        """
        if self._domain_share is None:
            raise ClosedResourceError(f"{self!r} was never opened: open it with `async with`")
        return self._domain_share.id


class ParentDomain(InterchangeableDomain):
    """A parent domain: ``ibv_alloc_parent_domain``. It is "completely interchangeable" with its protection domain.

    Resources created on it take no locks if `td` is native. Their queues and doorbell records come from `allocator` if
    the provider supports that. Memory registered on the protection domain can be used with the parent domain, and vice
    versa.

    Made by the method `parent_domain` of a protection domain or of another parent domain. The thread domain and the
    allocator of that other parent domain are not inherited.

    :param pd: protection domain, or domain interchangeable with one.
    :param td: thread domain whose event loop is to own the resources created on the parent domain; None to let any
        thread use them.
    :param allocator: allocator of the memory of queues; None for the provider's own.
    :param context: opaque user data, kept as the attribute `context` and passed to the allocator.
    :param require_native: True if opening must raise `VerbsError` when the provider has no parent domains or `td` is
        not native; False to continue without native ones.
    :raises TypeError: `pd` or `td` is of another type, or `allocator` lacks the methods of `Allocator`.
    :raises ValueError: `td` belongs to another device.
    :raises AffinityError: on opening: another event loop owns `td`.
    :raises ConcurrentAccessError: on opening: another verb is in progress on an object of the owner of `td`.
    :raises VerbsError: on opening: the verb failed; with EOPNOTSUPP, also if `require_native` cannot be met.
    """

    def __init__(
        self,
        pd: InterchangeableDomain,
        td: ThreadDomain | None = None,
        allocator: Allocator | None = None,
        context: object = None,
        *,
        require_native: bool = False,
    ) -> None:
        base = base_protection_domain("parent domain", pd)
        if td is not None and not isinstance(td, ThreadDomain):
            raise TypeError(f"`td` must be a ThreadDomain or None, got {td!r}")
        if td is not None:
            check_same_device(td, td._context, base)
        super().__init__(*with_base(pd), *([] if td is None else [td]))
        self._pd = base
        self._td = td
        self._context = base._context
        self._budget = base._budget
        self._require_native = require_native
        self._is_native = False
        self.allocator = checked_allocator(allocator)
        self.context = context

    def _owner(self) -> Affinity | None:
        return self._td.owner if self._td is not None else None

    def _open(self) -> None:
        """Create the parent domain.

        If the provider does not support parent domains and ``require_native`` is False, log a warning and use the
        protection domain instead.

        :raises VerbsError: the verb failed; with EOPNOTSUPP, also if ``require_native`` cannot be met.
        :raises ClosedResourceError: the protection domain or the thread domain is not open.
        :raises AffinityError: another event loop owns the thread domain.
        """
        td = self._td.handle if self._td is not None else None
        if self._require_native and self._td is not None and td is None:
            raise VerbsError("ibv_alloc_parent_domain", errno.EOPNOTSUPP, f"{self._td!r} is not native")
        try:
            handle = core.ParentDomain(
                self._pd.handle, td, self.allocator, self.context, affinity=self._lifecycle.owner
            )
        except VerbsError as error:
            from_allocator = error.__cause__ is not None  # the allocator raised, or returned unusable memory
            if error.errno not in _NO_PARENT_DOMAIN or from_allocator or self._require_native:
                raise
            message = "%s: parent domains are not native from here on, protection domains are used instead: %s"
            # A string, so that the log record keeps no frames alive.
            self._budget.warn_once("parent domain", message, self._context.name, str(error))
            self._handle = self._pd.handle
            return
        self._lifecycle.hold(handle)
        self._handle = handle
        self._is_native = True

    @property
    def base(self) -> ProtectionDomain:
        """Protection domain that this parent domain is built on; memory is registered on it."""
        return self._pd

    @property
    def td(self) -> ThreadDomain | None:
        """Thread domain that this parent domain was made with; None if it was made without one."""
        return self._td

    @property
    def native(self) -> bool:
        """Whether the parent domain is open and was created by the provider.

        If the provider does not support parent domains, the protection domain is used instead.
        """
        return self._is_native and self.state is ResourceState.OPEN

    def _queue_location(self) -> QueueLocation:
        return QueueLocation(self.handle, self._pd.handle, self.owner, self._is_native)

    @property
    def native_allocators(self) -> bool:
        """Whether the domain is open, native and has an allocator, so that the provider may call the allocator."""
        return self.native and self.allocator is not None


publish(__name__)
