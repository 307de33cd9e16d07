"""The fault plan: arguments passed to the device, records, refusals, and its context.

The device's part is tested in C: tests/native/test_fault*.c.
"""

import errno
import functools
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import (
    ClosedResourceError,
    EventType,
    ForkedProcessError,
    QpState,
    SendFlags,
    SendOpcode,
    VerbsError,
    WcStatus,
)
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.attributes import FaultRecord
from tests.core.children import in_child
from tests.core.contexts import MODES, opened
from tests.core.family import make_all
from tests.core.pairs import (
    CAPABILITIES,
    End,
    connect_to,
    make_domain,
    make_end,
    make_pair,
    make_queue,
    next_event,
    wait_for,
)
from tests.raw_verbs import poll, post_recv, post_send
from tests.waiting import wait_until

WRITE, SEND, SIGNALED = SendOpcode.RDMA_WRITE, SendOpcode.SEND, SendFlags.SIGNALED
MAX_RECORDS = 4096  # number of records kept


def query_errnos(context: software.Context, count: int) -> list[int]:
    """Return the errno of each of `count` calls of ``query_device``, 0 for success."""
    errnos = []
    for _ in range(count):
        try:
            context.query_device()
        except VerbsError as error:
            errnos.append(error.errno or -1)
        else:
            errnos.append(0)
    return errnos


def statuses(end: End, count: int) -> list[tuple[int, WcStatus]]:
    return [(completion.wr_id, completion.status) for completion in wait_for(end.cq, count)]


def write(qp: handles.QueuePair, *wr_ids: int) -> None:
    """Post writes of no bytes."""
    for wr_id in wr_ids:
        post_send(qp, WRITE, wr_id=wr_id, flags=SIGNALED)


# ---- Verbs


def test_a_planned_error_names_the_verb(inline: software.Context) -> None:
    inline.faults.fail("alloc_pd", errno.ENOSPC)
    with pytest.raises(VerbsError, match="ibv_alloc_pd failed: ENOSPC") as caught:
        handles.ProtectionDomain(inline)
    assert (caught.value.verb, caught.value.errno) == ("ibv_alloc_pd", errno.ENOSPC)
    assert inline.counts()["pds"] == 0
    handles.ProtectionDomain(inline)


def test_first_every_and_times_select_calls(inline: software.Context) -> None:
    inline.faults.fail("query_device", errno.EIO, first=2, every=3, times=2)
    inline.faults.fail(None, errno.ENOMEM, first=12)
    assert query_errnos(inline, 12) == [0, errno.EIO, 0, 0, errno.EIO, *[0] * 6, errno.ENOMEM]
    assert inline.faults.records() == [
        FaultRecord("verb", "query_device", number, error)
        for number, error in ((2, errno.EIO), (5, errno.EIO), (12, errno.ENOMEM))
    ]


def test_a_plan_belongs_to_one_context(inline: software.Context) -> None:
    with opened("inline") as other:
        inline.faults.fail("query_device", errno.EIO)
        assert query_errnos(other, 1) == [0]
        assert query_errnos(inline, 1) == [errno.EIO]
        assert other.faults.records() == []


def test_random_failures_depend_on_the_seed(inline: software.Context) -> None:
    def draw_errnos(seed: int) -> list[int]:
        inline.faults.seed(seed)
        return query_errnos(inline, 100)

    for per_million, failures in ((1_000_000, 20), (0, 0)):
        inline.faults.fail_at_random(per_million, errno.EPERM)
        assert query_errnos(inline, 20).count(errno.EPERM) == failures
    inline.faults.fail_at_random(250_000, errno.ENFILE)
    first = draw_errnos(1)
    assert 0 < first.count(errno.ENFILE) < 60
    assert draw_errnos(1) == first != draw_errnos(2)
    inline.faults.clear()
    assert query_errnos(inline, 20) == [0] * 20


def test_calls_are_counted(inline: software.Context) -> None:
    plan = inline.faults
    query_errnos(inline, 3)
    assert plan.calls() == plan.calls("query_device") == 0
    plan.count_calls()
    query_errnos(inline, 3)
    inline.query_port()
    assert (plan.calls("query_device"), plan.calls("query_port"), plan.calls("alloc_pd"), plan.calls()) == (3, 1, 0, 4)
    plan.count_calls(False)
    query_errnos(inline, 1)
    assert plan.calls() == 4
    plan.count_calls(True)
    assert plan.calls() == 0


