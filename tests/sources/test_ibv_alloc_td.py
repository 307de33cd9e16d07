"""ibv_alloc_td(3): one test for each sentence of the manual page."""

import asyncio
import errno

import pytest

from aioverbs import AffinityError, VerbsError
from aioverbs._core.handles import handles, parent_domain
from aioverbs._verbs.device import Device
from tests.capabilities import Capability, needs


@needs(Capability.OBJECT_COUNTS)
async def test_allocates_a_thread_domain_object_for_the_context(device: Device) -> None:
    """ "ibv_alloc_td() allocates a thread domain object for the RDMA device context context." """
    async with device.thread_domain() as td:
        assert td.handle is not None
        assert td.handle.context is device.handle
        assert dict(device.statistics().objects)["thread_domains"] == 1


@needs(Capability.PARENT_DOMAINS)
async def test_an_application_assigns_resources_to_it_when_it_creates_them(device: Device) -> None:
    """ "An application assigns verbs resources to a thread domain when it creates a verbs object." """
    async with device.protection_domain() as pd, device.thread_domain() as td, pd.parent_domain(td) as domain:
        queue = handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        qp = handles.QueuePair(domain.handle, queue, queue)
        srq = handles.SharedReceiveQueue(domain.handle, 4)
        assert queue.affinity is qp.affinity is srq.affinity is td.owner
        for handle in (qp, srq, queue):
            handle.destroy()


@needs(Capability.PARENT_DOMAINS)
async def test_objects_under_it_disable_internal_locking(device: Device) -> None:
    """ "any objects created under this thread domain will disable internal locking designed to protect against
    concurrent access to that object from multiple user threads": other threads are refused before they reach the
    object."""
    async with device.protection_domain() as pd, device.thread_domain() as td, pd.parent_domain(td) as domain:
        queue = handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        with pytest.raises(AffinityError, match="ibv_resize_cq"):
            await asyncio.to_thread(queue.resize, 4)
        queue.resize(4)
        queue.destroy()
    assert device.statistics().overlaps == 0, "the device counted no overlapping calls"


async def test_by_default_objects_are_safe_for_many_threads(device: Device) -> None:
    """ "By default all verbs objects are safe for multi-threaded access, whether or not a thread domain is specified":
    objects without a thread domain are usable from any thread."""
    async with device.protection_domain() as pd:
        queue = handles.CompletionQueue(device.handle, 4)
        qp = handles.QueuePair(pd.handle, queue, queue)
        await asyncio.gather(*(asyncio.to_thread(queue.resize, 4) for _ in range(16)), asyncio.to_thread(qp.query))
        qp.destroy()
        queue.destroy()


@needs(Capability.PARENT_DOMAINS)
async def test_it_can_be_added_to_a_parent_domain(device: Device) -> None:
    """ "A struct ibv_td can be added to a parent domain via ibv_alloc_parent_domain() and then the parent domain can be
    used to create verbs objects." """
    async with device.protection_domain() as pd, device.thread_domain() as td, pd.parent_domain(td) as domain:
        assert isinstance(domain.handle, parent_domain.ParentDomain)
        assert domain.handle.td is td.handle


async def test_resources_should_be_destroyed_before_it(device: Device) -> None:
    """ "All resources created with the td should be destroyed prior to deallocating the td": closing does so."""
    pd, td = await device.protection_domain().open(), await device.thread_domain().open()
    domain = await pd.parent_domain(td).open()
    with pytest.warns(ResourceWarning, match="ParentDomain"):
        await td.aclose()
    assert domain.closed
    await pd.aclose()


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EBUSY], ids=errno.errorcode.get)
async def test_errno_indicates_the_failure_reason(device: Device, number: int) -> None:
    """ "NULL if the request fails (and sets errno …)"; "ibv_dealloc_td() returns 0 …, or the value of errno"."""
    device.faults.fail("alloc_td", number)
    with pytest.raises(VerbsError) as caught:
        await device.thread_domain().open()
    assert (caught.value.verb, caught.value.errno) == ("ibv_alloc_td", number)
    td = await device.thread_domain().open()
    device.faults.fail("dealloc_td", number)
    with pytest.raises(VerbsError) as caught:
        await td.aclose()
    assert (caught.value.verb, caught.value.errno) == ("ibv_dealloc_td", number)
    await td.aclose()
