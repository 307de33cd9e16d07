"""The fault plan and completions: held, released in their order or shuffled, and none lost."""

import os
import select

import pytest

from aioverbs import QpState, SendFlags, SendOpcode, WcStatus
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from tests.core.contexts import opened
from tests.core.pairs import CAPABILITIES, connect_to, make_domain, make_pair, make_queue, succeed, wait_for
from tests.core.test_xrc import make_receiver, make_sender, make_target
from tests.raw_verbs import poll, post_recv, post_send
from tests.waiting import wait_until

WRITE, SEND, SIGNALED = SendOpcode.RDMA_WRITE, SendOpcode.SEND, SendFlags.SIGNALED


def post(qp: handles.QueuePair, *wr_ids: int) -> None:
    for wr_id in wr_ids:
        post_send(qp, WRITE, wr_id=wr_id, flags=SIGNALED)


def wait_held(context: software.Context, count: int) -> None:
    wait_until(lambda: context.faults.held() == count)


def wr_ids(cq: handles.CompletionQueue) -> list[int]:
    """What is in a queue; nothing is on its way to it."""
    return [completion.wr_id for completion in poll(cq, 64)]


def test_held_and_released(context: software.Context, kind: str) -> None:
    near, _ = make_pair(context, kind)
    plan = context.faults
    assert (plan.held(), plan.release()) == (0, 0)
    plan.hold()
    post(near.qp, *range(6))
    wait_held(context, 6)
    assert wr_ids(near.cq) == []
    assert plan.release(2) == 2
    assert wr_ids(near.cq) == [0, 1]
    post(near.qp, 6)  # is held, too
    wait_held(context, 5)
    assert plan.release() == 5
    assert wr_ids(near.cq) == [2, 3, 4, 5, 6]
    post(near.qp, 7)  # still
    wait_held(context, 1)
    assert plan.release(100) == 1
    post(near.qp, 8)
    wait_held(context, 1)
    plan.unhold()
    assert plan.held() == 0
    post(near.qp, 9)
    assert [completion.wr_id for completion in wait_for(near.cq, 3)] == [7, 8, 9]
    assert plan.records() == []  # nothing went wrong


def test_of_one_queue_pair_both_ways(context: software.Context, kind: str) -> None:
    near, far = make_pair(context, kind)
    context.faults.hold(far.qp)
    context.faults.hold(far.qp)  # is held already
    post_recv(far.qp, [far.sge(0, 8)], wr_id=10)
    post_send(near.qp, SEND, [near.sge(0, 8)], wr_id=1, flags=SIGNALED)
    succeed(near.cq)
    post(far.qp, 2)
    wait_held(context, 2)
    assert wr_ids(far.cq) == []
    context.faults.clear()
    assert sorted(wr_ids(far.cq)) == [2, 10]
    post(far.qp, 3)
    succeed(far.cq)


def test_clearing_lets_all_go(context: software.Context) -> None:
    near, _ = make_pair(context)
    context.faults.hold()
    post(near.qp, 1, 2)
    wait_held(context, 2)
    context.faults.clear()
    assert wr_ids(near.cq) == [1, 2]
    post(near.qp, 3)
    succeed(near.cq)


def test_flushed_ones_come_behind(context: software.Context, kind: str) -> None:
    near, _ = make_pair(context, kind)
    context.faults.hold(near.qp)
    post(near.qp, 1)
    wait_held(context, 1)
    near.qp.modify(QpState.ERR)
    post(near.qp, 2)
    wait_held(context, 2)
    context.faults.unhold()
    assert [(completion.wr_id, completion.status) for completion in poll(near.cq)] == [
        (1, WcStatus.SUCCESS),
        (2, WcStatus.WR_FLUSH_ERR),
    ]


