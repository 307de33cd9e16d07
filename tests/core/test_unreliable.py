"""Queue pairs of type UC: in order or not at all, and nobody is told."""

import pytest

from aioverbs import QpState, QpType, SendFlags, SendOpcode, VerbsError, WcFlags, WcOpcode, WcStatus
from aioverbs._core.software import software
from tests.core.pairs import succeed, wait_for
from tests.core.transports import connect_uc, make_uc_pair
from tests.waiting import wait_until

SEND, WRITE, SIGNALED = SendOpcode.SEND, SendOpcode.RDMA_WRITE, SendFlags.SIGNALED


def test_send_and_write(context: software.Context, kind: str) -> None:
    near, far = make_uc_pair(context, kind)
    near.memory[:9] = b"unordered"
    far.qp.post_recv([far.sge(0, 16)], wr_id=4)
    far.qp.post_recv(wr_id=5)
    near.qp.post_send(SEND, [near.sge(0, 9)], flags=SIGNALED)
    near.qp.post_send(
        WRITE, [near.sge(0, 9)], flags=SIGNALED, remote_addr=far.region.address + 100, rkey=far.region.rkey
    )
    near.qp.post_send(
        SendOpcode.RDMA_WRITE_WITH_IMM,
        [near.sge(0, 2)],
        flags=SIGNALED,
        imm_data=77,
        remote_addr=far.region.address + 200,
        rkey=far.region.rkey,
    )
    assert [wc.opcode for wc in wait_for(near.cq, 3)] == [WcOpcode.SEND, WcOpcode.RDMA_WRITE, WcOpcode.RDMA_WRITE]
    first, second = wait_for(far.cq, 2)
    assert (first.wr_id, first.byte_len) == (4, 9)
    assert (second.wr_id, second.opcode, second.imm_data) == (5, WcOpcode.RECV_RDMA_WITH_IMM, 77)
    assert second.wc_flags == WcFlags.WITH_IMM
    assert far.memory[:9] == far.memory[100:109] == b"unordered"
    assert far.memory[200:203] == b"un\0"
    assert near.qp.qp_type is QpType.UC


@pytest.mark.parametrize("gone", ["no receive", "peer destroyed", "peer reset", "bad key"])
def test_what_does_not_arrive_is_lost_in_silence(context: software.Context, kind: str, gone: str) -> None:
    near, far = make_uc_pair(context, kind)
    if gone == "peer destroyed":
        far.qp.destroy()
    if gone == "peer reset":
        far.qp.modify(QpState.RESET)
    if gone == "bad key":
        near.qp.post_send(
            WRITE, [near.sge(0, 4)], remote_addr=far.region.address, rkey=far.region.rkey ^ 0xFF00, flags=SIGNALED
        )
    else:
        near.qp.post_send(SEND, [near.sge(0, 4)], flags=SIGNALED)
    assert succeed(near.cq).status is WcStatus.SUCCESS
    assert far.cq.poll() == []
    assert near.qp.query().qp_state is QpState.RTS
    assert far.memory == bytes(4096)


def test_a_message_after_a_lost_one_arrives(context: software.Context) -> None:
    near, far = make_uc_pair(context)
    near.qp.post_send(SEND, [near.sge(0, 4)], flags=SIGNALED)
    succeed(near.cq)
    far.qp.post_recv([far.sge()])
    near.qp.post_send(SEND, [near.sge(0, 7)], flags=SIGNALED)
    assert succeed(far.cq).byte_len == 7


@pytest.mark.once
@pytest.mark.parametrize("opcode", [SendOpcode.RDMA_READ, SendOpcode.ATOMIC_FETCH_AND_ADD])
def test_what_needs_an_answer_is_refused(context: software.Context, opcode: SendOpcode) -> None:
    near, far = make_uc_pair(context)
    with pytest.raises(VerbsError, match="ibv_post_send failed: EINVAL"):
        near.qp.post_send(opcode, [near.sge(0, 8)], remote_addr=far.region.address, rkey=far.region.rkey)


def test_its_states_take_no_attributes_of_reliable_ones(inline: software.Context) -> None:
    near, far = make_uc_pair(inline)
    with pytest.raises(VerbsError, match="ibv_modify_qp failed: EINVAL"):
        near.qp.modify(min_rnr_timer=1)
    near.qp.modify(QpState.RESET)
    connect_uc(near.qp, far.qp.qp_num)


def test_an_error_of_its_own_stops_the_send_queue_alone(context: software.Context) -> None:
    near, far = make_uc_pair(context)
    near.qp.post_recv([near.sge()])
    near.qp.post_send(SEND, [(near.region.address, 8, near.region.lkey ^ 0xFF00)])
    assert wait_for(near.cq)[0].status is WcStatus.LOC_PROT_ERR
    wait_until(lambda: near.qp.query().qp_state is QpState.SQE)
    far.qp.post_send(SEND, [far.sge(0, 3)], flags=SIGNALED)
    succeed(far.cq)
    assert succeed(near.cq).byte_len == 3  # it still receives
