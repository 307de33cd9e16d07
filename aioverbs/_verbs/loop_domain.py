"""The one resource domain of an event loop, which blocks on it share."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.lifecycle import Life, State
from aioverbs._lifecycle.turns import LIGHT, go_round, spend
from aioverbs._verbs.resource_domain import ResourceDomain

__all__ = ["LoopDomain", "SharedByBlocks"]


class SharedByBlocks:
    """The resource domain of a loop, and how many blocks have it."""

    def __init__(self, domain: ResourceDomain) -> None:
        self.domain = domain
        self.blocks = 0


class LoopDomain:
    """What `Device.loop_domain` returns; it is in one block at a time.

    It is no generator: those that are open are closed by the end of their loop, in the middle of an await, too.

    :param make: makes a resource domain.
    :param domains: those of the device, by their loops.
    """

    def __init__(
        self, make: Callable[[], ResourceDomain], domains: dict[asyncio.AbstractEventLoop, SharedByBlocks]
    ) -> None:
        self._make = make
        self._domains = domains
        self._entered: tuple[asyncio.AbstractEventLoop, SharedByBlocks] | None = None
        self._life: Life | None = None  # of the last block's domain, also afterwards: who may leave it

    async def __aenter__(self) -> ResourceDomain:
        loop = running_loop()
        if turn := spend(LIGHT):
            await go_round(turn)
        # From here on there is no await, in which another one could come in.
        if self._entered is not None:
            raise RuntimeError("this is in a block already, which leaves the domain: call loop_domain() for each block")
        for other in tuple(self._domains):
            if other.is_closed():
                self._domains.pop(other, None)
        shared = self._domains.get(loop)
        if shared is None or shared.domain.state is not State.OPEN:  # somebody closed it
            domain = self._make()
            domain._open_now()
            shared = self._domains[loop] = SharedByBlocks(domain)
        shared.blocks += 1
        self._entered, self._life = (loop, shared), shared.domain._life
        return shared.domain

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._life is not None:
            if self._life.inherited:
                return
            self._life.check_owner("loop_domain")
        if self._entered is None:
            raise RuntimeError("this is in no block: there is nothing to leave")
        (loop, shared), self._entered = self._entered, None
        shared.blocks -= 1
        if not shared.blocks:
            if self._domains.get(loop) is shared:
                del self._domains[loop]
            await shared.domain.__aexit__(kind, error, traceback)
