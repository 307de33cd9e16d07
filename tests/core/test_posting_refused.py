"""Work requests that a queue does not take: nothing of them is done, and the queue goes on."""

import errno
from collections.abc import Callable
from functools import partial

import pytest

from aioverbs import QpState, SendFlags, SendOpcode, VerbsError
from aioverbs._core.software import software
from aioverbs.attributes import QpCapabilities
from tests.core.pairs import End, connect, make_domain, make_end, make_pair, succeed, to_init, to_rtr, to_rts, wait_for

SEND, READ, WRITE = SendOpcode.SEND, SendOpcode.RDMA_READ, SendOpcode.RDMA_WRITE
INLINE = SendFlags.INLINE

REFUSED: dict[str, tuple[Callable[[End], object], int]] = {
    "5 entries to send": (lambda end: end.qp.post_send(SEND, [end.sge(0, 1)] * 5), errno.EINVAL),
    "5 entries to receive": (lambda end: end.qp.post_recv([end.sge(0, 1)] * 5), errno.EINVAL),
    "more inline than granted": (lambda end: end.qp.post_send(SEND, [end.sge(0, 65)], flags=INLINE), errno.EINVAL),
    "more inline in parts": (lambda end: end.qp.post_send(SEND, [end.sge(0, 33)] * 2, flags=INLINE), errno.EINVAL),
    "inline read": (lambda end: end.qp.post_send(READ, [end.sge(0, 8)], flags=INLINE), errno.EINVAL),
    "inline atomic": (
        lambda end: end.qp.post_send(SendOpcode.ATOMIC_FETCH_AND_ADD, [end.sge(0, 8)], flags=INLINE),
        errno.EINVAL,
    ),
    "unknown flag": (lambda end: end.qp.post_send(SEND, flags=1 << 10), errno.EINVAL),
    "unknown opcode": (lambda end: end.qp.post_send(99), errno.EINVAL),
    "an atomic write": (lambda end: end.qp.post_send(SendOpcode.ATOMIC_WRITE), errno.EOPNOTSUPP),
    "segmentation": (lambda end: end.qp.post_send(SendOpcode.TSO), errno.EOPNOTSUPP),
}


@pytest.mark.parametrize(("post", "number"), REFUSED.values(), ids=REFUSED)
def test_refused(context: software.Context, kind: str, post: Callable[[End], object], number: int) -> None:
    near, far = make_pair(context, kind)
    with pytest.raises(VerbsError, match=r"ibv_post_(send|recv) failed") as caught:
        post(near)
    assert caught.value.errno == number
    far.qp.post_recv([far.sge(0, 8)])
    near.qp.post_send(SEND, [near.sge(0, 8)], flags=SendFlags.SIGNALED)
    succeed(near.cq)
    succeed(far.cq)


def answer(post: Callable[[], object]) -> int:
    """The error number of a verb, or 0."""
    try:
        post()
    except VerbsError as error:
        return error.errno
    return 0


def test_states(context: software.Context, kind: str) -> None:
    """Receives are taken from INIT on, sends from RTS on; in SQD they wait."""
    domain = make_domain(context, kind)
    end = make_end(domain)
    sends: dict[QpState, int] = {}
    receives: dict[QpState, int] = {}

    def attempt() -> None:
        state = end.qp.query().qp_state
        sends[state] = answer(partial(end.qp.post_send, WRITE))
        receives[state] = answer(end.qp.post_recv)

    attempt()
    to_init(end.qp)
    attempt()
    to_rtr(end.qp, end.qp.qp_num)
    attempt()
    to_rts(end.qp)
    attempt()
    end.qp.modify(QpState.SQD)
    attempt()
    end.qp.modify(QpState.ERR)
    attempt()
    refused, taken = errno.EINVAL, 0
    states = [QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS, QpState.SQD, QpState.ERR]
    assert sends == dict(zip(states, [refused, refused, refused, taken, taken, taken], strict=True))
    assert receives == dict(zip(states, [refused, taken, taken, taken, taken, taken], strict=True))


def test_a_drained_queue_goes_on(context: software.Context, kind: str) -> None:
    near, far = make_pair(context, kind)
    near.qp.modify(QpState.SQD)
    near.memory[:4] = b"held"
    near.qp.post_send(WRITE, [near.sge(0, 4)], remote_addr=far.region.address, rkey=far.region.rkey)
    near.qp.post_send(WRITE, flags=SendFlags.SIGNALED)
    assert near.cq.poll() == []
    assert far.memory[:4] == bytes(4)
    near.qp.modify(QpState.RTS)
    succeed(near.cq)
    assert far.memory[:4] == b"held"


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_full_queues(context: software.Context, kind: str, depth: int) -> None:
    """A request holds its place until a completion that tells of it, or of a later one, was polled."""
    domain = make_domain(context, kind)
    near, far = (make_end(domain, capabilities=QpCapabilities(max_send_wr=depth, max_recv_wr=depth)) for _ in range(2))
    connect(near.qp, far.qp)

    def fill(post: Callable[[], object]) -> int:
        answers = [answer(post) for _ in range(10)]
        assert answers == [0] * answers.count(0) + [errno.ENOMEM] * answers.count(errno.ENOMEM)
        return answers.count(0)

    assert fill(lambda: far.qp.post_recv([far.sge(0, 1)])) == depth
    near.qp.modify(QpState.SQD)
    assert fill(lambda: near.qp.post_send(SEND, [near.sge(0, 1)])) == depth
    near.qp.modify(QpState.RTS)
    wait_for(far.cq, depth)
    assert fill(far.qp.post_recv) == depth
    if depth:
        # Nothing was signalled: nobody will ever tell. The error does, of all of them.
        assert fill(lambda: near.qp.post_send(WRITE)) == 0
        near.qp.modify(QpState.ERR)
        assert near.cq.poll() == []


def test_a_signalled_request_frees_those_before_it(context: software.Context, kind: str) -> None:
    domain = make_domain(context, kind)
    near, far = (make_end(domain, capabilities=QpCapabilities(max_send_wr=4)) for _ in range(2))
    connect(near.qp, far.qp)
    for _ in range(5):
        for number in range(4):
            near.qp.post_send(WRITE, flags=SendFlags.SIGNALED if number == 3 else 0)
        with pytest.raises(VerbsError, match="ENOMEM"):
            near.qp.post_send(WRITE)
        succeed(near.cq)


def test_a_chain_may_be_posted_to_depth_and_over_the_wrap(context: software.Context, kind: str) -> None:
    domain = make_domain(context, kind)
    near, far = (make_end(domain, capabilities=QpCapabilities(max_send_wr=8)) for _ in range(2))
    connect(near.qp, far.qp)
    for number in range(100):
        near.memory[:1] = bytes([number])
        near.qp.post_send(
            WRITE,
            [near.sge(0, 1)],
            flags=SendFlags.SIGNALED,
            remote_addr=far.region.address + number,
            rkey=far.region.rkey,
        )
        succeed(near.cq)
    assert far.memory[:100] == bytes(range(100))
