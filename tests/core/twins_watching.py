"""Comparison of device and model: completions, events, states, memory, counts."""

import time
from collections import Counter

from hypothesis import note

from aioverbs import EventType, QpState, QpType, WcFlags, WcStatus
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from tests.core.model import AddressHandle, AsyncEventSource, Channel, Context, Pd, Queue, Region, Td, Window, XrcDomain
from tests.core.model_queue_pairs import RECEIVE_SIDE, SEND_SIDE, Expected, Qp, SharedQueue
from tests.core.twins_registry import Registry
from tests.raw_verbs import Completion, poll

PATIENCE_S = 10.0


class Watcher(Registry):
    """Waits for a device with a thread, and compares.

    With a device thread, work is in flight for at most one queue pair, so that its effects have a single order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: Qp | None = None
        self.posted_to: dict[int, SharedQueue] = {}  # receives that complete on a shared queue's own completion queue
        self.async_events: list[tuple[AsyncEventSource, handles.AsyncEvent]] = []  # events not yet acknowledged
        # Numbers of completions and events that were taken and agreed with the model.
        self.taken_completions: Counter[tuple[QpType, int, WcStatus]] = Counter()
        self.taken_events: Counter[EventType] = Counter()

    # ---- Completions and events

    def poll(self, queue: Queue, count: int) -> int:
        """Take up to `count` completions, and compare each with the next one that the model expects there."""
        completions = poll(self.cq(queue), count)
        note(f"poll for {count}: {completions}")
        for completion in completions:
            side = completion.wr_id & 1
            shared = self.posted_to.get(completion.wr_id)
            if shared:
                assert queue is shared.cq
                expected, kind = shared.polled(), QpType.XRC_RECV
            else:
                qp = self.fabric.qps[completion.qp_num]
                assert queue is (qp.send_cq, qp.recv_cq)[side]
                expected, kind = qp.polled(side), qp.type
            assert expected is not None, f"unexpected: {completion}"
            self._compare(completion, expected)
            self.taken_completions[kind, side, expected.status] += 1
        return len(completions)

    def _compare(self, completion: Completion, expected: Expected) -> None:
        assert (completion.wr_id, completion.status) == (expected.wr_id, expected.status), (completion, expected)
        if expected.opcode is not None:
            assert completion.opcode == expected.opcode
        if expected.byte_len is not None:
            assert completion.byte_len == expected.byte_len
        if expected.qp_num:
            assert completion.qp_num == expected.qp_num
        if expected.src_qp is not None:
            assert completion.src_qp == expected.src_qp
            flags = completion.wc_flags
            assert (completion.imm_data if flags & WcFlags.WITH_IMM else None) == expected.imm_data
            assert (completion.invalidated_rkey if flags & WcFlags.WITH_INV else None) == expected.invalidated
            assert bool(flags & WcFlags.GRH) == expected.with_header

    def poll_while_it_works(self, queue: Queue) -> None:
        """Poll before all completions have arrived, then the rest."""
        self.poll(queue, 1 << 20)
        self.catch_up()
        self.poll(queue, 1 << 20)

    def request_notify(self, queue: Queue, solicited_only: bool) -> None:
        self.catch_up()
        self.cq(queue).request_notify(solicited_only)
        queue.arm(solicited_only)

    def take_events(self, channel: Channel) -> None:
        """Take all waiting events. Events of different queues arrive in any order, on which nothing else may depend."""
        self.catch_up()
        handle = self.handle(channel, handles.CompletionChannel)
        waiting = {self.cq(queue): queue for queue in self.of(Queue) if queue.channel is channel}
        end = time.monotonic() + PATIENCE_S
        while any(queue.waiting for queue in waiting.values()):
            queue_handle = handle.get_event()
            if queue_handle is not None:
                waiting[queue_handle].waiting -= 1
                waiting[queue_handle].unacknowledged += 1
                assert waiting[queue_handle].waiting >= 0
            assert time.monotonic() < end, "the event did not arrive"
        assert handle.get_event() is None

    def take_async_events(self, context: Context) -> None:
        """Take all waiting events. Those of different objects arrive in any order, on which nothing else may depend."""
        self.catch_up()
        handle = self.handle(context, handles.Context)
        nodes = [*self.of(Qp, context), *self.of(SharedQueue, context)]
        waiting = [(node, event_type) for node in nodes for event_type in sorted(node.events)]
        taken: dict[tuple[AsyncEventSource, EventType], handles.AsyncEvent] = {}
        end = time.monotonic() + PATIENCE_S
        while len(taken) < len(waiting):
            event = handle.get_async_event()
            if event is not None:
                (node,) = [node for node in nodes if self.handles[node] is event.element]
                taken[node, event.event_type] = event
            assert time.monotonic() < end, f"of {waiting} only these arrived: {taken}"
        assert handle.get_async_event() is None
        assert taken.keys() == set(waiting)
        for node, event_type in waiting:
            node.events.clear()
            node.unacknowledged += 1
            self.async_events.append((node, taken[node, event_type]))
            self.taken_events[event_type] += 1

    def acknowledge_async_event(self, index: int) -> None:
        node, event = self.async_events.pop(index)
        event.ack()
        node.unacknowledged -= 1

    # ---- Comparison

    def catch_up(self) -> None:
        """Wait until the device has caught up with the model, and compare all memory and the states of all queues."""
        end = time.monotonic() + PATIENCE_S
        polled: dict[Queue, None] = {}
        while lagging := [qp for qp in self.of(Qp) if not self._agrees(qp)]:
            for qp in lagging:
                for queue in self._progress_queues(qp):
                    polled[queue] = None
                    self.poll(queue, 1 << 20)
            first_lagging = lagging[0]
            assert time.monotonic() < end, (
                first_lagging.number,
                first_lagging.type,
                first_lagging.state,
                first_lagging.next_psn,
                first_lagging.expected,
                self.qp(first_lagging).query(),
            )
        for queue in polled:  # take all that arrived meanwhile, so that speed makes no difference
            self.poll(queue, 1 << 20)
        for qp in self.of(Qp):
            if qp.reliable and qp.state in (QpState.RTR, QpState.RTS, QpState.SQD):
                assert self.qp(qp).query().rq_psn == qp.expected_psn
        for shared in self.of(SharedQueue):
            attributes = self.srq(shared).query()
            assert (attributes.max_wr, attributes.limit) == (shared.depth, shared.limit)
        for buffer, memory in self.memories:
            assert memory == buffer.content
        self.in_flight = None

    def _progress_queues(self, qp: Qp) -> list[Queue]:
        """Return the queues whose completions alone show the progress of a queue pair."""
        sides = []
        if qp.without_psn or qp.state in (QpState.SQE, QpState.ERR):
            sides.append((qp.send_cq, SEND_SIDE))
        if qp.state is QpState.ERR:
            sides.append((qp.recv_cq, RECEIVE_SIDE))
        return [queue for queue, side in sides if queue and qp.expected[side]]

    def _agrees(self, qp: Qp) -> bool:
        attributes = self.qp(qp).query()
        if attributes.qp_state is not qp.state:
            broken = qp.state in (QpState.SQE, QpState.ERR)
            assert broken, f"the queue pair is in {attributes.qp_state.name}, not in {qp.state.name}"
            return False
        if qp.state is QpState.ERR:
            return not any(qp.expected)
        if qp.state is QpState.SQE:
            return not qp.expected[SEND_SIDE]
        if qp.state not in (QpState.RTS, QpState.SQD):
            return True
        if qp.without_psn and qp.context.mode == "thread" and qp.expected[SEND_SIDE]:
            return False
        qp.without_psn = False
        return attributes.sq_psn == qp.next_psn

    def compare_counts(self) -> None:
        for context in self.of(Context):
            pds = self.of(Pd, context)
            assert self.handle(context, software.Context).counts() == {
                "pds": sum(pd.base is None for pd in pds),
                "parent_domains": sum(pd.base is not None for pd in pds),
                "thread_domains": len(self.of(Td, context)),
                "xrc_domains": len(self.of(XrcDomain, context)),
                "mrs": len(self.of(Region, context)),
                "mws": len(self.of(Window, context)),
                "ahs": len(self.of(AddressHandle, context)),
                "channels": len(self.of(Channel, context)),
                "cqs": len(self.of(Queue, context)),
                "srqs": len(self.of(SharedQueue, context)),
                "qps": len(self.of(Qp, context)),
                "overlaps": 0,
            }
        assert handles.open_handles() == [self.handles[node] for node in self.open]
        for pd in self.of(Pd):
            if pd.base is not None:
                assert self.handle(pd, parent_domain.ParentDomain).held == pd.held
        assert sum(len(allocator.live) for allocator in self.allocators) == sum(pd.held for pd in self.of(Pd))
