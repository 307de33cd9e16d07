"""Resource domains: a thread domain, a parent domain and a protection domain in one."""

from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, overload

from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, ThreadModel, owner_for, run_on_owner
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import Resource, check_open, lifecycle_of, open_part_now
from aioverbs._verbs.completion_queue import MessageModel, QueueLocation
from aioverbs._verbs.protection_domain import (
    InterchangeableDomain,
    ParentDomain,
    ProtectionDomain,
    base_protection_domain,
    check_same_device,
    with_base,
)
from aioverbs._verbs.thread_domain import ThreadDomain, ThreadDomainBudget
from aioverbs.allocators import Allocator, checked_allocator

__all__ = ["ResourceDomain"]

P = ParamSpec("P")
T = TypeVar("T")


class ResourceDomain(InterchangeableDomain):
    """A resource domain: declares how threads use its resources and how awaits wait, like
    ``ibv_exp_create_res_domain``.

    It consists of a thread domain (for the thread models SINGLE and UNSAFE), a parent domain and a protection domain,
    which are available as the attributes `td`, `parent` and `pd`. Made by `Device.resource_domain`.

    :param device: device of the domain.
    :param device_context: open context of the device.
    :param budget: budget of native thread domains of the device.
    :param pd: protection domain, or domain interchangeable with one, to build on; None to make a new protection domain.
    :param thread_model: rule for the threads that may use the resources of the domain.
    :param message_model: how awaits on the completion queues of the domain wait.
    :param allocator: allocator of the memory of queues; None for the provider's own.
    :param context: opaque user data, passed to the allocator.
    :param require_native: True if opening must raise `VerbsError` when the provider cannot drop its locks; False to
        continue with the locks in this case.
    :raises TypeError: `pd` is of another type, or `allocator` lacks the methods of `Allocator`.
    :raises ValueError: `pd` belongs to another device.
    :raises RuntimeError: on opening with the thread model SINGLE: no asyncio event loop is running.
    :raises VerbsError: on opening: a verb failed; with EOPNOTSUPP or ENOSPC, also if `require_native` cannot be met.
    """

    def __init__(
        self,
        device: Resource,
        device_context: handles.Context,
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
        self._context = device_context
        self._budget = budget
        self._require_native = require_native
        self._pd = (
            base_protection_domain("resource domain", pd)
            if pd is not None
            else ProtectionDomain(self, device_context, budget)
        )
        check_same_device(device, device_context, self._pd)
        self._td: ThreadDomain | None = None
        self._parent: ParentDomain | None = None
        self._location: QueueLocation | None = None
        self.thread_model = ThreadModel(thread_model)
        self.message_model = MessageModel(message_model)
        self.allocator = checked_allocator(allocator)
        self.context = context

    def _owner(self) -> Affinity | None:
        """Return a new owner, an `Affinity`, for the thread models SINGLE and UNSAFE; None for SAFE, which needs none.

        :raises RuntimeError: the thread model is SINGLE, and no asyncio event loop is running.
        """
        return owner_for(self.thread_model)

    def _open(self) -> None:
        """Open the parts of this domain: a thread domain, a parent domain, and a protection domain if none was given.

        With the thread model SAFE, there is no thread domain.

        :raises VerbsError: a verb failed, or ``require_native`` cannot be met.
        :raises ClosedResourceError: the given protection domain is not open.
        """
        owner = self._lifecycle.owner
        owns_pd = self._pd.state is ResourceState.NEW
        if owns_pd:
            open_part_now(self._pd)
        if owner is not None:
            self._td = open_part_now(
                ThreadDomain(self, self._context, self._budget, require_native=self._require_native, owner=owner)
            )
        # The parent domain is a child of this domain, too: closing this domain closes it, after the queues on it.
        self._parent = parent = ParentDomain(
            self, self._td, self.allocator, self.context, require_native=self._require_native
        )
        # A given protection domain has both this domain and the parent domain as children.
        lifecycle_of(parent).close_last = not owns_pd
        open_part_now(parent, keeps_parents=False)
        self._handle = parent.handle
        self._location = QueueLocation(
            parent.handle, self._pd.handle, parent.owner, parent.native, self.message_model
        )  # one for all queues

    @property
    def base(self) -> ProtectionDomain:
        """Protection domain that this resource domain is built on; memory is registered on it."""
        return self._pd

    pd = base

    @property
    def td(self) -> ThreadDomain | None:
        """Thread domain of this domain; None for the thread model SAFE, or if this domain was never opened."""
        return self._td

    @property
    def parent(self) -> ParentDomain:
        """Parent domain on which the resources of this domain are created. It is closed together with this domain.

        :raises ClosedResourceError: the domain is not open.
        """
        self._check_open()
        assert self._parent is not None
        return self._parent

    def _queue_location(self) -> QueueLocation:
        check_open(self.parent)
        check_open(self._pd)
        assert self._location is not None
        return self._location

    @property
    def native(self) -> bool:
        """Whether the domain is open and the provider takes no locks for resources that are created on it."""
        return self._td is not None and self._td.native and self._parent is not None and self._parent.native

    @overload
    async def run(self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def run(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> object:
        """Call a function on the event loop that owns the domain, from any asyncio event loop, and return its result.

        A plain function is called between the tasks of the owner's loop; a coroutine function is awaited in a task of
        its own. The function runs with the caller's context variables. If the domain has no owner, or the caller is on
        the owner's loop, the function is called directly. If the caller is cancelled, the function is cancelled once,
        and the caller still waits until the function has ended. It then raises the cancellation, or the exception that
        the function raised in response to it. Other exceptions that the function raises propagate unchanged.

        :param function: function or coroutine function to call.
        :param args: positional arguments of the function.
        :param kwargs: keyword arguments of the function.
        :returns: the result of the function.
        :raises AffinityError: the owner's loop is closed or its thread has ended.
        :raises RuntimeError: the domain belongs to an event loop, and no asyncio event loop is running here.
        :raises ForkedProcessError: the owner belongs to the parent process of a fork.
        :raises BrokenResourceError: the owner's loop cancelled the function, for example because the loop ended; or the
            function ended that loop with SystemExit or KeyboardInterrupt.
        :raises ClosedResourceError: the domain is not open.
        """
        self._check_open()
        return await run_on_owner(self.owner, function, *args, **kwargs)


publish(__name__)
