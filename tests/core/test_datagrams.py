"""Queue pairs of type UD: each datagram has its own way, arrives behind a header, or does not arrive."""

import pytest

from aioverbs import BusyResourceError, ClosedResourceError, QpState, QpType, SendFlags, SendOpcode, WcFlags, WcStatus
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.attributes import AddressVector
from tests.core.contexts import opened
from tests.core.pairs import End, make_domain, make_end, make_pair, succeed, wait_for
from tests.core.transports import GRH_BYTES, QKEY, make_ud_pair, start_ud, way_to

SEND, SIGNALED = SendOpcode.SEND, SendFlags.SIGNALED


def send(near: End, far: End, way: handles.AddressHandle, length: int, *, qkey: int = QKEY, wr_id: int = 0) -> None:
    near.qp.post_send(
        SEND,
        [near.sge(0, length)],
        ah=way,
        remote_qpn=far.qp.qp_num,
        remote_qkey=qkey,
        wr_id=wr_id,
        flags=SIGNALED,
    )


@pytest.mark.parametrize("extended", [False, True])
def test_a_datagram_comes_with_its_route(context: software.Context, kind: str, extended: bool) -> None:
    near, far = make_ud_pair(context, kind, extended=extended)
    way = handles.AddressHandle(near.pd, way_to(context))
    near.memory[:5] = b"hello"
    far.qp.post_recv([far.sge(0, 100)])
    send(near, far, way, 5)
    assert succeed(near.cq).opcode == SEND - 2  # IBV_WC_SEND
    received = succeed(far.cq)
    assert received.byte_len == GRH_BYTES + 5
    assert received.wc_flags & WcFlags.GRH
    assert received.src_qp == near.qp.qp_num
    header = far.memory[:GRH_BYTES]
    assert header[:20] == bytes(20)
    assert header[20] == 0x45  # IPv4, as RoCE v2 has it there
    assert header[32:40] == context.query_gid(1, 1)[12:] * 2
    assert far.memory[GRH_BYTES : GRH_BYTES + 6] == b"hello\0"


def test_a_route_of_ipv6_form(context: software.Context) -> None:
    near, far = make_ud_pair(context)
    gid = context.query_gid(1, 0)
    way = handles.AddressHandle(
        near.pd, AddressVector(gid, sgid_index=0, hop_limit=9, traffic_class=0x5A, flow_label=0x12345)
    )
    far.qp.post_recv([far.sge(0, 100)])
    send(near, far, way, 1)
    succeed(far.cq)
    header = far.memory[:GRH_BYTES]
    assert header[:4] == (6 << 28 | 0x5A << 20 | 0x12345).to_bytes(4, "big")
    assert header[7] == 9
    assert header[8:24] == header[24:40] == gid


def test_an_immediate_and_a_header_across_entries(context: software.Context, kind: str) -> None:
    near, far = make_ud_pair(context, kind)
    way = handles.AddressHandle(near.pd, way_to(context))
    near.memory[:3] = b"abc"
    far.qp.post_recv([far.sge(0, 30), far.sge(1000, 20)])
    near.qp.post_send(
        SendOpcode.SEND_WITH_IMM,
        [near.sge(0, 3)],
        ah=way,
        remote_qpn=far.qp.qp_num,
        remote_qkey=QKEY,
        imm_data=0xCAFE,
        flags=SIGNALED | SendFlags.SOLICITED,
    )
    received = succeed(far.cq)
    assert received.imm_data == 0xCAFE
    assert received.wc_flags == WcFlags.GRH | WcFlags.WITH_IMM
    assert far.memory[1010:1014] == b"abc\0"


def test_one_queue_pair_sends_to_many(context: software.Context) -> None:
    domain = make_domain(context, "plain")
    near, *others = (make_end(domain, qp_type=QpType.UD) for _ in range(4))
    start_ud(near.qp)
    way = handles.AddressHandle(domain, way_to(context))
    for number, far in enumerate(others):
        start_ud(far.qp, QKEY + number)
        far.qp.post_recv([far.sge()])
        near.memory[0] = 65 + number
        send(near, far, way, 1, qkey=QKEY + number)
        succeed(near.cq)
    for number, far in enumerate(others):
        succeed(far.cq)
        assert far.memory[GRH_BYTES] == 65 + number


