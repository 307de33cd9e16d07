"""Random valid and invalid verbs compared with a plain model: queue pairs of all types, several contexts, both
executions.

After every step the device and the model agree on the contents of all memory, on the state of every queue pair and
every shared receive queue, on the open objects and on those that refuse to be destroyed. Completions arrive per queue
in the order and with the statuses of the model, and so do events. Every run ends with every object destroyed.
"""

import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from aioverbs import EventType, QpType, WcStatus
from aioverbs._core.handles import handles
from aioverbs.testing import destroy_all
from tests.core.making import RECEIVERS, SENDERS
from tests.core.model_queue_pairs import RECEIVE_SIDE, SEND_SIDE
from tests.core.rules import Rules
from tests.pace import patience

ENOUGH = 75  # examples, enough to reach all of the coverage asserted below

taken_completions: Counter[tuple[QpType, int, WcStatus]] = Counter()
taken_events: Counter[EventType] = Counter()
coverage: Counter[str] = Counter()


class Device(Rules):
    """Rules with checks: after each step the same objects are open on both sides; at the end none are."""

    @invariant()
    def counts_agree(self) -> None:
        self.twins.compare_counts()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.twins.finish()
                taken_completions.update(self.twins.taken_completions)
                taken_events.update(self.twins.taken_events)
                coverage.update(self.twins.fabric.memory.coverage)
        finally:
            self.twins.close()
            destroy_all(handles.open_handles())


@pytest.mark.timeout(patience(280))  # shrinking a failure takes minutes
def test_device() -> None:
    taken_completions.clear()
    taken_events.clear()
    coverage.clear()
    profile = settings.default
    assert profile is not None
    run_state_machine_as_test(
        Device,
        settings=settings(
            max_examples=max(profile.max_examples, ENOUGH),
            stateful_step_count=50,
            phases=[phase for phase in Phase if phase is not Phase.explain],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
    # All of these were reached, most of them often.
    assert {status for _, _, status in taken_completions} >= {
        WcStatus.SUCCESS,
        WcStatus.LOC_LEN_ERR,
        WcStatus.LOC_PROT_ERR,
        WcStatus.REM_ACCESS_ERR,
        WcStatus.REM_INV_REQ_ERR,
        WcStatus.REM_OP_ERR,
        WcStatus.RNR_RETRY_EXC_ERR,
        WcStatus.WR_FLUSH_ERR,
    }
    succeeded = {(kind, side) for kind, side, status in taken_completions if status is WcStatus.SUCCESS}
    assert succeeded == {(kind, SEND_SIDE) for kind in SENDERS} | {(kind, RECEIVE_SIDE) for kind in RECEIVERS}
    assert set(coverage) >= {
        "UC arrived",
        "UC dropped",
        "UC stopped",
        "UD arrived",
        "UD dropped",
        "UD stopped",
        "shared receive",
        "bound",
        "through a window",
        "kept by a window",
        "unbound",
        "invalidated",
    }
    assert set(taken_events) >= {
        EventType.COMM_EST,
        EventType.QP_ACCESS_ERR,
        EventType.QP_REQ_ERR,
        EventType.QP_LAST_WQE_REACHED,
        EventType.SRQ_LIMIT_REACHED,
    }
