"""The fault plan and what is under way: requests and receives with a status, and losses."""

from typing import Any

import pytest

from aioverbs import ClosedResourceError, EventType, QpState, SendFlags, SendOpcode, WcStatus
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.attributes import FaultRecord
from tests.core.contexts import opened
from tests.core.pairs import (
    End,
    connect,
    make_domain,
    make_end,
    make_pair,
    next_event,
    succeed,
    to_init,
    to_rtr,
    to_rts,
    wait_for,
)
from tests.core.transports import QKEY, make_uc_pair, make_ud_pair, way_to
from tests.raw_verbs import poll, post_recv, post_send
from tests.waiting import wait_until

SEND, WRITE, SIGNALED = SendOpcode.SEND, SendOpcode.RDMA_WRITE, SendFlags.SIGNALED
WRITE_WITH_IMM = SendOpcode.RDMA_WRITE_WITH_IMM
FAILURES = [status for status in WcStatus if status]


def write(near: End, far: End, wr_id: int, length: int = 8) -> None:
    post_send(
        near.qp,
        WRITE,
        [near.sge(0, length)],
        wr_id=wr_id,
        flags=SIGNALED,
        remote_addr=far.region.address,
        rkey=far.region.rkey,
    )


def statuses(end: End, count: int) -> list[tuple[int, WcStatus]]:
    return [(completion.wr_id, completion.status) for completion in wait_for(end.cq, count)]


def make_patient_pair(context: software.Context, kind: str = "plain", timeout: int = 4) -> tuple[End, End]:
    """A pair that tries seven times again, after 65 us where nothing else is said."""
    domain = make_domain(context, kind)
    ends = make_end(domain), make_end(domain)
    for end, peer in zip(ends, reversed(ends), strict=True):
        to_init(end.qp)
        to_rtr(end.qp, peer.qp.qp_num)
        to_rts(end.qp, timeout=timeout, retry_cnt=7, rnr_retry=7)
    return ends


def again(near: End, far: End) -> None:
    for end in (near, far):
        end.qp.modify(QpState.RESET)
        assert poll(end.cq) == []
    connect(near.qp, far.qp)


class TestRequests:
    def test_the_second_of_a_queue_pair(self, context: software.Context, kind: str) -> None:
        near, far = make_pair(context, kind)
        near.memory[:8] = b"arrives?"
        context.faults.fail_request(WcStatus.LOC_QP_OP_ERR, near.qp, first=2, vendor_err=77)
        post_send(far.qp, WRITE, flags=SIGNALED)  # another queue pair's are not counted
        succeed(far.cq)
        post_send(near.qp, WRITE, wr_id=1, flags=SIGNALED)
        write(near, far, 2)
        write(near, far, 3)
        good, failed, flushed = wait_for(near.cq, 3)
        assert (good.wr_id, good.status) == (1, WcStatus.SUCCESS)
        assert (failed.wr_id, failed.status, failed.vendor_err) == (2, WcStatus.LOC_QP_OP_ERR, 77)
        assert (flushed.wr_id, flushed.status) == (3, WcStatus.WR_FLUSH_ERR)
        assert near.qp.query().qp_state is QpState.ERR
        assert far.qp.query().qp_state is QpState.RTS
        assert far.memory == bytes(4096)
        assert context.faults.records() == [
            FaultRecord("request", near.qp.qp_num, 2, WcStatus.LOC_QP_OP_ERR),
        ]
        again(near, far)
        write(near, far, 4)
        succeed(near.cq)
        assert far.memory[:8] == b"arrives?"

    @pytest.mark.parametrize("status", FAILURES, ids=lambda status: status.name)
    def test_each_status(self, inline: software.Context, status: WcStatus) -> None:
        near, _ = make_pair(inline)
        inline.faults.fail_request(int(status), near.qp)
        post_send(near.qp, WRITE, wr_id=1)  # it was not asked to complete, and does
        assert statuses(near, 1) == [(1, status)]
        assert inline.faults.records() == [("request", near.qp.qp_num, 1, status)]

    def test_of_all_queue_pairs_every_second_one(self, context: software.Context) -> None:
        near, far = make_pair(context)
        context.faults.fail_request(WcStatus.GENERAL_ERR, first=2, every=2, times=2)
        found = []
        for end in (near, far, near, near):
            post_send(end.qp, WRITE, flags=SIGNALED)
            found += statuses(end, 1)
            if found[-1][1]:
                again(near, far)
        assert [status for _, status in found] == [0, WcStatus.GENERAL_ERR, 0, WcStatus.GENERAL_ERR]
        assert [(record.subject, record.ordinal) for record in context.faults.records()] == [
            (far.qp.qp_num, 2),
            (near.qp.qp_num, 4),
        ]
        near.qp.modify(QpState.RESET)

    def test_unreliable_ones_stop_their_queue_alone(self, context: software.Context, kind: str) -> None:
        near, _ = make_uc_pair(context, kind)
        context.faults.fail_request(WcStatus.LOC_PROT_ERR, near.qp)
        post_send(near.qp, SEND, wr_id=1)
        assert statuses(near, 1) == [(1, WcStatus.LOC_PROT_ERR)]
        assert near.qp.query().qp_state is QpState.SQE

    def test_arguments(self, inline: software.Context) -> None:
        near, _ = make_pair(inline)
        plan = inline.faults
        with pytest.raises(ValueError, match="another status than SUCCESS"):
            plan.fail_request(WcStatus.SUCCESS)
        with pytest.raises(ValueError, match="99 is not a valid WcStatus"):
            plan.fail_request(99)
        for vendor_err in (-1, 1 << 32):
            with pytest.raises(OverflowError):
                plan.fail_request(WcStatus.FATAL_ERR, vendor_err=vendor_err)
        nonsense: Any = inline
        for use in (plan.lose_messages, plan.hold, lambda qp: plan.fail_request(WcStatus.FATAL_ERR, qp)):
            with pytest.raises(TypeError, match="QueuePair"):
                use(nonsense)
        post_send(near.qp, WRITE, flags=SIGNALED)
        succeed(near.cq)

    def test_queue_pairs_of_others_and_closed_ones(self, context: software.Context) -> None:
        near, _ = make_pair(context)
        plan = context.faults
        uses = (
            plan.lose_messages,
            plan.hold,
            lambda qp: plan.fail_request(WcStatus.FATAL_ERR, qp),
            plan.break_queue_pair,
        )
        with opened("inline") as other:
            stranger, _ = make_pair(other)
            for use in uses:
                with pytest.raises(ValueError, match=r"<QueuePair \d+ of soft0> is not of <Context of soft0>"):
                    use(stranger.qp)
            post_send(stranger.qp, WRITE, flags=SIGNALED)
            succeed(stranger.cq)
            stranger.qp.destroy()  # nothing keeps it
        near.qp.destroy()
        for use in uses:
            with pytest.raises(ClosedResourceError, match="QueuePair"):
                use(near.qp)


