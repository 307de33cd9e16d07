"""The fault plan and verbs: which calls fail, that it can be repeated, and what it tells of it."""

import errno
from collections.abc import Callable

import pytest

from aioverbs import VerbsError
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.attributes import FaultRecord
from tests.core.contexts import MODES, opened

KEPT = 4096


def outcome(call: Callable[[], object]) -> int:
    """The error number that a call fails with, or 0."""
    try:
        call()
    except VerbsError as error:
        return error.errno or -1
    return 0


def outcomes(context: software.Context, count: int) -> list[int]:
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
def test_which_calls(context: software.Context, strike: dict[str, int], calls: str) -> None:
    context.faults.fail("query_device", errno.EIO, **strike)
    for call in calls:
        assert outcome(context.query_device) == (errno.EIO if call == "x" else 0)
        assert outcome(context.query_port) == 0  # other verbs neither count nor fail
    struck = [number for number, call in enumerate(calls, 1) if call == "x"]
    assert context.faults.records() == [FaultRecord("verb", "query_device", number, errno.EIO) for number in struck]


def test_the_error_is_the_verb_s(context: software.Context) -> None:
    context.faults.fail("alloc_pd", errno.ENOSPC)
    with pytest.raises(VerbsError, match="ibv_alloc_pd failed: ENOSPC") as caught:
        handles.ProtectionDomain(context)
    assert (caught.value.verb, caught.value.errno) == ("ibv_alloc_pd", errno.ENOSPC)
    assert context.counts()["pds"] == 0
    handles.ProtectionDomain(context)


def test_all_verbs_counted_together(context: software.Context) -> None:
    context.faults.fail(None, errno.ENOMEM, first=2, every=2, times=2)
    query, port, gid, pkey = context.query_device, context.query_port, context.query_gid, context.query_pkey
    called: list[Callable[[], object]] = [query, port, gid, pkey, query]
    assert [outcome(call) for call in called] == [0, errno.ENOMEM, 0, errno.ENOMEM, 0]
    assert outcomes(context, 3) == [0, 0, 0]
    assert context.faults.records() == [
        ("verb", "query_port", 2, errno.ENOMEM),
        ("verb", "query_pkey", 4, errno.ENOMEM),
    ]


def test_the_oldest_rule_decides_and_each_counts_for_itself(context: software.Context) -> None:
    assert outcome(context.query_device) == 0  # before the rules: not counted
    context.faults.fail("query_device", errno.EIO, first=3)
    assert outcome(context.query_device) == 0
    context.faults.fail("query_device", errno.EPERM, times=3)
    assert outcomes(context, 4) == [errno.EPERM, errno.EIO, errno.EPERM, 0]


def test_a_plan_is_one_context_s(context: software.Context) -> None:
    with opened("inline") as other:
        context.faults.fail("query_device", errno.EIO)
        assert outcome(other.query_device) == 0
        assert outcome(context.query_device) == errno.EIO
        assert other.faults.records() == []


# ---- chances


def drawn(context: software.Context, seed: int) -> list[list[int]]:
    """What becomes of some calls of two verbs, of each in its own order."""
    context.faults.seed(seed)
    both = [(outcome(context.query_device), outcome(context.query_gid)) for _ in range(200)]
    return [list(calls) for calls in zip(*both, strict=True)]


def test_at_random_and_again(context: software.Context) -> None:
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


def test_the_ends_of_chance(context: software.Context) -> None:
    context.faults.fail_at_random(1_000_000, errno.EIO)
    assert outcomes(context, 20) == [errno.EIO] * 20
    context.faults.fail_at_random(1_000_000, errno.EPERM)
    assert outcomes(context, 20) == [errno.EPERM] * 20
    context.faults.fail_at_random(0, errno.EIO)
    assert outcomes(context, 20) == [0] * 20


def test_a_rule_comes_before_chance(context: software.Context) -> None:
    context.faults.fail_at_random(1_000_000, errno.EIO)
    context.faults.fail("query_device", errno.EPERM, first=2)
    assert outcomes(context, 3) == [errno.EIO, errno.EPERM, errno.EIO]
    context.faults.clear()


# ---- counting, records, and the end of a plan


def test_counting(context: software.Context) -> None:
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


def test_records_are_kept_up_to_a_number(inline: software.Context) -> None:
    inline.faults.fail("query_device", errno.EIO, times=0)
    for count in (63, 64, 65, 128):
        outcomes(inline, count - len(inline.faults.records()))
        assert [record.ordinal for record in inline.faults.records()] == list(range(1, count + 1))
    outcomes(inline, KEPT)
    assert [record.ordinal for record in inline.faults.records()] == list(range(1, KEPT + 1))


def test_clearing_ends_all_and_forgets_no_record(context: software.Context) -> None:
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
