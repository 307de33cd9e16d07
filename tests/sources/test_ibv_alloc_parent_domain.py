"""ibv_alloc_parent_domain(3): one test for each sentence of the manual page."""

import asyncio
import errno
import re
import threading
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    ArenaAllocator,
    ParentDomain,
    QpType,
    RecordingAllocator,
    ResourceState,
    ThreadDomain,
    ThreadModel,
    VerbsError,
    WorkerPool,
    current_worker,
)
from aioverbs._core.handles import handles, parent_domain
from aioverbs._verbs.device import Device
from aioverbs.attributes import AddressVector
from tests.capabilities import Capability, needs
from tests.core.allocators import Recording


@needs(Capability.OBJECT_COUNTS)
async def test_allocates_a_parent_domain_object_for_the_context(device: Device) -> None:
    """ "ibv_alloc_parent_domain() allocates a parent domain object for the RDMA device context context." """
    async with device.protection_domain() as pd, pd.parent_domain() as domain:
        assert domain.native
        assert domain.handle.context is device.handle
        assert dict(device.statistics().objects)["parent_domains"] == 1


async def test_extends_the_protection_domain_with_additional_objects(device: Device) -> None:
    """ "The parent domain object extends the normal protection domain with additional objects, such as a thread
    domain." """
    async with device.protection_domain() as pd, device.thread_domain() as td, pd.parent_domain(td) as domain:
        assert (domain.base, domain.td) == (pd, td)
        assert domain.owner is td.owner


async def test_is_completely_interchangeable_with_its_protection_domain(device: Device) -> None:
    """ "A parent domain is completely interchangeable with the struct ibv_pd used to create it, and can be used as an
    input argument to any function accepting a struct ibv_pd." """
    async with device.protection_domain() as pd, pd.parent_domain() as domain:
        made: list[handles.Handle] = []
        for one, other in ((pd, domain), (domain, pd)):
            queue = handles.CompletionQueue(device.handle, 4)
            way = AddressVector(device.handle.query_gid(1, 1), sgid_index=1)
            async with one.register(64) as region:
                near = handles.QueuePair(other.handle, queue, queue, qp_type=QpType.UD)
                made += [queue, near, handles.SharedReceiveQueue(one.handle, 4), handles.AddressHandle(one.handle, way)]
                made.append(handles.MemoryWindow(one.handle, 1))
                assert region.handle.pd is pd.handle
        for handle in reversed(made):
            handle.destroy()


async def test_resources_of_a_protection_domain_can_be_made_from_a_parent_domain(device: Device) -> None:
    """ "can be used as an input argument to any function accepting a struct ibv_pd": by another parent domain, a
    resource domain and a pool of workers, none of which takes over its thread domain or allocator."""
    allocator = Recording()
    async with (
        device.protection_domain() as pd,
        device.thread_domain() as td,
        pd.parent_domain(td, allocator, "mine") as first,
        first.parent_domain() as nested,
        nested.parent_domain(td) as innermost,
        device.resource_domain(nested) as domain,
        device.resource_domain(domain, thread_model=ThreadModel.SAFE) as over_another,
        WorkerPool(device, 1, pd=first) as pool,
        innermost.register(64) as region,
    ):
        over = [nested, innermost, domain, over_another]
        assert [each.base for each in over] == [pd] * 4
        assert (nested.owner, nested.td, nested.allocator, nested.context) == (None, None, None, None)
        assert pool.pd is pd
        for each in over:
            assert region.handle.pd is each.base.handle
            async with each.completion_queue(64) as cq, each.queue_pair(cq):
                assert not allocator.pieces
        async with first.completion_queue(4):
            assert bool(allocator.pieces) is first.native_allocators

        async def at_the_worker() -> bool:
            return current_worker().domain.base is pd

        assert await pool.run(at_the_worker)


@needs(Capability.SHARED_DOMAINS)
async def test_a_parent_domain_is_shared(device: Device) -> None:
    """ "any function accepting a struct ibv_pd", ``ibv_alloc_shpd`` among them."""
    async with (
        device.protection_domain() as pd,
        pd.parent_domain() as domain,
        domain.share(7) as shared,
        device.shared_protection_domain(shared.id, 7) as instance,
        domain.register(64, AccessFlags.LOCAL_WRITE, domain.shared_memory) as region,
    ):
        assert instance.state is ResourceState.OPEN
        assert region.handle.pd is pd.handle


