"""Taking completions from basic and from extended queues."""

import pytest

from aioverbs import SendFlags, SendOpcode, WcStatus
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.attributes import QpCapabilities
from tests.core.pairs import connect, make_domain, make_end, make_queue, wait_for
from tests.waiting import wait_until

WRITE = SendOpcode.RDMA_WRITE
COUNT = 150  # more than any batch that goes through the provider at once
DEEP = QpCapabilities(max_send_wr=256)


@pytest.fixture(params=["basic", "extended", "single-threaded"])
def cq(request: pytest.FixtureRequest, context: software.Context, kind: str) -> handles.CompletionQueue:
    """Polled in each way, and with each way of keeping threads apart."""
    if request.param == "single-threaded":
        return handles.CompletionQueue(context, 256, single_threaded=True)
    return make_queue(context, make_domain(context, kind), extended=request.param == "extended")


def writer(cq: handles.CompletionQueue) -> handles.QueuePair:
    """A connected queue pair that completes into a queue."""
    domain = cq.parent_domain or handles.ProtectionDomain(cq.context)
    qp = handles.QueuePair(domain, cq, cq, DEEP)
    connect(qp, make_end(domain).qp)
    return qp


def write(qp: handles.QueuePair, count: int) -> None:
    """Have requests 0 to `count` - 1 done, without polling."""
    before = qp.query().sq_psn
    for number in range(count):
        qp.post_send(WRITE, wr_id=number, flags=SendFlags.SIGNALED)
    wait_until(lambda: qp.query().sq_psn == before + count)


def numbers(completions: list[handles.WorkCompletion]) -> list[int]:
    return [completion.wr_id for completion in completions]


def test_as_many_as_asked_for(cq: handles.CompletionQueue) -> None:
    write(writer(cq), COUNT)
    assert numbers(cq.poll(1)) == [0]
    assert numbers(cq.poll()) == list(range(1, 17))
    assert numbers(cq.poll(64)) == list(range(17, 81))
    assert numbers(cq.poll(65)) == list(range(81, 146))
    assert numbers(cq.poll(1 << 20)) == list(range(146, COUNT))
    assert cq.poll() == []


@pytest.mark.parametrize("count", [COUNT, COUNT + 1, 1 << 30])
def test_all_at_once(cq: handles.CompletionQueue, count: int) -> None:
    write(writer(cq), COUNT)
    assert numbers(cq.poll(count)) == list(range(COUNT))
    assert cq.poll() == []


def test_a_queue_goes_round(cq: handles.CompletionQueue) -> None:
    qp = writer(cq)
    for _ in range(8):
        write(qp, COUNT)
        assert numbers(wait_for(cq, COUNT)) == list(range(COUNT))


def test_two_queue_pairs_complete_into_one_queue(cq: handles.CompletionQueue) -> None:
    qps = [writer(cq), writer(cq)]
    for qp in qps:
        write(qp, 20)
    found = [(completion.qp_num, completion.wr_id) for completion in cq.poll(64)]
    assert found == [(qp.qp_num, number) for qp in qps for number in range(20)]


def test_destroying_a_queue_pair_takes_its_completions_away(cq: handles.CompletionQueue) -> None:
    qps = [writer(cq), writer(cq), writer(cq)]
    for number in range(10):
        for qp in qps:
            write(qp, number % 3)
    qps[1].destroy()
    found = cq.poll(256)
    assert {completion.qp_num for completion in found} == {qps[0].qp_num, qps[2].qp_num}
    for qp in (qps[0], qps[2]):
        mine = [completion.wr_id for completion in found if completion.qp_num == qp.qp_num]
        assert mine == [wr_id for number in range(10) for wr_id in range(number % 3)]
    write(qps[0], 5)
    assert numbers(cq.poll(16)) == list(range(5))


def test_errors(cq: handles.CompletionQueue) -> None:
    qp = writer(cq)
    qp.post_send(WRITE, [(1, 1, 1)], wr_id=1 << 63)
    qp.post_send(WRITE, wr_id=(1 << 64) - 1)
    first, second = wait_for(cq, 2)
    assert (first.wr_id, first.status, first.qp_num) == (1 << 63, WcStatus.LOC_PROT_ERR, qp.qp_num)
    assert (second.wr_id, second.status, second.qp_num) == ((1 << 64) - 1, WcStatus.WR_FLUSH_ERR, qp.qp_num)
