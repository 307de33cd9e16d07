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
class Scene:
    """A program that creates and uses one of everything, with the same calls each time, whenever completions arrive."""

    context: software.Context
    allocator: Recording = field(default_factory=Recording)
    made: list[handles.Handle] = field(default_factory=list)

    def keep(self, handle: handles.Handle) -> None:
        self.made.append(handle)

    def taken(self, cq: handles.CompletionQueue, count: int) -> None:
        """Take `count` successful completions with one call; completions are held until all have arrived."""
        wait_until(lambda: self.context.faults.held() == count)
        assert self.context.faults.release() == count
        found = poll(cq, count)
        assert [completion.status for completion in found] == [WcStatus.SUCCESS] * count

    def event(self, event_type: EventType, element: handles.Handle) -> None:
        """Take an asynchronous event that has arrived."""
        event = self.context.get_async_event()
        assert event is not None
        assert (event.event_type, event.element) == (event_type, element)
        event.ack()

    def play(self) -> None:
        """Call every verb, up to the first that fails."""
        context = self.context
        context.faults.hold()
        context.query_device()
        context.query_port()
        context.query_pkey()
        way = AddressVector(context.query_gid(1, 1), sgid_index=1)
        self.keep(pd := handles.ProtectionDomain(context))
        self.keep(td := parent_domain.ThreadDomain(context))
        self.keep(domain := parent_domain.ParentDomain(pd, td, self.allocator))
        self.keep(instance := software.open_shared(context, software.share(pd, SHARE_KEY), SHARE_KEY))
        self.keep(xrc_domain := parent_domain.XrcDomain(context))
        memory = bytearray(256)
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.MW_BIND
        self.keep(region := handles.MemoryRegion(instance, memory, access))
        self.keep(window := handles.MemoryWindow(pd, MwType.TYPE_1))
        self.keep(second := handles.MemoryWindow(domain, MwType.TYPE_2))
        self.keep(ah := handles.AddressHandle(pd, way))
        self.keep(channel := handles.CompletionChannel(context))
        self.keep(cq := handles.CompletionQueue(context, 2, channel))
        self.keep(ex := handles.CompletionQueue(context, 4, extended=True, parent_domain=domain))
        cq.resize(32)
        ex.resize(32)
        cq.modify(2, 100)
        self.keep(srq := handles.SharedReceiveQueue(domain, 4, limit=2))
        self.keep(xrc_srq := handles.SharedReceiveQueue(domain, 4, xrc_domain=xrc_domain, cq=cq))
        self.keep(qp := handles.QueuePair(domain, ex, ex, CAPABILITIES))
        self.keep(ud := handles.QueuePair(domain, ex, ex, CAPABILITIES, qp_type=QpType.UD, srq=srq))
        self.keep(sender := handles.QueuePair(domain, cq, capabilities=CAPABILITIES, qp_type=QpType.XRC_SEND))
        self.keep(target := handles.QueuePair(xrc_domain=xrc_domain, qp_type=QpType.XRC_RECV))

        to_init(qp)
        to_rtr(qp, qp.qp_num)
        to_rts(qp)
        start_ud(ud)
        start_xrc_receiver(target, sender.qp_num)
        to_init(sender)
        sender.modify(QpState.RTR, path_mtu=5, dest_qp_num=target.qp_num, rq_psn=0, av=way)
        to_rts(sender)
        assert qp.query().qp_state is QpState.RTS

        data, room = (region.address + 200, 8, region.lkey), (region.address, 128, region.lkey)
        memory[200:208] = b"a scene."
        post_recv(qp, [room])
        post_send(qp, SendOpcode.SEND, [data], flags=SIGNALED)
        self.taken(ex, 2)
        assert memory[:8] == b"a scene."

        keys = window.rkey, second.rkey
        bind_window(qp, window, region, region.address, 64, AccessFlags.REMOTE_READ, flags=SIGNALED)
        bind_window(qp, second, region, region.address, 64, AccessFlags.REMOTE_READ, flags=SIGNALED)
        assert window.rkey != keys[0]
        post_send(qp, SendOpcode.LOCAL_INV, invalidate_rkey=second.rkey, flags=SIGNALED)
        self.taken(ex, 3)

        srq.modify(max_wr=32)
        srq.modify(limit=1)
        assert srq.query().limit == 1
        post_recv(srq, [room])
        post_send(ud, SendOpcode.SEND, [data], ah=ah, remote_qpn=ud.qp_num, remote_qkey=QKEY, flags=SIGNALED)
        self.taken(ex, 2)
        self.event(EventType.SRQ_LIMIT_REACHED, srq)

        post_recv(xrc_srq, [room])
        cq.request_notify()
        post_send(sender, SendOpcode.SEND, [data], remote_srqn=xrc_srq.number, flags=SIGNALED)
        self.taken(cq, 2)
        assert channel.get_event() is cq
        cq.ack_events()
        context.faults.unhold()

    def give_back(self) -> Iterator[tuple[handles.Handle, VerbsError]]:
        """Destroy everything created, the newest first; retry each failed verb after yielding its error."""
        while self.made:
            handle = self.made.pop()
            try:
                handle.destroy()
            except VerbsError as error:
                yield handle, error
                handle.destroy()
            assert handle.closed


