"""Protection domains, parent domains over them, and those that are shared with other contexts."""

import errno
import socket
from typing import TYPE_CHECKING

from aioverbs._core.handles import handles, parent_domain as core
from aioverbs._core.software import software
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import Resource, lifecycle_of
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
    "InterchangeableDomain",
    "ParentDomain",
    "ProtectionDomain",
    "SharedProtectionDomain",
    "base_of",
    "goes_to_processes",
]

# What a provider says that does not know an attribute of parent domains: some answer EINVAL.
_NO_PARENT_DOMAIN = {errno.EOPNOTSUPP, errno.EINVAL}


class _Allocators:
    """What a protection domain gives memory by, until it is closed."""

    def __init__(self) -> None:
        self.shared: NativeAllocator | None = None

    def destroy(self) -> None:
        """Let its memory go, whoever keeps the allocator."""
        shared, self.shared = self.shared, None
        if isinstance(shared, SharedMemoryAllocator):
            shared.close()


class InterchangeableDomain(Domain):
    """A protection domain, or what is "completely interchangeable" with one: a parent or a resource domain over it."""

    @property
    def base(self) -> "ProtectionDomain":
        """The protection domain that protects memory here."""
        raise NotImplementedError

    @property
    def shared_memory(self) -> NativeAllocator:
        """An allocator of memory for regions that queue pairs of all instances reach, those of other processes, too.

            async with pd.share(key), pd.register(1 << 30, access, pd.shared_memory) as region: ...

        On a software device that is a `SharedMemoryAllocator`: what else is registered serves in the process that
        registered it, and in others it is a key that is none. On RDMA devices all memory will do, and this is a
        `SharedPageAllocator`.

        :raises VerbsError: with EINVAL where it is not shared; with ENOMEM or EMFILE.
        :raises ClosedResourceError: it is not open.
        """
        return self.base._shared_allocator()

    def import_memory_region(self, key: int) -> ImportedMemoryRegion:
        """A memory region that another process registered with its instance of this domain: see `ImportedMemoryRegion`.

        It is for local work requests of this process: to send from, receive into, read and write. Peers reach it by its
        key through the queue pairs of either process, without this.

        Opening raises `VerbsError`: with ENOENT where no region of the domain has that key, with EFAULT where it is not
        of `shared_memory`, with EOPNOTSUPP on RDMA devices.

        :param key: its `MemoryRegion.rkey`, there.
        """
        return ImportedMemoryRegion(self.base, self.base.handle, key)

    def share(self, share_key: int) -> "SharedProtectionDomain":
        """Let other contexts of the device open it: see `SharedProtectionDomain`."""
        return SharedProtectionDomain(self.base, share_key)

    def parent_domain(
        self,
        td: ThreadDomain | None = None,
        allocator: Allocator | None = None,
        context: object = None,
        *,
        require_native: bool = False,
    ) -> "ParentDomain":
        """A parent domain over it: see `ParentDomain`."""
        return ParentDomain(self, td, allocator, context, require_native=require_native)


def base_of(what: str, pd: object) -> "ProtectionDomain":
    """The protection domain under what something is made from.

    :raises TypeError: that is no protection domain, and nothing that takes the place of one.
    """
    if not isinstance(pd, InterchangeableDomain):
        raise TypeError(f"a {what} is made from a protection domain, and {pd!r} is none")
    return pd.base


