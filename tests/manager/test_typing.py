"""What a type checker makes of the public names; at run time they are what it says."""

import socket
from typing import assert_type

import aioverbs
from aioverbs import (
    AccessFlags,
    Affinity,
    BufferPool,
    BufferPoolStatistics,
    CompletionQueue,
    CompletionQueueStatistics,
    Device,
    DeviceAttributes,
    DeviceInfo,
    DeviceStatistics,
    LeasedBuffer,
    MemoryRegion,
    ParentDomain,
    ProtectionDomain,
    QpAttributes,
    QueuePair,
    QueuePairAddress,
    QueuePairStatistics,
    RegionSlice,
    RegistrationCache,
    RegistrationCacheStatistics,
    RemoteRegion,
    ResourceDomain,
    ResourceInfo,
    ResourceStatistics,
    SharedProtectionDomain,
    SharedReceiveQueue,
    State,
    ThreadDomain,
    XrcDomain,
)


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
            assert_type(td.state, State)
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
        domain.completion_queue(4) as cq,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(cq, srq=srq) as qp,
        domain.register(64, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE) as region,
    ):
        assert_type(cq, CompletionQueue)
        assert_type(cq.statistics(), CompletionQueueStatistics)
        assert_type(srq, SharedReceiveQueue)
        assert_type(qp, QueuePair)
        assert_type(qp.statistics(), QueuePairStatistics)
        assert_type(qp.address, QueuePairAddress)
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


async def domain_is_open(domain: ResourceDomain) -> bool:
    return domain.state is State.OPEN