def test_records_are_kept_up_to_a_number(inline: software.Context) -> None:
    """Records are read in batches."""
    inline.faults.fail("query_device", errno.EIO, times=0)
    for count in (63, 64, 65, 128):
        query_errnos(inline, count - len(inline.faults.records()))
        assert [record.ordinal for record in inline.faults.records()] == list(range(1, count + 1))
    query_errnos(inline, MAX_RECORDS)
    assert [record.ordinal for record in inline.faults.records()] == list(range(1, MAX_RECORDS + 1))


def test_close_device_can_fail() -> None:
    for mode in MODES:
        with opened(mode) as context:
            context.faults.fail("close_device", errno.EAGAIN)
            with pytest.raises(VerbsError, match="ibv_close_device failed: EAGAIN"):
                context.destroy()
            assert not context.closed
            assert query_errnos(context, 1) == [0]


# ---- Requests, receives and messages


@pytest.mark.every_way
def test_a_request_and_a_receive_with_a_status(context: software.Context) -> None:
    near, far = make_pair(context)
    context.faults.fail_request(WcStatus.LOC_QP_OP_ERR, near.qp, first=2, vendor_err=77)
    write(near.qp, 1, 2, 3)
    good, failed, flushed = wait_for(near.cq, 3)
    assert (good.status, failed.status, failed.vendor_err) == (WcStatus.SUCCESS, WcStatus.LOC_QP_OP_ERR, 77)
    assert flushed.status is WcStatus.WR_FLUSH_ERR
    near, far = make_pair(context)
    context.faults.fail_request(int(WcStatus.LOC_LEN_ERR), far.qp, receives=True, vendor_err=5)
    post_recv(far.qp, [far.sge(0, 8)], wr_id=1)
    post_send(near.qp, SEND, [near.sge(0, 4)], wr_id=2)
    received = wait_for(far.cq)[0]
    assert (received.wr_id, received.status, received.vendor_err) == (1, WcStatus.LOC_LEN_ERR, 5)
    assert statuses(near, 1) == [(2, WcStatus.REM_INV_REQ_ERR)]
    requests, receives = context.faults.records()
    assert (requests.kind, requests.ordinal, requests.value) == ("request", 2, WcStatus.LOC_QP_OP_ERR)
    assert receives == ("receive", far.qp.qp_num, 1, WcStatus.LOC_LEN_ERR)


def test_lost_messages_exhaust_the_retries(context: software.Context) -> None:
    near, _ = make_pair(context)  # without retries
    context.faults.lose_messages(near.qp, first=2)
    write(near.qp, 1, 2)
    assert statuses(near, 2) == [(1, WcStatus.SUCCESS), (2, WcStatus.RETRY_EXC_ERR)]
    assert context.faults.records() == [("loss", near.qp.qp_num, 2, None)]
    for per_million, status in ((1_000_000, WcStatus.RETRY_EXC_ERR), (0, WcStatus.SUCCESS)):
        near, _ = make_pair(context)
        context.faults.lose_messages_at_random(per_million)
        write(near.qp, 1)
        assert statuses(near, 1) == [(1, status)]


def test_the_largest_jitter() -> None:
    """Requests with a delay of centuries are flushed instead."""
    with opened("thread") as context:
        near, _ = make_pair(context)
        context.faults.jitter((1 << 63) - 1)
        write(near.qp, *range(4))
        near.qp.modify(QpState.ERR)
        assert {status for _, status in statuses(near, 4)} == {WcStatus.WR_FLUSH_ERR}


