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
    Batch,
    CompletionQueue,
    Device,
    Endpoint,
    MemoryRegion,
    MemoryWindow,
    Mtu,
    Operation,
    ParentDomain,
    QpState,
    QueuePair,
    Resource,
    ResourceDomain,
    SharedReceiveQueue,
    State,
    ThreadDomain,
)
from tests.conftest import LOOP_FACTORIES

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
WINDOW = AccessFlags.REMOTE_WRITE
ENDPOINT = Endpoint(bytes(range(16)), 1, 1, Mtu.MTU_1024)
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
    receiver: QueuePair
    srq: SharedReceiveQueue
    region: MemoryRegion
    window: MemoryWindow
    batch: Batch
    posted: Batch
    operation: Operation[None]

    def resources(self) -> list[Resource]:
        return [self.td, self.parent, self.domain, self.cq, self.qp, self.receiver, self.srq]

    @property
    def rkey(self) -> int:
        return self.region.remote().rkey


@asynccontextmanager
async def owned(device: Device) -> AsyncIterator[Owned]:
    async with (
        device.protection_domain() as pd,
        device.thread_domain() as td,
        pd.parent_domain(td) as parent,
        parent.completion_queue(64) as parent_cq,
        device.resource_domain(pd) as domain,
        domain.completion_queue(64) as cq,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(cq, srq=srq) as qp,
        domain.queue_pair(cq) as receiver,
        domain.register(64, ACCESS | AccessFlags.MW_BIND) as region,
        domain.memory_window() as window,
    ):
        qp.connect(qp.local_endpoint(), ACCESS)
        receiver.to_init()
        batch, posted = qp.batch(), qp.batch()
        posted.write(region[:8], region.remote()[8:16])
        operation = qp.write(region[:8], region.remote()[8:16])
        yield Owned(td, parent, parent_cq, domain, cq, qp, receiver, srq, region, window, batch, posted, operation)


# What calls a verb, or opens something that does, by kind.
Call = Callable[[Owned], object | Awaitable[object]]
CALLS: dict[type[object], dict[str, Call]] = {
    ThreadDomain: {"aclose": lambda of: of.td.aclose()},
    ParentDomain: {
        "aclose": lambda of: of.parent.aclose(),
        "completion_queue": lambda of: of.parent.completion_queue(64).open(),
        "queue_pair": lambda of: of.parent.queue_pair(of.parent_cq).open(),
        "shared_receive_queue": lambda of: of.parent.shared_receive_queue(4).open(),
    },
    ResourceDomain: {
        "aclose": lambda of: of.domain.aclose(),
        "completion_queue": lambda of: of.domain.completion_queue(64).open(),
        "queue_pair": lambda of: of.domain.queue_pair(of.parent_cq).open(),
        "shared_receive_queue": lambda of: of.domain.shared_receive_queue(4).open(),
    },
    CompletionQueue: {"aclose": lambda of: of.cq.aclose(), "resize": lambda of: of.cq.resize(128)},
    QueuePair: {
        "aclose": lambda of: of.qp.aclose(),
        "activate": lambda of: of.qp.activate(),
        "bind_window": lambda of: of.qp.bind_window(of.window, of.region, WINDOW),
        "bind_window_nowait": lambda of: of.qp.bind_window_nowait(of.window, of.region, WINDOW),
        "compare_and_swap": lambda of: of.qp.compare_and_swap(of.region.remote()[:8], 0, 1),
        "compare_and_swap_nowait": lambda of: of.qp.compare_and_swap_nowait(of.region.remote()[:8], 0, 1),
        "connect": lambda of: of.qp.connect(ENDPOINT, ACCESS),
        "establish": lambda of: of.qp.establish(ENDPOINT, ACCESS),
        "fetch_and_add": lambda of: of.qp.fetch_and_add(of.region.remote()[:8], 1),
        "fetch_and_add_nowait": lambda of: of.qp.fetch_and_add_nowait(of.region.remote()[:8], 1),
        "invalidate": lambda of: of.qp.invalidate(of.rkey),
        "invalidate_nowait": lambda of: of.qp.invalidate_nowait(of.rkey),
        "query": lambda of: of.qp.query(),
        "read": lambda of: of.qp.read(of.region[:8], of.region.remote()[8:16]),
        "read_nowait": lambda of: of.qp.read_nowait(of.region[:8], of.region.remote()[8:16]),
        "receive": lambda of: of.receiver.receive(of.region[:8]),
        "receive_nowait": lambda of: of.receiver.receive_nowait(of.region[:8]),
        "send": lambda of: of.qp.send(of.region[:8]),
        "send_nowait": lambda of: of.qp.send_nowait(of.region[:8]),
        "send_with_invalidate": lambda of: of.qp.send_with_invalidate(of.region[:8], of.rkey),
        "send_with_invalidate_nowait": lambda of: of.qp.send_with_invalidate_nowait(of.region[:8], of.rkey),
        "to_error": lambda of: of.qp.to_error(),
        "to_init": lambda of: of.qp.to_init(),
        "to_reset": lambda of: of.qp.to_reset(),
        "to_rtr": lambda of: of.qp.to_rtr(ENDPOINT),
        "to_rts": lambda of: of.qp.to_rts(),
        "to_sqd": lambda of: of.qp.to_sqd(),
        "write": lambda of: of.qp.write(of.region[:8], of.region.remote()[8:16]),
        "write_nowait": lambda of: of.qp.write_nowait(of.region[:8], of.region.remote()[8:16]),
        "write_with_immediate": lambda of: of.qp.write_with_immediate(of.region[:8], of.region.remote()[8:16], 1),
        "write_with_immediate_nowait": lambda of: of.qp.write_with_immediate_nowait(
            of.region[:8], of.region.remote()[8:16], 1
        ),
    },
    Batch: {
        "compare_and_swap": lambda of: of.batch.compare_and_swap(of.region.remote()[:8], 0, 1),
        "fetch_and_add": lambda of: of.batch.fetch_and_add(of.region.remote()[:8], 1),
        "invalidate": lambda of: of.batch.invalidate(of.rkey),
        "post": lambda of: of.posted.post(),
        "post_nowait": lambda of: of.posted.post_nowait(),
        "read": lambda of: of.batch.read(of.region[:8], of.region.remote()[8:16]),
        "send": lambda of: of.batch.send(of.region[:8]),
        "send_with_invalidate": lambda of: of.batch.send_with_invalidate(of.region[:8], of.rkey),
        "write": lambda of: of.batch.write(of.region[:8], of.region.remote()[8:16]),
        "write_with_immediate": lambda of: of.batch.write_with_immediate(of.region[:8], of.region.remote()[8:16], 1),
    },
    Operation: {
        "await": lambda of: awaiting(of.operation),
        "close": lambda of: of.operation.close(),
        "done": lambda of: of.operation.done(),
        "send": lambda of: of.operation.send(None),
        "throw": lambda of: of.operation.throw(ValueError),
    },
    SharedReceiveQueue: {
        "aclose": lambda of: of.srq.aclose(),
        "number": lambda of: of.srq.number,
        "query": lambda of: of.srq.query(),
        "receive": lambda of: of.srq.receive(of.region[:8]),
        "receive_nowait": lambda of: of.srq.receive_nowait(of.region[:8]),
    },
}
# What calls none: attributes, what is for anybody, and `open`, which a new object has and these have behind them.
FREE = {
    "address_handle", "adopt_memory_region", "allocator", "base", "batch", "buffer_pool", "cache", "capabilities",
    "closed", "completer", "context", "depth", "events", "gid_index", "handle", "label", "local_endpoint",
    "import_memory_region", "memory_window", "message_model", "messages", "moderated", "native", "native_allocators",
    "open", "owner", "parent", "parent_domain", "path_to", "pd", "qp_num", "qp_state", "qp_type", "register",
    "remote_endpoint", "run", "share", "shared_memory", "state", "statistics", "td", "thread_model", "work",
}  # fmt: skip
# Of an operation: what it ended by is anybody's to read.
FREE_OF_OPERATION = {"ended", "result"}


