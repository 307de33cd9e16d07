"""The objects of the software device as plain data: their parents, and the events that wait on them.

No I/O, no threads, no time: an object has the state that the device reaches once all work is done.
"""

from dataclasses import dataclass, field

from aioverbs import AccessFlags, EventType

Sge = tuple[int, int, int]

NOTHING = AccessFlags(0)


@dataclass(eq=False)
class Node:
    """An object. It can be destroyed once none of its children is left."""

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
    held: int = 0  # number of allocations of its allocator in use

    @property
    def root(self) -> "Pd":
        """The domain that protects: queue pairs use memory of the same root."""
        return self.base or self


@dataclass(eq=False)
class Td(Node):
    context: Context = field(default_factory=Context)


@dataclass(eq=False)
class XrcDomain(Node):
    """An XRC domain; one of several handles if a file names the domain."""

    context: Context = field(default_factory=Context)
    identity: object = field(default_factory=object)
    of_file: bool = False


@dataclass(eq=False)
class AddressHandle(Node):
    """An address handle."""

    context: Context = field(default_factory=Context)
    pd: Pd = field(default_factory=Pd)
    source: bytes = b""
    target: bytes = b""
    traffic_class: int = 0
    hop_limit: int = 0
    flow_label: int = 0
    reaches_device: bool = True


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
    windows: int = 0  # number of windows bound to it

    @property
    def busy(self) -> bool:
        return super().busy or self.windows > 0

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset

    def view(self, address: int, length: int) -> memoryview | None:
        """Return a part of the memory; None if it is not entirely inside."""
        offset = address - self.address
        if offset < 0 or offset + length > self.length:
            return None
        start = self.offset + offset
        return memoryview(self.buffer.content)[start : start + length]


@dataclass(eq=False)
class Window(Node):
    """A key to a part of a region while the window is bound; a type 2 window is for one queue pair."""

    context: Context = field(default_factory=Context)
    pd: Pd = field(default_factory=Pd)
    second: bool = False
    posted_rkey: int = 0  # rkey of the last posted bind, which takes effect when executed
    key: int = 0  # rkey of the last executed bind
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
    """A source of asynchronous events; at most one of each type waits."""

    events: set[EventType] = field(default_factory=set)
    unacknowledged: int = 0

    @property
    def busy(self) -> bool:
        return super().busy or self.unacknowledged > 0


@dataclass(eq=False)
class Queue(Node):
    """A completion queue: only its events are modeled here; completions wait at their queue pair."""

    context: Context = field(default_factory=Context)
    size: int = 0
    reserved: int = 0  # number of completions reserved by the queues that complete here
    channel: Channel | None = None
    domain: Pd | None = None
    armed: str | None = None
    waiting: int = 0
    unacknowledged: int = 0

    @property
    def busy(self) -> bool:
        return super().busy or self.unacknowledged > 0

    @property
    def available(self) -> int:
        """Return the number of completions not reserved: a queue overflows only if it is overcommitted."""
        return self.size - self.reserved

    def arm(self, solicited_only: bool) -> None:
        if self.armed != "any":
            self.armed = "solicited" if solicited_only else "any"

    def completed(self, worth_an_event: bool) -> None:
        if self.armed == "any" or (self.armed == "solicited" and worth_an_event):
            self.armed = None
            self.waiting += self.channel is not None
