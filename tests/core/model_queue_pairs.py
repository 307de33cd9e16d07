"""Queue pairs, shared receive queues and their requests as plain data."""

from collections import deque
from dataclasses import dataclass, field

from aioverbs import AccessFlags, EventType, QpState, QpType, SendOpcode, WcOpcode, WcStatus
from aioverbs.attributes import QpCapabilities
from tests.core.model import (
    NOTHING,
    AddressHandle,
    AsyncEventSource,
    Context,
    Pd,
    Queue,
    Region,
    Sge,
    Window,
    XrcDomain,
)

SEND_SIDE, RECEIVE_SIDE = 0, 1


@dataclass
class Send:
    wr_id: int
    opcode: SendOpcode
    sges: list[Sge] = field(default_factory=list)
    signaled: bool = True
    solicited: bool = False
    inline: bytes | None = None
    remote_addr: int = 0
    rkey: int = 0
    imm_data: int = 0
    compare_add: int = 0
    swap: int = 0
    invalidate: int = 0
    ah: AddressHandle | None = None
    remote_qpn: int = 0
    remote_qkey: int = 0
    remote_srqn: int = 0
    index: int = 0


@dataclass
class Bind(Send):
    """A bind request; `remote_addr` and `rkey` are its address and its new key."""

    window: Window = field(default_factory=Window)
    region: Region | None = None
    lkey: int = 0
    length: int = 0
    access: AccessFlags = NOTHING


@dataclass
class Receive:
    wr_id: int
    sges: list[Sge]
    index: int = 0


@dataclass
class Expected:
    """An expected completion. None stands for a field that the completion does not report."""

    wr_id: int
    status: WcStatus
    index: int
    opcode: WcOpcode | None = None
    byte_len: int | None = None
    imm_data: int | None = None
    invalidated: int | None = None
    src_qp: int | None = None
    with_header: bool = False
    qp_num: int = 0
    shared: "SharedQueue | None" = None


@dataclass
class Ring:
    """The slots of one direction: taken by posting, freed by polling a completion that covers them."""

    depth: int
    posted: int = 0
    reaped: int = 0

    @property
    def full(self) -> bool:
        return self.posted - self.reaped >= self.depth


@dataclass(eq=False)
class SharedQueue(AsyncEventSource):
    """A shared receive queue: a slot is free again when the completion is polled, or when its queue pair is reset."""

    context: Context = field(default_factory=Context)
    pd: Pd = field(default_factory=Pd)
    depth: int = 0
    largest: int = 0  # the depth that fits into the completion queues
    max_sge: int = 0
    limit: int = 0
    outstanding: int = 0
    receives: deque[Receive] = field(default_factory=deque)
    # An XRC shared queue completes on a queue of its own.
    xrc_domain: XrcDomain | None = None
    cq: Queue | None = None
    number: int = 0
    expected: deque[Expected] = field(default_factory=deque)

    def take(self) -> Receive:
        receive = self.receives.popleft()
        if len(self.receives) < self.limit:
            self.limit = 0  # reported once
            self.events.add(EventType.SRQ_LIMIT_REACHED)
        return receive

    def polled(self) -> Expected | None:
        if not self.expected:
            return None
        self.outstanding -= 1
        return self.expected.popleft()


@dataclass(eq=False)
class Qp(AsyncEventSource):
    context: Context = field(default_factory=Context)
    type: QpType = QpType.RC
    pd: Pd = field(default_factory=Pd)  # of an XRC target: an empty one
    send_cq: Queue | None = None
    recv_cq: Queue | None = None
    shared: SharedQueue | None = None
    xrc_domain: XrcDomain | None = None
    capabilities: QpCapabilities = field(default_factory=QpCapabilities)
    sig_all: bool = False
    number: int = 0
    state: QpState = QpState.RESET
    access: AccessFlags = NOTHING
    peer: int = 0
    qkey: int = 0
    mtu: int = 256
    next_psn: int = 0
    expected_psn: int = 0
    reads: int = 0
    reads_served: int = 0
    established: bool = False  # COMM_EST was raised
    last_wqe_reached: bool = False  # QP_LAST_WQE_REACHED was raised
    without_psn: bool = False  # executed a request that has no sequence number
    sends: deque[Send] = field(default_factory=deque)
    receives: deque[Receive] = field(default_factory=deque)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rings = (Ring(0), Ring(0))
        self.expected: tuple[deque[Expected], deque[Expected]] = (deque(), deque())
        self.clear()

    @property
    def reliable(self) -> bool:
        return self.type not in (QpType.UC, QpType.UD)

    @property
    def sends_at_all(self) -> bool:
        return self.type is not QpType.XRC_RECV

    @property
    def receives_by_itself(self) -> bool:
        return self.shared is None and self.type not in (QpType.XRC_SEND, QpType.XRC_RECV)

    @property
    def queues(self) -> list[Queue]:
        return list(dict.fromkeys(queue for queue in (self.send_cq, self.recv_cq) if queue))

    def may_complete(self, queue: Queue) -> int:
        """Return how many of its completions may wait in a queue at once."""
        receives = self.shared.largest if self.shared else self.capabilities.max_recv_wr
        return self.capabilities.max_send_wr * (self.send_cq is queue) + receives * (self.recv_cq is queue)

    def clear(self) -> None:
        """Reset: discard all requests, and all completions not yet polled."""
        self.sends.clear()
        self.receives.clear()
        for expected in self.expected[RECEIVE_SIDE]:
            if expected.shared:
                expected.shared.outstanding -= 1
        self.rings = (Ring(self.capabilities.max_send_wr), Ring(self.capabilities.max_recv_wr))
        self.expected = (deque(), deque())

    def polled(self, side: int) -> Expected | None:
        """Take the next completion of one direction."""
        if not self.expected[side]:
            return None
        expected = self.expected[side].popleft()
        if expected.shared:
            expected.shared.outstanding -= 1
        else:
            self.rings[side].reaped = expected.index + 1
        return expected
