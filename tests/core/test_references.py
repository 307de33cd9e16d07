"""Handles and the garbage collector: dropping an open handle leaks it, visibly, and destroys nothing."""

import weakref
from collections.abc import Callable

from aioverbs import SendFlags, SendOpcode
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.testing import destroy_all
from tests.core.allocators import Recording
from tests.core.contexts import open_context, opened
from tests.core.family import make_all
from tests.core.pairs import make_pair
from tests.garbage import collect_garbage
from tests.raw_verbs import post_send
from tests.waiting import wait_until


def test_forgetting_open_handles_destroys_nothing() -> None:
    family = make_all(open_context("thread"))
    context = family["context"]
    assert isinstance(context, software.Context)
    counts, ledger = context.counts(), handles.open_handles()
    references = [weakref.ref(handle) for handle in family.values()]
    del family
    collect_garbage()
    assert all(reference() is not None for reference in references)
    assert handles.open_handles() == ledger
    assert context.counts() == counts
    destroy_all(ledger)


def test_destroyed_handles_are_collected() -> None:
    family = make_all(open_context("thread"))
    references = [weakref.ref(handle) for handle in family.values()]
    destroy_all(family.values())
    del family
    collect_garbage()
    assert [reference() for reference in references] == [None] * len(references)


def test_a_handle_keeps_its_parents(context: software.Context) -> None:
    def make() -> handles.QueuePair:
        cq = handles.CompletionQueue(context, 4, handles.CompletionChannel(context))
        return handles.QueuePair(parent_domain.ParentDomain(handles.ProtectionDomain(context)), cq, cq)

    qp = make()
    collect_garbage()
    assert isinstance(qp.pd, parent_domain.ParentDomain)
    assert qp.send_cq is not None
    assert qp.send_cq.channel is not None
    assert qp.send_cq.channel.get_event() is None


def test_registered_memory_stays_while_its_region_is_open(context: software.Context) -> None:
    class Memory(bytearray):
        pass

    memory = Memory(64)
    reference = weakref.ref(memory)
    region = handles.MemoryRegion(handles.ProtectionDomain(context), memory)
    del memory
    collect_garbage()
    assert reference() is not None
    region.destroy()
    collect_garbage()
    assert reference() is None


def test_an_allocator_stays_while_the_provider_holds_its_memory(context: software.Context) -> None:
    class WeakReferenced(Recording):
        pass

    def make() -> tuple[Callable[[], Recording | None], handles.CompletionQueue]:
        allocator = WeakReferenced()
        domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, allocator)
        return weakref.ref(allocator), handles.CompletionQueue(context, 4, parent_domain=domain)

    reference, cq = make()
    collect_garbage()
    allocator = reference()
    assert allocator is not None
    cq.destroy()
    assert allocator.live == []


def test_a_bare_handle_is_collected(context: software.Context) -> None:
    bare = handles.QueuePair.__new__(handles.QueuePair)
    reference = weakref.ref(bare)
    del bare
    collect_garbage()
    assert reference() is None


def test_requests_in_flight_outlive_every_reference() -> None:
    with opened("thread-delayed", delay_ns=10_000_000) as context:
        memory = bytearray(8)

        def post() -> weakref.ref[handles.QueuePair]:
            near, far = make_pair(context)
            region = handles.MemoryRegion(far.pd, memory, 7)
            near.memory[:8] = b"arrived!"
            post_send(
                near.qp,
                SendOpcode.RDMA_WRITE,
                [near.sge(0, 8)],
                flags=SendFlags.SIGNALED,
                remote_addr=region.address,
                rkey=region.rkey,
            )
            return weakref.ref(near.qp)

        reference = post()
        collect_garbage()
        wait_until(lambda: memory == b"arrived!")
        assert reference() in handles.open_handles()