async def test_the_protection_domain_cannot_be_null(device: Device) -> None:
    """ "reference to a protection domain, can't be NULL" """
    with pytest.raises(TypeError, match="requires a protection domain, got None"):
        ParentDomain(None)  # type: ignore[arg-type]


@needs(Capability.PARENT_DOMAINS)
@pytest.mark.parametrize("with_td", [False, True])
async def test_the_thread_domain_may_be_null(device: Device, with_td: bool) -> None:
    """ "reference to a thread domain, or NULL"; "An optional thread domain that the parent domain uses." """
    async with device.protection_domain() as pd, device.thread_domain() as td:
        given: ThreadDomain | None = td if with_td else None
        async with pd.parent_domain(given) as domain:
            assert domain.td is given
            assert isinstance(domain.handle, parent_domain.ParentDomain)
            assert domain.handle.td is (td.handle if with_td else None)


async def test_the_thread_domain_must_be_a_thread_domain(device: Device) -> None:
    """ "reference to a thread domain, or NULL" """
    async with device.protection_domain() as pd:
        given: Any
        for given in ("x", "", 0, 5, pd):
            with pytest.raises(TypeError, match=f"^`td` must be a ThreadDomain or None, got {re.escape(repr(given))}$"):
                pd.parent_domain(given)
        assert pd.statistics().children == 0


async def test_the_allocator_must_be_an_allocator(device: Device) -> None:
    """An allocator that would fail in the middle of a verb is refused before the verb."""
    async with device.protection_domain() as pd:
        given: Any
        for given in ("x", 0, ArenaAllocator):
            message = f"^allocator must have the methods of aioverbs.Allocator, got {re.escape(repr(given))}$"
            with pytest.raises(TypeError, match=message):
                pd.parent_domain(allocator=given)
            with pytest.raises(TypeError, match=message):
                device.resource_domain(allocator=given)
            with pytest.raises(TypeError, match=message):
                pd.register(4096, allocator=given)
            with pytest.raises(TypeError, match=message):
                WorkerPool(device, 1, allocator=given)
        assert pd.statistics().children == 0


@needs(Capability.FAULT_PLAN)
async def test_resources_should_be_destroyed_before_it(device: Device) -> None:
    """ "ibv_dealloc_pd() will deallocate the parent domain … All resources created with the parent domain should be
    destroyed prior to deallocating the parent domain." """
    async with device.protection_domain() as pd, pd.parent_domain() as domain:
        queue = handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        device.faults.count_calls()
        with pytest.raises(Exception, match="cannot be destroyed"):
            await domain.aclose()
        assert device.faults.calls("dealloc_pd") == 0, "refused before the verb"
        queue.destroy()


class ParentDomainRecorder(Recording):
    """Allocator that records the parent domain and context of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: dict[str, list[tuple[object, ...]]] = {"allocate": [], "free": []}

    def allocate(self, size: int, alignment: int, resource_type: int, *parent: object) -> Any:
        self.contexts["allocate"].append(parent)
        return super().allocate(size, alignment, resource_type, *parent)

    def free(self, address: int, resource_type: int, *parent: object) -> None:
        self.contexts["free"].append(parent)
        super().free(address, resource_type, *parent)


@needs(Capability.PARENT_DOMAINS)
async def test_provider_memory_comes_from_the_allocator(device: Device) -> None:
    """ "Provider memory allocations will use this function to allocate the needed memory. The allocation function is
    passed the parent domain pd and the user-specified context pd_context. In addition, the callback receives
    the size and the alignment of the requested buffer, as well a vendor-specific resource_type" """
    allocator = ParentDomainRecorder()
    async with device.protection_domain() as pd, pd.parent_domain(allocator=allocator, context="mine") as domain:
        assert domain.native_allocators
        assert domain.context == "mine"
        queue = handles.CompletionQueue(device.handle, 16, parent_domain=domain.handle)
        qp = handles.QueuePair(domain.handle, queue, queue)
        assert set(allocator.contexts["allocate"]) == {(domain.handle, "mine")}
        provider, codes = {piece.resource_type >> 32 for piece in allocator.live}, set(allocator.resource_types)
        assert provider == {1}
        assert {code & 0xFFFFFFFF for code in codes} == {1, 3, 5}
        assert all(piece.size > 0 and piece.address % piece.alignment == 0 for piece in allocator.live)
        qp.destroy()
        queue.destroy()
    assert not allocator.live


