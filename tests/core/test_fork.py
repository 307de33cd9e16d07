"""After a fork the device belongs to the parent: the child finds it closed, and opens its own without side effects."""

import threading

import pytest

from aioverbs import ForkedProcessError, SendFlags, SendOpcode
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from tests.core.allocators import Recording
from tests.core.children import allocating, in_child
from tests.core.contexts import open_context, opened
from tests.core.family import Family, make_all
from tests.core.pairs import PATIENCE_S, make_end, make_pair, succeed
from tests.core.test_handles_closed import IDENTITY, access, public
from tests.raw_verbs import post_send

WRITE, SIGNALED = SendOpcode.RDMA_WRITE, SendFlags.SIGNALED


def transfer(mode: str, kind: str = "thread domain") -> bytes:
    """Open a device, and copy some bytes over it."""
    with opened(mode) as context:
        near, far = make_pair(context, kind)
        near.memory[:5] = b"moved"
        post_send(
            near.qp, WRITE, [near.sge(0, 5)], flags=SIGNALED, remote_addr=far.region.address, rkey=far.region.rkey
        )
        succeed(near.cq)
        return bytes(far.memory[:5])


@pytest.mark.every_way
def test_the_child_finds_everything_closed(context: software.Context) -> None:
    family: Family = make_all(context)

    def child() -> int:
        assert handles.open_handles() == []
        accesses = 0
        for handle in family.values():
            assert handle.closed
            assert repr(handle).endswith(" of soft0 (closed)>")
            for name in set(public(handle)) - IDENTITY:
                with pytest.raises(ForkedProcessError, match=r"was opened before the fork: open the device again"):
                    access(handle, name)
                accesses += 1
            handle.destroy()
        return accesses

    assert in_child(child) > 40
    assert handles.open_handles() == list(family.values())
    assert not any(handle.closed for handle in family.values())


def test_inherited_parents_are_refused(context: software.Context) -> None:
    pd, channel = handles.ProtectionDomain(context), handles.CompletionChannel(context)
    cq, td = handles.CompletionQueue(context, 4, channel), parent_domain.ThreadDomain(context)

    def child() -> None:
        for make in (
            lambda: handles.ProtectionDomain(context),
            lambda: handles.MemoryRegion(pd, bytearray(8)),
            lambda: parent_domain.ParentDomain(pd, td),
            lambda: handles.CompletionQueue(context, 4),
            lambda: handles.QueuePair(pd, cq, cq),
        ):
            with pytest.raises(ForkedProcessError):
                make()
        assert handles.open_handles() == []

    in_child(child)
    handles.QueuePair(pd, cq, cq)


@pytest.mark.every_way
def test_children_and_grandchildren_open_their_own(context: software.Context) -> None:
    def child() -> bytes:
        own = open_context("thread")
        pd = handles.ProtectionDomain(own)

        def grandchild() -> bytes:
            assert context.closed
            assert own.closed
            assert pd.closed
            assert handles.open_handles() == []
            return transfer("thread")

        moved = in_child(grandchild)
        assert not pd.closed
        assert context.closed
        pd.destroy()
        own.destroy()
        return moved

    near, far = make_pair(context)
    assert in_child(child) == b"moved"
    post_send(near.qp, WRITE, flags=SIGNALED)
    succeed(near.cq)
    assert far.memory == bytes(4096)


def test_allocators_of_the_parent_are_left_alone(context: software.Context) -> None:
    allocator = Recording()
    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, allocator)
    end = make_end(domain)

    def child() -> int:
        end.qp.destroy()
        end.cq.destroy()
        domain.destroy()
        return sum(piece.freed for piece in allocator.pieces)

    assert in_child(child) == 0
    assert domain.held == 4


def test_memory_stays_registered_in_the_child(context: software.Context) -> None:
    """The child does not unpin memory: that would change state that belongs to the parent."""
    memory = bytearray(8)
    region = handles.MemoryRegion(handles.ProtectionDomain(context), memory)

    def child() -> None:
        region.destroy()
        with pytest.raises(BufferError):
            memory.append(0)

    in_child(child)
    region.destroy()
    memory.append(0)


def test_forks_from_threads_while_others_work(context: software.Context) -> None:
    """The child works, whatever lock was held at the moment of the fork."""
    begun, stop = threading.Event(), threading.Event()
    near, far = make_pair(context, "plain")

    def work() -> None:
        while not stop.is_set():
            post_send(
                near.qp, WRITE, [near.sge()], flags=SIGNALED, remote_addr=far.region.address, rkey=far.region.rkey
            )
            succeed(near.cq)
            with allocating:
                handles.MemoryRegion(near.pd, bytearray(8)).destroy()
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        for _ in range(3):
            assert in_child(lambda: transfer("thread")) == b"moved"
    finally:
        stop.set()
        thread.join()