@pytest.mark.every_way
def test_requests_are_held_and_released(context: software.Context) -> None:
    near, far = make_pair(context)
    plan = context.faults
    assert (plan.held(), plan.release()) == (0, 0)
    plan.hold(near.qp)
    write(far.qp, 9)
    assert statuses(far, 1) == [(9, WcStatus.SUCCESS)]
    plan.hold()
    write(near.qp, *range(6))
    wait_until(lambda: plan.held() == 6)
    assert poll(near.cq) == []
    assert plan.release(2) == 2
    assert [completion.wr_id for completion in poll(near.cq, 64)] == [0, 1]
    plan.unhold()
    assert plan.held() == 0
    assert [completion.wr_id for completion in poll(near.cq, 64)] == [2, 3, 4, 5]
    assert plan.records() == []  # no fault occurred


def release_order(context: software.Context, seed: int, *, shuffled: bool) -> list[int]:
    """Return the order in which completions of four queue pairs arrive on one queue, by queue pair."""
    domain = make_domain(context, "plain")
    cq = make_queue(context, domain, 64)
    qps = [handles.QueuePair(domain, cq, cq, CAPABILITIES) for _ in range(4)]
    numbers = {qp.qp_num: number for number, qp in enumerate(qps)}
    context.faults.seed(seed)
    context.faults.hold()
    for qp in qps:
        connect_to(qp, qp)
    for wr_id in range(8):
        for qp in qps:
            write(qp, wr_id)
    assert context.faults.release(shuffled=shuffled) == 32
    errnos = poll(cq, 64)
    context.faults.unhold()
    return [numbers[completion.qp_num] for completion in errnos]


def test_release_in_shuffled_order(inline: software.Context) -> None:
    assert release_order(inline, 1, shuffled=False) == [number % 4 for number in range(32)]
    first = release_order(inline, 1, shuffled=True)
    assert first != [number % 4 for number in range(32)]
    assert release_order(inline, 1, shuffled=True) == first != release_order(inline, 2, shuffled=True)


# ---- The device


@pytest.mark.every_way
def test_objects_of_a_lost_device_can_be_destroyed(context: software.Context) -> None:
    family = make_all(context)
    context.faults.lose_device()
    event = next_event(context)
    assert (event.event_type, event.element, event.port_num) == (EventType.DEVICE_FATAL, None, None)
    event.ack()
    with pytest.raises(VerbsError, match="ibv_alloc_pd failed: EIO"):
        handles.ProtectionDomain(context)
    assert query_errnos(context, 1) == [errno.EIO]
    for handle in reversed(list(family.values())):
        handle.destroy()
    assert not [handle for handle in family.values() if not handle.closed]


def test_objects_of_other_contexts_and_closed_ones_are_refused(inline: software.Context) -> None:
    domain = make_domain(inline, "plain")
    end, srq = make_end(domain), handles.SharedReceiveQueue(domain, 4)

    def uses(plan: software.FaultPlan) -> list[tuple[Callable[..., object], handles.Handle]]:
        return [
            (plan.hold, end.qp),
            (plan.lose_messages, end.qp),
            (lambda qp: plan.fail_request(WcStatus.FATAL_ERR, qp), end.qp),
            (plan.break_queue_pair, end.qp),
            (plan.break_completion_queue, end.cq),
            (plan.break_shared_receive_queue, srq),
        ]

    with opened("inline") as other:
        for call, handle in uses(other.faults):
            with pytest.raises(ValueError, match=r"<.* of soft0> does not belong to <Context of soft0>"):
                call(handle)
            with pytest.raises(TypeError):
                call(other)
    for handle in (end.qp, end.cq, srq):
        handle.destroy()  # not referenced by the plan
    for call, handle in uses(inline.faults):
        with pytest.raises(ClosedResourceError):
            call(handle)