class ProtectionDomain(InterchangeableDomain):
    """A protection domain: ``ibv_alloc_pd``. Any event loop may use it.

    Made by `Device.protection_domain`.
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
        self._lent = lent  # the user's own pyverbs PD
        self._cache = RegistrationCache(self)
        self._allocators = _Allocators()

    def _open(self) -> None:
        if self._lent is not None:
            self._handle = hardware.adopt_protection_domain(self._context, self._lent)
        elif self._shared is not None:
            self._handle = shared_pd.open_instance(self._context, *self._shared)
        else:
            self._handle = handles.ProtectionDomain(self._context)
        self._lifecycle.hold(self._handle)
        self._lifecycle.hold(self._allocators)

    @property
    def base(self) -> "ProtectionDomain":
        """Itself."""
        return self

    @property
    def cache(self) -> RegistrationCache:
        """The registrations that it keeps: see `RegistrationCache`."""
        return self._cache

    def _queue_location(self) -> QueueLocation:
        return QueueLocation(self.handle, self.handle, None, native=False)

    def _shared_allocator(self) -> NativeAllocator:
        handle = self.handle
        if self._allocators.shared is None:
            self._allocators.shared = _shared_memory(handle)
        return self._allocators.shared


def _shared_memory(handle: handles.ProtectionDomain) -> NativeAllocator:
    if not handle.context.software:
        return SharedPageAllocator()
    try:
        return SharedMemoryAllocator(software.shared_area(handle))
    except VerbsError as error:
        if error.errno == errno.EINVAL:
            raise VerbsError(error.verb, error.errno, "share() is to come first: it is of this process alone") from None
        raise shared_pd.refusal(error.errno) from None


class SharedProtectionDomain(Resource):
    """A protection domain that other contexts of its device may open: ``ibv_alloc_shpd``.

    It stays shared as long as the protection domain is open, on the software device as long as any instance of it is:
    the verbs take nothing back. The domain goes with its last instance, whosever that is.

    Other processes get it by `send`: on RDMA devices a context over this one, by ``ibv_import_device`` and
    ``ibv_import_pd``; on the software device, what it is in. There all contexts of this process's device may open it
    without that. Opening raises `VerbsError`, with EOPNOTSUPP where the provider does not have these verbs, and with
    EEXIST where the domain is shared already.

    What is registered with one instance serves queue pairs of all, by its keys, for as long as it is open; on the
    software device it is to be memory of `ProtectionDomain.shared_memory`, for other processes to reach it. Memory
    windows serve where they were made. Closing a region waits for what others are at with it. There 240 processes may
    have the domain at once, and each may have 65,536 regions and windows of it.

    Made by `ProtectionDomain.share`.

    :param share_key: the secret of 64 bits that others need.
    """

    def __init__(self, pd: ProtectionDomain, share_key: int) -> None:
        shared_pd.check_share(0, share_key)
        super().__init__(pd)
        self._pd = pd
        self._share_key = share_key
        self._id: int | None = None
        self._share: shared_pd.Share | shared_pd.SoftShare | None = None

    def _open(self) -> None:
        self._id, self._share = shared_pd.share(self._pd.handle, self._share_key)
        lifecycle_of(self._pd).hold(self._share)

    async def send(self, socket: socket.socket) -> None:
        """Let the process at the other end of a socket have it, which calls `import_device`: answer one request.

        It is given more than the domain: on RDMA devices the context's descriptor, by which it can reach whatever is
        made of this device; on the software device all memory of `ProtectionDomain.shared_memory`.
        After a cancellation or an error other than a refusal the socket is of no more use.

        The request proves that somebody knows the key who asked somewhere, and not that it is who holds this socket: a
        process that others ask for the domain can pass their request on, and is given what they asked for. So know by
        other means whose socket it is, as by its path's directory or by SO_PEERCRED.

        :param socket: a connected stream socket of the Unix domain, not blocking; it stays the caller's, and is read
            and written by nobody else meanwhile.
        :raises VerbsError: the peer was refused, and told so: with ENOENT, EACCES or EXDEV for another id, key or
            device; with EPROTO or EPROTONOSUPPORT where it speaks something else. With EPROTO also, and not told, where
            it attached descriptors: then the socket is closed.
        :raises BrokenResourceError: the peer is gone.
        :raises ClosedResourceError: it is not open.
        """
        self._check_open()
        assert self._share is not None
        await exchange.answer(socket, self._pd.handle.context, self._share)

    @property
    def id(self) -> int:
        """The number that `Device.shared_protection_domain` takes: 96 bits, which tell the device, too.

        It stays, as other instances may.

        :raises ClosedResourceError: it was not opened yet.
        """
        if self._id is None:
            raise ClosedResourceError(f"{self!r} is not open")
        return self._id


class ParentDomain(InterchangeableDomain):
    """A parent domain: ``ibv_alloc_parent_domain``. It is "completely interchangeable" with its protection domain.

    What is made on it takes no locks where `td` is native, and gets its queues and doorbell records from `allocator`
    where the provider asks one. Memory registered on its protection domain serves it, and the other way round.

    Made by the `parent_domain` of a protection domain or of another parent domain, whose thread domain and allocator it
    does not take over.

    :param td: the thread domain whose owner is to own what is made on it; None: anyone may use that.
    :param allocator: where the provider takes memory from; None: from its own.
    :param context: anything: "additional user-specific data", which `context` and the allocator are given back.
    :param require_native: raise where the provider has no parent domains, or where `td` is not native, instead of
        going on without.
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
        base = base_of("parent domain", pd)
        if td is not None and not isinstance(td, ThreadDomain):
            raise TypeError(f"td must be a ThreadDomain or None, not {td!r}")
        super().__init__(*([pd] if td is None else [pd, td]))
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
        td = self._td.handle if self._td is not None else None
        if self._require_native and self._td is not None and td is None:
            raise VerbsError("ibv_alloc_parent_domain", errno.EOPNOTSUPP, f"{self._td!r} is not native")
        try:
            handle = core.ParentDomain(
                self._pd.handle, td, self.allocator, self.context, affinity=self._lifecycle.owner
            )
        except VerbsError as error:
            of_allocator = error.__cause__ is not None  # it raised, or gave what cannot be used
            if error.errno not in _NO_PARENT_DOMAIN or of_allocator or self._require_native:
                raise
            message = "%s: parent domains are not native from here on, their protection domains stand for them: %s"
            self._budget.say_once("parent domain", message, self._context.name, str(error))  # no frames in logs
            self._handle = self._pd.handle
            return
        self._lifecycle.hold(handle)
        self._handle = handle
        self._is_native = True

    @property
    def base(self) -> ProtectionDomain:
        """The protection domain that protects memory here."""
        return self._pd

    @property
    def td(self) -> ThreadDomain | None:
        """The thread domain that it was made with."""
        return self._td

    @property
    def native(self) -> bool:
        """Whether it is open and the provider made a parent domain; if not, its protection domain stands for it."""
        return self._is_native and self.state is ResourceState.OPEN

    def _queue_location(self) -> QueueLocation:
        return QueueLocation(self.handle, self._pd.handle, self.owner, self._is_native)

    @property
    def native_allocators(self) -> bool:
        """Whether the provider was told of the allocator, and may ask it."""
        return self.native and self.allocator is not None


def goes_to_processes(shared: SharedProtectionDomain) -> bool:
    """Whether what is shared can be sent to other processes, and not only to other contexts of this one."""
    return shared._share is not None


publish(__name__)