class TestReceives:
    """The receiver sees the status, and the sender, where it is told, that it went wrong over there."""

    @pytest.mark.parametrize("status", FAILURES, ids=lambda status: status.name)
    def test_each_status(self, inline: software.Context, status: WcStatus) -> None:
        near, far = make_pair(inline)
        inline.faults.fail_request(status, far.qp, receives=True, vendor_err=5)
        post_recv(far.qp, [far.sge(0, 8)], wr_id=1)
        post_send(near.qp, SEND, [near.sge(0, 4)], wr_id=2)
        received = wait_for(far.cq)[0]
        assert (received.wr_id, received.status, received.vendor_err) == (1, status, 5)
        told = WcStatus.REM_INV_REQ_ERR if status is WcStatus.LOC_LEN_ERR else WcStatus.REM_OP_ERR
        assert statuses(near, 1) == [(2, told)]
        assert [end.qp.query().qp_state for end in (near, far)] == [QpState.ERR] * 2
        assert inline.faults.records() == [("receive", far.qp.qp_num, 1, status)]

    def test_counted_as_messages_come_for_them(self, context: software.Context, kind: str) -> None:
        near, far = make_pair(context, kind)
        near.memory[:4] = b"near"
        context.faults.fail_request(WcStatus.LOC_PROT_ERR, receives=True, first=2)
        for wr_id in (10, 11, 12):
            post_recv(far.qp, [far.sge(100, 8)], wr_id=wr_id)
        write(near, far, 1)  # comes for none
        post_send(near.qp, SEND, [near.sge(0, 2)], wr_id=2, flags=SIGNALED)
        assert statuses(near, 2) == [(1, WcStatus.SUCCESS), (2, WcStatus.SUCCESS)]
        post_send(
            near.qp,
            WRITE_WITH_IMM,
            [near.sge(0, 4)],
            wr_id=3,
            remote_addr=far.region.address + 200,
            rkey=far.region.rkey,
        )
        assert statuses(near, 1) == [(3, WcStatus.REM_OP_ERR)]
        assert statuses(far, 3) == [
            (10, WcStatus.SUCCESS),
            (11, WcStatus.LOC_PROT_ERR),
            (12, WcStatus.WR_FLUSH_ERR),
        ]
        assert far.memory[100:102] == b"ne"
        assert far.memory[200:204] == bytes(4)

    def test_unreliable_senders_are_not_told(self, context: software.Context, kind: str) -> None:
        for make in (make_uc_pair, make_ud_pair):
            near, far = make(context, kind)
            context.faults.fail_request(WcStatus.LOC_LEN_ERR, far.qp, receives=True)
            post_recv(far.qp, [far.sge(0, 64)], wr_id=1)
            way = handles.AddressHandle(near.pd, way_to(context)) if make is make_ud_pair else None
            post_send(
                near.qp,
                SEND,
                [near.sge(0, 4)],
                ah=way,
                remote_qpn=far.qp.qp_num if way else 0,
                remote_qkey=QKEY,
                flags=SIGNALED,
            )
            succeed(near.cq)
            assert statuses(far, 1) == [(1, WcStatus.LOC_LEN_ERR)]
            assert near.qp.query().qp_state is QpState.RTS
            wait_until(lambda qp=far.qp: qp.query().qp_state is QpState.ERR)  # type: ignore[misc]

    def test_of_a_shared_queue(self, context: software.Context) -> None:
        domain = make_domain(context, "plain")
        srq = handles.SharedReceiveQueue(domain, 4)
        near, far = make_end(domain), make_end(domain, srq=srq)
        connect(near.qp, far.qp)
        context.faults.fail_request(WcStatus.LOC_ACCESS_ERR, far.qp, receives=True)
        post_recv(srq, [far.sge(0, 8)], wr_id=1)
        post_send(near.qp, SEND, [near.sge(0, 4)], wr_id=2)
        assert statuses(near, 1) == [(2, WcStatus.REM_OP_ERR)]
        assert statuses(far, 1) == [(1, WcStatus.LOC_ACCESS_ERR)]
        event = next_event(context)
        assert (event.event_type, event.element) == (EventType.QP_LAST_WQE_REACHED, far.qp)
        event.ack()


