"""Completion queues change their size, moderate their events and tell the time."""

import errno
import select
import threading
import time

import pytest

from aioverbs import SendFlags, SendOpcode, VerbsError
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from tests.core.allocators import Recording
from tests.core.pairs import CAPABILITIES, PATIENCE_S, End, connect, make_domain, make_end, make_pair, wait_for
from tests.raw_verbs import post_send
from tests.waiting import wait_until

WRITE, SIGNALED = SendOpcode.RDMA_WRITE, SendFlags.SIGNALED


@pytest.mark.parametrize("extended", [False, True])
def test_a_larger_queue_keeps_what_it_holds(context: software.Context, kind: str, extended: bool) -> None:
    domain = make_domain(context, kind)
    parent = domain if isinstance(domain, parent_domain.ParentDomain) else None
    cq = handles.CompletionQueue(context, 4, extended=extended, parent_domain=parent)
    near, far = (handles.QueuePair(domain, cq, cq, CAPABILITIES) for _ in range(2))
    connect(near, far)
    for number in range(4):
        post_send(near, WRITE, wr_id=number, flags=SIGNALED)
    wait_until(lambda: near.query().sq_psn == 4)
    cq.resize(100)
    assert cq.cqe >= 100
    for number in range(4, 100):
        post_send(near, WRITE, wr_id=number, flags=SIGNALED)
    assert [wc.wr_id for wc in wait_for(cq, 100)] == list(range(100))
    cq.resize(1)
    assert 1 <= cq.cqe < 100


def test_a_size_that_is_too_small_changes_nothing(context: software.Context) -> None:
    near, _ = make_pair(context)
    for number in range(10):
        post_send(near.qp, WRITE, wr_id=number, flags=SIGNALED)
    wait_until(lambda: near.qp.query().sq_psn == 10)
    before = near.cq.cqe
    for size in (1, 9):
        with pytest.raises(VerbsError, match="ibv_resize_cq failed: EINVAL"):
            near.cq.resize(size)
    with pytest.raises(ValueError, match="1 completion at least, not 0"):
        near.cq.resize(0)
    assert near.cq.cqe == before
    assert [wc.wr_id for wc in wait_for(near.cq, 10)] == list(range(10))


def test_another_size_s_memory_comes_from_the_allocator(context: software.Context) -> None:
    refusing = False

    def answer(recording: Recording, size: int, alignment: int, resource_type: int) -> object:
        if refusing:
            raise MemoryError("no more")
        return recording.piece(size, alignment, resource_type).address

    allocator = Recording(answer)
    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, allocator)
    cq = handles.CompletionQueue(context, 4, parent_domain=domain)
    held = domain.held
    cq.resize(4096)
    assert domain.held == held
    assert len(allocator.pieces) > held
    refusing = True
    with pytest.raises(VerbsError, match="ibv_resize_cq") as caught:
        cq.resize(8192)
    assert caught.value.errno == errno.ENOMEM
    assert isinstance(caught.value.__cause__, MemoryError)
    assert 4096 <= cq.cqe < 8192


def test_polling_while_a_queue_is_resized(context: software.Context) -> None:
    """An allocator that needs the GIL is called in the middle of it; whoever polls meanwhile gets what there is."""
    inside, go_on = threading.Event(), threading.Event()

    def answer(recording: Recording, size: int, alignment: int, resource_type: int) -> object:
        if recording.pieces[1:]:
            inside.set()
            assert go_on.wait(PATIENCE_S)
        return recording.piece(size, alignment, resource_type).address

    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, Recording(answer))
    cq = handles.CompletionQueue(context, 64, parent_domain=domain)
    pd = handles.ProtectionDomain(context)
    near, far = (handles.QueuePair(pd, cq, cq) for _ in range(2))
    connect(near, far)
    resizing = threading.Thread(target=cq.resize, args=(1000,))
    resizing.start()
    assert inside.wait(PATIENCE_S)
    post_send(near, WRITE, wr_id=3, flags=SIGNALED)
    assert [wc.wr_id for wc in wait_for(cq)] == [3]
    go_on.set()
    resizing.join(PATIENCE_S)
    assert cq.cqe >= 1000


def moderated(context: software.Context, count: int, period_us: int) -> tuple[handles.CompletionChannel, End]:
    channel = handles.CompletionChannel(context)
    domain = make_domain(context, "plain")
    near, far = make_end(domain, channel=channel), make_end(domain)
    connect(near.qp, far.qp)
    near.cq.modify(count, period_us)
    near.cq.request_notify()
    return channel, near


def test_an_event_after_so_many_completions(context: software.Context) -> None:
    """And not after the period: the machine may take longer than that, but not each time."""
    channel, near = moderated(context, 5, 65535)

    def comes_early() -> bool:
        start = time.monotonic()
        for _ in range(4):
            post_send(near.qp, WRITE, flags=SIGNALED)
        wait_until(lambda: near.qp.query().sq_psn % 5 == 4)
        taken = channel.get_event()
        assert taken is None or time.monotonic() - start >= 0.065
        post_send(near.qp, WRITE, flags=SIGNALED)
        if taken is None:
            assert select.select([channel], [], [], PATIENCE_S)[0]
            taken = channel.get_event()
        early = time.monotonic() - start < 0.065
        assert taken is near.cq
        near.cq.ack_events()
        wait_for(near.cq, 5)
        near.cq.request_notify()
        return early

    assert any(comes_early() for _ in range(20))


def test_an_event_after_some_time(context: software.Context) -> None:
    channel, near = moderated(context, 1000, 30_000)
    start = time.monotonic()
    post_send(near.qp, WRITE, flags=SIGNALED)
    assert select.select([channel], [], [], PATIENCE_S)[0]
    assert time.monotonic() - start >= 0.030
    assert channel.get_event() is near.cq
    near.cq.ack_events()


def test_moderation_ends(context: software.Context) -> None:
    channel, near = moderated(context, 1000, 0)
    near.cq.modify(0, 0)
    near.cq.request_notify()
    post_send(near.qp, WRITE, flags=SIGNALED)
    assert select.select([channel], [], [], PATIENCE_S)[0]
    assert channel.get_event() is near.cq
    near.cq.ack_events()


def test_moderation_has_16_bits(inline: software.Context) -> None:
    cq = handles.CompletionQueue(inline, 4)
    cq.modify(65535, 65535)
    for count, period_us in ((65536, 0), (0, 65536), (-1, 0)):
        with pytest.raises(OverflowError):
            cq.modify(count, period_us)
