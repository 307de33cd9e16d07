"""A queue pair, called from a loop that it does not belong to, as nobody should: what stops that, and what is then."""

import asyncio
from dataclasses import dataclass

from aioverbs._memory.region import MemoryRegion
from aioverbs._verbs.base_domain import Domain
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs.errors import AffinityError
from aioverbs.types import AccessFlags

__all__ = ["Misuse", "misuse"]

_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
_DATA = b"to be written"


@dataclass(frozen=True)
class Misuse:
    """What came of it.

    :param error: what stopped it, as it is; None: nothing did.
    :param untouched: whether no byte was written by that.
    :param works: whether the same call from the loop that the queue pair belongs to was done, after that.
    """

    error: str | None
    untouched: bool
    works: bool


async def misuse(domain: Domain) -> Misuse:
    """Call a queue pair of the running loop's domain from another thread with another loop; then from this one."""
    size = len(_DATA)
    async with (
        domain.register(2 * size, _ACCESS) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), _ACCESS)
        far.connect(near.local_endpoint(), _ACCESS)
        region.buffer[:size] = _DATA
        error: str | None = None
        try:
            await asyncio.to_thread(lambda: asyncio.run(_write(near, region)))
        except AffinityError as found:
            error = str(found)
        untouched = bytes(region.buffer[size:]) == bytes(size)
        if error is not None:
            await _write(near, region)
        return Misuse(error, untouched, error is not None and bytes(region.buffer[size:]) == _DATA)


async def _write(qp: QueuePair, region: MemoryRegion) -> None:
    size = len(_DATA)
    await qp.write(region[:size], region.remote()[size:])
