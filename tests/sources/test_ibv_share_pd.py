"""ibv_share_pd(3): one test for each sentence of the manual page."""

import asyncio
import socket

import pytest

from aioverbs import AccessFlags, SendFlags, SendOpcode, VerbsError, import_device
from aioverbs._core.handles import handles
from aioverbs._verbs.device import Device, open_device
from tests.capabilities import Capability, needs
from tests.core.pairs import succeed
from tests.raw_verbs import post_send
from tests.rdma.seam import connect

KEY = 0xFEDCBA9876543210


@needs(Capability.SHARED_DOMAINS)
async def test_shares_the_domain_specified_by_an_identifier(device: Device) -> None:
    """ "ibv_share_pd() shares the protection domain specified by a unique identifier shpd for the RDMA device context
    context. share_key is the 64 bit key used to generate the unique identifier shpd." """
    async with open_device("soft0") as other, device.protection_domain() as pd, pd.share(KEY) as shared:
        async with other.shared_protection_domain(shared.id, KEY) as instance:
            assert instance.handle.context is other.handle
        with pytest.raises(VerbsError, match="EACCES"):
            await other.shared_protection_domain(shared.id, KEY ^ 1).open()
    async with open_device("soft0") as other:
        with pytest.raises(VerbsError, match="ENOENT"):
            await other.shared_protection_domain(shared.id, KEY).open()


@needs(Capability.SHARED_DOMAINS)
async def test_every_instance_is_deallocated_and_the_last_removes_it(device: Device) -> None:
    """ "ibv_pds created using ibv_share_pd() can be deallocated using ibv_dealloc_pd(). Libibverbs keeps track of each
    instance of the shared PD and removes the PD from RDMA device when the last instance of the shared PD is
    deallocated." """
    async with open_device("soft0") as other:
        pd = await device.protection_domain().open()
        async with pd.share(KEY) as shared:
            first = await other.shared_protection_domain(shared.id, KEY).open()
        await pd.aclose()
        async with other.shared_protection_domain(shared.id, KEY):
            await first.aclose()
        with pytest.raises(VerbsError, match="ENOENT"):
            await other.shared_protection_domain(shared.id, KEY).open()


@needs(Capability.SHARED_DOMAINS)
async def test_queue_pairs_of_one_instance_use_memory_of_another(device: Device) -> None:
    """ "the same PD is shared by multiple contexts of an RDMA device" """
    async with open_device("soft0") as other, device.protection_domain() as pd, pd.share(KEY) as shared:
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
        async with other.shared_protection_domain(shared.id, KEY) as instance, instance.register(64, access) as region:
            region.buffer[:4] = b"ours"
            queue = handles.CompletionQueue(device.handle, 4)
            near, far = handles.QueuePair(pd.handle, queue, queue), handles.QueuePair(pd.handle, queue, queue)
            connect(near, far)
            connect(far, near)
            post_send(
                near,
                SendOpcode.RDMA_WRITE,
                [region[:4].sge],
                flags=SendFlags.SIGNALED,
                remote_addr=region.address + 32,
                rkey=region.rkey,
            )
            succeed(queue)
            assert bytes(region[32:36].buffer) == b"ours"
            for handle in (near, far, queue):
                handle.destroy()


@needs(Capability.SHARED_DOMAINS)
async def test_a_resource_lives_as_long_as_its_instance(device: Device) -> None:
    """ "The life span of an MR mr1 created under ibv_pd pd1 (which is an instance of shared PD shPD1) will end whenever
    pd1 is deallocated, even though underlying shPD1 may continue to live on." """
    async with open_device("soft0") as other, device.protection_domain() as pd, pd.share(KEY) as shared:
        instance = await other.shared_protection_domain(shared.id, KEY).open()
        region = await instance.register(64).open()
        with pytest.warns(ResourceWarning, match="MemoryRegion"):
            await instance.aclose()
        assert region.closed
        async with other.shared_protection_domain(shared.id, KEY), pd.register(64):
            pass


@needs(Capability.SHARED_DOMAINS)
async def test_different_devices_cannot_share(device: Device) -> None:
    """ "Sharing PD is not supported among 'ibv_context' created for different RDMA devices." """
    async with open_device("soft0") as other, device.protection_domain() as pd, pd.share(KEY) as shared:
        guid = int.from_bytes(device.attributes().node_guid)
        assert shared.id >> 32 == guid
        with pytest.raises(VerbsError, match="EXDEV"):
            await other.shared_protection_domain(shared.id ^ 1 << 32, KEY).open()


@needs(Capability.SHARED_DOMAINS, Capability.OBJECT_COUNTS)
async def test_processes_share_it_by_a_socket(device: Device) -> None:
    """ "the same PD is shared by multiple contexts of an RDMA device or processes": here both ends are in this
    process. Tests with two processes are in tests/sharing, with RDMA devices in tests/rdma/test_sharing.py."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        async with device.protection_domain() as pd, pd.share(KEY) as shared:
            sending = asyncio.create_task(shared.send(near))
            async with import_device(far, shared.id, KEY) as other:
                await sending
                async with other.shared_protection_domain(shared.id, KEY) as instance:
                    assert instance.handle.context is other.handle
