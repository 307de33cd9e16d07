"""Failure of every single call of every verb, in a program that calls them all: nothing is left behind.

The program raises at the planned call; once everything created so far is destroyed, the device is as before.
"""

import errno
import select
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from aioverbs import (
    AccessFlags,
    BusyResourceError,
    ConcurrentAccessError,
    EventType,
    MwType,
    QpState,
    QpType,
    SendFlags,
    SendOpcode,
    VerbsError,
    WcStatus,
)
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.attributes import AddressVector, QpCapabilities
from tests.core.allocators import Recording
from tests.core.contexts import MODES, children, opened
from tests.core.pairs import to_init, to_rtr, to_rts
from tests.core.transports import QKEY, start_ud, start_xrc_receiver
from tests.raw_verbs import bind_window, poll, post_recv, post_send
from tests.waiting import wait_until

SIGNALED = SendFlags.SIGNALED
SHARE_KEY = 0x123456789
CAPABILITIES = QpCapabilities(max_send_wr=8, max_recv_wr=8, max_send_sge=1, max_recv_sge=1)
ERRORS = (errno.ENOMEM, errno.EIO)

# Verbs that the program does not call: one runs after its end, the library does not use the others.
UNCALLED = {"close_device", "query_device_ex", "query_rt_values"}


@dataclass
class Program:
    """A program that creates and uses one of everything, with the same calls each time, whenever completions arrive."""

    context: software.Context
    allocator: Recording = field(default_factory=Recording)
    created: list[handles.Handle] = field(default_factory=list)

    def add(self, handle: handles.Handle) -> None:
        self.created.append(handle)

    def take_completions(self, cq: handles.CompletionQueue, count: int) -> None:
        """Take `count` successful completions with one call; completions are held until all have arrived."""
        wait_until(lambda: self.context.faults.held() == count)
        assert self.context.faults.release() == count
        completions = poll(cq, count)
        assert [completion.status for completion in completions] == [WcStatus.SUCCESS] * count

    def take_event(self, event_type: EventType, element: handles.Handle) -> None:
        """Take an asynchronous event that has arrived."""
        event = self.context.get_async_event()
        assert event is not None
        assert (event.event_type, event.element) == (event_type, element)
        event.ack()

    def call_verbs(self) -> None:
        """Call every verb, up to the first that fails."""
        context = self.context
        context.faults.hold()
        context.query_device()
        context.query_port()
        context.query_pkey()
        vector = AddressVector(context.query_gid(1, 1), sgid_index=1)
        self.add(pd := handles.ProtectionDomain(context))
        self.add(td := parent_domain.ThreadDomain(context))
        self.add(domain := parent_domain.ParentDomain(pd, td, self.allocator))
        self.add(instance := software.open_shared(context, software.share(pd, SHARE_KEY), SHARE_KEY))
        self.add(xrc_domain := parent_domain.XrcDomain(context))
        memory = bytearray(256)
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.MW_BIND
        self.add(region := handles.MemoryRegion(instance, memory, access))
        self.add(window := handles.MemoryWindow(pd, MwType.TYPE_1))
        self.add(window_2 := handles.MemoryWindow(domain, MwType.TYPE_2))
        self.add(ah := handles.AddressHandle(pd, vector))
        self.add(channel := handles.CompletionChannel(context))
        self.add(cq := handles.CompletionQueue(context, 2, channel))
        self.add(ex := handles.CompletionQueue(context, 4, extended=True, parent_domain=domain))
        cq.resize(32)
        ex.resize(32)
        cq.modify(2, 100)
        self.add(srq := handles.SharedReceiveQueue(domain, 4, limit=2))
        self.add(xrc_srq := handles.SharedReceiveQueue(domain, 4, xrc_domain=xrc_domain, cq=cq))
        self.add(qp := handles.QueuePair(domain, ex, ex, CAPABILITIES))
        self.add(ud := handles.QueuePair(domain, ex, ex, CAPABILITIES, qp_type=QpType.UD, srq=srq))
        self.add(sender := handles.QueuePair(domain, cq, capabilities=CAPABILITIES, qp_type=QpType.XRC_SEND))
        self.add(target := handles.QueuePair(xrc_domain=xrc_domain, qp_type=QpType.XRC_RECV))

        to_init(qp)
        to_rtr(qp, qp.qp_num)
        to_rts(qp)
        start_ud(ud)
        start_xrc_receiver(target, sender.qp_num)
        to_init(sender)
        sender.modify(QpState.RTR, path_mtu=5, dest_qp_num=target.qp_num, rq_psn=0, av=vector)
        to_rts(sender)
        assert qp.query().qp_state is QpState.RTS

        send_entry, receive_entry = (region.address + 200, 8, region.lkey), (region.address, 128, region.lkey)
        memory[200:208] = b"a scene."
        post_recv(qp, [receive_entry])
        post_send(qp, SendOpcode.SEND, [send_entry], flags=SIGNALED)
        self.take_completions(ex, 2)
        assert memory[:8] == b"a scene."

        keys = window.rkey, window_2.rkey
        bind_window(qp, window, region, region.address, 64, AccessFlags.REMOTE_READ, flags=SIGNALED)
        bind_window(qp, window_2, region, region.address, 64, AccessFlags.REMOTE_READ, flags=SIGNALED)
        assert window.rkey != keys[0]
        post_send(qp, SendOpcode.LOCAL_INV, invalidate_rkey=window_2.rkey, flags=SIGNALED)
        self.take_completions(ex, 3)

        srq.modify(max_wr=32)
        srq.modify(limit=1)
        assert srq.query().limit == 1
        post_recv(srq, [receive_entry])
        post_send(ud, SendOpcode.SEND, [send_entry], ah=ah, remote_qpn=ud.qp_num, remote_qkey=QKEY, flags=SIGNALED)
        self.take_completions(ex, 2)
        self.take_event(EventType.SRQ_LIMIT_REACHED, srq)

        post_recv(xrc_srq, [receive_entry])
        cq.request_notify()
        post_send(sender, SendOpcode.SEND, [send_entry], remote_srqn=xrc_srq.number, flags=SIGNALED)
        self.take_completions(cq, 2)
        assert channel.get_event() is cq
        cq.ack_events()
        context.faults.unhold()

    def destroy_created(self) -> Iterator[tuple[handles.Handle, VerbsError]]:
        """Destroy everything created, the newest first; retry each failed verb after yielding its error."""
        while self.created:
            handle = self.created.pop()
            try:
                handle.destroy()
            except VerbsError as error:
                yield handle, error
                handle.destroy()
            assert handle.closed


