"""Resource domains: a thread domain, a parent domain and a protection domain in one."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, overload

from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, ThreadModel, owner_for, run_on_owner
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import Resource, lifecycle_of, open_part_now
from aioverbs._verbs.completion_queue import MessageModel, QueueLocation
from aioverbs._verbs.protection_domain import (
    InterchangeableDomain,
    ParentDomain,
    ProtectionDomain,
    base_of,
    with_base,
)
from aioverbs._verbs.thread_domain import ThreadDomain, ThreadDomainBudget
from aioverbs.allocators import Allocator, checked_allocator

__all__ = ["ResourceDomain"]

P = ParamSpec("P")
T = TypeVar("T")


class ResourceDomain(InterchangeableDomain):
    """A resource domain: the threads and messages of what is made on it, as ``ibv_exp_create_res_domain`` had it.

    It is made of a thread domain (for the thread models SINGLE and UNSAFE), a parent domain and, where none is given, a
    protection domain; `td`, `parent` and `pd` are these.

    Made by `Device.resource_domain`.

    :param pd: the protection domain, or a parent domain over it; None: one of its own.
    :param thread_model: who may use what is made on it.
    :param message_model: what its queues are good at.
    :param allocator: where the provider takes memory from; None: from its own.
    :param context: anything, which the allocator is given back.
    :param require_native: raise where the provider cannot drop its locks, instead of going on with them.
    """

    def __init__(
        self,
        device: Resource,
        of_device: handles.Context,
        budget: ThreadDomainBudget,
        pd: InterchangeableDomain | None = None,
        *,
        thread_model: ThreadModel = ThreadModel.SINGLE,
        message_model: MessageModel = MessageModel.DEFAULT,
        allocator: Allocator | None = None,
        context: object = None,
        require_native: bool = False,
    ) -> None:
        super().__init__(*with_base(pd if pd is not None else device))
        self._context = of_device
        self._budget = budget
        self._require_native = require_native
        self._pd = base_of("resource domain", pd) if pd is not None else ProtectionDomain(self, of_device, budget)
        self._td: ThreadDomain | None = None
        self._parent: ParentDomain | None = None
        self.thread_model = ThreadModel(thread_model)
        self.message_model = MessageModel(message_model)
        self.allocator = checked_allocator(allocator)
        self.context = context

    def _owner(self) -> Affinity | None:
        return owner_for(self.thread_model)

    def _open(self) -> None:
        owner = self._lifecycle.owner
        owns_pd = self._pd.state is ResourceState.NEW
        if owns_pd:
            open_part_now(self._pd)
        if owner is not None:
            self._td = open_part_now(
                ThreadDomain(self, self._context, self._budget, require_native=self._require_native, owner=owner)
            )
        # The parent domain is a child of this domain, too: closing this one closes it, after the queues on it.
        self._parent = parent = ParentDomain(
            self, self._td, self.allocator, self.context, require_native=self._require_native
        )
        # A given protection domain has both this domain and the parent domain as children.
        lifecycle_of(parent).close_last = not owns_pd
        open_part_now(parent, keeps_parents=False)
        self._handle = self._parent.handle

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

    def _queue_location(self) -> QueueLocation:
        return replace(self.parent._queue_location(), message_model=self.message_model)

    @property
    def native(self) -> bool:
        """Whether it is open and the provider takes no locks for what is made on it."""
        return self._td is not None and self._td.native and self._parent is not None and self._parent.native

    @overload
    async def run(self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def run(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> object:
        """Call a function on the loop that owns the domain, from any asyncio event loop; its result comes back.

        Context variables go with it. A plain function is called between the owner's tasks, a coroutine function is
        awaited in one of its own. Without an owner, or by the owner itself, it is called at once. A cancellation goes
        there, too, once, and is raised here when the function has ended, or what that raised on its way out.

        :raises AffinityError: the owner is gone.
        :raises RuntimeError: it is called from elsewhere than an asyncio event loop.
        :raises ForkedProcessError: the owner is of the process that this one was forked from.
        :raises BrokenResourceError: the owner's loop cancelled the function, as it does when it ends; or the function
            ended that loop, by a SystemExit.
        """
        self._check_open()
        return await run_on_owner(self.owner, function, *args, **kwargs)


publish(__name__)
