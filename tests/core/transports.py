"""Queue pairs of the other types, ready to send and to receive."""

from aioverbs import Mtu, QpState, QpType
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.attributes import AddressVector
from tests.core.pairs import End, make_domain, make_end, to_init, to_rtr, to_rts

QKEY = 0x11111111
GRH_BYTES = 40


def way_to(context: handles.Context, index: int = 1) -> AddressVector:
    """The way to the device itself, by one of its two GIDs."""
    return AddressVector(context.query_gid(1, index), sgid_index=index)


def connect_uc(qp: handles.QueuePair, peer: int) -> None:
    to_init(qp)
    qp.modify(QpState.RTR, path_mtu=Mtu.MTU_4096, dest_qp_num=peer, rq_psn=0, av=way_to(qp.context))
    qp.modify(QpState.RTS, sq_psn=0)


def make_uc_pair(context: software.Context, kind: str = "plain") -> tuple[End, End]:
    """Two ends that send without being told whether it arrives."""
    domain = make_domain(context, kind)
    near, far = make_end(domain, qp_type=QpType.UC), make_end(domain, qp_type=QpType.UC)
    connect_uc(near.qp, far.qp.qp_num)
    connect_uc(far.qp, near.qp.qp_num)
    return near, far


def start_ud(qp: handles.QueuePair, qkey: int = QKEY) -> None:
    qp.modify(QpState.INIT, pkey_index=0, port_num=1, qkey=qkey)
    qp.modify(QpState.RTR)
    qp.modify(QpState.RTS, sq_psn=0)


def make_ud_pair(context: software.Context, kind: str = "plain", *, extended: bool = False) -> tuple[End, End]:
    """Two ends that send each other datagrams."""
    domain = make_domain(context, kind)
    near, far = (make_end(domain, qp_type=QpType.UD, extended=extended) for _ in range(2))
    start_ud(near.qp)
    start_ud(far.qp)
    return near, far


def start_xrc_sender(qp: handles.QueuePair, peer: int) -> None:
    to_init(qp)
    qp.modify(QpState.RTR, path_mtu=Mtu.MTU_4096, dest_qp_num=peer, rq_psn=0, av=way_to(qp.context))
    to_rts(qp)


def start_xrc_receiver(qp: handles.QueuePair, peer: int) -> None:
    to_init(qp)
    to_rtr(qp, peer)