def run_program(context: software.Context, check: Callable[[VerbsError], None]) -> int:
    """Run the program and destroy everything; return how often a verb failed."""
    program = Program(context)
    failures = 0
    try:
        program.call_verbs()
    except VerbsError as error:
        check(error)
        failures += 1
        # The failed constructor or method released what it held, and left no half-made object.
        assert children(context) == program.created
        context.faults.unhold()
    finished = not failures
    live = len(program.allocator.live)
    for handle, refused in program.destroy_created():
        check(refused)
        failures += 1
        assert not handle.closed
        assert handle in handles.open_handles()
        assert context.counts()["overlaps"] == 0
        assert len(program.allocator.live) <= live
    assert children(context) == []
    assert not any(context.counts().values())
    assert not select.select([context.async_fd], [], [], 0)[0]
    assert program.allocator.live == []
    assert all(piece.freed == 1 for piece in program.allocator.pieces)
    assert not finished or len(program.allocator.pieces) >= 10
    return failures


def unexpected(error: VerbsError) -> None:
    raise AssertionError(f"{error} was not planned") from error


def count_calls(context: software.Context) -> dict[str, int]:
    """Return how often the program calls each verb."""
    context.faults.count_calls()
    assert run_program(context, unexpected) == 0
    return {verb: context.faults.calls(verb) for verb in software.FaultPlan.verbs}


@pytest.fixture(scope="module")
def calls() -> dict[str, int]:
    """Number of calls of each verb, which is the same in every mode."""
    counts = []
    for mode in MODES:
        with opened(mode) as context:
            counts.append(count_calls(context))
    assert all(count == counts[0] for count in counts)
    return counts[0]


