"""What becomes of work requests, by the InfiniBand architecture: the responder's checks, their order, their answers.

Plain and pure, like the objects that it works on.
"""

import errno
from dataclasses import dataclass, field

from aioverbs import AccessFlags, QpState, SendOpcode, WcOpcode, WcStatus
from tests.core.model import RECEIVE_SIDE, SEND_SIDE, Expected, Pd, Qp, Queue, Receive, Region, Send, Sge

PSN_MASK = 0xFFFFFF
ANSWERED = {SendOpcode.RDMA_READ, SendOpcode.ATOMIC_CMP_AND_SWP, SendOpcode.ATOMIC_FETCH_AND_ADD}
ATOMIC = ANSWERED - {SendOpcode.RDMA_READ}
WITH_IMMEDIATE = {SendOpcode.SEND_WITH_IMM, SendOpcode.RDMA_WRITE_WITH_IMM}
ONE_SIDED = {
    SendOpcode.RDMA_WRITE: AccessFlags.REMOTE_WRITE,
    SendOpcode.RDMA_WRITE_WITH_IMM: AccessFlags.REMOTE_WRITE,
    SendOpcode.RDMA_READ: AccessFlags.REMOTE_READ,
    SendOpcode.ATOMIC_CMP_AND_SWP: AccessFlags.REMOTE_ATOMIC,
    SendOpcode.ATOMIC_FETCH_AND_ADD: AccessFlags.REMOTE_ATOMIC,
}
COMPLETES_AS = {
    SendOpcode.SEND: WcOpcode.SEND,
    SendOpcode.SEND_WITH_IMM: WcOpcode.SEND,
    SendOpcode.RDMA_WRITE: WcOpcode.RDMA_WRITE,
    SendOpcode.RDMA_WRITE_WITH_IMM: WcOpcode.RDMA_WRITE,
    SendOpcode.RDMA_READ: WcOpcode.RDMA_READ,
    SendOpcode.ATOMIC_CMP_AND_SWP: WcOpcode.COMP_SWAP,
    SendOpcode.ATOMIC_FETCH_AND_ADD: WcOpcode.FETCH_ADD,
}


class Failed(Exception):
    """A request that the responder refuses for good: its status, and whether the responder broke over it."""

    def __init__(self, status: WcStatus, breaks_peer: bool = True) -> None:
        super().__init__(status)
        self.status = status
        self.breaks_peer = breaks_peer


def scatter(views: list[memoryview], data: bytes) -> None:
    for view in views:
        part, data = data[: len(view)], data[len(view) :]
        view[: len(part)] = part


