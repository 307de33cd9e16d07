"""The fault plan and verbs: which calls fail, that it can be repeated, and what it tells of it."""

import errno
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import ClosedResourceError, ForkedProcessError, VerbsError
from aioverbs._core import engine
from aioverbs.attributes import FaultRecord
from tests.core.children import in_child
from tests.core.contexts import MODES, opened

KEPT = 4096


def outcome(call: Callable[[], object]) -> int:
    """The error number that a call fails with, or 0."""
    try:
        call()
    except VerbsError as error:
        return error.errno or -1
    return 0


def outcomes(context: engine.Context, count: int) -> list[int]:
    """The same of so many calls of ``query_device``."""
    return [outcome(context.query_device) for _ in range(count)]


@pytest.mark.parametrize(
    ("strike", "calls"),
    [
        ({}, "x..........."),
        ({"first": 3}, "..x........."),
        ({"first": 3, "every": 5}, "..x........."),
        ({"times": 0}, "xxxxxxxxxxxx"),
        ({"times": 3}, "xxx........."),
        ({"first": 2, "every": 3, "times": 0}, ".x..x..x..x."),
        ({"first": 2, "every": 3, "times": 2}, ".x..x......."),
        ({"first": 12, "times": 0}, "...........x"),
    ],
)
def test_which_calls(context: engine.Context, strike: dict[str, int], calls: str) -> None:
    context.faults.fail("query_device", errno.EIO, **strike)
    for call in calls:
        assert outcome(context.query_device) == (errno.EIO if call == "x" else 0)
        assert outcome(context.query_port) == 0  # other verbs neither count nor fail
    struck = [number for number, call in enumerate(calls, 1) if call == "x"]
    assert context.faults.records() == [FaultRecord("verb", "query_device", number, errno.EIO) for number in struck]


def test_the_error_is_the_verb_s(context: engine.Context) -> None:
    context.faults.fail("alloc_pd", errno.ENOSPC)
    with pytest.raises(VerbsError, match="ibv_alloc_pd failed: ENOSPC") as caught:
        engine.ProtectionDomain(context)
    assert (caught.value.verb, caught.value.errno) == ("ibv_alloc_pd", errno.ENOSPC)
    assert context.counts()["pds"] == 0
    engine.ProtectionDomain(context)


def test_all_verbs_counted_together(context: engine.Context) -> None:
    context.faults.fail(None, errno.ENOMEM, first=2, every=2, times=2)
    query, port, gid, pkey = context.query_device, context.query_port, context.query_gid, context.query_pkey
    called: list[Callable[[], object]] = [query, port, gid, pkey, query]
    assert [outcome(call) for call in called] == [0, errno.ENOMEM, 0, errno.ENOMEM, 0]
    assert outcomes(context, 3) == [0, 0, 0]
    assert context.faults.records() == [
        ("verb", "query_port", 2, errno.ENOMEM),
        ("verb", "query_pkey", 4, errno.ENOMEM),
    ]


def test_the_oldest_rule_decides_and_each_counts_for_itself(context: engine.Context) -> None:
    assert outcome(context.query_device) == 0  # before the rules: not counted
    context.faults.fail("query_device", errno.EIO, first=3)
    assert outcome(context.query_device) == 0
    context.faults.fail("query_device", errno.EPERM, times=3)
    assert outcomes(context, 4) == [errno.EPERM, errno.EIO, errno.EPERM, 0]


def test_a_plan_is_one_context_s(context: engine.Context) -> None:
    with opened("inline") as other:
        context.faults.fail("query_device", errno.EIO)
        assert outcome(other.query_device) == 0
        assert outcome(context.query_device) == errno.EIO
        assert other.faults.records() == []


# ---- chances


def drawn(context: engine.Context, seed: int) -> list[list[int]]:
    """What becomes of some calls of two verbs, of each in its own order."""
    context.faults.seed(seed)
    both = [(outcome(context.query_device), outcome(context.query_gid)) for _ in range(200)]
    return [list(calls) for calls in zip(*both, strict=True)]


