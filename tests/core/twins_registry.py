"""The objects of the stateful test: each one of the model with its handle of the device."""

import ctypes
import os
from typing import TypeVar

from hypothesis import note

from aioverbs._core.handles import handles
from tests.core.allocators import Recording
from tests.core.model import Buffer, Context, Node, Queue, Region
from tests.core.model_execution import Fabric
from tests.core.model_queue_pairs import Qp, SharedQueue

NodeT = TypeVar("NodeT", bound=Node)
HandleT = TypeVar("HandleT", bound=handles.Handle)


class Registry:
    """The open objects, oldest first, and the closed ones."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.open: list[Node] = []
        self.closed: list[Node] = []
        self.handles: dict[Node, handles.Handle] = {}
        self.memories: list[tuple[Buffer, bytearray]] = []
        self.regions: list[Region] = []
        self.allocators: list[Recording] = []
        self.file = os.memfd_create("XRC domain")
        self._wr_ids = 0

    def add(self, node: Node, handle: handles.Handle) -> None:
        note(f"made {handle} of {[self.handles[parent] for parent in node.parents]}")
        self.open.append(node)
        self.handles[node] = handle

    def of(self, kind: type[NodeT], context: Context | None = None) -> list[NodeT]:
        """Return the open objects of a kind, of one context if one is given."""
        nodes = [node for node in self.open if isinstance(node, kind)]
        return [node for node in nodes if context is None or getattr(node, "context", None) is context]

    def handle(self, node: Node, kind: type[HandleT]) -> HandleT:
        handle = self.handles[node]
        assert isinstance(handle, kind)
        return handle

    def qp(self, qp: Qp) -> handles.QueuePair:
        return self.handle(qp, handles.QueuePair)

    def cq(self, queue: Queue) -> handles.CompletionQueue:
        return self.handle(queue, handles.CompletionQueue)

    def srq(self, shared: SharedQueue) -> handles.SharedReceiveQueue:
        return self.handle(shared, handles.SharedReceiveQueue)

    def new_buffer(self, size: int, far: bool) -> tuple[Buffer, bytearray]:
        first = 1 + 89 * len(self.memories)
        memory = bytearray((first + place) % 251 for place in range(size))  # no two parts are alike
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.memories.append((Buffer(address, memory[:], far), memory))
        return self.memories[-1]

    def new_wr_id(self, side: int) -> int:
        self._wr_ids += 1
        return self._wr_ids << 1 | side
