"""The resource domain of an event loop, shared by all blocks on that loop that use it."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from aioverbs._lifecycle.affinity import OwnedBlock, running_loop
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import open_now
from aioverbs._lifecycle.turns import LIGHT, spend, yield_to_loop
from aioverbs._verbs.resource_domain import ResourceDomain

__all__ = ["LoopDomain", "SharedDomain"]


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
    :param domains: shared resource domains of the device, by event loop.
    """

    def __init__(
        self, make: Callable[[], ResourceDomain], domains: dict[asyncio.AbstractEventLoop, SharedDomain]
    ) -> None:
        super().__init__("loop_domain()", running_loop)
        self._make = make
        self._domains = domains
        self._entered: tuple[asyncio.AbstractEventLoop, SharedDomain] | None = None

    async def _begin(self) -> ResourceDomain:
        """Return the open resource domain of the running loop.

        The first block on the loop opens the domain. If code in a block has closed it, the next block opens a new one.
        This raises the exceptions that opening a `ResourceDomain` raises.
        """
        loop = running_loop()
        if turn := spend(LIGHT):
            await yield_to_loop(turn)
        # There is no await from here onward, so no other task can enter a block in the meantime.
        for other in tuple(self._domains):
            if other.is_closed():
                self._domains.pop(other, None)
        shared = self._domains.get(loop)
        if shared is None or shared.domain.state is not ResourceState.OPEN:  # a block has closed it
            domain = self._make()
            open_now(domain)
            shared = self._domains[loop] = SharedDomain(domain)
        shared.blocks += 1
        self._entered = loop, shared
        return shared.domain

    async def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the block. If this is the last block on the domain, close the domain.

        If `Resource.aclose` raises an exception, that exception propagates, unless the block raised one: then a note
        about the failure is added to the block's exception. In both cases the next block opens a new domain.
        """
        assert self._entered is not None
        (loop, shared), self._entered = self._entered, None
        shared.blocks -= 1
        if not shared.blocks:
            if self._domains.get(loop) is shared:
                del self._domains[loop]
            await shared.domain.__aexit__(kind, error, traceback)
