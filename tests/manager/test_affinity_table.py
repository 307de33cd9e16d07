"""Every public method of what a loop owns with every wrong caller: refused, with nothing changed."""

import asyncio
import concurrent.futures
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    AffinityError,
    CompletionQueue,
    Device,
    MemoryRegion,
    Mtu,
    ParentDomain,
    QueuePair,
    QueuePairAddress,
    Resource,
    ResourceDomain,
    SharedReceiveQueue,
    State,
    ThreadDomain,
)
from tests.conftest import LOOP_FACTORIES

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
ADDRESS = QueuePairAddress(bytes(16), 1, 1, Mtu.MTU_1024)
Factory = Callable[[], asyncio.AbstractEventLoop]


@dataclass
class Owned:
    """One of each kind that a loop owns, and memory, which is anybody's."""

    td: ThreadDomain
    parent: ParentDomain
    parent_cq: CompletionQueue
    domain: ResourceDomain
    cq: CompletionQueue
    qp: QueuePair
    srq: SharedReceiveQueue
    region: MemoryRegion

    def resources(self) -> list[Resource]:
        return [self.td, self.parent, self.domain, self.cq, self.qp, self.srq]


@asynccontextmanager
async def owned(device: Device) -> AsyncIterator[Owned]:
    async with (
        device.protection_domain() as pd,
        device.thread_domain() as td,
        pd.parent_domain(td) as parent,
        parent.completion_queue(4) as parent_cq,
        device.resource_domain(pd) as domain,
        domain.completion_queue(4) as cq,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(cq, srq=srq) as qp,
        domain.register(64, ACCESS) as region,
    ):
        qp.connect(qp.address, ACCESS)
        yield Owned(td, parent, parent_cq, domain, cq, qp, srq, region)


# What calls a verb, or opens something that does, by kind.
Call = Callable[[Owned], object | Awaitable[object]]
CALLS: dict[type[Resource], dict[str, Call]] = {
    ThreadDomain: {"aclose": lambda of: of.td.aclose()},
    ParentDomain: {
        "aclose": lambda of: of.parent.aclose(),
        "completion_queue": lambda of: of.parent.completion_queue(4).open(),
        "queue_pair": lambda of: of.parent.queue_pair(of.parent_cq).open(),
        "shared_receive_queue": lambda of: of.parent.shared_receive_queue(4).open(),
    },
    ResourceDomain: {
        "aclose": lambda of: of.domain.aclose(),
        "completion_queue": lambda of: of.domain.completion_queue(4).open(),
        "queue_pair": lambda of: of.domain.queue_pair(of.cq).open(),
        "shared_receive_queue": lambda of: of.domain.shared_receive_queue(4).open(),
    },
    CompletionQueue: {"aclose": lambda of: of.cq.aclose()},
    QueuePair: {
        "aclose": lambda of: of.qp.aclose(),
        "connect": lambda of: of.qp.connect(ADDRESS, ACCESS),
        "query": lambda of: of.qp.query(),
        "write": lambda of: of.qp.write(of.region[:8], of.region.remote()[8:16]),
    },
    SharedReceiveQueue: {
        "aclose": lambda of: of.srq.aclose(),
        "number": lambda of: of.srq.number,
        "query": lambda of: of.srq.query(),
    },
}
# What calls none: attributes, what is for anybody, and `open`, which a new object has and these have behind them.
FREE = {
    "address", "adopt_memory_region", "allocator", "base", "buffer_pool", "cache", "capabilities", "closed", "context",
    "events", "handle", "label", "message_model", "native", "native_allocators", "open", "owner", "parent", "pd",
    "qp_num", "qp_type", "register", "run", "state", "statistics", "td", "thread_model",
}  # fmt: skip


def test_the_table_is_whole() -> None:
    for kind, calls in CALLS.items():
        public = {name for name in dir(kind) if not name.startswith("_")}
        assert public - FREE == set(calls), kind.__name__


async def refused(of: Owned) -> int:
    """Call everything; how much that was."""
    asked = 0
    for calls in CALLS.values():
        for call in calls.values():
            with pytest.raises(AffinityError, match="which belongs to thread"):
                await _done(call(of))
            asked += 1
    return asked


async def _done(result: object) -> None:
    if inspect.isawaitable(result):
        await result


def without_a_loop(of: Owned) -> int:
    """The same where no loop runs: only what is not a coroutine gets as far as a verb."""
    asked = 0
    for calls in CALLS.values():
        for call in calls.values():
            try:
                result: Any = call(of)
            except AffinityError:
                asked += 1
            else:
                assert inspect.iscoroutine(result)
                result.close()
    return asked


async def check(of: Owned) -> None:
    """All is as it was, for the owner."""
    assert [resource.state for resource in of.resources()] == [State.OPEN] * 6
    assert of.cq.statistics().under_way == len(of.region.pins) == 0
    assert of.srq.query().max_wr >= 4
    of.region.buffer[:8] = b"as ever."
    await of.qp.write(of.region[:8], of.region.remote()[8:16])
    assert bytes(of.region.buffer[8:16]) == b"as ever."


TABLE = sum(len(calls) for calls in CALLS.values())


@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
async def test_a_thread_with_a_loop(device: Device, factory: Factory) -> None:
    def run(of: Owned) -> int:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(refused(of))

    async with owned(device) as of:
        assert await asyncio.to_thread(run, of) == TABLE
        await check(of)


async def test_a_thread_without_one_and_an_executor(device: Device) -> None:
    async with owned(device) as of:
        assert await asyncio.to_thread(without_a_loop, of) == 4
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            assert await asyncio.get_running_loop().run_in_executor(executor, without_a_loop, of) == 4
        await check(of)


@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
def test_the_owners_thread_with_another_loop_or_none(factory: Factory) -> None:
    from aioverbs import open_device

    loop, other = factory(), factory()
    scene = _scene(open_device("soft0"))
    try:
        of = loop.run_until_complete(anext(scene))
        assert other.run_until_complete(refused(of)) == TABLE
        assert without_a_loop(of) == 4
        loop.run_until_complete(check(of))
        loop.run_until_complete(scene.aclose())
    finally:
        other.close()
        loop.close()


async def _scene(device: Device) -> AsyncGenerator[Owned, None]:
    async with device, owned(device) as of:
        yield of