class TestLosses:
    def test_lost_ones_are_tried_again(self, context: software.Context, kind: str) -> None:
        near, far = make_patient_pair(context, kind)
        near.memory[:8] = b"at last!"
        context.faults.lose_messages(near.qp, first=2, times=3)
        post_send(far.qp, WRITE, flags=SIGNALED)
        succeed(far.cq)
        post_send(near.qp, WRITE, flags=SIGNALED)
        succeed(near.cq)
        write(near, far, 2)
        succeed(near.cq)
        assert far.memory[:8] == b"at last!"
        assert context.faults.records() == [("loss", near.qp.qp_num, number, None) for number in (2, 3, 4)]

    def test_retries_are_used_up(self, context: software.Context) -> None:
        near, far = make_patient_pair(context)
        context.faults.lose_messages(times=8)  # the first attempt, and seven more
        write(near, far, 1)
        assert statuses(near, 1) == [(1, WcStatus.RETRY_EXC_ERR)]
        assert near.qp.query().qp_state is QpState.ERR
        assert far.qp.query().qp_state is QpState.RTS
        assert len(context.faults.records()) == 8

    def test_the_link_is_cut_and_whole_again(self, context: software.Context, kind: str) -> None:
        near, far = make_pair(context, kind)
        context.faults.lose_messages_at_random(1_000_000)
        for end in (near, far):
            post_send(end.qp, WRITE, wr_id=1)
            assert statuses(end, 1) == [(1, WcStatus.RETRY_EXC_ERR)]
        context.faults.lose_messages_at_random(0)
        again(near, far)
        write(near, far, 2)
        succeed(near.cq)

    def test_datagrams_just_do_not_arrive(self, context: software.Context) -> None:
        near, far = make_ud_pair(context)
        way = handles.AddressHandle(near.pd, way_to(context))
        context.faults.lose_messages(near.qp, first=1, every=2, times=2)
        for wr_id in range(4):
            post_recv(far.qp, [far.sge(0, 64)], wr_id=wr_id)
        for number in range(4):
            post_send(
                near.qp, SEND, [near.sge(0, number)], ah=way, remote_qpn=far.qp.qp_num, remote_qkey=QKEY, flags=SIGNALED
            )
            succeed(near.cq)
        assert [completion.byte_len - 40 for completion in wait_for(far.cq, 2)] == [1, 3]
        assert poll(far.cq) == []

    def test_at_random_and_again(self, context: software.Context) -> None:
        """The n-th attempts of a queue pair are lost by the seed, here and in another context."""

        def lost(context: software.Context, ends: tuple[End, End], seed: int) -> list[list[int]]:
            plan = context.faults
            before = len(plan.records())
            plan.seed(seed)
            for _ in range(40):
                for end in ends:
                    post_send(end.qp, WRITE, flags=SIGNALED)
                for end in ends:
                    succeed(end.cq)
            records = plan.records()[before:]
            assert {record.kind for record in records} == {"loss"}
            return [[record.ordinal for record in records if record.subject == end.qp.qp_num] for end in ends]

        ends = make_patient_pair(context)
        context.faults.lose_messages_at_random(200_000)
        first = lost(context, ends, 7)
        assert all(3 < len(ordinals) < 30 for ordinals in first)
        assert first[0] != first[1]
        assert lost(context, ends, 7) == first
        assert lost(context, ends, 8) != first
        context.faults.lose_messages_at_random(0)
        with opened("engine") as other:
            pair = make_patient_pair(other)
            other.faults.lose_messages_at_random(200_000)
            assert lost(other, pair, 7) == first
            other.faults.clear()
