"""The software device and its model side by side: every step is applied to both, and they are compared."""

import os
from collections.abc import Callable

from hypothesis import note

from aioverbs import BusyResourceError, ClosedResourceError, SendFlags, VerbsError
from aioverbs._core.handles import handles
from tests import raw_verbs
from tests.core.model import Channel, Context, Node, Pd, Queue, Region, Window
from tests.core.model_queue_pairs import Bind, Qp, Receive, Send, SharedQueue
from tests.core.twins_watching import Watcher


def errno_of(call: Callable[[], object]) -> int:
    """Return the errno of the VerbsError that `call` raises, or 0."""
    try:
        call()
    except VerbsError as refusal:
        return refusal.errno
    return 0


class Twins(Watcher):
    """Apply steps to the device and to the model."""

    # ---- Posting

    def post_send(self, qp: Qp, request: Send) -> None:
        if request.inline is not None or self.in_flight is not qp:
            self.catch_up()
        if request.inline is not None:
            request.inline = self._read(request)
        note(f"queue pair {qp.number}: post {request}")
        error = errno_of(lambda: self._post_bind(qp, request) if isinstance(request, Bind) else self._post(qp, request))
        assert error == self.fabric.post_send(qp, request), (qp.number, request)
        if isinstance(request, Bind):
            assert self.handle(request.window, handles.MemoryWindow).rkey == request.window.posted_rkey
        self.in_flight = qp

    def _post(self, qp: Qp, request: Send) -> None:
        flags = (
            SendFlags.SIGNALED * request.signaled
            | SendFlags.SOLICITED * request.solicited
            | SendFlags.INLINE * (request.inline is not None)
        )
        raw_verbs.post_send(
            self.qp(qp),
            request.opcode,
            request.sges,
            wr_id=request.wr_id,
            flags=flags,
            remote_addr=request.remote_addr,
            rkey=request.rkey,
            imm_data=request.imm_data,
            compare_add=request.compare_add,
            swap=request.swap,
            invalidate_rkey=request.invalidate,
            ah=self.handle(request.ah, handles.AddressHandle) if request.ah else None,
            remote_qpn=request.remote_qpn,
            remote_qkey=request.remote_qkey,
            remote_srqn=request.remote_srqn,
        )

    def _post_bind(self, qp: Qp, request: Bind) -> None:
        raw_verbs.bind_window(
            self.qp(qp),
            self.handle(request.window, handles.MemoryWindow),
            self.handle(request.region, handles.MemoryRegion) if request.region else None,
            request.remote_addr,
            request.length,
            request.access,
            wr_id=request.wr_id,
            flags=SendFlags.SIGNALED * request.signaled,
            rkey=request.rkey if request.window.second else None,
        )

    def _read(self, request: Send) -> bytes:
        """Return the bytes that an inline post copies."""
        data = b""
        for address, length, _ in request.sges:
            for buffer, _ in self.memories:
                start = address - buffer.address
                if length and start >= 0 and start + length <= len(buffer.content):
                    data += buffer.content[start : start + length]
        return data

    def post_recv(self, qp: Qp, receive: Receive) -> None:
        self.catch_up()
        note(f"queue pair {qp.number}: post {receive}")
        error = errno_of(lambda: raw_verbs.post_recv(self.qp(qp), receive.sges, wr_id=receive.wr_id))
        assert error == self.fabric.post_recv(qp, receive), (qp.number, receive)
        self.in_flight = qp

    def post_shared(self, shared: SharedQueue, receive: Receive) -> None:
        self.catch_up()
        note(f"{self.srq(shared)}: post {receive}")
        if shared.xrc_domain:
            self.posted_to[receive.wr_id] = shared
        error = errno_of(lambda: raw_verbs.post_recv(self.srq(shared), receive.sges, wr_id=receive.wr_id))
        assert error == self.fabric.post_shared(shared, receive), (shared, receive)

    # ---- Destroying

    def destroy(self, node: Node) -> bool:
        """Destroy an object, or check that it refuses as the model does; return whether it was destroyed."""
        self.catch_up()
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
        self._remove_from_model(node)
        return True

    def _remove_from_model(self, node: Node) -> None:
        match node:
            case Region() | Window():
                self.fabric.memory.remove(node)
            case Queue(domain=Pd(allocates=True) as domain):
                domain.held -= 2
            case SharedQueue():
                self.fabric.shared.pop(node.number, None)
                node.pd.held -= 2 * node.pd.allocates
                if node.cq:
                    node.cq.reserved -= node.largest
            case Qp():
                del self.fabric.qps[node.number]
                for queue in node.queues:
                    queue.reserved -= node.may_complete(queue)
                node.clear()
                node.pd.held -= 2 * node.pd.allocates

    def check_closed(self, node: Node) -> None:
        handle = self.handles[node]
        handle.destroy()
        refused = False
        try:
            match handle:
                case handles.Context():
                    handle.query_device()
                case handles.CompletionQueue():
                    assert handle.cqe
                case handles.QueuePair() | handles.SharedReceiveQueue():
                    handle.query()
                case handles.MemoryRegion():
                    assert handle.lkey
                case handles.MemoryWindow():
                    assert handle.rkey
                case handles.CompletionChannel():
                    handle.get_event()
                case handles.ProtectionDomain():
                    handles.MemoryRegion(handle, bytearray(1))
                case _:
                    return
        except ClosedResourceError:
            refused = True
        assert refused, handle

    def finish(self) -> None:
        """Take all remaining completions and events, then destroy everything and check that nothing is left."""
        self.catch_up()
        for queue in self.of(Queue):
            while self.poll(queue, 7):
                pass
        for qp in self.of(Qp):
            assert not any(qp.expected), f"these completions did not arrive: {qp.expected}"
        for shared in self.of(SharedQueue):
            assert not shared.expected, f"these completions did not arrive: {shared.expected}"
            assert shared.outstanding == len(shared.receives)
        for channel in self.of(Channel):
            self.take_events(channel)
        for queue in self.of(Queue):
            self.cq(queue).ack_events(queue.unacknowledged)
            queue.unacknowledged = 0
        for context in self.of(Context):
            self.take_async_events(context)
        while self.async_events:
            self.acknowledge_async_event(0)
        # Windows first: a region bound to a window may be younger than the window.
        for node in [*self.of(Window), *reversed([node for node in self.open if not isinstance(node, Window)])]:
            assert self.destroy(node)
            self.compare_counts()
        assert handles.open_handles() == []
        assert not any(allocator.live for allocator in self.allocators)

    def close(self) -> None:
        """Release resources, after `finish` or a failure."""
        while self.async_events:
            self.acknowledge_async_event(0)
        for window in self.of(Window):
            self.handles[window].destroy()
        os.close(self.file)