async def awaiting(operation: Operation[None]) -> None:
    await operation


def test_the_table_is_whole() -> None:
    for kind, calls in CALLS.items():
        public = {name for name in dir(kind) if not name.startswith("_")}
        free = FREE_OF_OPERATION if kind is Operation else FREE
        assert public - free == set(calls) - {"await"}, kind.__name__


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
    """The same where no loop runs: only what is not a coroutine function gets as far as a verb."""
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
    assert [resource.state for resource in of.resources()] == [State.OPEN] * 7
    before = of.qp.statistics()
    assert (before.sends.posted, before.sends.queued, of.receiver.statistics().receives.posted) == (1, 0, 0)
    assert (len(of.batch), len(of.posted), of.cq.statistics().depth >= 128) == (0, 1, False)
    assert of.srq.statistics().posted == 0
    assert of.srq.query().max_wr >= 4
    await of.operation
    assert of.cq.statistics().under_way == 0
    of.region.buffer[:8] = b"as ever."
    await of.posted.post()
    assert bytes(of.region.buffer[8:16]) == b"as ever."
    assert len(of.region.pins) == 0
    assert of.window.rkey == of.window.handle.rkey


TABLE = sum(len(calls) for calls in CALLS.values())
SYNCHRONOUS = TABLE - sum(name in ("aclose", "await", "establish") for calls in CALLS.values() for name in calls) - 6


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
        assert await asyncio.to_thread(without_a_loop, of) == SYNCHRONOUS
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            assert await asyncio.get_running_loop().run_in_executor(executor, without_a_loop, of) == SYNCHRONOUS
        await check(of)


@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
def test_the_owners_thread_with_another_loop_or_none(factory: Factory) -> None:
    from aioverbs import open_device

    loop, other = factory(), factory()
    scene = _scene(open_device("soft0"))
    try:
        of = loop.run_until_complete(anext(scene))
        assert other.run_until_complete(refused(of)) == TABLE
        assert without_a_loop(of) == SYNCHRONOUS
        loop.run_until_complete(check(of))
        loop.run_until_complete(scene.aclose())
    finally:
        other.close()
        loop.close()


@pytest.mark.once
async def test_a_queue_pair_is_of_the_owner_of_its_completion_queue(device: Device) -> None:
    async with (
        device.protection_domain() as pd,
        device.resource_domain(pd) as domain,
        domain.completion_queue(64) as cq,
        pd.completion_queue(64) as anybodys,
        pd.queue_pair(cq) as sends,
        pd.queue_pair(anybodys, cq) as receives,
    ):
        for qp in (sends, receives):
            assert qp.owner is domain.owner is cq.owner
            qp.to_init()

            async def elsewhere(qp: QueuePair = qp) -> None:
                for change in (qp.to_error, qp.to_reset, qp.aclose):
                    with pytest.raises(AffinityError, match="which belongs to thread"):
                        await _done(change())

            await asyncio.to_thread(asyncio.run, elsewhere())
            assert qp.query().qp_state is QpState.INIT


async def _scene(device: Device) -> AsyncGenerator[Owned, None]:
    async with device, owned(device) as of:
        yield of
