"""The objects of the software device as plain data: who is made from whom, and what waits where.

No I/O, no threads, no time: an object is in the state that the device's will be in when everything is done.
"""

from collections import deque
from dataclasses import dataclass, field

from aioverbs import AccessFlags, QpState, SendOpcode, WcOpcode, WcStatus
from aioverbs.attributes import QpCapabilities

Sge = tuple[int, int, int]

SEND_SIDE, RECEIVE_SIDE = 0, 1
NOTHING = AccessFlags(0)


@dataclass(eq=False)
class Node:
    """An object. It may go when nothing that was made from it is left."""

    parents: tuple["Node", ...] = ()
    children: int = 0
    open: bool = True

    def __post_init__(self) -> None:
        for parent in self.parents:
            parent.children += 1

    @property
    def busy(self) -> bool:
        return self.children > 0

    def destroy(self) -> None:
        self.open = False
        for parent in self.parents:
            parent.children -= 1


@dataclass(eq=False)
class Context(Node):
    mode: str = "inline"


@dataclass(eq=False)
class Pd(Node):
    """A protection domain; a parent domain is one, too, with another as its base."""

    context: Context = field(default_factory=Context)
    base: "Pd | None" = None
    allocates: bool = False
    held: int = 0  # pieces of its allocator's memory

    @property
    def root(self) -> "Pd":
        """What protects: memory of one root is for queue pairs of that root."""
        return self.base or self


@dataclass(eq=False)
class Td(Node):
    context: Context = field(default_factory=Context)


@dataclass(eq=False)
class Channel(Node):
    context: Context = field(default_factory=Context)


@dataclass(eq=False)
class Buffer:
    """Memory of the user. Requests go from near buffers to far ones and back, so that they never overlap."""

    address: int
    content: bytearray
    far: bool


@dataclass(eq=False)
class Region(Node):
    context: Context = field(default_factory=Context)
    pd: Pd = field(default_factory=Pd)
    buffer: Buffer = field(default_factory=lambda: Buffer(0, bytearray(), False))
    offset: int = 0
    length: int = 0
    access: AccessFlags = NOTHING
    key: int = 0

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset

    def view(self, address: int, length: int) -> memoryview | None:
        """A part of the memory, None where it is not all inside."""
        offset = address - self.address
        if offset < 0 or offset + length > self.length:
            return None
        start = self.offset + offset
        return memoryview(self.buffer.content)[start : start + length]


@dataclass(eq=False)
class Queue(Node):
    """A completion queue: only its events are here, completions wait at their queue pair."""

    context: Context = field(default_factory=Context)
    size: int = 0
    promised: int = 0  # places that its queue pairs may take, all together
    channel: Channel | None = None
    domain: Pd | None = None
    armed: str | None = None
    waiting: int = 0
    taken: int = 0

    @property
    def busy(self) -> bool:
        return super().busy or self.taken > 0

    def arm(self, solicited_only: bool) -> None:
        if self.armed != "any":
            self.armed = "solicited" if solicited_only else "any"

    def completed(self, worth_an_event: bool) -> None:
        if self.armed == "any" or (self.armed == "solicited" and worth_an_event):
            self.armed = None
            self.waiting += self.channel is not None


@dataclass
class Send:
    wr_id: int
    opcode: SendOpcode
    sges: list[Sge]
    signaled: bool
    solicited: bool
    inline: bytes | None
    remote_addr: int
    rkey: int
    imm_data: int
    compare_add: int
    swap: int
    index: int = 0


@dataclass
class Receive:
    wr_id: int
    sges: list[Sge]
    index: int = 0


@dataclass
class Expected:
    """A completion to come. None is for what it does not tell."""

    wr_id: int
    status: WcStatus
    index: int
    opcode: WcOpcode | None = None
    byte_len: int | None = None
    imm_data: int | None = None
    src_qp: int | None = None


@dataclass
class Ring:
    """The places of one direction: taken by posting, freed by polling a completion that tells of them."""

    depth: int
    posted: int = 0
    reaped: int = 0

    @property
    def full(self) -> bool:
        return self.posted - self.reaped >= self.depth


@dataclass(eq=False)
class Qp(Node):
    context: Context = field(default_factory=Context)
    pd: Pd = field(default_factory=Pd)
    send_cq: Queue = field(default_factory=Queue)
    recv_cq: Queue = field(default_factory=Queue)
    capabilities: QpCapabilities = field(default_factory=QpCapabilities)
    sig_all: bool = False
    number: int = 0
    state: QpState = QpState.RESET
    access: AccessFlags = NOTHING
    peer: int = 0
    mtu: int = 256
    next_psn: int = 0
    expected_psn: int = 0
    reads: int = 0
    reads_served: int = 0
    sends: deque[Send] = field(default_factory=deque)
    receives: deque[Receive] = field(default_factory=deque)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clear()

    def clear(self) -> None:
        """As after RESET: nothing is posted, and nothing that completed is left to be polled."""
        self.sends.clear()
        self.receives.clear()
        self.rings = (Ring(self.capabilities.max_send_wr), Ring(self.capabilities.max_recv_wr))
        self.expected: tuple[deque[Expected], deque[Expected]] = (deque(), deque())

    def polled(self, side: int) -> Expected | None:
        """The next completion of one direction is taken."""
        if not self.expected[side]:
            return None
        expected = self.expected[side].popleft()
        self.rings[side].reaped = expected.index + 1
        return expected
