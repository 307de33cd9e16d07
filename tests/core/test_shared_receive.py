"""Shared receive queues: many queue pairs take from one, which says when it runs low, and grows."""

import errno

import pytest

from aioverbs import BusyResourceError, EventType, QpState, QpType, SendFlags, SendOpcode, VerbsError, WcStatus
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.attributes import SrqAttributes
from tests.core.allocators import Recording
from tests.core.pairs import End, connect, make_domain, make_end, next_event, succeed, wait_for
from tests.core.transports import GRH_BYTES, QKEY, start_ud, way_to
from tests.raw_verbs import poll, post_recv, post_send

SEND, SIGNALED = SendOpcode.SEND, SendFlags.SIGNALED


def make_star(
    context: software.Context, kind: str, count: int = 2, depth: int = 16, limit: int = 0
) -> tuple[handles.SharedReceiveQueue, list[tuple[End, End]]]:
    """Pairs whose far ends share a receive queue."""
    domain = make_domain(context, kind)
    srq = handles.SharedReceiveQueue(domain, depth, 2, limit)
    pairs = [(make_end(domain), make_end(domain, srq=srq)) for _ in range(count)]
    for near, far in pairs:
        connect(near.qp, far.qp)
    return srq, pairs


def test_receives_are_taken_in_the_order_of_messages(context: software.Context, kind: str) -> None:
    srq, pairs = make_star(context, kind)
    memory = pairs[0][1]
    for wr_id in range(4):
        post_recv(srq, [memory.sge(16 * wr_id, 16)], wr_id=wr_id)
    for number in range(4):
        near, far = pairs[number % 2]
        near.memory[:1] = bytes([65 + number])
        post_send(near.qp, SEND, [near.sge(0, 1)])
        completion = succeed(far.cq)
        assert (completion.wr_id, completion.qp_num) == (number, far.qp.qp_num)
    assert memory.memory[0:64:16] == b"ABCD"


def test_who_has_one_has_no_receive_queue(inline: software.Context) -> None:
    srq, pairs = make_star(inline, "plain", 1)
    far = pairs[0][1]
    assert far.qp.srq is srq
    assert (far.qp.capabilities.max_recv_wr, far.qp.capabilities.max_recv_sge) == (0, 0)
    with pytest.raises(VerbsError, match="ibv_post_recv failed: EINVAL"):
        post_recv(far.qp)


def test_datagrams_too(context: software.Context) -> None:
    domain = make_domain(context, "plain")
    srq = handles.SharedReceiveQueue(domain, 4)
    near, far = make_end(domain, qp_type=QpType.UD), make_end(domain, qp_type=QpType.UD, srq=srq)
    start_ud(near.qp)
    start_ud(far.qp)
    post_recv(srq, [far.sge()])
    way = handles.AddressHandle(domain, way_to(context))
    post_send(near.qp, SEND, [near.sge(0, 3)], ah=way, remote_qpn=far.qp.qp_num, remote_qkey=QKEY)
    assert succeed(far.cq).byte_len == GRH_BYTES + 3


def test_it_tells_its_size(inline: software.Context) -> None:
    pd = handles.ProtectionDomain(inline)
    srq = handles.SharedReceiveQueue(pd, 10, 3)
    told = srq.query()
    assert told.max_wr >= 10
    assert (told.max_sge, told.limit) == (3, 0)
    assert handles.SharedReceiveQueue(pd, 10, limit=4).query().limit == 4
    assert isinstance(told, SrqAttributes)
    assert srq.pd is pd
    assert (srq.cq, srq.xrc_domain) == (None, None)
    with pytest.raises(VerbsError, match="ibv_get_srq_num failed: EINVAL"):
        srq.number  # noqa: B018


def test_a_full_one_refuses(context: software.Context, kind: str) -> None:
    srq, pairs = make_star(context, kind, 1, depth=4)
    near, far = pairs[0]
    for _ in range(4):
        post_recv(srq, [far.sge(0, 8)])
    with pytest.raises(VerbsError, match="ibv_post_srq_recv failed: ENOMEM"):
        post_recv(srq)
    post_send(near.qp, SEND, [near.sge(0, 8)])
    succeed(far.cq)
    post_recv(srq)


def test_the_limit_is_told_once(context: software.Context, kind: str) -> None:
    srq, pairs = make_star(context, kind, limit=2)
    near, far = pairs[0]
    for _ in range(4):
        post_recv(srq, [far.sge(0, 8)])
    for left in (3, 2):
        post_send(near.qp, SEND, [near.sge(0, 8)])
        succeed(far.cq)
        assert context.get_async_event() is None, left
    post_send(near.qp, SEND, [near.sge(0, 8)])
    succeed(far.cq)
    event = next_event(context)
    assert event.event_type is EventType.SRQ_LIMIT_REACHED
    assert event.element is srq
    assert event.port_num is None
    event.ack()
    assert srq.query().limit == 0
    post_send(near.qp, SEND, [near.sge(0, 8)])
    succeed(far.cq)
    assert context.get_async_event() is None
    srq.modify(limit=1)  # as few are left already: at once, or with the next message
    post_recv(srq, [far.sge(0, 8)])
    post_send(near.qp, SEND, [near.sge(0, 8)])
    succeed(far.cq)
    event = next_event(context)
    assert event.element is srq
    event.ack()


