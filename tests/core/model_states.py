"""The states of a queue pair by its type: the attributes that a transition needs, by the InfiniBand architecture."""

import errno

from aioverbs import QpState, QpType
from tests.core.model_queue_pairs import Qp

# The exact attributes of each type on its path to RTS.
_PATH = ("path_mtu", "dest_qp_num", "rq_psn", "av")
_REQUESTER = ("sq_psn", "timeout", "retry_cnt", "rnr_retry", "max_rd_atomic")
_RESPONDER = ("max_dest_rd_atomic", "min_rnr_timer")
_CONNECTED = ("pkey_index", "port_num", "qp_access_flags")

NEEDS: dict[QpType, dict[QpState, tuple[str, ...]]] = {
    QpType.RC: {QpState.INIT: _CONNECTED, QpState.RTR: _PATH + _RESPONDER, QpState.RTS: _REQUESTER},
    QpType.UC: {QpState.INIT: _CONNECTED, QpState.RTR: _PATH, QpState.RTS: ("sq_psn",)},
    QpType.UD: {QpState.INIT: ("pkey_index", "port_num", "qkey"), QpState.RTR: (), QpState.RTS: ("sq_psn",)},
    QpType.XRC_SEND: {QpState.INIT: _CONNECTED, QpState.RTR: _PATH, QpState.RTS: _REQUESTER},
    QpType.XRC_RECV: {
        QpState.INIT: _CONNECTED,
        QpState.RTR: _PATH + _RESPONDER,
        QpState.RTS: ("sq_psn", "timeout"),
    },
}
_SOURCES = {
    QpState.INIT: (QpState.RESET, QpState.INIT),
    QpState.RTR: (QpState.INIT,),
    QpState.RTS: (QpState.RTR,),
    QpState.SQD: (QpState.RTS, QpState.SQD),
}
# Types that can be connected to each other.
COUNTERPART = {kind: kind for kind in NEEDS} | {QpType.XRC_SEND: QpType.XRC_RECV, QpType.XRC_RECV: QpType.XRC_SEND}


def may_change(qp: Qp, state: QpState, attributes: tuple[str, ...]) -> int:
    """Return 0, or the errno of the refusal."""
    if state is QpState.RESET:
        return 0
    if state is QpState.ERR:
        return errno.EINVAL if qp.state is QpState.RESET else 0
    if qp.state not in _SOURCES.get(state, ()):
        return errno.EINVAL
    return 0 if set(attributes) == set(NEEDS[qp.type].get(state, ())) else errno.EINVAL


def may_resume(qp: Qp) -> int:
    """Return 0 if the queue pair may go to RTS without attributes, or else an errno. Only unreliable send queues reach
    SQE.
    """
    return 0 if qp.state in (QpState.RTS, QpState.SQD, QpState.SQE) else errno.EINVAL


def reset(qp: Qp) -> None:
    qp.access = type(qp.access)(0)
    qp.peer = qp.qkey = qp.reads = qp.reads_served = 0
    qp.established = qp.last_wqe_reached = qp.without_psn = False
    qp.clear()
