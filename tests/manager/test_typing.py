"""Types of the public names: checked by the type checker, and at run time by executing the same code."""

import asyncio
import socket
from pathlib import Path
from typing import assert_type

import pytest

import aioverbs
from aioverbs import (
    AccessFlags,
    AddressHandle,
    Affinity,
    Batch,
    BufferPool,
    BufferPoolStatistics,
    CallFuture,
    CompletionQueue,
    CompletionQueueStatistics,
    Destination,
    Device,
    DeviceAttributes,
    DeviceInfo,
    DeviceStatistics,
    Endpoint,
    LeasedBuffer,
    MemoryRegion,
    MemoryWindow,
    Message,
    Monitor,
    Operation,
    ParentDomain,
    PoolStatistics,
    ProtectionDomain,
    QpAttributes,
    QpCapabilities,
    QpState,
    QpType,
    QueuePair,
    QueuePairStatistics,
    Received,
    RegionSlice,
    RegistrationCache,
    RegistrationCacheStatistics,
    RemoteRegion,
    ResourceDomain,
    ResourceInfo,
    ResourceState,
    ResourceStatistics,
    SharedProtectionDomain,
    SharedReceiveQueue,
    SharedReceiveQueueStatistics,
    ThreadDomain,
    WorkerPool,
    WorkerStatistics,
    WorkQueueStatistics,
    XrcDomain,
)
from aioverbs.attributes import AddressVector


async def test_monitors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOVERBS_MONITOR_DIRECTORY", str(tmp_path / "monitor"))
    assert_type(aioverbs.monitor(), Monitor)
    async with aioverbs.monitor() as watched:
        assert_type(watched, Monitor)
        assert_type(watched.path, Path)


async def test_devices_and_domains() -> None:
    with socket.socket(socket.AF_UNIX) as blocking:
        assert_type(aioverbs.import_device(blocking, 1, 1), Device)
    assert_type(aioverbs.devices(), list[DeviceInfo])
    async with aioverbs.open_device("soft0") as device:
        assert_type(device, Device)
        assert_type(device.attributes(), DeviceAttributes)
        assert_type(device.statistics(), DeviceStatistics)
        assert_type(device.resources(), ResourceInfo)
        async with device.protection_domain() as pd, device.thread_domain() as td, device.xrc_domain() as xrc:
            assert_type(pd, ProtectionDomain)
            assert_type(td, ThreadDomain)
            assert_type(xrc, XrcDomain)
            assert_type(td.owner, Affinity | None)
            assert_type(td.state, ResourceState)
            assert_type(td.statistics(), ResourceStatistics)
            async with pd.parent_domain(td) as domain, pd.share(1) as shared:
                assert_type(domain, ParentDomain)
                assert_type(domain.base, ProtectionDomain)
                assert_type(shared, SharedProtectionDomain)
                assert_type(shared.id, int)
        async with device.loop_domain() as of_loop, device.resource_domain() as resource_domain:
            assert_type(of_loop, ResourceDomain)
            assert_type(resource_domain, ResourceDomain)


async def test_queues_and_memory() -> None:
    async with (
        aioverbs.open_device("soft0") as device,
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(cq, srq=srq) as qp,
        domain.register(64, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE) as region,
    ):
        assert_type(cq, CompletionQueue)
        assert_type(cq.statistics(), CompletionQueueStatistics)
        assert_type(srq, SharedReceiveQueue)
        assert_type(qp, QueuePair)
        assert_type(qp.statistics(), QueuePairStatistics)
        assert_type(qp.local_endpoint(), Endpoint)
        assert_type(qp.remote_endpoint, Endpoint | None)
        assert_type(qp.path_to(qp.local_endpoint()), AddressVector)
        assert_type(qp.qp_state, QpState)
        assert_type(region, MemoryRegion)
        assert_type(region[:8], RegionSlice)
        assert_type(region[:8].buffer, memoryview)
        assert_type(region.remote(), RemoteRegion)
        assert_type(region.remote()[:8], RemoteRegion)
        assert_type(await domain.run(qp.query), QpAttributes)
        assert_type(await domain.run(domain_is_open, domain), bool)


