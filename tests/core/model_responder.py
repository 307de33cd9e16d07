"""The responder's checks by the InfiniBand architecture: their order and their answers."""

from dataclasses import dataclass

from aioverbs import AccessFlags, EventType, QpState, SendOpcode, WcOpcode, WcStatus
from tests.core.model import Pd, Queue
from tests.core.model_datagrams import header
from tests.core.model_memory import Memory
from tests.core.model_queue_pairs import RECEIVE_SIDE, Expected, Qp, Receive, Send, SharedQueue

ANSWERED = {SendOpcode.RDMA_READ, SendOpcode.ATOMIC_CMP_AND_SWP, SendOpcode.ATOMIC_FETCH_AND_ADD}
ATOMIC = ANSWERED - {SendOpcode.RDMA_READ}
WITH_IMMEDIATE = {SendOpcode.SEND_WITH_IMM, SendOpcode.RDMA_WRITE_WITH_IMM}
SENDS = {SendOpcode.SEND, SendOpcode.SEND_WITH_IMM, SendOpcode.SEND_WITH_INV}
ONE_SIDED = {
    SendOpcode.RDMA_WRITE: AccessFlags.REMOTE_WRITE,
    SendOpcode.RDMA_WRITE_WITH_IMM: AccessFlags.REMOTE_WRITE,
    SendOpcode.RDMA_READ: AccessFlags.REMOTE_READ,
    SendOpcode.ATOMIC_CMP_AND_SWP: AccessFlags.REMOTE_ATOMIC,
    SendOpcode.ATOMIC_FETCH_AND_ADD: AccessFlags.REMOTE_ATOMIC,
}


class Failed(Exception):
    """A request that the responder refuses for good.

    :param status: status of the requester's completion.
    :param breaks_peer: whether the responder goes to ERR.
    :param reported: whether a completion at the responder reports the failure. On unreliable transports only a failure
        with such a completion has an effect.
    """

    def __init__(self, status: WcStatus, *, breaks_peer: bool = True, reported: bool = False) -> None:
        super().__init__(status)
        self.status = status
        self.breaks_peer = breaks_peer
        self.reported = reported


class Dropped(Exception):
    """A message that does not fit, on a transport without answers: ignored as if it had never arrived."""


def scatter(views: list[memoryview], data: bytes) -> None:
    for view in views:
        part, data = data[: len(view)], data[len(view) :]
        view[: len(part)] = part


def expect_completion(queue: Queue | None, expected: Expected, solicited: bool = False) -> None:
    """Add a completion to a queue, which may be armed for it."""
    assert queue is not None
    queue.completed(solicited or expected.status is not WcStatus.SUCCESS)


