"""Queue pairs in the error state, peers that do not answer, and what is under way when something goes."""

import pytest

from aioverbs import QpState, SendFlags, SendOpcode, VerbsError, WcStatus
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.core.pairs import CAPABILITIES, connect, make_domain, make_end, succeed, to_init, to_rtr, to_rts, wait_for
from tests.core.test_faults_messages import make_patient_pair
from tests.waiting import wait_until

WRITE, SEND = SendOpcode.RDMA_WRITE, SendOpcode.SEND


def test_what_is_posted_to_a_broken_queue_pair_is_flushed(context: software.Context, kind: str) -> None:
    end = make_end(make_domain(context, kind))
    to_init(end.qp)
    end.qp.modify(QpState.ERR)
    end.qp.post_recv(wr_id=1)
    end.qp.post_send(SEND, wr_id=2)
    assert {(completion.wr_id, completion.status) for completion in wait_for(end.cq, 2)} == {
        (1, WcStatus.WR_FLUSH_ERR),
        (2, WcStatus.WR_FLUSH_ERR),
    }


def test_going_to_error_flushes_both_queues_in_order(context: software.Context, kind: str) -> None:
    domain = make_domain(context, kind)
    near, far = make_end(domain), make_end(domain)
    connect(near.qp, far.qp)
    near.qp.modify(QpState.SQD)  # what is posted now waits
    for number in range(20):
        near.qp.post_send(WRITE, wr_id=number)
        near.qp.post_recv(wr_id=100 + number)
    near.qp.modify(QpState.ERR)
    found = wait_for(near.cq, 40)
    assert all(completion.status is WcStatus.WR_FLUSH_ERR for completion in found)
    numbers = [completion.wr_id for completion in found]
    assert [number for number in numbers if number < 100] == list(range(20))
    assert [number for number in numbers if number >= 100] == list(range(100, 120))


@pytest.mark.parametrize("gone", ["destroyed", "reset", "connected to another", "in error", "out of sequence"])
def test_a_peer_that_does_not_answer(context: software.Context, kind: str, gone: str) -> None:
    domain = make_domain(context, kind)
    near, far = make_end(domain), make_end(domain)
    connect(near.qp, far.qp)
    match gone:
        case "destroyed":
            far.qp.destroy()
        case "reset" | "connected to another" | "out of sequence":
            far.qp.modify(QpState.RESET)
            if gone != "reset":
                to_init(far.qp)
                to_rtr(far.qp, near.qp.qp_num + (gone != "out of sequence"), psn=int(gone == "out of sequence"))
        case "in error":
            far.qp.modify(QpState.ERR)
    near.qp.post_send(WRITE, [near.sge(0, 8)], remote_addr=far.region.address, rkey=far.region.rkey)
    (completion,) = wait_for(near.cq)
    assert completion.status is WcStatus.RETRY_EXC_ERR


def test_a_peer_that_is_late(context: software.Context) -> None:
    """With retries left, a request waits for the peer, and for its receive."""
    domain = make_domain(context, "plain")
    near, far = make_end(domain), make_end(domain)
    to_init(near.qp)
    to_rtr(near.qp, far.qp.qp_num)
    to_rts(near.qp, timeout=15, retry_cnt=7, rnr_retry=7)  # for a second in all
    to_init(far.qp)
    near.memory[:4] = b"late"
    near.qp.post_send(SEND, [near.sge(0, 4)], flags=SendFlags.SIGNALED)
    assert near.cq.poll() == []
    to_rtr(far.qp, near.qp.qp_num)  # now it answers: not ready
    assert near.cq.poll() == []
    far.qp.post_recv([far.sge(0, 4)])
    succeed(near.cq)
    assert succeed(far.cq).byte_len == 4
    assert far.memory[:4] == b"late"


