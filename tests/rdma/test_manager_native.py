"""The resource manager with native domains, in the structures of a live kernel context.

Kernel soft-RoCE lacks thread domains, parent domains and XRC domains: the test-only library of `shim.h` adds them to
the context that the manager has open. Without the shim the manager works without them, which is tested here, too.
"""

import asyncio
import itertools
import os
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from aioverbs import (
    USE_DEFAULT,
    AccessFlags,
    AffinityError,
    BusyResourceError,
    ClosedResourceError,
    Device,
    MessageModel,
    QpType,
    RecordingAllocator,
    SharedPageAllocator,
    ThreadModel,
    VerbsError,
    open_device,
)
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import Resource
from aioverbs._memory.region import MemoryRegion
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs._verbs.resource_domain import ResourceDomain
from tests.core.allocators import Recording
from tests.rdma.seam import rdma_devices
from tests.rdma.shim import CONTROL_PAGE, Shim

pytestmark = pytest.mark.rdma

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
every_model = pytest.mark.parametrize("model", ThreadModel, ids=lambda model: model.name)


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    async with open_device(rdma_devices()[0]) as device:
        yield device


@pytest.fixture
def shim(device: Device) -> Iterator[Shim]:
    shim = Shim(device.handle)
    yield shim
    shim.uninstall()


@asynccontextmanager
async def ends(domain: ResourceDomain) -> AsyncIterator[tuple[QueuePair, MemoryRegion, MemoryRegion]]:
    """Open a connected queue pair, memory to write from, and memory to write to."""
    async with (
        domain.register(4096, REMOTE) as source,
        domain.register(4096, REMOTE) as target,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), REMOTE)
        far.connect(near.local_endpoint(), REMOTE)
        yield near, source, target
        assert (cq.statistics().in_flight, len(source.pins)) == (0, 0)


async def write(near: QueuePair, source: MemoryRegion, target: MemoryRegion) -> None:
    """Write once, then many times concurrently."""
    source.buffer[:256] = bytes(range(256))
    await near.write(source[:16], target.remote()[:16])
    await asyncio.gather(
        *(near.write(source[at : at + 16], target.remote()[at : at + 16]) for at in range(16, 256, 16))
    )
    assert bytes(target.buffer[:256]) == bytes(range(256))


# ---- Thread domains, parent domains


async def test_thread_domains_are_native(device: Device, shim: Shim) -> None:
    async with device.thread_domain(require_native=True) as first, device.thread_domain() as second:
        assert first.native
        assert second.native
        assert shim.alive() == {"tds": 2}
        assert device.statistics().native_thread_domains == 2
        assert first.handle is not None
        with pytest.raises(AffinityError, match="ibv_dealloc_td"):
            await asyncio.to_thread(first.handle.destroy)
        assert shim.alive() == {"tds": 2}
    assert device.statistics().native_thread_domains == 0


async def test_native_thread_domains_are_limited_by_the_budget(device: Device, shim: Shim) -> None:
    async with device.thread_domain() as first:
        device._budget.limit = 1
        async with device.thread_domain() as second, device.protection_domain() as pd:
            assert (first.native, second.native, shim.alive()["tds"]) == (True, False, 1)
            async with pd.parent_domain(second) as parent:  # the thread domain stays open only up to here
                assert parent.native
                assert parent.owner is second.owner
                with pytest.raises(VerbsError, match="is not native"):
                    await pd.parent_domain(second, require_native=True).open()


async def test_a_parent_domain_calls_its_allocator(device: Device, shim: Shim) -> None:
    ours, native = Recording(), RecordingAllocator(SharedPageAllocator())
    async with device.protection_domain() as pd, device.thread_domain() as td:
        async with (
            pd.parent_domain(td, ours, "mine", require_native=True) as parent,
            pd.parent_domain(td, native) as another,
            pd.parent_domain() as plain,
        ):
            assert (parent.native_allocators, another.native_allocators, plain.native_allocators) == (True, True, False)
            assert parent.context == "mine"
            (piece,) = ours.live
            assert (piece.size, piece.alignment, piece.resource_type) == (4096, 4096, CONTROL_PAGE)
            (usage,) = native.usage().values()
            assert (usage.pieces, usage.size_bytes) == (1, 4096)
            assert shim.alive() == {"tds": 1, "parents": 3}
        assert not ours.live
        assert all(not usage.pieces for usage in native.usage().values())
        assert (shim.counts()["alloc_calls"], shim.counts()["free_calls"]) == (2, 2)