async def test_buffers() -> None:
    async with (
        aioverbs.open_device("soft0") as device,
        device.protection_domain() as pd,
        pd.buffer_pool(64, 2) as pool,
        pool.lease() as buffer,
        pd.cache.region(bytearray(64)) as region,
    ):
        assert_type(pool, BufferPool)
        assert_type(pool.statistics(), BufferPoolStatistics)
        assert_type(buffer, LeasedBuffer)
        assert_type(buffer[:8], RegionSlice)
        with pool.lease_nowait() as another:
            assert_type(another, LeasedBuffer)
        another = await pool.lease()
        another.release()
        assert_type(pd.cache, RegistrationCache)
        assert_type(pd.cache.statistics(), RegistrationCacheStatistics)
        assert_type(region, MemoryRegion)


async def test_requests() -> None:
    access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
    async with (
        aioverbs.open_device("soft0") as device,
        device.resource_domain() as domain,
        domain.register(64, access | AccessFlags.MW_BIND) as region,
        domain.completion_queue(128) as cq,
        domain.queue_pair(cq, capabilities=QpCapabilities(max_send_sge=2)) as near,
        domain.queue_pair(cq, receive_depth=2, receive_size=8) as far,
        domain.memory_window() as window,
    ):
        near.connect(far.local_endpoint(), access)
        far.connect(near.local_endpoint(), access)
        remote = region.remote()
        for write in (near.write(region[:8], remote[:8]), near.write_nowait([region[:4], region[4:8]], remote[:8])):
            await assert_type(write, Operation[None])
        adding = assert_type(near.fetch_and_add(remote[:8], 1), Operation[int])
        assert assert_type(await adding, int) == assert_type(adding.result(), int) == 0
        assert assert_type(adding.done(), bool)
        both = assert_type(
            await asyncio.gather(near.compare_and_swap(remote[:8], 1, 2), near.write(region[8:16], remote[16:24])),
            tuple[int, None],
        )
        assert list(both) == [1, None]
        assert assert_type(await asyncio.wait_for(near.fetch_and_add(remote[:8], 1), 5), int) == 2
        task = assert_type(asyncio.create_task(near.fetch_and_add(remote[:8], 1)), asyncio.Task[int])
        assert await task == 3
        async with assert_type(near.batch(), Batch) as batch:
            added = batch.fetch_and_add(remote[:8], 1)
        assert assert_type(added.result(), int) == 4
        assert_type(window, MemoryWindow)
        assert_type(await near.bind_window(window, region[:8], AccessFlags.REMOTE_WRITE), RemoteRegion)
        await near.send(region[:8])
        async for message in far.messages():
            with assert_type(message, Message):
                assert_type(message.data, memoryview)
                assert_type(message.immediate, int | None)
            break
        receive = assert_type(near.receive(region[:8]), Operation[Received])
        await far.send(None, immediate=7)
        assert assert_type(await receive, Received).immediate == 7
        assert_type(near.statistics().sends, WorkQueueStatistics)


def number() -> int:
    return aioverbs.current_worker().number


async def text(value: int, ending: str) -> str:
    return f"{value}{ending}"


async def test_pools() -> None:
    async with aioverbs.open_device("soft0") as device, aioverbs.WorkerPool(device, 2) as pool:
        assert_type(pool, WorkerPool)
        assert_type(pool.pd, ProtectionDomain)
        assert assert_type(await pool.run(number, worker=1), int) == 1
        assert assert_type(await pool.run(text, 1, ".", key="a"), str) == "1."
        started = assert_type(pool.start_soon(text, 1, "."), CallFuture[str])
        assert assert_type(await started.wait(), str) == "1."
        assert assert_type(await pool.map(str, [1, 2]), list[str]) == ["1", "2"]
        assert_type(pool.statistics(), PoolStatistics)
        assert_type(pool.statistics().workers, tuple[WorkerStatistics, ...])


async def test_peers() -> None:
    async with aioverbs.open_device("soft0") as device:
        assert_type(device.peers(), tuple[aioverbs.Peer, ...])
        assert_type(device.refusals(), tuple[aioverbs.RejectedPeer, ...])


async def test_shared_receives_and_datagrams() -> None:
    async with (
        aioverbs.open_device("soft0") as device,
        device.resource_domain() as domain,
        domain.register(64) as region,
        domain.completion_queue(128) as cq,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(cq, srq=srq, qp_type=QpType.UD) as qp,
    ):
        qp.activate()
        async with domain.address_handle(qp.local_endpoint()) as address_handle:
            assert_type(address_handle, AddressHandle)
            assert_type(address_handle.to(), Destination)
        receive = assert_type(srq.receive(region), Operation[Received])
        assert not receive.done()
        assert assert_type(srq.statistics(), SharedReceiveQueueStatistics).in_flight == 1


async def domain_is_open(domain: ResourceDomain) -> bool:
    return domain.state is ResourceState.OPEN