def test_at_random_and_again(context: engine.Context) -> None:
    """The same seed and the same calls: the same failures and records, in this context and in another."""
    context.faults.fail_at_random(250_000, errno.ENFILE)
    first = drawn(context, 1)
    records = context.faults.records()
    failures = [calls.count(errno.ENFILE) for calls in first]
    assert all(25 < count < 100 for count in failures)
    assert all(calls.count(0) + calls.count(errno.ENFILE) == 200 for calls in first)
    assert first[0] != first[1]
    assert len(records) == sum(failures)
    for verb, calls in zip(("query_device", "query_gid"), first, strict=True):
        ordinals = [number for number, error in enumerate(calls, 1) if error]
        assert [record.ordinal for record in records if record.subject == verb] == ordinals
    assert drawn(context, 1) == first
    assert context.faults.records() == records * 2
    assert drawn(context, 2) != first
    with opened("engine") as other:
        other.faults.fail_at_random(250_000, errno.ENFILE)
        assert drawn(other, 1) == first
        assert other.faults.records() == records
        other.faults.clear()
    context.faults.clear()


def test_the_ends_of_chance(context: engine.Context) -> None:
    context.faults.fail_at_random(1_000_000, errno.EIO)
    assert outcomes(context, 20) == [errno.EIO] * 20
    context.faults.fail_at_random(1_000_000, errno.EPERM)
    assert outcomes(context, 20) == [errno.EPERM] * 20
    context.faults.fail_at_random(0, errno.EIO)
    assert outcomes(context, 20) == [0] * 20


def test_a_rule_comes_before_chance(context: engine.Context) -> None:
    context.faults.fail_at_random(1_000_000, errno.EIO)
    context.faults.fail("query_device", errno.EPERM, first=2)
    assert outcomes(context, 3) == [errno.EIO, errno.EPERM, errno.EIO]
    context.faults.clear()


# ---- counting, records, and the end of a plan


def test_counting(context: engine.Context) -> None:
    plan = context.faults
    outcomes(context, 3)
    assert plan.calls() == plan.calls("query_device") == 0
    plan.count_calls()
    plan.fail("query_device", errno.EIO)
    assert outcomes(context, 3) == [errno.EIO, 0, 0]  # one that fails is a call, too
    context.query_port()
    assert (plan.calls("query_device"), plan.calls("query_port"), plan.calls("alloc_pd"), plan.calls()) == (3, 1, 0, 4)
    plan.clear()
    context.query_device()
    assert plan.calls("query_device") == 4
    plan.count_calls(False)
    context.query_device()
    assert plan.calls() == 5
    plan.count_calls(True)
    assert plan.calls() == 0


def test_records_are_kept_up_to_a_number(inline: engine.Context) -> None:
    inline.faults.fail("query_device", errno.EIO, times=0)
    for count in (63, 64, 65, 128):
        outcomes(inline, count - len(inline.faults.records()))
        assert [record.ordinal for record in inline.faults.records()] == list(range(1, count + 1))
    outcomes(inline, KEPT)
    assert [record.ordinal for record in inline.faults.records()] == list(range(1, KEPT + 1))


def test_clearing_ends_all_and_forgets_no_record(context: engine.Context) -> None:
    context.faults.fail("query_device", errno.EIO, times=0)
    context.faults.fail_at_random(1_000_000, errno.EPERM)
    assert outcomes(context, 1) == [errno.EIO]
    context.faults.clear()
    context.faults.clear()
    assert outcomes(context, 10) == [0] * 10
    assert len(context.faults.records()) == 1


def test_the_last_verb_of_all() -> None:
    for mode in MODES:
        with opened(mode) as context:
            context.faults.fail("close_device", errno.EAGAIN)
            with pytest.raises(VerbsError, match="ibv_close_device failed: EAGAIN"):
                context.destroy()
            assert not context.closed
            assert outcome(context.query_device) == 0


