"""Execution of work requests: their destination, and their effect on queue pairs.

Pure functions of the model, without I/O.
"""

import errno
from dataclasses import dataclass, field

from aioverbs import AccessFlags, EventType, QpState, QpType, SendOpcode, WcOpcode, WcStatus
from tests.core.model_datagrams import PORT_MTU
from tests.core.model_memory import Memory
from tests.core.model_queue_pairs import (
    RECEIVE_SIDE,
    SEND_SIDE,
    Bind,
    Expected,
    Qp,
    Receive,
    Send,
    SharedQueue,
)
from tests.core.model_responder import ANSWERED, ATOMIC, SENDS, Dropped, Failed, Responder, expect_completion
from tests.core.model_states import COUNTERPART, may_change, may_resume, reset

PSN_MASK = 0xFFFFFF
BY_DEFAULT_KEY = 1 << 31  # a datagram with this bit in its Q_Key carries the Q_Key of its queue pair
LOCAL = {SendOpcode.LOCAL_INV, SendOpcode.BIND_MW}
WRITES = {SendOpcode.RDMA_WRITE, SendOpcode.RDMA_WRITE_WITH_IMM}
CAN_SEND = {
    QpType.RC: SENDS | WRITES | ANSWERED | LOCAL,
    QpType.UC: SENDS | WRITES | LOCAL,
    QpType.UD: {SendOpcode.SEND, SendOpcode.SEND_WITH_IMM},
    QpType.XRC_SEND: SENDS | WRITES | ANSWERED | LOCAL,
    QpType.XRC_RECV: set[SendOpcode](),
}
COMPLETES_AS = {
    SendOpcode.SEND: WcOpcode.SEND,
    SendOpcode.SEND_WITH_IMM: WcOpcode.SEND,
    SendOpcode.SEND_WITH_INV: WcOpcode.SEND,
    SendOpcode.RDMA_WRITE: WcOpcode.RDMA_WRITE,
    SendOpcode.RDMA_WRITE_WITH_IMM: WcOpcode.RDMA_WRITE,
    SendOpcode.RDMA_READ: WcOpcode.RDMA_READ,
    SendOpcode.ATOMIC_CMP_AND_SWP: WcOpcode.COMP_SWAP,
    SendOpcode.ATOMIC_FETCH_AND_ADD: WcOpcode.FETCH_ADD,
    SendOpcode.LOCAL_INV: WcOpcode.LOCAL_INV,
    SendOpcode.BIND_MW: WcOpcode.BIND_MW,
}
LISTENING = (QpState.RTR, QpState.RTS, QpState.SQD, QpState.SQE)


