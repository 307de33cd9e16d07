"""The fault plan's arguments, and whose it is."""

import errno
import functools
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import ClosedResourceError, ForkedProcessError
from aioverbs._core.software import software
from tests.core.children import in_child
from tests.core.contexts import opened
from tests.core.test_faults_verbs import outcomes


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
def test_arguments(inline: software.Context, arguments: tuple[Any, Any], error: type[Exception], text: str) -> None:
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
def test_numbers_of_a_strike(
    inline: software.Context, strike: dict[str, Any], error: type[Exception], text: str
) -> None:
    plan = inline.faults
    with pytest.raises(error, match=text):
        plan.fail("query_device", errno.EIO, **strike)
    with pytest.raises(error, match=text):
        plan.fail_request(5, **strike)
    with pytest.raises(error, match=text):
        plan.lose_messages(**strike)
    for frames in (plan.drop_frames, plan.duplicate_frames, plan.cut_at_frames):
        with pytest.raises(error, match=text):
            frames(**strike)
    with pytest.raises(error, match=text):
        plan.delay_frames(1, **strike)
    assert outcomes(inline, 3) == [0, 0, 0]


def test_the_largest_numbers(inline: software.Context) -> None:
    most = (1 << 63) - 1
    inline.faults.fail("query_device", errno.EIO, first=most, every=most, times=most)
    inline.faults.fail("query_device", 4095, first=1, every=most, times=0)
    assert outcomes(inline, 3) == [4095, 0, 0]


def test_other_arguments(inline: software.Context) -> None:
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


def test_arguments_about_frames(inline: software.Context) -> None:
    plan = inline.faults
    nonsense: Any = "requests"
    for use in (plan.drop_frames, plan.duplicate_frames, plan.cut_at_frames, functools.partial(plan.delay_frames, 1)):
        with pytest.raises(ValueError, match="'requests' is no kind of frame; these are: request_out, answer_in, "):
            use(nonsense)
        with pytest.raises(
            ValueError, match=r"a peer is known by its GID, 16 bytes as Endpoint\.gid has them, not by b"
        ):
            use(peer=b"a")
    for streams in (plan.cut_streams, plan.stall_streams):
        with pytest.raises(ValueError, match="a peer is known by its GID"):
            streams(nonsense)
        assert streams() == streams(bytes(16)) == 0  # there are none
    for delay in (-1, 1 << 63):
        with pytest.raises(ValueError, match="delay_ns must be from 0"):
            plan.delay_frames(delay)
        with pytest.raises(ValueError, match="max_delay_ns must be from 0"):
            plan.disturb_frames_at_random(delay=1, max_delay_ns=delay)
    for chance in ("drop", "duplicate", "delay", "cut"):
        with pytest.raises(ValueError, match=f"{chance} must be from 0 to 1000000, not 1000001"):
            plan.disturb_frames_at_random(**{chance: 1_000_001})
    with pytest.raises(ValueError, match="the sum of all chances must be from 0 to 1000000, not 1000001"):
        plan.disturb_frames_at_random(drop=500_000, cut=500_001)
    plan.disturb_frames_at_random(drop=500_000, cut=500_000, max_delay_ns=(1 << 63) - 1)
    assert outcomes(inline, 3) == [0, 0, 0]


# ---- the plan itself


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
    """But for those that take an object, which is closed with the context."""
    public = {name for name in vars(software.FaultPlan) if not name.startswith("_")} - {"verbs", "frames", "context"}
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


def test_a_child_of_a_fork_has_no_plan(context: software.Context) -> None:
    plan = context.faults
    plan.fail("query_device", errno.EIO, times=0)

    def child() -> None:
        for use in USES.values():
            with pytest.raises(ForkedProcessError):
                use(plan)

    in_child(child)
    assert outcomes(context, 1) == [errno.EIO]


def test_it_comes_from_a_context_only(inline: software.Context) -> None:
    for arguments in ((), (inline,)):
        with pytest.raises(TypeError):
            software.FaultPlan(*arguments)
    for wrong in ((), (None,)):
        with pytest.raises(TypeError):
            software.FaultPlan.__new__(software.FaultPlan, *wrong)
    assert repr(inline.faults) == f"<FaultPlan of {inline!r}>"
    assert inline.faults is not inline.faults  # a view: what it plans is the context's
    assert "create_qp" in software.FaultPlan.verbs
    assert len(set(software.FaultPlan.verbs)) == len(software.FaultPlan.verbs)