async def test_an_allocator_may_decline_or_fail(device: Device, shim: Shim) -> None:
    def fail(*_: object) -> object:
        raise MemoryError("no pages left")

    async with device.protection_domain() as pd:
        async with pd.parent_domain(allocator=Recording(lambda *_: USE_DEFAULT)) as parent:
            assert parent.native
        with pytest.raises(VerbsError, match="ibv_alloc_parent_domain failed: ENOMEM") as caught:
            await pd.parent_domain(allocator=Recording(fail)).open()
        assert str(caught.value.__cause__) == "no pages left"
        with pytest.raises(VerbsError, match="ibv_alloc_parent_domain failed: EINVAL") as caught:
            # The same errno as of a provider without allocators; for that one, the manager would continue without the
            # allocator.
            await pd.parent_domain(allocator=Recording(unaligned)).open()
        assert "not aligned to 4096 bytes" in str(caught.value.__cause__)
        assert not shim.alive()


def unaligned(recording: Recording, size: int, alignment: int, resource_type: int) -> int:
    piece = recording.piece(size + 8, alignment, resource_type)
    piece.address += 8
    return piece.address


# ---- Resource domains


@every_model
async def test_a_write(device: Device, shim: Shim, model: ThreadModel) -> None:
    allocator = Recording()
    async with device.resource_domain(
        thread_model=model, message_model=MessageModel.LOW_LATENCY, allocator=allocator
    ) as domain:
        bound = model is not ThreadModel.SAFE
        assert (domain.native, domain.parent.native) == (bound, True)
        assert shim.alive() == ({"tds": 1, "parents": 1} if bound else {"parents": 1})
        assert len(allocator.live) == 1
        async with ends(domain) as (near, source, target):
            await write(near, source, target)
            if model is ThreadModel.SINGLE:
                with pytest.raises(AffinityError, match="ibv_query_qp"):
                    await asyncio.to_thread(near.query)
            else:
                assert (await asyncio.to_thread(near.query)).qp_state.name == "RTS"
    assert not allocator.live


@pytest.mark.parametrize("model", [ThreadModel.UNSAFE, ThreadModel.SAFE], ids=lambda model: model.name)
async def test_a_write_from_another_loop(device: Device, shim: Shim, model: ThreadModel) -> None:
    async with device.resource_domain(thread_model=model) as domain, ends(domain) as (near, source, target):
        await asyncio.to_thread(asyncio.run, write(near, source, target))


async def test_a_domain_for_each_loop_over_one_protection_domain(device: Device, shim: Shim) -> None:
    """One protection domain and one memory region, with a thread domain for each loop's thread."""
    async with device.protection_domain() as pd, pd.register(bytearray(8192), REMOTE) as shared:
        started = threading.Barrier(3, timeout=60)

        async def serve(number: int) -> None:
            async with device.resource_domain(pd, require_native=True) as domain, ends(domain) as (near, source, _):
                await asyncio.to_thread(started.wait)
                source.buffer[:8] = bytes([number]) * 8
                await near.write(source[:8], shared.remote()[8 * number : 8 * number + 8])

        async def serve_here() -> None:
            await serve(2)

        others = [asyncio.to_thread(asyncio.run, serve(number)) for number in range(2)]
        await asyncio.gather(serve_here(), *others)
        assert bytes(shared.buffer[:24]) == b"\0" * 8 + b"\1" * 8 + b"\2" * 8
        assert not shim.alive()


# ---- Orders of closing


PARTS = ("pd", "td", "parent", "qp")


async def opened_parts(device: Device, td_first: bool) -> dict[str, Resource]:
    pd, td = device.protection_domain(), device.thread_domain()
    for part in (td, pd) if td_first else (pd, td):
        await part.open()
    parent = await pd.parent_domain(td).open()
    cq = await parent.completion_queue(64).open()
    cq._lifecycle.suppress_warning = True
    return {"pd": pd, "td": td, "parent": parent, "qp": await parent.queue_pair(cq).open()}


