"""Shared receive queues: used by many queue pairs, with a limit event, and resizable.

The device's part is tested in C: tests/native/test_srq*.c.
"""

import pytest

from aioverbs import EventType, SendOpcode, VerbsError
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.attributes import SrqAttributes
from tests.core.pairs import connect, make_domain, make_end, next_event, succeed
from tests.raw_verbs import post_recv, post_send

SEND = SendOpcode.SEND


def test_receives_of_one_queue_for_many(context: software.Context, kind: str) -> None:
    domain = make_domain(context, kind)
    srq = handles.SharedReceiveQueue(domain, 4, 2)
    pairs = [(make_end(domain), make_end(domain, srq=srq)) for _ in range(2)]
    memory = pairs[0][1]
    for near, far in pairs:
        assert far.qp.srq is srq
        assert (far.qp.capabilities.max_recv_wr, far.qp.capabilities.max_recv_sge) == (0, 0)
        connect(near.qp, far.qp)
        with pytest.raises(VerbsError, match="ibv_post_recv failed: EINVAL"):
            post_recv(far.qp)
    for wr_id in range(4):
        post_recv(srq, [memory.sge(16 * wr_id, 16)], wr_id=wr_id)
    with pytest.raises(VerbsError, match="ibv_post_srq_recv failed: ENOMEM"):
        post_recv(srq)
    for number in range(4):
        near, far = pairs[number % 2]
        near.memory[:1] = bytes([65 + number])
        post_send(near.qp, SEND, [near.sge(0, 1)])
        completion = succeed(far.cq)
        assert (completion.wr_id, completion.qp_num) == (number, far.qp.qp_num)
    assert memory.memory[0:64:16] == b"ABCD"


def test_a_shared_queue_changes_its_limit_and_size(context: software.Context) -> None:
    domain = make_domain(context, "plain")
    srq = handles.SharedReceiveQueue(domain, 4)
    near, far = make_end(domain), make_end(domain, srq=srq)
    connect(near.qp, far.qp)
    post_recv(srq, [far.sge(0, 8)])
    before = srq.query()
    with pytest.raises(VerbsError, match="ibv_modify_srq failed: EINVAL"):
        srq.modify(limit=1 << 20)
    assert srq.query() == before
    srq.modify(max_wr=64, limit=1)
    assert (srq.query().max_wr, srq.query().limit) == (64, 1)
    post_send(near.qp, SEND, [near.sge(0, 1)])
    succeed(far.cq)
    event = next_event(context)
    assert (event.event_type, event.element, event.port_num) == (EventType.SRQ_LIMIT_REACHED, srq, None)
    event.ack()
    assert srq.query().limit == 0
    srq.modify(limit=3)
    assert (srq.query().max_wr, srq.query().limit) == (64, 3)


def test_attributes_of_a_shared_queue(inline: software.Context) -> None:
    pd = handles.ProtectionDomain(inline)
    srq = handles.SharedReceiveQueue(pd, 10, 3)
    attributes = srq.query()
    assert attributes.max_wr >= 10
    assert (attributes.max_sge, attributes.limit) == (3, 0)
    assert handles.SharedReceiveQueue(pd, 10, limit=4).query().limit == 4
    assert isinstance(attributes, SrqAttributes)
    assert srq.pd is pd
    assert (srq.cq, srq.xrc_domain) == (None, None)
    with pytest.raises(VerbsError, match="ibv_get_srq_num failed: EINVAL"):
        srq.number  # noqa: B018


def test_a_queue_whose_limit_cannot_be_armed_is_destroyed(inline: software.Context) -> None:
    pd = handles.ProtectionDomain(inline)
    before = inline.counts()
    with pytest.raises(VerbsError, match="ibv_modify_srq failed: EINVAL"):
        handles.SharedReceiveQueue(pd, 4, limit=1 << 20)
    assert inline.counts() == before