def test_a_queue_pair_serves_again_after_reset(context: software.Context, kind: str) -> None:
    domain = make_domain(context, kind)
    near, far = make_end(domain), make_end(domain)
    for round_ in range(3):
        connect(near.qp, far.qp)
        near.memory[:1] = bytes([round_])
        near.qp.post_send(
            WRITE, [near.sge(0, 1)], flags=SendFlags.SIGNALED, remote_addr=far.region.address, rkey=far.region.rkey
        )
        succeed(near.cq)
        assert far.memory[0] == round_
        near.qp.post_send(WRITE, [near.sge(0, 1)], wr_id=5, remote_addr=far.region.address, rkey=0)
        assert wait_for(near.cq)[0].status is WcStatus.REM_ACCESS_ERR
        near.qp.post_recv(wr_id=6)
        for end in (near, far):
            end.qp.modify(QpState.RESET)
        assert near.cq.poll() == []  # the flushed receive went with the reset


def test_memory_that_was_deregistered_is_not_touched(context: software.Context, kind: str) -> None:
    """A request that is under way when its region goes, here for want of a receive, finds it gone."""
    near, far = make_patient_pair(context, kind)
    near.memory[:4] = b"data"
    near.qp.post_send(
        SendOpcode.RDMA_WRITE_WITH_IMM, [near.sge(0, 4)], remote_addr=far.region.address, rkey=far.region.rkey
    )
    far.region.destroy()
    far.memory.clear()
    far.qp.post_recv()
    assert wait_for(near.cq)[0].status is WcStatus.REM_ACCESS_ERR


@pytest.mark.parametrize("end", ["near", "far"])
def test_destroying_a_queue_pair_with_requests_under_way(context: software.Context, kind: str, end: str) -> None:
    near, far = make_patient_pair(context, kind)
    gone, left = (near, far) if end == "near" else (far, near)
    for _ in range(10):  # without receives none of them ends
        near.qp.post_send(SEND, [near.sge(0, 8)])
        far.qp.post_send(SEND, [far.sge(0, 8)])
    gone.qp.destroy()
    statuses = [completion.status for completion in wait_for(left.cq, 10)]
    assert statuses == [WcStatus.RETRY_EXC_ERR] + [WcStatus.WR_FLUSH_ERR] * 9
    assert gone.cq.poll() == []


@pytest.mark.parametrize("extended", [False, True])
def test_a_full_completion_queue_is_lost_for_good(context: software.Context, extended: bool) -> None:
    pd = handles.ProtectionDomain(context)
    cq = handles.CompletionQueue(context, 4, extended=extended)
    near, far = (handles.QueuePair(pd, cq, cq, CAPABILITIES) for _ in range(2))
    connect(near, far)
    for number in range(6):
        near.post_send(WRITE, wr_id=number, flags=SendFlags.SIGNALED)
    wait_until(lambda: near.query().qp_state is QpState.ERR)
    assert [completion.wr_id for completion in wait_for(cq, 4)] == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(VerbsError, match=f"{'ibv_start_poll' if extended else 'ibv_poll_cq'} failed: EIO"):
            cq.poll()
    cq.resize(64)  # more room brings nothing back
    with pytest.raises(VerbsError, match="EIO"):
        cq.poll()


def test_who_sleeps_hears_of_a_lost_queue(context: software.Context) -> None:
    """A queue that overran has nothing more to tell but this: its event comes all the same."""
    pd, channel = handles.ProtectionDomain(context), handles.CompletionChannel(context)
    cq = handles.CompletionQueue(context, 1, channel)
    near, far = (handles.QueuePair(pd, cq, cq, CAPABILITIES) for _ in range(2))
    connect(near, far)
    near.post_send(WRITE, flags=SendFlags.SIGNALED)
    wait_until(lambda: near.query().sq_psn == 1)
    cq.request_notify()
    near.post_send(WRITE, flags=SendFlags.SIGNALED)
    wait_until(lambda: channel.get_event() is cq)
    cq.ack_events()
    assert len(cq.poll()) == 1
    with pytest.raises(VerbsError, match="ibv_poll_cq failed: EIO"):
        cq.poll()