@dataclass
class Responder:
    """One end of a connection, with its source of receives and memory: for XRC, the queue that the request names."""

    memory: Memory
    qp: Qp
    shared: SharedQueue | None
    pd: Pd

    @property
    def has_receive(self) -> bool:
        return bool(self.shared.receives if self.shared else self.qp.receives)

    def take(self) -> Receive:
        return self.shared.take() if self.shared else self.qp.receives.popleft()

    def complete(self, sender: Qp, request: Send, receive: Receive, length: int, status: WcStatus) -> None:
        """Complete a receive, on the completion queue of its queue pair, or of its own shared queue."""
        shared = self.shared
        expected = Expected(receive.wr_id, status, receive.index, qp_num=self.qp.number, shared=shared)
        if status is WcStatus.SUCCESS:
            written = request.opcode is SendOpcode.RDMA_WRITE_WITH_IMM
            expected.opcode = WcOpcode.RECV_RDMA_WITH_IMM if written else WcOpcode.RECV
            expected.byte_len = length
            expected.imm_data = request.imm_data if request.opcode in WITH_IMMEDIATE else None
            expected.invalidated = request.invalidate if request.opcode is SendOpcode.SEND_WITH_INV else None
            expected.src_qp = sender.number
            expected.with_header = request.ah is not None
        if shared and shared.cq:
            shared.expected.append(expected)
            expect_completion(shared.cq, expected, request.solicited)
        else:
            self.qp.expected[RECEIVE_SIDE].append(expected)
            expect_completion(self.qp.recv_cq, expected, request.solicited)
        self.memory.coverage["shared receive"] += shared is not None

    def _receive_memory(self, receive: Receive, length: int) -> tuple[list[memoryview], WcStatus]:
        """Return the memory for a message; only as many entries as the message fills are checked."""
        views: list[memoryview] = []
        if sum(sge[1] for sge in receive.sges) < length:
            return views, WcStatus.LOC_LEN_ERR
        for sge in receive.sges:
            if sum(map(len, views)) >= length:
                break
            if sge[1]:
                owner = self.shared.pd if self.shared else self.pd
                view = self.memory.find(owner, sge, AccessFlags.LOCAL_WRITE)
                if view is None:
                    return views, WcStatus.LOC_PROT_ERR
                views.append(view)
        return views, WcStatus.SUCCESS

    def _send(self, sender: Qp, request: Send, data: bytes) -> None:
        if request.ah:
            data = header(request.ah, len(data), request.opcode in WITH_IMMEDIATE) + data
        # A receive stays posted until a datagram fits, but one taken from a shared queue cannot be put back.
        waits = not self.qp.reliable and not self.shared
        if waits and self._receive_memory(self.qp.receives[0], len(data))[1] is WcStatus.LOC_LEN_ERR:
            raise Dropped
        receive = self.take()
        views, status = self._receive_memory(receive, len(data))
        if status is WcStatus.SUCCESS:
            scatter(views, data)
            inverting = request.opcode is SendOpcode.SEND_WITH_INV
            if inverting and not self.memory.invalidate(self.qp, self.pd, request.invalidate):
                status = WcStatus.MW_BIND_ERR
        self.complete(sender, request, receive, len(data), status)
        if status is WcStatus.LOC_LEN_ERR:
            raise Failed(WcStatus.REM_INV_REQ_ERR, reported=True)
        if status is not WcStatus.SUCCESS:
            raise Failed(WcStatus.REM_OP_ERR, reported=True)

    def _target(self, request: Send, length: int, access: AccessFlags) -> memoryview:
        """Return the memory that a request names."""
        view = self.memory.find_for_peer(self.qp, self.pd, (request.remote_addr, length, request.rkey), access)
        if view is None:
            raise Failed(WcStatus.REM_ACCESS_ERR)
        return view

    def _atomic(self, request: Send) -> bytes:
        if request.remote_addr % 8:
            raise Failed(WcStatus.REM_INV_REQ_ERR)
        view = self._target(request, 8, AccessFlags.REMOTE_ATOMIC)
        previous = bytes(view)
        value = int.from_bytes(previous, "little")
        if request.opcode is SendOpcode.ATOMIC_FETCH_AND_ADD:
            value = (value + request.compare_add) % (1 << 64)
        elif value == request.compare_add:
            value = request.swap
        view[:] = value.to_bytes(8, "little")
        return previous

    def respond(self, sender: Qp, request: Send, data: bytes, answer: list[memoryview]) -> None:
        """Execute a request. Read data goes to `answer`."""
        if request.ah is None and not self.qp.established and self.qp.state is QpState.RTR:
            self.qp.established = True
            self.qp.events.add(EventType.COMM_EST)
        immediate = request.opcode is SendOpcode.RDMA_WRITE_WITH_IMM
        # Order of checks: access of the queue pair, whatever the length; then receives; then keys.
        if request.opcode in ONE_SIDED and not self.qp.access & ONE_SIDED[request.opcode]:
            raise Failed(WcStatus.REM_INV_REQ_ERR)
        if (immediate or request.opcode in SENDS) and not self.has_receive:
            raise Failed(WcStatus.RNR_RETRY_EXC_ERR, breaks_peer=False)
        if request.opcode in ANSWERED and not self.qp.reads_served:
            raise Failed(WcStatus.REM_INV_REQ_ERR)
        if request.opcode in ATOMIC:
            scatter(answer, self._atomic(request))
        elif request.opcode is SendOpcode.RDMA_READ:
            length = sum(map(len, answer))
            if length:
                scatter(answer, bytes(self._target(request, length, AccessFlags.REMOTE_READ)))
        elif request.opcode in SENDS:
            self._send(sender, request, data)
        else:
            if data:  # a write of 0 bytes does not check the key
                self._target(request, len(data), AccessFlags.REMOTE_WRITE)[:] = data
            if immediate:
                self.complete(sender, request, self.take(), len(data), WcStatus.SUCCESS)
