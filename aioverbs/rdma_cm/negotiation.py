"""Queue pair attributes that two connection managers negotiate, and checks before the negotiation."""

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

# Placeholders for the attributes that librdmacm supplies later: with them the caller's attributes can be checked before
# the peer is contacted.
_PLACEHOLDERS = QpAttrs(
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
    """Check that rdma_cm can connect a queue pair with `attributes`.

    :param qp: queue pair to check.
    :param attributes: attributes that the caller of `Identifier.connect` or `Identifier.accept` sets.
    :raises ValueError: the queue pair is not of type RC.
    :raises VerbsError: with EOPNOTSUPP if the queue pair belongs to the software device; or a query failed.
    :raises TransitionError: the queue pair is neither in RESET nor in INIT, or an attribute is invalid.
    :raises ClosedResourceError: the queue pair is not open.
    :raises AffinityError: another event loop owns the queue pair.
    :raises BusyResourceError: another thread is changing the state of the queue pair.
    :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain.
    :raises TypeError: the value of a numeric attribute is not an integer.
    """
    if qp.handle.context.software:
        advice = "the software device has no IP address: connect its queue pairs with QueuePair.connect"
        raise VerbsError("rdma_connect", errno.EOPNOTSUPP, advice)
    if qp.qp_type is not QpType.RC:
        raise ValueError(f"{qp!r} is of type {qp.qp_type.name}: rdma_cm connects queue pairs of type RC")
    state = qp.query().qp_state
    try:
        if state not in (QpState.RESET, QpState.INIT):
            raise TransitionError(QpType.RC, state, QpState.RTR, reachable=qp_state_machine.reachable(QpType.RC, state))
        limits = limits_for(qp, 1)
        moves = (QpState.RTR, QpState.RTS)
        qp_state_machine.plan(QpType.RC, QpState.INIT, moves, attributes, defaults=_PLACEHOLDERS, limits=limits)
    except TransitionError as error:
        error.subject = repr(qp)
        raise


def negotiate(proposed: QpAttrs, overrides: QpAttrs, limits: Limits) -> QpAttrs:
    """PURE: Return the `QpAttrs` for ``ibv_modify_qp``: negotiated values after limits and overrides are applied.

    A peer's connection manager asks for up to 7 retries, which means infinite retries in the case of RNR, and leaves
    the RNR timer at 0, which means 655 ms. This function limits the retries and uses the timer of `QueuePair.connect`,
    so that no request waits forever. The number of reads in flight never exceeds the number that the peer can respond
    to, even if `overrides` contains a larger one.

    :param proposed: attributes that ``rdma_init_qp_attr`` returns.
    :param overrides: attributes that the caller sets.
    :param limits: limits of the device port.
    """
    agreed = proposed.copy()
    if "retry_cnt" in proposed:
        agreed["retry_cnt"] = min(proposed["retry_cnt"], RETRIES["retry_cnt"])
    if "rnr_retry" in proposed:
        agreed["rnr_retry"] = min(proposed["rnr_retry"], RETRIES["rnr_retry"])
    if "min_rnr_timer" in proposed:
        agreed["min_rnr_timer"] = RETRIES["min_rnr_timer"]
    if "path_mtu" in proposed:
        agreed["path_mtu"] = min(proposed["path_mtu"], limits.mtu)
    if "max_dest_rd_atomic" in proposed:
        agreed["max_dest_rd_atomic"] = min(proposed["max_dest_rd_atomic"], limits.max_dest_rd_atomic)
    agreed.update(overrides)
    if "max_rd_atomic" in proposed:
        requested = overrides.get("max_rd_atomic", limits.max_rd_atomic)
        agreed["max_rd_atomic"] = min(proposed["max_rd_atomic"], requested)
    return agreed
