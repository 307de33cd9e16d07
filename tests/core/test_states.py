"""The states of each type of queue pair: what takes it from one to the next, attribute by attribute."""

import pytest

from aioverbs import QpState, QpType, VerbsError
from aioverbs._core.software import software
from tests.core.transitions import (
    ERR,
    INIT,
    RC,
    REACHABLE,
    RESET,
    RTR,
    RTS,
    SQD,
    SQE,
    UC,
    UD,
    XRC_RECV,
    XRC_SEND,
    Bench,
    make_bench,
    rule,
)


@pytest.fixture
def bench(context: software.Context) -> Bench:
    return make_bench(context)


@pytest.mark.parametrize(("qp_type", "before"), REACHABLE)
def test_transitions(bench: Bench, qp_type: QpType, before: QpState) -> None:
    for after in (RESET, INIT, RTR, RTS, SQD, SQE, ERR):
        found = rule(qp_type, before, after)
        if found is None:
            assert not bench.attempt(qp_type, before, after, set()), after
            continue
        needed, allowed = found
        assert bench.attempt(qp_type, before, after, needed | allowed), after
        for name in bench.attributes(before):
            good = name in allowed
            assert bench.attempt(qp_type, before, after, needed ^ {name}) == good, (after, name)


def test_a_state_that_it_is_not_in(bench: Bench) -> None:
    """`cur_qp_state` is what the caller believes: where he is wrong, nothing is done."""
    for qp_type in (RC, UC, UD, XRC_SEND, XRC_RECV):
        qp = bench.make(qp_type, SQD)
        for believed in (RESET, INIT, RTR, RTS, SQE, ERR):
            with pytest.raises(VerbsError, match="ibv_modify_qp failed: EINVAL"):
                qp.modify(RTS, cur_qp_state=believed)
            assert qp.query().qp_state is SQD
        qp.modify(RTS, cur_qp_state=SQD)
        qp.destroy()