def test_events_come_with_the_release(context: software.Context) -> None:
    pd = handles.ProtectionDomain(context)
    channel = handles.CompletionChannel(context)
    cq = handles.CompletionQueue(context, 8, channel)
    qp = handles.QueuePair(pd, cq, cq, CAPABILITIES)
    connect_to(qp, qp)
    cq.request_notify()
    context.faults.hold()
    post(qp, 1)
    wait_held(context, 1)
    assert not select.select([channel.fileno()], [], [], 0)[0]
    assert channel.get_event() is None
    assert context.faults.release(1, shuffled=True) == 1
    assert channel.get_event() is cq
    cq.ack_events()
    assert wr_ids(cq) == [1]


def test_what_goes_with_its_queue_pair(context: software.Context, kind: str) -> None:
    near, far = make_pair(context, kind)
    context.faults.hold()
    post(near.qp, 1, 2)
    post(far.qp, 3)
    wait_held(context, 3)
    near.qp.destroy()
    assert context.faults.held() == 1
    far.qp.modify(QpState.RESET)
    assert context.faults.held() == 0
    context.faults.unhold()
    assert wr_ids(near.cq) == wr_ids(far.cq) == []


@pytest.mark.parametrize("shuffled", [False, True])
def test_each_queue_keeps_its_order(context: software.Context, kind: str, shuffled: bool) -> None:
    order = release_all(context, kind, seed=1, shuffled=shuffled)
    assert (order == [number % 4 for number in range(32)]) is not shuffled


def release_all(context: software.Context, kind: str, seed: int, *, shuffled: bool = True) -> list[int]:
    """The order in which completions of four queue pairs come on one queue, by queue pair: partly one by one."""
    domain = make_domain(context, kind)
    cq = make_queue(context, domain, 64)
    qps = [handles.QueuePair(domain, cq, cq, CAPABILITIES) for _ in range(4)]
    numbers = {qp.qp_num: number for number, qp in enumerate(qps)}
    plan = context.faults
    for qp in qps:
        connect_to(qp, qp)
    plan.seed(seed)
    plan.hold()
    held = 0
    for wr_id in range(8):
        for qp in qps:
            held += 1
            post(qp, wr_id)
            wait_held(context, held)  # so that they come in this order
    assert [plan.release(1, shuffled=shuffled) for _ in range(10)] == [1] * 10
    assert plan.release(shuffled=shuffled) == 22
    found = poll(cq, 64)
    plan.unhold()
    for number, qp in enumerate(qps):
        assert [completion.wr_id for completion in found if numbers[completion.qp_num] == number] == list(range(8))
        qp.destroy()
    return [numbers[completion.qp_num] for completion in found]


def test_shuffled_again(context: software.Context, kind: str) -> None:
    """The same seed and the same calls: the same order, in this context and in another."""
    first = release_all(context, kind, 1)
    assert release_all(context, kind, 1) == first
    assert release_all(context, kind, 2) != first
    with opened("inline") as other:
        assert release_all(other, kind, 1) == first


def test_a_queue_of_another_context(context: software.Context) -> None:
    """Receives by XRC are held where their queue is, and go with it; the target's context has no part in that."""
    descriptor = os.memfd_create("domain")
    with opened("inline") as other:
        here, there = parent_domain.XrcDomain(context, descriptor), parent_domain.XrcDomain(other, descriptor)
        os.close(descriptor)
        receiver, sender = make_receiver(other, there), make_sender(context)
        make_target(here, sender)
        context.faults.hold()
        other.faults.hold()
        receiver.post()
        sender.send(receiver.srq, b"held")
        wait_held(context, 1)
        wait_held(other, 1)
        receiver.srq.destroy()
        assert other.faults.held() == 0
        receiver.cq.destroy()
        context.faults.unhold()
        succeed(sender.cq)
        other.faults.unhold()


def test_arguments(inline: software.Context) -> None:
    near, _ = make_pair(inline)
    plan = inline.faults
    plan.hold()
    post(near.qp, 1, 2)
    for wrong in (-1, 1 << 63):
        with pytest.raises(ValueError, match="count must be from 0 to 9223372036854775807"):
            plan.release(wrong)
    with pytest.raises(TypeError):
        plan.release(1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        plan.release(1, True)  # type: ignore[call-arg]
    assert plan.held() == 2
    assert plan.release((1 << 63) - 1) == 2