@pytest.mark.rdma_all
@pytest.mark.parametrize("td_first", [False, True], ids=["pd first", "td first"])
@pytest.mark.parametrize("order", list(itertools.permutations(PARTS)), ids="-".join)
async def test_every_order_of_closing(device: Device, shim: Shim, order: tuple[str, ...], td_first: bool) -> None:
    parts = await opened_parts(device, td_first)
    assert shim.alive() == {"tds": 1, "parents": 1}
    # Closing a domain closes everything created from it, with a warning for each object that was left open.
    below = {"qp": {"qp"}, "parent": {"qp", "parent"}, "td": {"qp", "parent", "td"}, "pd": {"qp", "parent", "pd"}}
    closed: set[str] = set()
    for name in order:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await parts[name].aclose()
        left_open = below[name] - closed - {name} if name not in closed else set()
        assert len(caught) == len(left_open), [str(each.message) for each in caught]
        closed |= below[name]
        assert {each for each, part in parts.items() if part.state is ResourceState.CLOSED} == closed
        expected = {"tds": "td" not in closed, "parents": "parent" not in closed}
        assert shim.alive() == {what: 1 for what, there in expected.items() if there}


async def test_objects_of_another_loop_keep_domains_open(device: Device, shim: Shim) -> None:
    async with device.protection_domain() as pd:
        ready, done = threading.Event(), threading.Event()

        async def own() -> None:
            async with device.resource_domain(pd):
                ready.set()
                assert await asyncio.to_thread(done.wait, 60)

        other = asyncio.create_task(asyncio.to_thread(asyncio.run, own()))
        assert await asyncio.to_thread(ready.wait, 60)
        with pytest.raises(BusyResourceError, match="close that resource there first"):
            await pd.aclose()
        assert shim.alive() == {"tds": 1, "parents": 1}
        done.set()
        await other


async def test_a_closed_loop_leaves_orphans(device: Device, shim: Shim) -> None:
    async with device.protection_domain() as pd:
        left: list[ResourceDomain] = []

        async def leave() -> None:
            left.append(await device.resource_domain(pd).open())

        await asyncio.to_thread(asyncio.run, leave())
        assert shim.alive() == {"tds": 1, "parents": 1}
        with pytest.warns(ResourceWarning, match="was still open"):
            await pd.aclose()
        assert not shim.alive()
        assert left[0].closed


# ---- XRC domains


async def test_an_xrc_domain(device: Device, shim: Shim, tmp_path: Path) -> None:
    path = tmp_path / "domain"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        async with device.xrc_domain(fd) as first, device.xrc_domain(fd, 0), device.xrc_domain():
            assert shim.alive() == {"xrcds": 3, "xrc_domains": 2}
            with pytest.raises(VerbsError, match="ibv_open_xrcd failed: EINVAL"):
                await device.xrc_domain(fd, os.O_CREAT | os.O_EXCL).open()
            shim.associate(first.handle, 1)
            with pytest.raises(BusyResourceError, match="is associated with it"):
                await first.aclose()
            assert first.state is ResourceState.OPEN
            shim.associate(first.handle, -1)
    finally:
        os.close(fd)
    with pytest.raises(ClosedResourceError):
        first.handle  # noqa: B018


async def test_rejected_xrc_objects_leave_nothing(device: Device, shim: Shim) -> None:
    """Soft-RoCE has no XRC transport: the verb fails, and everything can be closed."""
    async with (
        device.xrc_domain() as xrc,
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
    ):
        for resource in (
            xrc.queue_pair(),
            domain.queue_pair(cq, qp_type=QpType.XRC_SEND),
            domain.shared_receive_queue(8, xrc_domain=xrc, cq=cq),
        ):
            with pytest.raises(VerbsError, match=r"ibv_create_(qp|qp_ex|srq_ex) failed"):
                await resource.open()
            assert resource.state is ResourceState.NEW
        assert not xrc.statistics().children
        assert shim.alive() == {"tds": 1, "parents": 1, "xrcds": 1, "xrc_domains": 1}


# ---- Without native domains


async def test_working_without_native_domains(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    for native in (True, False):
        shim = Shim(device.handle) if native else None
        async with device.resource_domain(allocator=SharedPageAllocator()) as domain:
            assert (domain.native, domain.parent.native, domain.parent.native_allocators) == (native,) * 3
            assert domain.owner is not None
            assert not domain.owner.orphaned
            async with ends(domain) as (near, source, target):
                await write(near, source, target)
                with pytest.raises(AffinityError):
                    await asyncio.to_thread(near.query)
        assert len(caplog.records) == (0 if native else 2)
        if shim is not None:
            shim.uninstall()