def test_the_scene_calls_every_verb(calls: dict[str, int]) -> None:
    assert {verb for verb, count in calls.items() if not count} == UNCALLED


@pytest.mark.every_way
def test_every_call_of_every_verb(context: software.Context, calls: dict[str, int]) -> None:
    plan = context.faults
    expected = []
    for verb in sorted(set(software.FaultPlan.verbs) - UNCALLED):
        for k in range(1, calls[verb] + 1):
            error = ERRORS[k % 2]

            def check(raised: VerbsError, verb: str = verb, k: int = k, error: int = error) -> None:
                assert raised.errno == error
                assert raised.__cause__ is None
                assert plan.calls(verb) == k  # that very call failed
                assert verb.removesuffix("_ex") in raised.verb

            plan.count_calls()
            plan.fail(verb, error, first=k)
            assert run_program(context, check) == 1, (verb, k, error)
            expected.append(("verb", verb, k, error))
            assert plan.records()[-1:] == expected[-1:]
    assert plan.records() == expected
    assert run_program(context, unexpected) == 0


def test_ebusy_leaves_the_object_open() -> None:
    """EBUSY of a queue means overlapping calls, and raises an exception of its own; of other objects, a reference to
    them.

    The object stays open in either case.
    """
    for verb in [verb for verb in software.FaultPlan.verbs if verb.startswith(("de", "close"))]:
        with opened("inline") as context:
            check_busy(context, verb)


def check_busy(inline: software.Context, verb: str) -> None:
    program = Program(inline)
    if verb == "close_device":
        program.add(inline)
    else:
        program.call_verbs()
    inline.faults.fail(verb, errno.EBUSY, times=0)
    raised: list[Exception] = []
    for handle in reversed(program.created):
        try:
            handle.destroy()
        except BusyResourceError:  # its children are open, too, or its busy count refused before the verb
            assert not handle.closed
        except (ConcurrentAccessError, VerbsError) as error:
            assert not handle.closed
            raised.append(error)
    assert [record.subject for record in inline.faults.records()] == [verb] * len(inline.faults.records()) != []
    inline.faults.clear()
    for handle in reversed(program.created):
        handle.destroy()
    assert program.allocator.live == []
    overlap = verb in ("destroy_cq", "destroy_qp", "destroy_srq")
    assert all(isinstance(error, ConcurrentAccessError if overlap else VerbsError) for error in raised)
    assert raised or verb in ("close_xrcd", "dereg_mr"), "no verb failed"


def test_a_queue_that_can_be_neither_armed_nor_destroyed(inline: software.Context) -> None:
    """If two verbs of one constructor fail, the object created by the first stays an open handle."""
    pd = handles.ProtectionDomain(inline)
    inline.faults.fail("modify_srq", errno.EIO)
    inline.faults.fail("destroy_srq", errno.EPERM)
    with pytest.raises(VerbsError, match="ibv_modify_srq failed: EIO"):
        handles.SharedReceiveQueue(pd, 4, limit=1)
    assert inline.counts()["srqs"] == 1
    with pytest.raises(BusyResourceError):
        pd.destroy()
    remaining = children(inline)[-1]
    assert isinstance(remaining, handles.SharedReceiveQueue)
    remaining.destroy()
    pd.destroy()


def test_several_calls_fail_at_random(inline: software.Context) -> None:
    """Verbs that destroy objects fail as well."""
    plan = inline.faults
    most_failures = 0
    for seed in range(15):
        before = len(plan.records())
        plan.seed(seed)
        plan.fail_at_random(50_000, errno.EIO)
        program = Program(inline)
        with suppress(VerbsError):
            program.call_verbs()
        plan.unhold()
        for _ in range(1000):
            remaining = children(inline)
            if not remaining:
                break
            with suppress(VerbsError):
                remaining[-1].destroy()
        plan.fail_at_random(0, errno.EIO)
        assert not any(inline.counts().values())
        assert not select.select([inline.async_fd], [], [], 0)[0]
        assert all(piece.freed == 1 for piece in program.allocator.pieces)
        most_failures = max(most_failures, len(plan.records()) - before)
    assert most_failures > 2
    assert run_program(inline, unexpected) == 0