# ---- Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("no_verb", errno.EIO), ValueError, "has no verb 'no_verb'; it has close_device, "),
        (("query_device", 0), ValueError, "error must be from 1 to 4095, got 0"),
        (("query_device", 4096), ValueError, "error must be from 1 to 4095, got 4096"),
        (("query_device", 1 << 40), ValueError, "error must be from 1 to 4095, got 1099511627776"),
        (("query_device", -1), ValueError, "error must be from 1 to 4095, got -1"),
        (("query_device", 1.5), TypeError, "integer"),
        (([], errno.EIO), TypeError, "unhashable"),
    ],
)
def test_invalid_errors_are_refused(
    inline: software.Context, arguments: tuple[Any, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        inline.faults.fail(*arguments)
    assert query_errnos(inline, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("selection", "error", "text"),
    [
        ({"first": 0}, ValueError, "first must be from 1 to 9223372036854775807, got 0"),
        ({"first": 1 << 63}, ValueError, "first must be"),
        ({"first": 1.5}, TypeError, "integer"),
        ({"every": 0}, ValueError, "every must be from 1"),
        ({"times": -1}, ValueError, "times must be from 0"),
    ],
)
def test_invalid_selections_are_refused(
    inline: software.Context, selection: dict[str, Any], error: type[Exception], text: str
) -> None:
    plan = inline.faults
    with pytest.raises(error, match=text):
        plan.fail("query_device", errno.EIO, **selection)
    with pytest.raises(error, match=text):
        plan.fail_request(5, **selection)
    with pytest.raises(error, match=text):
        plan.lose_messages(**selection)
    for frames in (plan.drop_frames, plan.duplicate_frames, plan.cut_at_frames):
        with pytest.raises(error, match=text):
            frames(**selection)
    with pytest.raises(error, match=text):
        plan.delay_frames(1, **selection)
    assert query_errnos(inline, 3) == [0, 0, 0]


def test_the_largest_selections_are_accepted(inline: software.Context) -> None:
    most = (1 << 63) - 1
    inline.faults.fail("query_device", errno.EIO, first=most, every=most, times=most)
    inline.faults.fail("query_device", 4095, first=1, every=most, times=0)
    assert query_errnos(inline, 3) == [4095, 0, 0]


def test_invalid_arguments_of_other_methods_are_refused(inline: software.Context) -> None:
    plan = inline.faults
    for per_million in (-1, 1_000_001):
        with pytest.raises(ValueError, match="per_million must be from 0 to 1000000"):
            plan.fail_at_random(per_million, errno.EIO)
        with pytest.raises(ValueError, match="per_million must be from 0 to 1000000"):
            plan.lose_messages_at_random(per_million)
    for error in (0, -1, 1 << 40):
        with pytest.raises(ValueError, match="error must be from 1 to 4095"):
            plan.fail_at_random(0, error)
    with pytest.raises(ValueError, match="has no verb 'open'"):
        plan.calls("open")
    for seed in (-1, 1 << 64):
        with pytest.raises(ValueError, match="seed must be from 0 to 18446744073709551615"):
            plan.seed(seed)
    plan.seed((1 << 64) - 1)
    for wrong in (-1, 1 << 63):
        with pytest.raises(ValueError, match="count must be from 0 to 9223372036854775807"):
            plan.release(wrong)
        with pytest.raises(ValueError, match="max_ns must be from 0 to 9223372036854775807"):
            plan.jitter(wrong)
    with pytest.raises(VerbsError, match="soft_fault_jitter failed: EINVAL"):
        plan.jitter(1000)  # inline execution has no delay
    with pytest.raises(ValueError, match="must be an error status, got SUCCESS"):
        plan.fail_request(WcStatus.SUCCESS)
    with pytest.raises(ValueError, match="99 is not a valid WcStatus"):
        plan.fail_request(99)
    for vendor_err in (-1, 1 << 32):
        with pytest.raises(ValueError, match="vendor_err must be from 0 to 4294967295"):
            plan.fail_request(WcStatus.FATAL_ERR, vendor_err=vendor_err)


def test_invalid_arguments_about_frames_are_refused(inline: software.Context) -> None:
    plan = inline.faults
    nonsense: Any = "requests"
    for use in (plan.drop_frames, plan.duplicate_frames, plan.cut_at_frames, functools.partial(plan.delay_frames, 1)):
        with pytest.raises(ValueError, match=r"`kind` must be one of request_out, answer_in, .*, got 'requests'"):
            use(nonsense)
        with pytest.raises(ValueError, match=r"`peer` must be a GID of 16 bytes, such as Endpoint\.gid, got b"):
            use(peer=b"a")
    for streams in (plan.cut_streams, plan.stall_streams):
        with pytest.raises(ValueError, match="`peer` must be a GID"):
            streams(nonsense)
        assert streams() == streams(bytes(16)) == 0  # no streams exist
    for delay in (-1, 1 << 63):
        with pytest.raises(ValueError, match="delay_ns must be from 0"):
            plan.delay_frames(delay)
        with pytest.raises(ValueError, match="max_delay_ns must be from 0"):
            plan.disturb_frames_at_random(delay=1, max_delay_ns=delay)
    for chance in ("drop", "duplicate", "delay", "cut"):
        with pytest.raises(ValueError, match=f"{chance} must be from 0 to 1000000, got 1000001"):
            plan.disturb_frames_at_random(**{chance: 1_000_001})
    with pytest.raises(ValueError, match="the sum of all chances must be from 0 to 1000000, got 1000001"):
        plan.disturb_frames_at_random(drop=500_000, cut=500_001)
    plan.disturb_frames_at_random(drop=500_000, cut=500_000, max_delay_ns=(1 << 63) - 1)
    assert query_errnos(inline, 3) == [0, 0, 0]


# ---- The plan itself


USES: dict[str, Callable[[software.FaultPlan], object]] = {
    "fail": lambda plan: plan.fail("query_device", errno.EIO),
    "fail_at_random": lambda plan: plan.fail_at_random(1, errno.EIO),
    "count_calls": lambda plan: plan.count_calls(),
    "calls": lambda plan: plan.calls(),
    "fail_request": lambda plan: plan.fail_request(5),
    "lose_messages": lambda plan: plan.lose_messages(),
    "lose_messages_at_random": lambda plan: plan.lose_messages_at_random(1),
    "jitter": lambda plan: plan.jitter(0),
    "drop_frames": lambda plan: plan.drop_frames(),
    "duplicate_frames": lambda plan: plan.duplicate_frames(),
    "delay_frames": lambda plan: plan.delay_frames(1),
    "cut_at_frames": lambda plan: plan.cut_at_frames(),
    "disturb_frames_at_random": lambda plan: plan.disturb_frames_at_random(drop=1),
    "cut_streams": lambda plan: plan.cut_streams(),
    "stall_streams": lambda plan: plan.stall_streams(),
    "hold": lambda plan: plan.hold(),
    "held": lambda plan: plan.held(),
    "release": lambda plan: plan.release(),
    "unhold": lambda plan: plan.unhold(),
    "seed": lambda plan: plan.seed(1),
    "clear": lambda plan: plan.clear(),
    "records": lambda plan: plan.records(),
    "set_port": lambda plan: plan.set_port(True),
    "lose_device": lambda plan: plan.lose_device(),
}


def test_every_use_is_listed() -> None:
    """All methods but those that take an object, which is closed with the context."""
    public = {name for name in vars(software.FaultPlan) if not name.startswith("_")} - {"verbs", "frames", "context"}
    assert public == set(USES) | {"break_queue_pair", "break_completion_queue", "break_shared_receive_queue"}


def test_a_plan_ends_with_its_context() -> None:
    with opened("inline") as context:
        plan = context.faults
    assert plan.context is context
    for use in USES.values():
        with pytest.raises(ClosedResourceError, match="is closed"):
            use(plan)
    with pytest.raises(ClosedResourceError, match="is closed"):
        assert context.faults is not None


def test_a_child_of_a_fork_has_no_plan(inline: software.Context) -> None:
    plan = inline.faults
    plan.fail("query_device", errno.EIO, times=0)

    def child() -> None:
        for use in USES.values():
            with pytest.raises(ForkedProcessError):
                use(plan)

    in_child(child)
    assert query_errnos(inline, 1) == [errno.EIO]


def test_a_plan_is_not_constructed_directly(inline: software.Context) -> None:
    for arguments in ((), (inline,)):
        with pytest.raises(TypeError):
            software.FaultPlan(*arguments)
    for wrong in ((), (None,)):
        with pytest.raises(TypeError):
            software.FaultPlan.__new__(software.FaultPlan, *wrong)
    assert repr(inline.faults) == f"<FaultPlan of {inline!r}>"
    assert inline.faults is not inline.faults  # a view: the plan belongs to the context
    assert "create_qp" in software.FaultPlan.verbs
    assert len(set(software.FaultPlan.verbs)) == len(software.FaultPlan.verbs)