# ---- wrong input


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("no_verb", errno.EIO), ValueError, "has no verb 'no_verb'; it has close_device, "),
        (("ibv_query_device", errno.EIO), ValueError, "has no verb"),
        (("query_device", 0), ValueError, "error must be from 1 to 4095, not 0"),
        (("query_device", -5), ValueError, "error must be from 1 to 4095, not -5"),
        (("query_device", 4096), ValueError, "error must be from 1 to 4095, not 4096"),
        (("query_device", 1 << 40), OverflowError, "too large"),
        (("query_device", "EIO"), TypeError, "integer"),
        (([], errno.EIO), TypeError, "unhashable"),
    ],
)
def test_arguments(inline: engine.Context, arguments: tuple[Any, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        inline.faults.fail(*arguments)
    assert outcomes(inline, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("strike", "error", "text"),
    [
        ({"first": 0}, ValueError, "first must be from 1 to 9223372036854775807, not 0"),
        ({"first": -1}, ValueError, "first must be"),
        ({"first": 1 << 63}, ValueError, "first must be"),
        ({"first": 1.5}, TypeError, "integer"),
        ({"every": 0}, ValueError, "every must be from 1"),
        ({"times": -1}, ValueError, "times must be from 0"),
        ({"times": None}, TypeError, "integer"),
    ],
)
def test_numbers_of_a_strike(inline: engine.Context, strike: dict[str, Any], error: type[Exception], text: str) -> None:
    plan = inline.faults
    with pytest.raises(error, match=text):
        plan.fail("query_device", errno.EIO, **strike)
    with pytest.raises(error, match=text):
        plan.fail_request(5, **strike)
    with pytest.raises(error, match=text):
        plan.lose_messages(**strike)
    assert outcomes(inline, 3) == [0, 0, 0]


def test_the_largest_numbers(inline: engine.Context) -> None:
    most = (1 << 63) - 1
    inline.faults.fail("query_device", errno.EIO, first=most, every=most, times=most)
    inline.faults.fail("query_device", 4095, first=1, every=most, times=0)
    assert outcomes(inline, 3) == [4095, 0, 0]


def test_other_arguments(inline: engine.Context) -> None:
    plan = inline.faults
    for per_million in (-1, 1_000_001):
        with pytest.raises(ValueError, match="per_million must be from 0 to 1000000"):
            plan.fail_at_random(per_million, errno.EIO)
        with pytest.raises(ValueError, match="per_million must be from 0 to 1000000"):
            plan.lose_messages_at_random(per_million)
    with pytest.raises(ValueError, match="error must be"):
        plan.fail_at_random(0, 0)
    with pytest.raises(ValueError, match="has no verb 'open'"):
        plan.calls("open")
    for seed in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            plan.seed(seed)
    plan.seed((1 << 64) - 1)


# ---- the plan itself


USES: dict[str, Callable[[engine.FaultPlan], object]] = {
    "fail": lambda plan: plan.fail("query_device", errno.EIO),
    "fail_at_random": lambda plan: plan.fail_at_random(1, errno.EIO),
    "count_calls": lambda plan: plan.count_calls(),
    "calls": lambda plan: plan.calls(),
    "fail_request": lambda plan: plan.fail_request(5),
    "lose_messages": lambda plan: plan.lose_messages(),
    "lose_messages_at_random": lambda plan: plan.lose_messages_at_random(1),
    "jitter": lambda plan: plan.jitter(0),
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
    """But for those that take an object, which is closed with the context."""
    public = {name for name in vars(engine.FaultPlan) if not name.startswith("_")} - {"verbs", "context"}
    assert public == set(USES) | {"break_queue_pair", "break_completion_queue", "break_shared_receive_queue"}


@pytest.mark.parametrize("use", USES)
def test_it_ends_with_its_context(use: str) -> None:
    with opened("inline") as context:
        plan = context.faults
    assert plan.context is context
    with pytest.raises(ClosedResourceError, match="is closed"):
        USES[use](plan)
    with pytest.raises(ClosedResourceError, match="is closed"):
        assert context.faults is not None


def test_a_child_of_a_fork_has_no_plan(context: engine.Context) -> None:
    plan = context.faults
    plan.fail("query_device", errno.EIO, times=0)

    def child() -> None:
        for use in USES.values():
            with pytest.raises(ForkedProcessError):
                use(plan)

    in_child(child)
    assert outcomes(context, 1) == [errno.EIO]


def test_it_comes_from_a_context_only(inline: engine.Context) -> None:
    for arguments in ((), (inline,)):
        with pytest.raises(TypeError):
            engine.FaultPlan(*arguments)
    for wrong in ((), (None,)):
        with pytest.raises(TypeError):
            engine.FaultPlan.__new__(engine.FaultPlan, *wrong)
    assert repr(inline.faults) == f"<FaultPlan of {inline!r}>"
    assert inline.faults is not inline.faults  # a view: what it plans is the context's
    assert "create_qp" in engine.FaultPlan.verbs
    assert len(set(engine.FaultPlan.verbs)) == len(engine.FaultPlan.verbs)