def test_a_larger_size(context: software.Context, kind: str) -> None:
    srq, pairs = make_star(context, kind, 1, depth=4)
    near, far = pairs[0]
    for number in range(4):
        post_recv(srq, [far.sge(number, 1)], wr_id=number)
    srq.modify(max_wr=64, limit=3)
    assert srq.query().max_wr >= 64
    assert srq.query().limit == 3
    srq.modify(limit=0)
    for number in range(4, 64):
        post_recv(srq, [far.sge(number, 1)], wr_id=number)
    for number in range(64):
        near.memory[number] = number
        post_send(near.qp, SEND, [near.sge(number, 1)])
        assert succeed(far.cq).wr_id == number
    assert far.memory[:64] == bytes(range(64))


def test_a_size_that_is_too_small_changes_nothing(context: software.Context, kind: str) -> None:
    srq, pairs = make_star(context, kind, 1, depth=16)
    near, far = pairs[0]
    for number in range(16):
        post_recv(srq, [far.sge(0, 8)], wr_id=number)
    before = srq.query()
    with pytest.raises(VerbsError, match="ibv_modify_srq failed: E"):
        srq.modify(max_wr=2)
    assert srq.query() == before
    post_send(near.qp, SEND, [near.sge(0, 8)])
    assert succeed(far.cq).wr_id == 0


def test_memory_comes_from_the_parent_domain_s_allocator(context: software.Context) -> None:
    allocator = Recording()
    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, allocator)
    srq = handles.SharedReceiveQueue(domain, 8)
    asked = len(allocator.live)
    assert asked
    srq.modify(max_wr=128)
    assert len(allocator.live) == asked
    assert len(allocator.pieces) > asked
    srq.destroy()
    assert allocator.live == []


def test_an_allocator_that_fails_is_the_cause(context: software.Context) -> None:
    refusing = False

    def answer(recording: Recording, size: int, alignment: int, resource_type: int) -> object:
        if refusing:
            raise MemoryError("no more")
        return recording.piece(size, alignment, resource_type).address

    allocator = Recording(answer)
    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, allocator)
    srq = handles.SharedReceiveQueue(domain, 8)
    refusing = True
    for verb, call in (
        ("ibv_modify_srq", lambda: srq.modify(max_wr=128)),
        ("ibv_create_srq", lambda: handles.SharedReceiveQueue(domain, 8)),
    ):
        with pytest.raises(VerbsError) as caught:
            call()
        assert (caught.value.verb, caught.value.errno) == (verb, errno.ENOMEM)
        assert isinstance(caught.value.__cause__, MemoryError)
    assert srq.query().max_wr == 8


def test_an_xrc_queue_has_a_limit_and_grows(context: software.Context) -> None:
    pd, cq = handles.ProtectionDomain(context), handles.CompletionQueue(context, 16)
    srq = handles.SharedReceiveQueue(pd, 4, limit=2, xrc_domain=handles.XrcDomain(context), cq=cq)
    number = srq.number
    assert srq.query().limit == 2
    for _ in range(4):
        post_recv(srq)
    with pytest.raises(VerbsError, match="ibv_modify_srq failed: EINVAL"):
        srq.modify(max_wr=3, limit=5)
    with pytest.raises(BusyResourceError, match="1 open objects"):
        cq.destroy()
    srq.modify(max_wr=64, limit=40)
    assert (srq.query().max_wr, srq.query().limit, srq.number) == (64, 40, number)
    for _ in range(60):
        post_recv(srq)


def test_a_limit_that_cannot_be_armed_takes_the_queue_back(inline: software.Context) -> None:
    pd = handles.ProtectionDomain(inline)
    before = inline.counts()
    with pytest.raises(VerbsError, match="ibv_modify_srq failed: EINVAL"):
        handles.SharedReceiveQueue(pd, 4, limit=1 << 20)
    assert inline.counts() == before


def test_the_last_receive_of_a_queue_pair_in_error(context: software.Context) -> None:
    """Nothing is flushed: an event tells that it takes nothing any more."""
    srq, pairs = make_star(context, "plain", 1)
    far = pairs[0][1]
    post_recv(srq, [far.sge(0, 8)])
    far.qp.modify(QpState.ERR)
    event = next_event(context)
    assert event.event_type is EventType.QP_LAST_WQE_REACHED
    assert event.element is far.qp
    event.ack()
    assert poll(far.cq) == []


def test_bad_memory_breaks_the_queue_pair_alone(context: software.Context, kind: str) -> None:
    srq, pairs = make_star(context, kind)
    (near, far), (other, whole) = pairs
    post_recv(srq, [(far.region.address, 8, far.region.lkey ^ 0xFF00)])
    post_send(near.qp, SEND, [near.sge(0, 8)])
    assert wait_for(far.cq)[0].status is WcStatus.LOC_PROT_ERR
    assert wait_for(near.cq)[0].status is WcStatus.REM_OP_ERR
    post_recv(srq, [whole.sge(0, 8)])
    post_send(other.qp, SEND, [other.sge(0, 8)], flags=SIGNALED)
    succeed(other.cq)
    succeed(whole.cq)
    while event := context.get_async_event():
        event.ack()
