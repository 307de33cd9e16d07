"""Queues whose memory comes from a parent domain's allocator."""

import mmap
import threading

import pytest

from aioverbs import BusyResourceError, SendFlags, SendOpcode
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from tests.core.allocators import CQ, QP, RECORD, Recording, default
from tests.core.pairs import CAPABILITIES, connect, make_end, succeed
from tests.raw_verbs import post_send


def domain_of(context: software.Context, allocator: Recording) -> parent_domain.ParentDomain:
    return parent_domain.ParentDomain(handles.ProtectionDomain(context), None, allocator)


def test_attributes_of_a_parent_domain(context: software.Context) -> None:
    pd, td, allocator = handles.ProtectionDomain(context), parent_domain.ThreadDomain(context), Recording()
    domain = parent_domain.ParentDomain(pd, td, allocator)
    assert domain.base is pd
    assert domain.td is td
    assert domain.allocator is allocator
    assert domain.held == 0
    assert parent_domain.ParentDomain(pd).allocator is None
    assert isinstance(domain, handles.ProtectionDomain)


def test_allocations_of_each_queue(context: software.Context) -> None:
    allocator = Recording()
    domain = domain_of(context, allocator)
    cq = handles.CompletionQueue(context, 100, parent_domain=domain)
    assert allocator.resource_types == [CQ, RECORD]
    qp = handles.QueuePair(domain, cq, cq, CAPABILITIES)
    assert allocator.resource_types == [CQ, RECORD, QP, RECORD]
    assert domain.held == len(allocator.live) == 4
    ring, record, _, doorbell = allocator.pieces
    assert ring.alignment == mmap.PAGESIZE
    assert ring.size >= cq.cqe * 64
    for piece in (record, doorbell):
        assert (piece.size, piece.alignment) == (8, 8)

    qp.destroy()
    assert allocator.live == [ring, record]
    cq.destroy()
    assert domain.held == len(allocator.live) == 0
    # A region is no queue: its memory belongs to the user.
    handles.MemoryRegion(domain, bytearray(64))
    assert len(allocator.pieces) == 4


def test_use_default(context: software.Context) -> None:
    """The provider allocates by itself, and frees by itself, too."""
    allocator = Recording(default)
    domain = domain_of(context, allocator)
    near, far = make_end(domain), make_end(domain)
    connect(near.qp, far.qp)
    post_send(near.qp, SendOpcode.RDMA_WRITE, flags=SendFlags.SIGNALED)
    succeed(near.cq)
    assert domain.held == 0
    near.qp.destroy()
    near.cq.destroy()
    assert allocator.pieces == []


def test_free_is_called_once_with_the_same_type(context: software.Context) -> None:
    allocator = Recording()  # its free() checks the type
    domain = domain_of(context, allocator)
    for _ in range(3):
        near, far = make_end(domain), make_end(domain)
        connect(near.qp, far.qp)
        post_send(near.qp, SendOpcode.RDMA_WRITE)
        with pytest.raises(BusyResourceError):
            near.cq.destroy()
        for end in (near, far):
            end.qp.destroy()
            end.qp.destroy()
            end.cq.destroy()
            end.region.destroy()
    assert [piece.freed for piece in allocator.pieces] == [1] * 24
    domain.destroy()
    assert [piece.freed for piece in allocator.pieces] == [1] * 24


@pytest.mark.every_way
def test_an_allocator_may_create_and_destroy_objects(context: software.Context) -> None:
    """No lock is held while the allocator runs: it may use objects of the same context, and of the same domain."""
    nested: list[handles.Handle] = []
    depth = 0

    def reentering(self: Recording, size: int, alignment: int, resource_type: int) -> object:
        nonlocal depth
        depth += 1
        if depth == 1:
            pd = handles.ProtectionDomain(context)
            handles.MemoryRegion(pd, bytearray(size)).destroy()
            pd.destroy()
            inner = handles.CompletionQueue(context, 4, parent_domain=domain)
            nested.append(inner)
            handles.QueuePair(domain, inner, inner).destroy()
        depth -= 1
        return self.piece(size, alignment, resource_type).address

    allocator = Recording(reentering)
    domain = domain_of(context, allocator)
    near, far = make_end(domain), make_end(domain)
    connect(near.qp, far.qp)
    post_send(near.qp, SendOpcode.RDMA_WRITE, flags=SendFlags.SIGNALED)
    succeed(near.cq)
    assert len(nested) == 8
    with pytest.raises(BusyResourceError):
        domain.destroy()


def test_an_allocator_is_called_in_the_thread_of_the_verb(context: software.Context) -> None:
    allocator = Recording()
    domain = domain_of(context, allocator)
    cq = handles.CompletionQueue(context, 4, parent_domain=domain)
    threads: list[int] = []

    def work() -> None:
        threads.append(threading.get_ident())
        handles.QueuePair(domain, cq, cq)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    here = threading.get_ident()
    assert [piece.thread for piece in allocator.pieces] == [here, here, threads[0], threads[0]]


def test_many_threads_make_queues_on_one_domain(context: software.Context) -> None:
    allocator = Recording()
    domain = domain_of(context, allocator)

    def work() -> None:
        for _ in range(10):
            cq = handles.CompletionQueue(context, 4, parent_domain=domain)
            handles.QueuePair(domain, cq, cq).destroy()
            cq.destroy()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(allocator.pieces) == 160
    assert allocator.live == []
