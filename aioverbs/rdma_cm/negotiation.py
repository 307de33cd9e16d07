"""What two connection managers agree on for a queue pair, and what is made of that."""

import errno

from aioverbs._verbs import qp_state_machine
from aioverbs._verbs.qp_defaults import RETRIES
from aioverbs._verbs.qp_modify import limits_for
from aioverbs._verbs.qp_state_machine import Limits, QpAttrs
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs.attributes import AddressVector
from aioverbs.errors import TransitionError, VerbsError
from aioverbs.types import Mtu, QpState, QpType

__all__ = ["check_queue_pair", "negotiate"]

# What librdmacm will say stands for itself here: whether the rest can be is seen before a peer is asked.
_TOLD = QpAttrs(
    av=AddressVector(dgid=bytes(15) + b"\1"),
    path_mtu=Mtu.MTU_256,
    dest_qp_num=0,
    rq_psn=0,
    sq_psn=0,
    max_rd_atomic=1,
    max_dest_rd_atomic=1,
    timeout=1,
    retry_cnt=1,
    rnr_retry=1,
    min_rnr_timer=1,
)


def check_queue_pair(qp: QueuePair, attributes: QpAttrs) -> None:
    """See that a queue pair can be connected, with these attributes.

    :raises ValueError: it is not of type RC.
    :raises VerbsError: with EOPNOTSUPP where it is of the software device.
    :raises TransitionError: it is in another state than RESET and INIT, or an attribute cannot be.
    """
    if qp.handle.context.software:
        advice = "the software device has no address: connect its queue pairs by QueuePair.connect"
        raise VerbsError("rdma_connect", errno.EOPNOTSUPP, advice)
    if qp.qp_type is not QpType.RC:
        raise ValueError(f"{qp!r} is of type {qp.qp_type.name}: librdmacm connects those of type RC")
    state = qp.query().qp_state
    try:
        if state not in (QpState.RESET, QpState.INIT):
            raise TransitionError(QpType.RC, state, QpState.RTR, reachable=qp_state_machine.reachable(QpType.RC, state))
        limits = limits_for(qp, 1)
        moves = (QpState.RTR, QpState.RTS)
        qp_state_machine.plan(QpType.RC, QpState.INIT, moves, attributes, defaults=_TOLD, limits=limits)
    except TransitionError as error:
        error.subject = repr(qp)
        raise


def negotiate(told: QpAttrs, given: QpAttrs, limits: Limits) -> QpAttrs:
    """PURE: What the managers agreed on, such that nothing waits for ever, within the device's limits, and as given.

    A peer's manager asks for up to 7 repetitions, which is for ever, and says nothing of how long one waits that finds
    no receive, which then is 655 ms: connections made by hand have better ones, and so have these. No more reads are
    under way than the peer said that it serves, whatever is given.
    """
    settled = told.copy()
    if "retry_cnt" in told:
        settled["retry_cnt"] = min(told["retry_cnt"], RETRIES["retry_cnt"])
    if "rnr_retry" in told:
        settled["rnr_retry"] = min(told["rnr_retry"], RETRIES["rnr_retry"])
    if "min_rnr_timer" in told:
        settled["min_rnr_timer"] = RETRIES["min_rnr_timer"]
    if "path_mtu" in told:
        settled["path_mtu"] = min(told["path_mtu"], limits.mtu)
    if "max_dest_rd_atomic" in told:
        settled["max_dest_rd_atomic"] = min(told["max_dest_rd_atomic"], limits.max_dest_rd_atomic)
    settled.update(given)
    if "max_rd_atomic" in told:
        wanted = given.get("max_rd_atomic", limits.max_rd_atomic)
        settled["max_rd_atomic"] = min(told["max_rd_atomic"], wanted)
    return settled
