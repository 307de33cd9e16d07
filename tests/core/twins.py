"""The software device and its model side by side: everything is done to both, and they are compared."""

import ctypes
import time
from typing import TypeVar

from hypothesis import note

from aioverbs import BusyResourceError, ClosedResourceError, QpState, SendFlags, VerbsError, WcFlags
from aioverbs._core import domains, engine
from tests.core.allocators import Recording
from tests.core.model import (
    Buffer,
    Channel,
    Context,
    Expected,
    Node,
    Pd,
    Qp,
    Queue,
    Receive,
    Region,
    Send,
    Td,
)
from tests.core.model_execution import Fabric

PATIENCE_S = 10.0

NodeT = TypeVar("NodeT", bound=Node)
HandleT = TypeVar("HandleT", bound=engine.Handle)


def number_of(error: VerbsError | None) -> int:
    return error.errno if error else 0


class Twins:
    """What is open, oldest first, and what was: the model's objects with the device's handles.

    With an engine, work is under way for at most one queue pair, so that its effects have one order.
    """

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.open: list[Node] = []
        self.closed: list[Node] = []
        self.handles: dict[Node, engine.Handle] = {}
        self.memories: list[tuple[Buffer, bytearray]] = []
        self.regions: list[Region] = []
        self.allocators: list[Recording] = []
        self.under_way: Qp | None = None
        self.done: list[Expected] = []  # completions that were polled, and fitted
        self._wr_ids = 0

    # ---- making and finding

    def add(self, node: Node, handle: engine.Handle) -> None:
        note(f"made {handle} of {[self.handles[parent] for parent in node.parents]}")
        self.open.append(node)
        self.handles[node] = handle

    def of(self, kind: type[NodeT], context: Context | None = None) -> list[NodeT]:
        """The open objects of a kind; of one context, where that is said."""
        found = [node for node in self.open if isinstance(node, kind)]
        return [node for node in found if context is None or getattr(node, "context", None) is context]

    def handle(self, node: Node, kind: type[HandleT]) -> HandleT:
        handle = self.handles[node]
        assert isinstance(handle, kind)
        return handle

    def qp(self, qp: Qp) -> engine.QueuePair:
        return self.handle(qp, engine.QueuePair)

    def cq(self, queue: Queue) -> engine.CompletionQueue:
        return self.handle(queue, engine.CompletionQueue)

    def new_buffer(self, size: int, far: bool) -> tuple[Buffer, bytearray]:
        memory = bytearray(size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.memories.append((Buffer(address, bytearray(size), far), memory))
        return self.memories[-1]

    def new_wr_id(self, side: int) -> int:
        self._wr_ids += 1
        return self._wr_ids << 1 | side

    # ---- posting

    def post_send(self, qp: Qp, request: Send) -> None:
        if request.inline is not None or self.under_way is not qp:
            self.settle()
        if request.inline is not None:
            request.inline = self._read(request)
        flags = (
            SendFlags.SIGNALED * request.signaled
            | SendFlags.SOLICITED * request.solicited
            | SendFlags.INLINE * (request.inline is not None)
        )
        note(f"queue pair {qp.number}: post {request}")
        error = None
        try:
            self.qp(qp).post_send(
                request.opcode,
                request.sges,
                wr_id=request.wr_id,
                flags=flags,
                remote_addr=request.remote_addr,
                rkey=request.rkey,
                imm_data=request.imm_data,
                compare_add=request.compare_add,
                swap=request.swap,
            )
        except VerbsError as refusal:
            error = refusal
        assert number_of(error) == self.fabric.post_send(qp, request), (qp.number, request)
        self.under_way = qp

    def _read(self, request: Send) -> bytes:
        """The bytes that the call copies."""
        data = b""
        for address, length, _ in request.sges:
            for buffer, _ in self.memories:
                start = address - buffer.address
                if length and start >= 0 and start + length <= len(buffer.content):
                    data += buffer.content[start : start + length]
        return data

    def post_recv(self, qp: Qp, receive: Receive) -> None:
        self.settle()
        note(f"queue pair {qp.number}: post {receive}")
        error = None
        try:
            self.qp(qp).post_recv(receive.sges, wr_id=receive.wr_id)
        except VerbsError as refusal:
            error = refusal
        assert number_of(error) == self.fabric.post_recv(qp, receive), (qp.number, receive)
        self.under_way = qp

    # ---- completions and events

    def poll(self, queue: Queue, count: int) -> int:
        """Take up to so many completions and compare each with the next one that the model expects there."""
        completions = self.cq(queue).poll(count)
        note(f"poll for {count}: {completions}")
        for completion in completions:
            qp = self.fabric.qps[completion.qp_num]
            side = completion.wr_id & 1
            assert queue is (qp.send_cq, qp.recv_cq)[side]
            expected = qp.polled(side)
            assert expected is not None, f"nobody expects {completion}"
            self._compare(completion, expected)
            self.done.append(expected)
        return len(completions)

    def _compare(self, completion: engine.WorkCompletion, expected: Expected) -> None:
        assert (completion.wr_id, completion.status) == (expected.wr_id, expected.status), (completion, expected)
        if expected.opcode is not None:
            assert completion.opcode == expected.opcode
        if expected.byte_len is not None:
            assert completion.byte_len == expected.byte_len
        if expected.src_qp is not None:
            assert completion.src_qp == expected.src_qp
            immediate = bool(completion.wc_flags & WcFlags.WITH_IMM)
            assert (completion.imm_data if immediate else None) == expected.imm_data

    def request_notify(self, queue: Queue, solicited_only: bool) -> None:
        self.settle()
        self.cq(queue).request_notify(solicited_only)
        queue.arm(solicited_only)

    def take_event(self, channel: Channel) -> None:
        self.settle()
        waiting = {self.cq(queue): queue for queue in self.of(Queue) if queue.channel is channel and queue.waiting}
        handle = self.handle(channel, engine.CompletionChannel)
        end = time.monotonic() + PATIENCE_S
        taken = handle.get_event()
        while waiting and taken is None:
            assert time.monotonic() < end, "the event does not come"
            taken = handle.get_event()
        if waiting:
            assert taken is not None
            waiting[taken].waiting -= 1
            waiting[taken].taken += 1
        else:
            assert taken is None

    # ---- comparing

    def settle(self) -> None:
        """Wait until the device has done what the model has done, and compare all memory and all queue pairs."""
        end = time.monotonic() + PATIENCE_S
        while lagging := [qp for qp in self.of(Qp) if not self._agrees(qp)]:
            for qp in lagging:
                if qp.state is QpState.ERR:  # its flushed requests show only there
                    self.poll(qp.send_cq, 1 << 20)
                    self.poll(qp.recv_cq, 1 << 20)
            late = lagging[0]
            assert time.monotonic() < end, (
                late.number,
                late.state,
                late.next_psn,
                late.expected,
                self.qp(late).query(),
            )
        for qp in self.of(Qp):
            if qp.state in (QpState.RTR, QpState.RTS, QpState.SQD):
                assert self.qp(qp).query().rq_psn == qp.expected_psn
        for buffer, memory in self.memories:
            assert memory == buffer.content
        self.under_way = None

    def _agrees(self, qp: Qp) -> bool:
        told = self.qp(qp).query()
        if told.qp_state is not qp.state:
            assert qp.state is QpState.ERR, f"it is in {told.qp_state.name}, not in {qp.state.name}"
            return False
        if qp.state is QpState.ERR:
            return not any(qp.expected)
        return qp.state not in (QpState.RTS, QpState.SQD) or told.sq_psn == qp.next_psn

    def compare_counts(self) -> None:
        for context in self.of(Context):
            pds = self.of(Pd, context)
            assert self.handle(context, engine.Context).counts() == {
                "pds": sum(pd.base is None for pd in pds),
                "parent_domains": sum(pd.base is not None for pd in pds),
                "thread_domains": len(self.of(Td, context)),
                "xrc_domains": 0,
                "mrs": len(self.of(Region, context)),
                "mws": 0,
                "ahs": 0,
                "channels": len(self.of(Channel, context)),
                "cqs": len(self.of(Queue, context)),
                "srqs": 0,
                "qps": len(self.of(Qp, context)),
                "overlaps": 0,
            }
        assert engine.open_handles() == [self.handles[node] for node in self.open]
        for pd in self.of(Pd):
            if pd.base is not None:
                assert self.handle(pd, domains.ParentDomain).held == pd.held
        assert sum(len(allocator.live) for allocator in self.allocators) == sum(pd.held for pd in self.of(Pd))

    # ---- destroying

    def destroy(self, node: Node) -> bool:
        """Destroy an object, or see it refuse as it must."""
        self.settle()
        handle = self.handles[node]
        note(f"destroy {handle}")
        refused = False
        try:
            handle.destroy()
        except BusyResourceError:
            refused = True
        assert refused == node.busy, handle
        assert handle.closed != refused
        if refused:
            return False
        node.destroy()
        self.open.remove(node)
        self.closed.append(node)
        match node:
            case Region():
                del self.fabric.regions[node.key]
            case Queue(domain=Pd(allocates=True) as domain):
                domain.held -= 2
            case Qp():
                del self.fabric.qps[node.number]
                for queue in (node.send_cq, node.recv_cq):
                    queue.promised -= self.promise(node, queue)
                node.clear()
                node.pd.held -= 2 * node.pd.allocates
        return True

    @staticmethod
    def promise(qp: Qp, queue: Queue) -> int:
        """How many completions of a queue pair may wait in a queue at once."""
        sends, receives = qp.capabilities.max_send_wr, qp.capabilities.max_recv_wr
        return sends * (qp.send_cq is queue) + receives * (qp.recv_cq is queue)

    def use_closed(self, node: Node) -> None:
        handle = self.handles[node]
        handle.destroy()
        refused = False
        try:
            match handle:
                case engine.Context():
                    handle.query_device()
                case engine.CompletionQueue():
                    handle.poll()
                case engine.QueuePair():
                    handle.query()
                case engine.MemoryRegion():
                    assert handle.lkey
                case engine.CompletionChannel():
                    handle.get_event()
                case engine.ProtectionDomain():
                    engine.MemoryRegion(handle, bytearray(1))
                case _:
                    return
        except ClosedResourceError:
            refused = True
        assert refused, handle

    def finish(self) -> None:
        """Take what is still to be taken, then destroy everything; nothing may be left over."""
        self.settle()
        for queue in self.of(Queue):
            while self.poll(queue, 7):
                pass
        for qp in self.of(Qp):
            assert not any(qp.expected), f"these never came: {qp.expected}"
        for channel in self.of(Channel):
            for _ in range(1 + sum(queue.waiting for queue in self.of(Queue) if queue.channel is channel)):
                self.take_event(channel)
        for queue in self.of(Queue):
            self.cq(queue).ack_events(queue.taken)
            queue.taken = 0
        for node in reversed(self.open[:]):
            assert self.destroy(node)
            self.compare_counts()
        assert engine.open_handles() == []
        assert not any(allocator.live for allocator in self.allocators)