@dataclass
class Fabric:
    """All queue pairs and XRC shared receive queues by number, and all memory by key."""

    qps: dict[int, Qp] = field(default_factory=dict)
    shared: dict[int, SharedQueue] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)

    # ---- The requester's side of a request

    def local(self, qp: Qp, request: Send) -> list[memoryview]:
        """Return the local memory of a request."""
        if request.ah and request.ah.pd.root is not qp.pd.root:
            raise Failed(WcStatus.LOC_QP_OP_ERR, breaks_peer=False)
        if request.inline is not None:
            return []
        access = AccessFlags.LOCAL_WRITE if request.opcode in ANSWERED else AccessFlags(0)
        views = []
        for sge in request.sges:
            if sge[1]:
                view = self.memory.find(qp.pd, sge, access)
                if view is None:
                    raise Failed(WcStatus.LOC_PROT_ERR, breaks_peer=False)
                views.append(view)
        if request.opcode in ATOMIC and sum(map(len, views)) != 8:
            raise Failed(WcStatus.LOC_LEN_ERR, breaks_peer=False)
        if request.opcode in ANSWERED and not qp.reads:
            raise Failed(WcStatus.LOC_QP_OP_ERR, breaks_peer=False)
        return views

    def complete(self, qp: Qp, request: Send, status: WcStatus, length: int = 0) -> None:
        expected = Expected(request.wr_id, status, request.index)
        if status is WcStatus.SUCCESS:
            if not (request.signaled or qp.sig_all):
                return
            expected.opcode = COMPLETES_AS[request.opcode]
            expected.byte_len = length if request.opcode in ANSWERED else None
        elif qp.reliable:
            qp.state = QpState.ERR
        elif qp.state is QpState.RTS:
            qp.state = QpState.SQE  # unreliable queue pairs go on receiving
            self.memory.coverage[f"{qp.type.name} stopped"] += 1
        qp.expected[SEND_SIDE].append(expected)
        expect_completion(qp.send_cq, expected)

    # ---- The responder

    def connected_peer(self, qp: Qp) -> Qp | None:
        """Return the connected peer of a queue pair, or None if it cannot answer. An unreliable one accepts any PSN."""
        peer = self.qps.get(qp.peer)
        if peer is None or peer.type is not COUNTERPART[qp.type]:
            return None
        if peer.state not in LISTENING or peer.peer != qp.number:
            return None
        return peer if peer.expected_psn == qp.next_psn or not qp.reliable else None

    def receiver_of(self, qp: Qp, request: Send) -> Qp | None:
        """Return the receiver of a datagram, or None."""
        peer = self.qps.get(request.remote_qpn)
        if peer is None or peer.type is not QpType.UD or peer.state not in LISTENING:
            return None
        if request.ah is None or not request.ah.reaches_device:
            return None
        qkey = qp.qkey if request.remote_qkey & BY_DEFAULT_KEY else request.remote_qkey
        return peer if peer.qkey == qkey else None

    def responder(self, peer: Qp, request: Send) -> Responder:
        """Return the responder; for XRC, with the shared queue that the request names, and with its memory."""
        if peer.type is not QpType.XRC_RECV:
            return Responder(self.memory, peer, peer.shared, peer.pd)
        shared = self.shared.get(request.remote_srqn)
        theirs = shared.xrc_domain if shared else None
        if (
            shared is None
            or theirs is None
            or peer.xrc_domain is None
            or theirs.identity is not peer.xrc_domain.identity
        ):
            raise Failed(WcStatus.REM_INV_REQ_ERR)
        return Responder(self.memory, peer, shared, shared.pd)

    # ---- One request

    def execute(self, qp: Qp, request: Send) -> Qp | None:
        """Execute one request; return the peer that breaks by it, or None."""
        if request.opcode in LOCAL:
            self.execute_locally(qp, request)
            return None
        try:
            views = self.local(qp, request)
        except Failed as failure:
            self.complete(qp, request, failure.status)
            return None
        data = b"".join(views) if request.inline is None else request.inline
        return (self.send_reliably if qp.reliable else self.send_unreliably)(qp, request, data, views)

    def execute_locally(self, qp: Qp, request: Send) -> None:
        qp.without_psn = True
        if isinstance(request, Bind):
            status = WcStatus.SUCCESS if self.memory.bind(qp, request) else WcStatus.MW_BIND_ERR
        else:
            good = self.memory.invalidate(qp, qp.pd, request.invalidate)
            status = WcStatus.SUCCESS if good else WcStatus.LOC_QP_OP_ERR
        self.complete(qp, request, status)

    def send_reliably(self, qp: Qp, request: Send, data: bytes, views: list[memoryview]) -> Qp | None:
        peer = self.connected_peer(qp)
        try:
            if peer is None:
                raise Failed(WcStatus.RETRY_EXC_ERR, breaks_peer=False)
            self.responder(peer, request).respond(qp, request, data, views)
        except Failed as failure:
            broken = peer if failure.breaks_peer else None
            if broken:
                broken.state = QpState.ERR
                if not failure.reported:
                    denied = failure.status is WcStatus.REM_ACCESS_ERR
                    broken.events.add(EventType.QP_ACCESS_ERR if denied else EventType.QP_REQ_ERR)
            self.complete(qp, request, failure.status)
            return broken
        packets = max(1, -(-len(data) // qp.mtu))
        qp.next_psn = (qp.next_psn + packets) & PSN_MASK
        peer.expected_psn = (peer.expected_psn + packets) & PSN_MASK
        self.complete(qp, request, WcStatus.SUCCESS, len(data))
        return None

    def send_unreliably(self, qp: Qp, request: Send, data: bytes, views: list[memoryview]) -> Qp | None:
        """Send without an answer: the sender learns only that the request was sent."""
        datagram, broken = qp.type is QpType.UD, None
        peer = self.receiver_of(qp, request) if datagram else self.connected_peer(qp)
        if datagram and len(data) > PORT_MTU:
            peer = None
        arrived = False
        if peer:
            try:
                self.responder(peer, request).respond(qp, request, data, views)
                arrived = True
            except Dropped:
                pass
            except Failed as failure:
                if failure.reported:
                    peer.state = QpState.ERR
                    broken = peer
        self.memory.coverage[f"{qp.type.name} {'arrived' if arrived else 'dropped'}"] += 1
        packets = 1 if datagram else max(1, -(-len(data) // qp.mtu))
        qp.next_psn = (qp.next_psn + packets) & PSN_MASK
        self.complete(qp, request, WcStatus.SUCCESS)
        return broken

    # ---- A queue

    def run(self, qp: Qp) -> None:
        """Execute all requests of a queue pair that can be executed."""
        broken: dict[Qp, None] = {}
        while qp.sends and qp.state in (QpState.RTS, QpState.SQE, QpState.ERR):
            request = qp.sends.popleft()
            if qp.state is not QpState.RTS:
                self.complete(qp, request, WcStatus.WR_FLUSH_ERR)
            elif peer := self.execute(qp, request):
                broken[peer] = None
        if qp.state is QpState.ERR:
            while qp.receives:
                receive = qp.receives.popleft()
                expected = Expected(receive.wr_id, WcStatus.WR_FLUSH_ERR, receive.index)
                qp.expected[RECEIVE_SIDE].append(expected)
                expect_completion(qp.recv_cq, expected)
            if qp.shared and not qp.last_wqe_reached:
                qp.last_wqe_reached = True
                qp.events.add(EventType.QP_LAST_WQE_REACHED)
        for peer in broken:
            if peer is not qp:
                self.run(peer)

    # ---- Verbs, which return 0 or the errno of the refusal

    def post_send(self, qp: Qp, request: Send) -> int:
        capabilities, ring = qp.capabilities, qp.rings[SEND_SIDE]
        if qp.state not in (QpState.RTS, QpState.SQD, QpState.SQE, QpState.ERR):
            return errno.EINVAL
        if request.opcode not in CAN_SEND[qp.type]:
            return errno.EINVAL
        if request.inline is not None and request.opcode in ANSWERED | LOCAL:
            return errno.EINVAL
        if len(request.sges) > capabilities.max_send_sge:
            return errno.EINVAL
        if isinstance(request, Bind) and (request.rkey ^ request.window.posted_rkey) >> 8:
            return errno.EINVAL
        if ring.full:
            return errno.ENOMEM
        if request.inline is not None and len(request.inline) > capabilities.max_inline_data:
            return errno.EINVAL
        if isinstance(request, Bind):
            request.window.posted_rkey = request.rkey
        request.index = ring.posted
        ring.posted += 1
        qp.sends.append(request)
        self.run(qp)
        return 0

    def post_recv(self, qp: Qp, receive: Receive) -> int:
        ring = qp.rings[RECEIVE_SIDE]
        if not qp.receives_by_itself or qp.state is QpState.RESET:
            return errno.EINVAL
        if len(receive.sges) > qp.capabilities.max_recv_sge:
            return errno.EINVAL
        if ring.full:
            return errno.ENOMEM
        receive.index = ring.posted
        ring.posted += 1
        qp.receives.append(receive)
        self.run(qp)
        return 0

    def post_shared(self, shared: SharedQueue, receive: Receive) -> int:
        if len(receive.sges) > shared.max_sge:
            return errno.EINVAL
        if shared.outstanding >= shared.depth:
            return errno.ENOMEM
        shared.outstanding += 1
        shared.receives.append(receive)
        return 0

    def resize_shared(self, shared: SharedQueue, depth: int | None, limit: int | None) -> int:
        """Change the depth (a power of two), the limit, or both."""
        new_depth = shared.depth if depth is None else depth
        new_limit = shared.limit if limit is None else limit
        if new_limit > new_depth or shared.outstanding > new_depth:
            return errno.EINVAL
        shared.depth, shared.limit = new_depth, new_limit
        return 0

    def modify(self, qp: Qp, state: QpState, attributes: tuple[str, ...]) -> int:
        """Change the state; the caller stores the attributes."""
        error = may_change(qp, state, attributes)
        if error:
            return error
        qp.state = state
        if state is QpState.RESET:
            reset(qp)
        self.run(qp)
        return 0

    def resume(self, qp: Qp) -> int:
        """Go from SQD or SQE back to RTS, without attributes."""
        error = may_resume(qp)
        if error:
            return error
        qp.state = QpState.RTS
        self.run(qp)
        return 0
