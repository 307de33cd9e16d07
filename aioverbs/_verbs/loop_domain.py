"""The resource domains of an event loop, each shared by all blocks on that loop that ask for the same settings."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from aioverbs._lifecycle.affinity import OwnedBlock, running_loop
from aioverbs._lifecycle.lifecycle import ResourceState, reap_orphan
from aioverbs._lifecycle.resource import lifecycle_of, open_now
from aioverbs._lifecycle.turns import LIGHT, spend, yield_to_loop
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.resource_domain import ResourceDomain
from aioverbs.allocators import Allocator, checked_allocator

__all__ = ["DomainKey", "LoopDomain", "SharedDomain"]

DomainKey = tuple[asyncio.AbstractEventLoop, MessageModel, int]
"""Key of a shared resource domain: its event loop, its message model and the ``id`` of its allocator. The domain keeps
a reference to the allocator, which need not be hashable."""


class SharedDomain:
    """Resource domain of an event loop and the number of blocks that use it.

    :param domain: the open domain.
    """

    def __init__(self, domain: ResourceDomain) -> None:
        self.domain = domain
        self.blocks = 0


class LoopDomain(OwnedBlock[ResourceDomain]):
    """Async context manager that `Device.loop_domain` returns; ``async with`` yields the open resource domain.

    This is a class instead of an async generator, because an event loop that ends closes its open generators, even in
    the middle of an await.

    :param make: function that makes a resource domain, which is opened here.
    :param domains: shared resource domains of the device.
    :param message_model: how awaits on the completion queues of the domain wait.
    :param allocator: allocator of the memory of queues; None for the provider's own.
    :raises ValueError: `message_model` is not a `MessageModel`.
    :raises TypeError: `allocator` lacks the methods of `Allocator`.
    """

    def __init__(
        self,
        make: Callable[..., ResourceDomain],
        domains: dict[DomainKey, SharedDomain],
        message_model: MessageModel,
        allocator: Allocator | None,
    ) -> None:
        super().__init__("loop_domain()", running_loop)
        self._make = make
        self._domains = domains
        self._message_model = MessageModel(message_model)
        self._allocator = checked_allocator(allocator)
        self._entered: tuple[DomainKey, SharedDomain] | None = None

    async def _begin(self) -> ResourceDomain:
        """Return the open resource domain of the running loop that has the settings of this block.

        The first block to ask for it opens the domain. Domains of loops that were closed inside a block are closed in
        the background. If code in a block has closed it, the next block opens a new one. This raises the exceptions
        that opening a `ResourceDomain` raises.
        """
        loop = running_loop()
        if turn := spend(LIGHT):
            await yield_to_loop(turn)
        # There is no await from here onward, so no other task can enter a block in the meantime.
        for other in tuple(self._domains):
            if other[0].is_closed() and (left := self._domains.pop(other, None)) is not None:
                reap_orphan(lifecycle_of(left.domain))
        key = loop, self._message_model, id(self._allocator)
        shared = self._domains.get(key)
        if shared is None or shared.domain.state is not ResourceState.OPEN:  # a block has closed it
            domain = self._make(message_model=self._message_model, allocator=self._allocator)
            open_now(domain)
            shared = self._domains[key] = SharedDomain(domain)
        shared.blocks += 1
        self._entered = key, shared
        return shared.domain

    async def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the block. If this is the last block on the domain, close the domain.

        If `Resource.aclose` raises an exception, that exception propagates, unless the block raised one: then a note
        about the failure is added to the block's exception. In both cases the next block opens a new domain.
        """
        assert self._entered is not None
        (key, shared), self._entered = self._entered, None
        shared.blocks -= 1
        if not shared.blocks:
            if self._domains.get(key) is shared:
                del self._domains[key]
            await shared.domain.__aexit__(kind, error, traceback)
