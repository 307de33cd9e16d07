"""Resizing completion queues, and moderating their events.

The device's part is tested in C: tests/native/test_cq_resize.c and test_moderation.c.
"""

import select
import time

import pytest

from aioverbs import SendFlags, SendOpcode, VerbsError
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.core.pairs import PATIENCE_S, connect, make_domain, make_end, make_pair, wait_for
from tests.raw_verbs import post_send
from tests.waiting import wait_until

WRITE, SIGNALED = SendOpcode.RDMA_WRITE, SendFlags.SIGNALED


@pytest.mark.parametrize("extended", [False, True])
def test_resizing_keeps_completions(context: software.Context, kind: str, extended: bool) -> None:
    near, _ = make_pair(context, kind, extended=extended)
    for number in range(10):
        post_send(near.qp, WRITE, wr_id=number, flags=SIGNALED)
    wait_until(lambda: near.qp.query().sq_psn == 10)
    for size in (1, 9):
        with pytest.raises(VerbsError, match="ibv_resize_cq failed: EINVAL"):
            near.cq.resize(size)
    with pytest.raises(ValueError, match="`cqe` must be at least 1, got 0"):
        near.cq.resize(0)
    assert near.cq.cqe == 256
    near.cq.resize(1000)
    assert near.cq.cqe >= 1000
    assert [wc.wr_id for wc in wait_for(near.cq, 10)] == list(range(10))
    near.cq.resize(1)
    assert 1 <= near.cq.cqe < 256


def test_moderation(context: software.Context) -> None:
    """Raise an event after `count` completions, or a period after the first one; without moderation, for each."""
    channel = handles.CompletionChannel(context)
    domain = make_domain(context, "plain")
    near, far = make_end(domain, channel=channel), make_end(domain)
    connect(near.qp, far.qp)
    posted = 0
    for count, period_us, fewer in ((3, 65535, 2), (65535, 1, 0), (0, 0, 0)):
        near.cq.modify(count, period_us)
        near.cq.request_notify()
        start = time.monotonic()
        posted += fewer
        for _ in range(fewer):
            post_send(near.qp, WRITE, flags=SIGNALED)
        wait_until(lambda count=posted: near.qp.query().sq_psn == count)  # type: ignore[misc]
        event_queue = channel.get_event()
        assert event_queue is None or time.monotonic() - start >= period_us * 1e-6
        posted += 1
        post_send(near.qp, WRITE, flags=SIGNALED)
        if event_queue is None:
            assert select.select([channel], [], [], PATIENCE_S)[0]
            event_queue = channel.get_event()
        assert event_queue is near.cq
        near.cq.ack_events()
        wait_for(near.cq, fewer + 1)


def test_moderation_has_16_bits(inline: software.Context) -> None:
    cq = handles.CompletionQueue(inline, 4)
    cq.modify(65535, 65535)
    for count, period_us in ((65536, 0), (0, 65536), (-1, 0)):
        with pytest.raises(OverflowError):
            cq.modify(count, period_us)
