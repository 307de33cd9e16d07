"""The fault plan and time: requests that are executed late."""

import errno
import time

import pytest

from aioverbs import QpState, SendFlags, SendOpcode, VerbsError, WcStatus
from aioverbs._core.software import software
from tests.core.contexts import opened
from tests.core.pairs import make_pair, succeed, wait_for
from tests.raw_verbs import poll, post_send

WRITE, SIGNALED = SendOpcode.RDMA_WRITE, SendFlags.SIGNALED


def test_not_without_an_engine(inline: software.Context) -> None:
    with pytest.raises(VerbsError, match="soft_fault_jitter failed: EINVAL") as caught:
        inline.faults.jitter(1000)
    assert caught.value.errno == errno.EINVAL
    for wrong in (-1, 1 << 63):
        with pytest.raises(ValueError, match="max_ns must be from 0 to 9223372036854775807"):
            inline.faults.jitter(wrong)
    with pytest.raises(TypeError):
        inline.faults.jitter(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["engine", "engine-delayed"])
def test_late_and_in_order(mode: str, kind: str) -> None:
    with opened(mode) as context:
        near, _ = make_pair(context, kind)
        context.faults.jitter(40_000_000)
        begin = time.monotonic()
        for wr_id in range(12):
            post_send(near.qp, WRITE, wr_id=wr_id, flags=SIGNALED)
        assert [completion.wr_id for completion in wait_for(near.cq, 12)] == list(range(12))
        assert time.monotonic() - begin > 0.01  # the latest of twelve
        context.faults.jitter(0)
        post_send(near.qp, WRITE, flags=SIGNALED)
        succeed(near.cq)
        assert context.faults.records() == []


@pytest.mark.parametrize("most", [(1 << 63) - 1, 1 << 62])
def test_as_late_as_can_be(most: int) -> None:
    with opened("engine", 0) as context:
        near, _ = make_pair(context)
        context.set_delay((1 << 64) - 1)
        context.faults.jitter(most)
        for _ in range(4):
            post_send(near.qp, WRITE, flags=SIGNALED)
        time.sleep(0.02)
        assert poll(near.cq) == []
        near.qp.modify(QpState.ERR)
        assert {completion.status for completion in wait_for(near.cq, 4)} == {WcStatus.WR_FLUSH_ERR}
