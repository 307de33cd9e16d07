"""Domains: what protects memory, whose thread takes no locks, and both together."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from aioverbs._core import domains as core
from aioverbs._core import engine
from aioverbs.affinity import Affinity, ThreadModel, owner_for, run_on_owner
from aioverbs.allocators import Allocator
from aioverbs.attributes import QpCapabilities
from aioverbs.buffers import BufferPool
from aioverbs.completion import CompletionQueue, MessageModel, Placement
from aioverbs.errors import BusyResourceError, ClosedResourceError, VerbsError
from aioverbs.memory import MemoryParent, MemoryRegion
from aioverbs.queue_pair import QueuePair, SharedReceiveQueue, XrcParent
from aioverbs.registration_cache import RegistrationCache
from aioverbs.resource import Resource, State
from aioverbs.types import AccessFlags, QpType

if TYPE_CHECKING:
    from typing_extensions import Buffer


__all__ = [
    "ParentDomain",
    "ProtectionDomain",
    "ResourceDomain",
    "SharedProtectionDomain",
    "ThreadDomain",
    "ThreadDomainBudget",
    "XrcDomain",
]

logger = logging.getLogger("aioverbs")

P = ParamSpec("P")
T = TypeVar("T")

# What a provider says that has no thread domains, or no more of them: registers of the device run out.
_NO_THREAD_DOMAIN = {errno.EOPNOTSUPP, errno.ENOSPC, errno.ENOMEM}
# What one says that does not know an attribute: some answer EINVAL.
_NO_PARENT_DOMAIN = {errno.EOPNOTSUPP, errno.EINVAL}


class ThreadDomainBudget:
    """How many native thread domains a device may give at once: on NICs each takes a register that others need, too.

    Thread-safe. With it is remembered what was said once for the device.

    :param limit: None for as many as the provider has.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"max_native_thread_domains is 0 or more, or None for no limit, not {limit}")
        self.limit = limit
        self.used = 0
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one, if there is one."""
        with self._lock:
            if self.limit is not None and self.used >= self.limit:
                return False
            self.used += 1
            return True

    def destroy(self) -> None:
        """Give one back. It is named as what a `Life` does to its handles."""
        with self._lock:
            self.used -= 1

    def say_once(self, what: str, message: str, *arguments: object) -> None:
        """Log a warning, the first time only."""
        with self._lock:
            first = what not in self._said
            self._said.add(what)
        if first:
            logger.warning(message, *arguments)


class ThreadDomain(Resource):
    """A thread domain: ``ibv_alloc_td``, of the running event loop and its thread.

    "Any objects created under this thread domain will disable internal locking": so they are touched by the thread of
    the loop that opens it and by no other, which is checked at every call. Where the provider has no thread domains,
    or no more of them, the checks stay and so do the provider's locks.

    Made by `Device.thread_domain`.
    """

    def __init__(
        self,
        device: Resource,
        context: engine.Context,
        budget: ThreadDomainBudget,
        *,
        require_native: bool = False,
        owner: Affinity | None = None,
    ) -> None:
        super().__init__(device)
        self._context = context
        self._budget = budget
        self._require_native = require_native
        self._given_owner = owner
        self._handle: core.ThreadDomain | None = None

    def _owner(self) -> Affinity | None:
        return self._given_owner or owner_for(ThreadModel.SINGLE)

    def _open(self) -> None:
        reason = f"{self._budget.limit} are in use, which is max_native_thread_domains"
        if self._budget.take():
            try:
                self._handle = core.ThreadDomain(self._context, affinity=self._life.owner)
            except BaseException as error:
                self._budget.destroy()
                if not isinstance(error, VerbsError) or error.errno not in _NO_THREAD_DOMAIN or self._require_native:
                    raise
                reason = str(error)
            else:
                self._life.hold(self._budget)
                self._life.hold(self._handle)
        elif self._require_native:
            raise VerbsError("ibv_alloc_td", errno.ENOSPC, f"of the device's native thread domains {reason}")
        if self._handle is None:
            message = "%s: thread domains are not native from here on, the provider keeps its locks: %s"
            self._budget.say_once("td", message, self._context.name, reason)

    @property
    def native(self) -> bool:
        """Whether the provider drops its locks for what is made on it."""
        return self._handle is not None

    @property
    def handle(self) -> core.ThreadDomain | None:
        """The verbs object, None where it is not native."""
        return self._handle


class _Base(MemoryParent):
    """What a protection domain and a parent domain have in common: everything that takes the one takes the other."""

    _context: engine.Context
    _budget: ThreadDomainBudget
    _handle: engine.ProtectionDomain | None

    @property
    def handle(self) -> engine.ProtectionDomain:
        """The verbs object that stands for it.

        :raises ClosedResourceError: it is not open.
        """
        self._check_open()
        assert self._handle is not None
        return self._handle

    @property
    def base(self) -> "ProtectionDomain":
        """The protection domain that protects memory here."""
        raise NotImplementedError

    @property
    def cache(self) -> RegistrationCache:
        """The registrations of its protection domain that are kept: see `RegistrationCache`."""
        return self.base.cache

    def _placement(self) -> Placement:
        """Where its queues are made."""
        raise NotImplementedError

    def completion_queue(self, depth: int, *, comp_vector: int = 0) -> CompletionQueue:
        """A completion queue, to be opened: see `CompletionQueue`."""
        return CompletionQueue(self, self._placement(), depth, comp_vector)

    def queue_pair(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue | None = None,
        capabilities: QpCapabilities | None = None,
        *,
        qp_type: QpType = QpType.RC,
        srq: SharedReceiveQueue | None = None,
        port: int = 1,
        gid_index: int = 1,
    ) -> QueuePair:
        """A queue pair, to be opened: see `QueuePair`.

        :param port: the device's port that it sends from.
        :param gid_index: which of the port's GIDs it sends from.
        """
        if qp_type is QpType.XRC_RECV:
            raise ValueError(
                "a queue pair of type XRC_RECV has no protection domain: make it by XrcDomain.queue_pair()"
            )
        return QueuePair(
            self,
            self._placement(),
            send_cq,
            recv_cq,
            capabilities,
            qp_type=qp_type,
            srq=srq,
            port=port,
            gid_index=gid_index,
        )

    def shared_receive_queue(
        self,
        max_wr: int,
        max_sge: int = 1,
        limit: int = 0,
        *,
        xrc_domain: "XrcDomain | None" = None,
        cq: CompletionQueue | None = None,
    ) -> SharedReceiveQueue:
        """A shared receive queue, to be opened: see `SharedReceiveQueue`."""
        return SharedReceiveQueue(self, self._placement(), max_wr, max_sge, limit, xrc_domain=xrc_domain, cq=cq)

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


class ProtectionDomain(_Base):
    """A protection domain: ``ibv_alloc_pd``. Any event loop may use it.

    Made by `Device.protection_domain`.
    """

    def __init__(
        self,
        device: Resource,
        context: engine.Context,
        budget: ThreadDomainBudget,
        shared: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(device)
        self._context = context
        self._budget = budget
        self._shared = shared
        self._handle = None
        self._cache = RegistrationCache(self)

    def _open(self) -> None:
        if self._shared is None:
            self._handle = engine.ProtectionDomain(self._context)
        else:
            self._handle = engine.ProtectionDomain.open_shared(self._context, *self._shared)
        self._life.hold(self._handle)

    @property
    def base(self) -> "ProtectionDomain":
        """Itself."""
        return self

    @property
    def cache(self) -> RegistrationCache:
        """The registrations that it keeps: see `RegistrationCache`."""
        return self._cache

    def _placement(self) -> Placement:
        return Placement(self.handle, None, native=False)

    def share(self, share_key: int) -> "SharedProtectionDomain":
        """Let other contexts of the device open it: see `SharedProtectionDomain`."""
        return SharedProtectionDomain(self, share_key)

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


class SharedProtectionDomain(Resource):
    """A protection domain that other contexts of its device may open: ``ibv_alloc_shpd``.

    It stays shared as long as the protection domain or another instance of it is open: the verbs take nothing back.
    Made by `ProtectionDomain.share`.

    :param share_key: the secret of 64 bits that others need.
    """

    def __init__(self, pd: ProtectionDomain, share_key: int) -> None:
        if not 0 <= share_key < 1 << 64:
            raise ValueError("a share key has 64 bits")
        super().__init__(pd)
        self._pd = pd
        self._share_key = share_key
        self._id: int | None = None

    def _open(self) -> None:
        self._id = self._pd.handle.share(self._share_key)

    @property
    def id(self) -> int:
        """The number that `Device.shared_protection_domain` takes; it stays, as other instances may.

        :raises ClosedResourceError: it was not opened yet.
        """
        if self._id is None:
            raise ClosedResourceError(f"{self!r} is not open")
        return self._id


class ParentDomain(_Base):
    """A parent domain: ``ibv_alloc_parent_domain``. It is "completely interchangeable" with its protection domain.

    What is made on it takes no locks where `td` is native, and gets its queues and doorbell records from `allocator`
    where the provider asks one. Memory registered on its protection domain serves it, and the other way round.

    Made by `ProtectionDomain.parent_domain`.

    :param td: the thread domain whose owner is to own what is made on it; None: anyone may use that.
    :param allocator: where the provider takes memory from; None: from its own.
    :param context: anything; `context` gives it back ("additional user-specific data").
    :param require_native: raise where the provider has no parent domains, or where `td` is not native, instead of
        going on without.
    """

    def __init__(
        self,
        pd: ProtectionDomain,
        td: ThreadDomain | None = None,
        allocator: Allocator | None = None,
        context: object = None,
        *,
        require_native: bool = False,
    ) -> None:
        if not isinstance(pd, ProtectionDomain):
            raise TypeError(f"a parent domain is made from a protection domain, and {pd!r} is none")
        super().__init__(*([pd] if td is None else [pd, td]))
        self._pd = pd
        self._td = td
        self._context = pd._context
        self._budget = pd._budget
        self._require_native = require_native
        self._handle = None
        self._is_native = False
        self.allocator = allocator
        self.context = context

    def _owner(self) -> Affinity | None:
        return self._td.owner if self._td is not None else None

    def _open(self) -> None:
        td = self._td.handle if self._td is not None else None
        if self._require_native and self._td is not None and td is None:
            raise VerbsError("ibv_alloc_parent_domain", errno.EOPNOTSUPP, f"{self._td!r} is not native")
        try:
            handle = core.ParentDomain(self._pd.handle, td, self.allocator, affinity=self._life.owner)
        except VerbsError as error:
            if error.errno not in _NO_PARENT_DOMAIN or self._require_native:
                raise
            message = "%s: parent domains are not native from here on, their protection domains stand for them: %s"
            self._budget.say_once("parent domain", message, self._context.name, error)
            self._handle = self._pd.handle
            return
        self._life.hold(handle)
        self._handle = handle
        self._is_native = True

    @property
    def base(self) -> ProtectionDomain:
        """The protection domain that it was made from."""
        return self._pd

    @property
    def td(self) -> ThreadDomain | None:
        """The thread domain that it was made with."""
        return self._td

    @property
    def native(self) -> bool:
        """Whether the provider made a parent domain; if not, its protection domain stands for it."""
        return self._is_native

    def _placement(self) -> Placement:
        return Placement(self.handle, self.owner, self._is_native)

    @property
    def native_allocators(self) -> bool:
        """Whether the provider was told of the allocator, and may ask it."""
        return self._is_native and self.allocator is not None


class ResourceDomain(_Base):
    """A resource domain: the threads and messages of what is made on it, as ``ibv_exp_create_res_domain`` had it.

    It is made of a thread domain (for the thread models SINGLE and UNSAFE), a parent domain and, where none is given, a
    protection domain; `td`, `parent` and `pd` are these.

    Made by `Device.resource_domain`.

    :param pd: the protection domain; None: one of its own.
    :param thread_model: who may use what is made on it.
    :param message_model: what its queues are good at.
    :param allocator: where the provider takes memory from; None: from its own.
    :param require_native: raise where the provider cannot drop its locks, instead of going on with them.
    """

    def __init__(
        self,
        device: Resource,
        context: engine.Context,
        budget: ThreadDomainBudget,
        pd: ProtectionDomain | None = None,
        *,
        thread_model: ThreadModel = ThreadModel.SINGLE,
        message_model: MessageModel = MessageModel.DEFAULT,
        allocator: Allocator | None = None,
        require_native: bool = False,
    ) -> None:
        super().__init__(pd if pd is not None else device)
        self._context = context
        self._budget = budget
        self._require_native = require_native
        self._handle = None
        self._pd = pd if pd is not None else ProtectionDomain(self, context, budget)
        self._td: ThreadDomain | None = None
        self._parent: ParentDomain | None = None
        self.thread_model = ThreadModel(thread_model)
        self.message_model = MessageModel(message_model)
        self.allocator = allocator

    def _owner(self) -> Affinity | None:
        return owner_for(self.thread_model)

    def _open(self) -> None:
        owner = self._life.owner
        if self._pd.state is State.NEW:
            self._open_part(self._pd)
        if owner is not None:
            self._td = ThreadDomain(self, self._context, self._budget, require_native=self._require_native, owner=owner)
            self._open_part(self._td)
        self._parent = ParentDomain(self._pd, self._td, self.allocator, require_native=self._require_native)
        self._open_part(self._parent)
        self._handle = self._parent.handle

    def _open_part(self, part: Resource) -> None:
        part._life.quiet = True
        part._open_now()

    @property
    def base(self) -> ProtectionDomain:
        """Its protection domain."""
        return self._pd

    pd = base

    @property
    def td(self) -> ThreadDomain | None:
        """Its thread domain; None for the thread model SAFE, or where it is not open."""
        return self._td

    @property
    def parent(self) -> ParentDomain:
        """Its parent domain.

        :raises ClosedResourceError: it is not open.
        """
        self._check_open()
        assert self._parent is not None
        return self._parent

    def _placement(self) -> Placement:
        return self.parent._placement()

    @property
    def native(self) -> bool:
        """Whether the provider takes no locks for what is made on it."""
        return self._td is not None and self._td.native and self._parent is not None and self._parent.native

    @overload
    async def run(self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def run(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> object:
        """Call a function on the loop that owns the domain, from any asyncio event loop: see `run_on_owner`."""
        self._check_open()
        return await run_on_owner(self.owner, function, *args, **kwargs)


class XrcDomain(XrcParent):
    """An XRC domain: ``ibv_open_xrcd``. Any event loop may use it.

    Made by `Device.xrc_domain`.

    :param fd: "the file descriptor to associate with the XRCD": who opens one with the same inode opens the same; -1:
        no inode is associated, and nobody else opens it.
    :param oflag: ``os.O_CREAT``: it is created where it does not exist; with ``os.O_EXCL`` opening fails where it does.
    """

    def __init__(self, device: Resource, context: engine.Context, fd: int = -1, oflag: int = os.O_CREAT) -> None:
        super().__init__(device)
        self._context = context
        self._fd = fd
        self._oflag = oflag
        self._handle: engine.XrcDomain | None = None

    def _open(self) -> None:
        self._handle = engine.XrcDomain(self._context, self._fd, self._oflag)
        self._life.hold(self._handle)

    @property
    def handle(self) -> engine.XrcDomain:
        """The verbs object.

        :raises ClosedResourceError: it is not open.
        """
        self._check_open()
        assert self._handle is not None
        return self._handle

    def queue_pair(self, *, port: int = 1, gid_index: int = 1) -> QueuePair:
        """A queue pair of type XRC_RECV, to be opened. It has nothing but the domain: what arrives goes to the shared
        receive queues that its peers name.

        :param port: the device's port that it answers from.
        :param gid_index: which of the port's GIDs it answers from.
        """
        return QueuePair(self, None, None, qp_type=QpType.XRC_RECV, xrc_domain=self, port=port, gid_index=gid_index)

    async def aclose(self) -> None:
        """Close it: ``ibv_close_xrcd``.

        :raises BusyResourceError: something is still associated with it, which the verb refuses, too; nothing was done.
        :raises VerbsError: the verb failed; it is still open, and can be closed again.
        """
        if self._life.children:
            first = next(iter(self._life.children.values()))
            raise BusyResourceError(f"{self!r} cannot be closed: {first!r} is associated with it; close that first")
        await super().aclose()