@needs(Capability.PARENT_DOMAINS)
async def test_the_context_is_passed_back_to_the_allocator(device: Device) -> None:
    """ "A pointer for additional user-specific data to be associated with this parent domain. The pointer is passed
    back to the custom allocator functions": that of each domain, also through a recording allocator. Buffers have
    no parent domain."""
    allocator = ParentDomainRecorder()
    async with (
        device.protection_domain() as pd,
        pd.parent_domain(allocator=allocator, context="one") as one,
        pd.parent_domain(allocator=RecordingAllocator(allocator), context="another") as another,
        device.resource_domain(allocator=allocator, context=(thing := object())) as domain,
        pd.register(64, allocator=allocator),
    ):
        assert (one.context, another.context, domain.context, domain.parent.context) == ("one", "another", thing, thing)
        queues = [
            handles.CompletionQueue(device.handle, 4, parent_domain=each.handle) for each in (one, another, domain)
        ]
        for queue in queues:
            queue.destroy()
        of_queues = [(one.handle, "one"), (another.handle, "another"), (domain.handle, thing)]
    assert not allocator.live
    assert set(allocator.contexts["allocate"]) == set(allocator.contexts["free"]) == {*of_queues, (None, None)}


@needs(Capability.PARENT_DOMAINS)
async def test_null_designates_an_error(device: Device) -> None:
    """ "The function returns the pointer to the allocated buffer, or NULL to designate an error." """
    async with device.resource_domain(allocator=Recording(lambda *_: None)) as domain:
        with pytest.raises(VerbsError) as caught:
            handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        assert caught.value.errno == errno.ENOMEM


async def test_the_default_allocator_may_be_requested(device: Device) -> None:
    """ "It may also return IBV_ALLOCATOR_USE_DEFAULT asking the callee to allocate the buffer using the default
    allocator." Memory of the default allocator is not passed to the
    custom `free`."""
    allocator = Recording(lambda *_: parent_domain.USE_DEFAULT)
    async with device.resource_domain(allocator=allocator) as domain:
        queue = handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        queue.destroy()
    assert allocator.pieces == []


@needs(Capability.PARENT_DOMAINS)
async def test_the_buffer_is_zeroed(device: Device) -> None:
    """ "The callback makes sure the allocated buffer is initialized with zeros." """

    def dirty(recording: Recording, size: int, alignment: int, resource_type: int) -> object:
        piece = recording.piece(size, alignment, resource_type)
        piece.memory[:] = b"\x01" * len(piece.memory)
        return piece.address

    allocator = Recording(dirty)
    async with device.resource_domain(allocator=allocator) as domain:
        with pytest.raises(VerbsError) as caught:
            handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        assert "zero" in str(caught.value.__cause__)
    assert not allocator.live


@needs(Capability.PARENT_DOMAINS)
async def test_buffers_of_a_successful_alloc_are_freed(device: Device) -> None:
    """ "Callback to free memory buffers that were allocated using a successful alloc()": each once, with its type."""
    allocator = Recording()
    async with device.resource_domain(allocator=allocator) as domain:
        handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle).destroy()
        assert allocator.pieces
    assert [piece.freed for piece in allocator.pieces] == [1] * len(allocator.pieces)


async def test_the_allocator_is_asked_in_the_calling_thread(device: Device) -> None:
    """The manual page does not define it; providers of NICs and the software device call it within the verb."""
    allocator = Recording()
    async with device.protection_domain() as pd, pd.parent_domain(allocator=allocator) as domain:
        queue = await asyncio.to_thread(handles.CompletionQueue, device.handle, 4, parent_domain=domain.handle)
        assert threading.get_ident() not in {piece.thread for piece in allocator.pieces}
        queue.destroy()


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EIO], ids=errno.errorcode.get)
async def test_errno_indicates_the_failure_reason(device: Device, number: int) -> None:
    """ "or NULL if the request fails (and sets errno to indicate the failure reason)" """
    device.faults.fail("alloc_parent_domain", number)
    async with device.protection_domain() as pd:
        with pytest.raises(VerbsError) as caught:
            await pd.parent_domain().open()
    assert (caught.value.verb, caught.value.errno) == ("ibv_alloc_parent_domain", number)