def run(context: software.Context, check: Callable[[VerbsError], None]) -> int:
    """Run the program and destroy everything; return how often a verb failed."""
    scene = Scene(context)
    failures = 0
    try:
        scene.play()
    except VerbsError as error:
        check(error)
        failures += 1
        # The failed constructor or method released what it held, and left no half-made object.
        assert children(context) == scene.made
        context.faults.unhold()
    finished = not failures
    live = len(scene.allocator.live)
    for handle, refused in scene.give_back():
        check(refused)
        failures += 1
        assert not handle.closed
        assert handle in handles.open_handles()
        assert context.counts()["overlaps"] == 0
        assert len(scene.allocator.live) <= live
    assert children(context) == []
    assert not any(context.counts().values())
    assert not select.select([context.async_fd], [], [], 0)[0]
    assert scene.allocator.live == []
    assert all(piece.freed == 1 for piece in scene.allocator.pieces)
    assert not finished or len(scene.allocator.pieces) >= 10
    return failures


def unexpected(error: VerbsError) -> None:
    raise AssertionError(f"{error} was not planned") from error


def count_calls(context: software.Context) -> dict[str, int]:
    """Return how often the program calls each verb."""
    context.faults.count_calls()
    assert run(context, unexpected) == 0
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
            assert run(context, check) == 1, (verb, k, error)
            expected.append(("verb", verb, k, error))
            assert plan.records()[-1:] == expected[-1:]
    assert plan.records() == expected
    assert run(context, unexpected) == 0


def test_a_busy_answer_is_not_the_end_either() -> None:
    """EBUSY of a queue means overlapping calls, and raises an exception of its own; of other objects, a reference to
    them.

    The object stays open in either case.
    """
    for verb in [verb for verb in software.FaultPlan.verbs if verb.startswith(("de", "close"))]:
        with opened("inline") as context:
            check_busy(context, verb)


def check_busy(inline: software.Context, verb: str) -> None:
    scene = Scene(inline)
    if verb == "close_device":
        scene.keep(inline)
    else:
        scene.play()
    inline.faults.fail(verb, errno.EBUSY, times=0)
    raised: list[Exception] = []
    for handle in reversed(scene.made):
        try:
            handle.destroy()
        except BusyResourceError:  # its children are open, too, or its busy count refused before the verb
            assert not handle.closed
        except (ConcurrentAccessError, VerbsError) as error:
            assert not handle.closed
            raised.append(error)
    assert [record.subject for record in inline.faults.records()] == [verb] * len(inline.faults.records()) != []
    inline.faults.clear()
    for handle in reversed(scene.made):
        handle.destroy()
    assert scene.allocator.live == []
    overlap = verb in ("destroy_cq", "destroy_qp", "destroy_srq")
    assert all(isinstance(error, ConcurrentAccessError if overlap else VerbsError) for error in raised)
    assert raised or verb in ("close_xrcd", "dereg_mr"), "of which it is told what keeps them"


def test_a_queue_that_can_neither_be_armed_nor_go(inline: software.Context) -> None:
    """If two verbs of one constructor fail, the object created by the first stays an open handle."""
    pd = handles.ProtectionDomain(inline)
    inline.faults.fail("modify_srq", errno.EIO)
    inline.faults.fail("destroy_srq", errno.EPERM)
    with pytest.raises(VerbsError, match="ibv_modify_srq failed: EIO"):
        handles.SharedReceiveQueue(pd, 4, limit=1)
    assert inline.counts()["srqs"] == 1
    with pytest.raises(BusyResourceError):
        pd.destroy()
    left = children(inline)[-1]
    assert isinstance(left, handles.SharedReceiveQueue)
    left.destroy()
    pd.destroy()


def test_several_calls_fail_by_chance(inline: software.Context) -> None:
    """Verbs that destroy objects fail as well."""
    plan = inline.faults
    most = 0
    for seed in range(15):
        before = len(plan.records())
        plan.seed(seed)
        plan.fail_at_random(50_000, errno.EIO)
        scene = Scene(inline)
        with suppress(VerbsError):
            scene.play()
        plan.unhold()
        for _ in range(1000):
            left = children(inline)
            if not left:
                break
            with suppress(VerbsError):
                left[-1].destroy()
        plan.fail_at_random(0, errno.EIO)
        assert not any(inline.counts().values())
        assert not select.select([inline.async_fd], [], [], 0)[0]
        assert all(piece.freed == 1 for piece in scene.allocator.pieces)
        most = max(most, len(plan.records()) - before)
    assert most > 2
    assert run(inline, unexpected) == 0