@pytest.mark.parametrize("reason", ["Q_Key", "number", "type", "state", "no receive", "too large", "way"])
def test_what_cannot_arrive_is_lost_in_silence(context: software.Context, kind: str, reason: str) -> None:
    near, far = make_ud_pair(context, kind)
    way, number, qkey, length = handles.AddressHandle(near.pd, way_to(context)), far.qp.qp_num, QKEY, 8
    if reason != "no receive":
        far.qp.post_recv([far.sge()])
    match reason:
        case "Q_Key":
            qkey = QKEY + 1
        case "number":
            number = 0xFFFFFE
        case "type":
            connected, peer = make_pair(context)
            connected.qp.post_recv([connected.sge()])
            number, far = connected.qp.qp_num, connected
            assert peer.cq.poll() == []
        case "state":
            far.qp.modify(QpState.ERR)
            assert wait_for(far.cq)[0].status is WcStatus.WR_FLUSH_ERR
        case "too large":
            large = make_end(near.pd, size=8192, qp_type=QpType.UD)
            near, length = End(near.qp, near.cq, large.memory, large.region), 4097
        case "way":
            nowhere = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
            way = handles.AddressHandle(near.pd, AddressVector(nowhere, sgid_index=1))
    near.qp.post_send(SEND, [near.sge(0, length)], ah=way, remote_qpn=number, remote_qkey=qkey, flags=SIGNALED, wr_id=5)
    assert succeed(near.cq).wr_id == 5  # the sender is told nothing
    assert far.cq.poll() == []
    if reason not in ("type", "state", "no receive"):  # the receive is still there
        send(near, far, handles.AddressHandle(near.pd, way_to(context)), 2)
        assert succeed(far.cq).byte_len == GRH_BYTES + 2


def test_a_receive_that_is_too_small_waits_for_one_that_fits(context: software.Context, kind: str) -> None:
    near, far = make_ud_pair(context, kind)
    way = handles.AddressHandle(near.pd, way_to(context))
    far.qp.post_recv([far.sge(0, GRH_BYTES + 4)])
    for length in (5, 4):
        send(near, far, way, length)
        assert succeed(near.cq).status is WcStatus.SUCCESS
    assert succeed(far.cq).byte_len == GRH_BYTES + 4
    assert far.cq.poll() == []


@pytest.mark.once
def test_qkey_is_told(context: software.Context) -> None:
    near, _ = make_ud_pair(context)
    assert near.qp.query().qkey == QKEY
    near.qp.modify(qkey=7)
    assert near.qp.query().qkey == 7
    assert near.qp.qp_type is QpType.UD


def test_a_way_may_go_while_datagrams_are_under_way() -> None:
    with opened("engine-delayed", delay_ns=10_000_000) as context:
        near, far = make_ud_pair(context)
        way = handles.AddressHandle(near.pd, way_to(context))
        with pytest.raises(BusyResourceError):
            near.pd.destroy()
        far.qp.post_recv([far.sge()])
        send(near, far, way, 9)
        way.destroy()
        assert succeed(far.cq).byte_len == GRH_BYTES + 9


def test_a_closed_way_is_refused(context: software.Context) -> None:
    near, far = make_ud_pair(context)
    way = handles.AddressHandle(near.pd, way_to(context))
    way.destroy()
    with pytest.raises(ClosedResourceError, match=f"AddressHandle to {context.query_gid(1, 1).hex()}"):
        send(near, far, way, 1)
    near.qp.post_send(
        SEND, ah=handles.AddressHandle(near.pd, way_to(context)), remote_qpn=far.qp.qp_num, flags=SIGNALED
    )
    succeed(near.cq)


def test_a_way_of_another_protection_domain(context: software.Context) -> None:
    near, far = make_ud_pair(context)
    send(near, far, handles.AddressHandle(handles.ProtectionDomain(context), way_to(context)), 1)
    assert wait_for(near.cq)[0].status is WcStatus.LOC_QP_OP_ERR


def test_after_an_error_of_its_own_the_sender_stops_and_goes_on(context: software.Context, kind: str) -> None:
    """SQE: the send queue alone has broken, and may be set going again."""
    near, far = make_ud_pair(context, kind)
    way = handles.AddressHandle(near.pd, way_to(context))
    near.qp.post_send(SEND, [(near.region.address, 8, near.region.lkey ^ 0xFF00)], ah=way, remote_qpn=far.qp.qp_num)
    assert wait_for(near.cq)[0].status is WcStatus.LOC_PROT_ERR
    assert near.qp.query().qp_state is QpState.SQE
    send(near, far, way, 1)
    assert wait_for(near.cq)[0].status is WcStatus.WR_FLUSH_ERR
    near.qp.modify(QpState.RTS, cur_qp_state=QpState.SQE)
    far.qp.post_recv([far.sge()])
    send(near, far, way, 1)
    succeed(far.cq)
    succeed(near.cq)
