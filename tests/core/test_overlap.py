"""Overlapping calls: refused by the device inside a thread domain, and by a handle that is being destroyed.

How the device detects the overlap is tested in C, with threads inside a call: tests/native/test_overlap.c.
"""

import errno
import threading
from collections.abc import Callable

import pytest

from aioverbs import BusyResourceError, ConcurrentAccessError, SendFlags, SendOpcode
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from tests.core.allocators import Recording
from tests.core.pairs import PATIENCE_S, connect, make_pair, wait_for
from tests.raw_verbs import post_send

WRITE, SIGNALED = SendOpcode.RDMA_WRITE, SendFlags.SIGNALED


def test_ebusy_raises_concurrent_access_error(inline: software.Context) -> None:
    """EBUSY of a queue raises an exception of its own, and nothing is done."""
    near, _ = make_pair(inline)
    cq, srq = handles.CompletionQueue(inline, 4), handles.SharedReceiveQueue(near.pd, 4)
    calls: dict[str, tuple[handles.Handle, Callable[[], object]]] = {
        "query_qp": (near.qp, near.qp.query),
        "modify_qp": (near.qp, lambda: near.qp.modify(min_rnr_timer=9)),
        "resize_cq": (cq, lambda: cq.resize(64)),
        "modify_srq": (srq, lambda: srq.modify(max_wr=64)),
        "query_srq": (srq, srq.query),
        "destroy_cq": (cq, cq.destroy),
        "destroy_srq": (srq, srq.destroy),
        "destroy_qp": (near.qp, near.qp.destroy),
    }
    before = inline.counts(), near.qp.query(), cq.cqe, srq.query()
    for verb, (handle, call) in calls.items():
        inline.faults.fail(verb, errno.EBUSY)
        with pytest.raises(ConcurrentAccessError) as refusal:
            call()
        assert str(refusal.value) == (
            f"ibv_{verb} on {handle!r}: another call is inside it or its thread domain; this call was refused"
        )
        assert not handle.closed
    assert (inline.counts(), near.qp.query(), cq.cqe, srq.query()) == before


@pytest.mark.every_way
def test_a_queue_in_use_works_and_is_not_destroyed(context: software.Context) -> None:
    """An allocator that needs the GIL is called in the middle of a resize, while another thread polls."""
    entered, go_on = threading.Event(), threading.Event()

    def answer(recording: Recording, size: int, alignment: int, resource_type: int) -> object:
        if recording.pieces[1:]:
            entered.set()
            assert go_on.wait(PATIENCE_S)
        return recording.piece(size, alignment, resource_type).address

    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, Recording(answer))
    cq = handles.CompletionQueue(context, 64, parent_domain=domain)
    pd = handles.ProtectionDomain(context)
    near, far = (handles.QueuePair(pd, cq, cq) for _ in range(2))
    connect(near, far)
    resizing = threading.Thread(target=cq.resize, args=(1000,))
    resizing.start()
    assert entered.wait(PATIENCE_S)
    post_send(near, WRITE, wr_id=3, flags=SIGNALED)
    assert [wc.wr_id for wc in wait_for(cq)] == [3]
    near.destroy()
    far.destroy()
    with pytest.raises(BusyResourceError, match="1 open objects or calls use it"):
        cq.destroy()
    go_on.set()
    resizing.join(PATIENCE_S)
    assert cq.cqe >= 1000


def test_sequential_calls_from_different_threads_are_allowed(context: software.Context) -> None:
    """A thread domain belongs to one thread at a time, not to the thread that created it."""
    near, _ = make_pair(context, "thread domain")

    def work() -> None:
        post_send(near.qp, WRITE, flags=SIGNALED)
        wait_for(near.cq)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(PATIENCE_S)
        work()
    assert context.counts()["overlaps"] == 0
