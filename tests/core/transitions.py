"""The transition table of each type of queue pair, and queue pairs in any state to test it on."""

from dataclasses import dataclass
from typing import Any

from aioverbs import AccessFlags, Mtu, QpState, QpType, SendOpcode, WcStatus
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from tests.core.pairs import CAPABILITIES, wait_for
from tests.core.transports import QKEY, path_to_self
from tests.raw_verbs import post_send

RC, UC, UD, XRC_SEND, XRC_RECV = QpType.RC, QpType.UC, QpType.UD, QpType.XRC_SEND, QpType.XRC_RECV
RESET, INIT, RTR, RTS, SQD, SQE, ERR = (
    QpState.RESET,
    QpState.INIT,
    QpState.RTR,
    QpState.RTS,
    QpState.SQD,
    QpState.SQE,
    QpState.ERR,
)

CONNECTED = {RC, UC, XRC_SEND, XRC_RECV}
REQUESTERS, RESPONDERS = {RC, XRC_SEND}, {RC, XRC_RECV}
ALL = CONNECTED | {UD}

# From, to, types, required attributes, optional attributes: a transition combines all rows of its type.
ROWS: list[tuple[QpState, QpState, set[QpType], str, str]] = [
    (RESET, INIT, CONNECTED, "pkey_index port_num qp_access_flags", ""),
    (RESET, INIT, {UD}, "pkey_index port_num qkey", ""),
    (INIT, INIT, CONNECTED, "", "pkey_index port_num qp_access_flags"),
    (INIT, INIT, {UD}, "", "pkey_index port_num qkey"),
    (INIT, RTR, CONNECTED, "av path_mtu dest_qp_num rq_psn", "pkey_index qp_access_flags"),
    (INIT, RTR, RESPONDERS, "max_dest_rd_atomic min_rnr_timer", ""),
    (INIT, RTR, {UD}, "", "pkey_index qkey"),
    (RTR, RTS, ALL, "sq_psn", "cur_qp_state"),
    (RTR, RTS, REQUESTERS, "timeout retry_cnt rnr_retry max_rd_atomic", ""),
    (RTR, RTS, {XRC_RECV}, "timeout", ""),
    (RTR, RTS, CONNECTED, "", "qp_access_flags"),
    (RTR, RTS, RESPONDERS, "", "min_rnr_timer"),
    (RTR, RTS, {UD}, "", "qkey"),
    *(
        row
        for state in (RTS, SQD)
        for row in (
            (state, RTS, ALL, "", "cur_qp_state"),
            (state, RTS, CONNECTED, "", "qp_access_flags"),
            (state, RTS, RESPONDERS, "", "min_rnr_timer"),
            (state, RTS, {UD}, "", "qkey"),
        )
    ),
    (RTS, SQD, ALL, "", "en_sqd_async_notify"),
    (SQD, SQD, ALL, "", "pkey_index"),
    (SQD, SQD, CONNECTED, "", "av qp_access_flags"),
    (SQD, SQD, REQUESTERS | RESPONDERS, "", "port_num timeout"),
    (SQD, SQD, REQUESTERS, "", "retry_cnt rnr_retry max_rd_atomic"),
    (SQD, SQD, RESPONDERS, "", "max_dest_rd_atomic min_rnr_timer"),
    (SQD, SQD, {UD}, "", "qkey"),
    (SQE, RTS, {UC, UD}, "", "cur_qp_state"),
    (SQE, RTS, {UC}, "", "qp_access_flags"),
    (SQE, RTS, {UD}, "", "qkey"),
]


def rule(qp_type: QpType, before: QpState, after: QpState) -> tuple[set[str], set[str]] | None:
    """Return the required and optional attributes of a transition; None if it does not exist."""
    if after is RESET or (after is ERR and before is not RESET):
        return set(), set()
    needed: set[str] = set()
    allowed: set[str] = set()
    possible = False
    for source, target, types, must, may in ROWS:
        if (source, target) == (before, after) and qp_type in types:
            possible = True
            needed |= set(must.split())
            allowed |= set(may.split())
    return (needed, allowed - needed) if possible else None


@dataclass
class QueuePairFactory:
    """The objects that queue pairs of all types need."""

    context: software.Context
    pd: handles.ProtectionDomain
    cq: handles.CompletionQueue
    xrc_domain: parent_domain.XrcDomain
    ah: handles.AddressHandle

    def attributes(self, before: QpState) -> dict[str, Any]:
        """Return a valid value for each keyword of `modify`."""
        return {
            "path_mtu": Mtu.MTU_1024,
            "rq_psn": 5,
            "sq_psn": 6,
            "dest_qp_num": 0x4321,
            "qp_access_flags": AccessFlags.REMOTE_READ,
            "av": path_to_self(self.context),
            "pkey_index": 0,
            "port_num": 1,
            "max_rd_atomic": 2,
            "max_dest_rd_atomic": 3,
            "min_rnr_timer": 4,
            "timeout": 7,
            "retry_cnt": 1,
            "rnr_retry": 2,
            "qkey": QKEY,
            "cur_qp_state": before,
            "en_sqd_async_notify": False,
        }

    def step(self, qp: handles.QueuePair, before: QpState, after: QpState, names: set[str]) -> None:
        values = self.attributes(before)
        qp.modify(after, **{name: values[name] for name in names})

    def make(self, qp_type: QpType, state: QpState) -> handles.QueuePair:
        """Create a queue pair in that state."""
        if qp_type is XRC_RECV:
            qp = handles.QueuePair(xrc_domain=self.xrc_domain, qp_type=qp_type)
        else:
            recv_cq = None if qp_type is XRC_SEND else self.cq
            qp = handles.QueuePair(self.pd, self.cq, recv_cq, CAPABILITIES, qp_type=qp_type)
        steps = {RESET: [], INIT: [INIT], RTR: [INIT, RTR], RTS: [INIT, RTR, RTS], SQD: [INIT, RTR, RTS, SQD]}
        before = RESET
        for after in steps.get(state, [INIT, RTR, RTS]):
            attributes = rule(qp_type, before, after)
            assert attributes
            self.step(qp, before, after, attributes[0])
            before = after
        if state is ERR:
            qp.modify(ERR)
        if state is SQE:
            post_send(qp, SendOpcode.SEND, [(4096, 1, 0xFFFF_FF00)], ah=self.ah if qp_type is UD else None)
            assert wait_for(self.cq)[0].status is WcStatus.LOC_PROT_ERR
        assert qp.query().qp_state is state
        return qp


def make_factory(context: software.Context) -> QueuePairFactory:
    """Create the objects on a context."""
    pd = handles.ProtectionDomain(context)
    return QueuePairFactory(
        context,
        pd,
        handles.CompletionQueue(context, 64),
        parent_domain.XrcDomain(context),
        handles.AddressHandle(pd, path_to_self(context)),
    )


# Only the send queue of an unreliable queue pair stops alone (SQE).
REACHABLE = [
    (qp_type, state)
    for qp_type in (RC, UC, UD, XRC_SEND, XRC_RECV)
    for state in (RESET, INIT, RTR, RTS, SQD, SQE, ERR)
    if state is not SQE or qp_type in {UC, UD}
]
