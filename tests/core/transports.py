"""Queue pairs of the other types, ready to send and to receive."""

from aioverbs import Mtu, QpState
from aioverbs._core.handles import handles
from aioverbs.attributes import AddressVector
from tests.core.pairs import to_init, to_rtr, to_rts

QKEY = 0x11111111


def path_to_self(context: handles.Context, index: int = 1) -> AddressVector:
    """Return the address vector of the device itself, by one of its two GIDs."""
    return AddressVector(context.query_gid(1, index), sgid_index=index)


def start_ud(qp: handles.QueuePair, qkey: int = QKEY) -> None:
    qp.modify(QpState.INIT, pkey_index=0, port_num=1, qkey=qkey)
    qp.modify(QpState.RTR)
    qp.modify(QpState.RTS, sq_psn=0)


def start_xrc_sender(qp: handles.QueuePair, peer: int) -> None:
    to_init(qp)
    qp.modify(QpState.RTR, path_mtu=Mtu.MTU_4096, dest_qp_num=peer, rq_psn=0, av=path_to_self(qp.context))
    to_rts(qp)


def start_xrc_receiver(qp: handles.QueuePair, peer: int) -> None:
    to_init(qp)
    to_rtr(qp, peer)
