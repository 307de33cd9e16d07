"""The objects of the software device as plain data: who is made from whom, and what waits where.

No I/O, no threads, no time: an object is in the state that the device's will be in when everything is done.
"""

from dataclasses import dataclass, field

from aioverbs import AccessFlags, EventType

Sge = tuple[int, int, int]

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
class XrcDomain(Node):
    """One of several handles, where a file names it."""

    context: Context = field(default_factory=Context)
    identity: object = field(default_factory=object)
    of_file: bool = False


@dataclass(eq=False)
class Destination(Node):
    """An address handle."""

    context: Context = field(default_factory=Context)
    pd: Pd = field(default_factory=Pd)
    source: bytes = b""
    target: bytes = b""
    traffic_class: int = 0
    hop_limit: int = 0
    flow_label: int = 0
    leads_here: bool = True


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
    windows: int = 0  # that are bound to it

    @property
    def busy(self) -> bool:
        return super().busy or self.windows > 0

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
class Window(Node):
    """A key to a part of a region, while it is bound; of type 2, for one queue pair."""

    context: Context = field(default_factory=Context)
    pd: Pd = field(default_factory=Pd)
    second: bool = False
    told: int = 0  # its user's key, which the next request is to make good
    key: int = 0  # the last one that a request made good
    region: Region | None = None
    address: int = 0
    length: int = 0
    access: AccessFlags = NOTHING
    qp: Node | None = None

    def unbind(self) -> None:
        if self.region is not None:
            self.region.windows -= 1
        self.region = None

    def destroy(self) -> None:
        super().destroy()
        self.unbind()

    def view(self, address: int, length: int) -> memoryview | None:
        if self.region is None or address < self.address or address + length > self.address + self.length:
            return None
        return self.region.view(address, length)


@dataclass(eq=False)
class AsyncEventSource(Node):
    """What asynchronous events are about: one of each type waits at most."""

    events: set[EventType] = field(default_factory=set)
    unacknowledged: int = 0

    @property
    def busy(self) -> bool:
        return super().busy or self.unacknowledged > 0


@dataclass(eq=False)
class Queue(Node):
    """A completion queue: only its events are here, completions wait at their queue pair."""

    context: Context = field(default_factory=Context)
    size: int = 0
    promised: int = 0  # places that those who complete there may take, all together
    channel: Channel | None = None
    domain: Pd | None = None
    armed: str | None = None
    waiting: int = 0
    taken: int = 0

    @property
    def busy(self) -> bool:
        return super().busy or self.taken > 0

    @property
    def room(self) -> int:
        """A queue overflows only where it was promised to too many."""
        return self.size - self.promised

    def arm(self, solicited_only: bool) -> None:
        if self.armed != "any":
            self.armed = "solicited" if solicited_only else "any"

    def completed(self, worth_an_event: bool) -> None:
        if self.armed == "any" or (self.armed == "solicited" and worth_an_event):
            self.armed = None
            self.waiting += self.channel is not None