@dataclass
class Fabric:
    """All queue pairs by their number, and all regions by their key."""

    qps: dict[int, Qp] = field(default_factory=dict)
    regions: dict[int, Region] = field(default_factory=dict)

    # ---- memory

    def find(self, pd: Pd, sge: Sge, access: AccessFlags) -> memoryview | None:
        """The memory that a key gives access to."""
        address, length, key = sge
        region = self.regions.get(key)
        if region is None or region.pd.root is not pd.root or region.access & access != access:
            return None
        return region.view(address, length)

    def local(self, qp: Qp, request: Send) -> list[memoryview]:
        """The memory on this side of a request."""
        access = AccessFlags.LOCAL_WRITE if request.opcode in ANSWERED else AccessFlags(0)
        views = []
        for sge in request.sges:
            if sge[1]:
                view = self.find(qp.pd, sge, access)
                if view is None:
                    raise Failed(WcStatus.LOC_PROT_ERR, breaks_peer=False)
                views.append(view)
        if request.opcode in ATOMIC and sum(map(len, views)) != 8:
            raise Failed(WcStatus.LOC_LEN_ERR, breaks_peer=False)
        if request.opcode in ANSWERED and not qp.reads:
            raise Failed(WcStatus.LOC_QP_OP_ERR, breaks_peer=False)
        return views

    def remote(self, peer: Qp, request: Send, length: int, access: AccessFlags) -> memoryview:
        """The memory on the other side."""
        view = self.find(peer.pd, (request.remote_addr, length, request.rkey), access)
        if view is None:
            raise Failed(WcStatus.REM_ACCESS_ERR)
        return view

    # ---- completions

    def push(self, qp: Qp, side: int, expected: Expected, solicited: bool = False) -> None:
        qp.expected[side].append(expected)
        queue: Queue = qp.send_cq if side == SEND_SIDE else qp.recv_cq
        queue.completed(solicited or expected.status is not WcStatus.SUCCESS)

    def complete(self, qp: Qp, request: Send, status: WcStatus, length: int = 0) -> None:
        if status is not WcStatus.SUCCESS:
            qp.state = QpState.ERR
            self.push(qp, SEND_SIDE, Expected(request.wr_id, status, request.index))
        elif request.signaled or qp.sig_all:
            told = length if request.opcode in ANSWERED else None
            opcode = COMPLETES_AS[request.opcode]
            self.push(qp, SEND_SIDE, Expected(request.wr_id, status, request.index, opcode, told))

    def receive(self, qp: Qp, peer: Qp, request: Send, length: int, status: WcStatus) -> None:
        """The peer's oldest receive completes."""
        receive = peer.receives.popleft()
        expected = Expected(receive.wr_id, status, receive.index)
        if status is WcStatus.SUCCESS:
            written = request.opcode is SendOpcode.RDMA_WRITE_WITH_IMM
            expected.opcode = WcOpcode.RECV_RDMA_WITH_IMM if written else WcOpcode.RECV
            expected.byte_len = length
            expected.imm_data = request.imm_data if request.opcode in WITH_IMMEDIATE else None
            expected.src_qp = qp.number
        self.push(peer, RECEIVE_SIDE, expected, request.solicited)

    # ---- the responder

    def peer_of(self, qp: Qp) -> Qp | None:
        """Who answers to a queue pair; None where nobody does."""
        peer = self.qps.get(qp.peer)
        if (
            peer is None
            or peer.state not in (QpState.RTR, QpState.RTS, QpState.SQD)
            or peer.peer != qp.number
            or peer.expected_psn != qp.next_psn
        ):
            return None
        return peer

    def respond_send(self, qp: Qp, peer: Qp, request: Send, data: bytes) -> None:
        receive = peer.receives[0]
        views, status = self.place(peer, receive, len(data))
        if status is WcStatus.SUCCESS:
            scatter(views, data)
        self.receive(qp, peer, request, len(data), status)
        if status is WcStatus.LOC_LEN_ERR:
            raise Failed(WcStatus.REM_INV_REQ_ERR)
        if status is not WcStatus.SUCCESS:
            raise Failed(WcStatus.REM_OP_ERR)

    def place(self, peer: Qp, receive: Receive, length: int) -> tuple[list[memoryview], WcStatus]:
        """Where a message goes: only as many entries as it fills are looked at."""
        views: list[memoryview] = []
        if sum(sge[1] for sge in receive.sges) < length:
            return views, WcStatus.LOC_LEN_ERR
        for sge in receive.sges:
            if sum(map(len, views)) >= length:
                break
            if sge[1]:
                view = self.find(peer.pd, sge, AccessFlags.LOCAL_WRITE)
                if view is None:
                    return views, WcStatus.LOC_PROT_ERR
                views.append(view)
        return views, WcStatus.SUCCESS

    def respond_atomic(self, peer: Qp, request: Send) -> bytes:
        if request.remote_addr % 8:
            raise Failed(WcStatus.REM_INV_REQ_ERR)
        view = self.remote(peer, request, 8, AccessFlags.REMOTE_ATOMIC)
        found = bytes(view)
        value = int.from_bytes(found, "little")
        if request.opcode is SendOpcode.ATOMIC_FETCH_AND_ADD:
            value = (value + request.compare_add) % (1 << 64)
        elif value == request.compare_add:
            value = request.swap
        view[:] = value.to_bytes(8, "little")
        return found

    def deliver(self, qp: Qp, peer: Qp, request: Send, views: list[memoryview]) -> int:
        """Execute a request at the peer; how many bytes it moved."""
        data = request.inline if request.inline is not None else b"".join(views)
        immediate = request.opcode in WITH_IMMEDIATE
        # What the queue pair does not allow comes first, however short it is; then receives; then keys.
        if request.opcode in ONE_SIDED and not peer.access & ONE_SIDED[request.opcode]:
            raise Failed(WcStatus.REM_INV_REQ_ERR)
        if (immediate or request.opcode is SendOpcode.SEND) and not peer.receives:
            raise Failed(WcStatus.RNR_RETRY_EXC_ERR, breaks_peer=False)
        if request.opcode in ANSWERED and not peer.reads_served:
            raise Failed(WcStatus.REM_INV_REQ_ERR)
        if request.opcode in ATOMIC:
            scatter(views, self.respond_atomic(peer, request))
        elif request.opcode is SendOpcode.RDMA_READ:
            if data:
                scatter(views, bytes(self.remote(peer, request, len(data), AccessFlags.REMOTE_READ)))
        elif request.opcode in (SendOpcode.RDMA_WRITE, SendOpcode.RDMA_WRITE_WITH_IMM):
            if data:
                self.remote(peer, request, len(data), AccessFlags.REMOTE_WRITE)[:] = data
            if immediate:
                self.receive(qp, peer, request, len(data), WcStatus.SUCCESS)
        else:
            self.respond_send(qp, peer, request, data)
        return len(data)

    # ---- the requester

    def execute(self, qp: Qp, request: Send) -> Qp | None:
        """Carry one request out; a peer that broke over it, or None."""
        peer = None
        try:
            views = self.local(qp, request) if request.inline is None else []
            peer = self.peer_of(qp)
            if peer is None:
                raise Failed(WcStatus.RETRY_EXC_ERR, breaks_peer=False)
            length = self.deliver(qp, peer, request, views)
        except Failed as failure:
            broken = peer if failure.breaks_peer else None
            if broken:
                broken.state = QpState.ERR
            self.complete(qp, request, failure.status)
            return broken
        packets = max(1, -(-length // qp.mtu))
        qp.next_psn = (qp.next_psn + packets) & PSN_MASK
        peer.expected_psn = (peer.expected_psn + packets) & PSN_MASK
        self.complete(qp, request, WcStatus.SUCCESS, length)
        return None

    def run(self, qp: Qp) -> None:
        """Do all that can be done for a queue pair."""
        broken = None
        while qp.sends and qp.state in (QpState.RTS, QpState.ERR):
            request = qp.sends.popleft()
            if qp.state is QpState.ERR:
                self.complete(qp, request, WcStatus.WR_FLUSH_ERR)
            else:
                broken = self.execute(qp, request) or broken
        if qp.state is QpState.ERR:
            while qp.receives:
                receive = qp.receives.popleft()
                expected = Expected(receive.wr_id, WcStatus.WR_FLUSH_ERR, receive.index)
                self.push(qp, RECEIVE_SIDE, expected)
        if broken and broken is not qp:
            self.run(broken)

    # ---- the verbs: 0, or the number of the error that refuses

    def post_send(self, qp: Qp, request: Send) -> int:
        capabilities, ring = qp.capabilities, qp.rings[SEND_SIDE]
        if qp.state not in (QpState.RTS, QpState.SQD, QpState.ERR):
            return errno.EINVAL
        if request.inline is not None and request.opcode in ANSWERED:
            return errno.EINVAL
        if len(request.sges) > capabilities.max_send_sge:
            return errno.EINVAL
        if ring.full:
            return errno.ENOMEM
        if request.inline is not None and len(request.inline) > capabilities.max_inline_data:
            return errno.EINVAL
        request.index = ring.posted
        ring.posted += 1
        qp.sends.append(request)
        self.run(qp)
        return 0

    def post_recv(self, qp: Qp, receive: Receive) -> int:
        ring = qp.rings[RECEIVE_SIDE]
        if qp.state is QpState.RESET or len(receive.sges) > qp.capabilities.max_recv_sge:
            return errno.EINVAL
        if ring.full:
            return errno.ENOMEM
        receive.index = ring.posted
        ring.posted += 1
        qp.receives.append(receive)
        self.run(qp)
        return 0

    def modify(self, qp: Qp, state: QpState) -> int:
        """Change the state with the attributes that it needs, which the caller enters."""
        sources = {
            QpState.INIT: (QpState.RESET, QpState.INIT),
            QpState.RTR: (QpState.INIT,),
            QpState.RTS: (QpState.RTR,),
            QpState.SQD: (QpState.RTS, QpState.SQD),
        }
        if state is QpState.RESET:
            qp.state = state
            qp.access, qp.peer, qp.reads, qp.reads_served = AccessFlags(0), 0, 0, 0
            qp.clear()
            return 0
        if state is QpState.ERR and qp.state is QpState.RESET:
            return errno.EINVAL
        if state is not QpState.ERR and qp.state not in sources[state]:
            return errno.EINVAL
        qp.state = state
        self.run(qp)
        return 0

    def resume(self, qp: Qp) -> int:
        """From SQD back to RTS, without attributes."""
        if qp.state not in (QpState.RTS, QpState.SQD):
            return errno.EINVAL
        qp.state = QpState.RTS
        self.run(qp)
        return 0
