"""Requests that go wrong: how they complete on both sides, and what becomes of the queue pairs."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from aioverbs import AccessFlags, QpState, SendOpcode, WcStatus
from aioverbs._core.software import software
from tests.core.pairs import ALL_ACCESS, End, Sge, make_domain, make_end, to_init, to_rtr, to_rts, wait_for

WRITE, READ, SEND = SendOpcode.RDMA_WRITE, SendOpcode.RDMA_READ, SendOpcode.SEND
ADD = SendOpcode.ATOMIC_FETCH_AND_ADD


@dataclass
class Wrong:
    """A request from near to far with something wrong; the functions are given (near, far, a foreign end)."""

    opcode: SendOpcode
    status: WcStatus
    local: Callable[[End, End], Sge] = lambda near, _: near.sge(0, 8)
    remote: Callable[[End, End], tuple[int, int]] = lambda far, _: (far.region.address, far.region.rkey)
    receive: Callable[[End, End], Sge] | None = None
    received: WcStatus | None = None
    access: AccessFlags = ALL_ACCESS
    regions: AccessFlags = ALL_ACCESS
    breaks_the_peer: bool = True
    reads: int = 16


def beyond(end: End, _: End) -> tuple[int, int]:
    return end.region.address + end.region.length - 7, end.region.rkey


def before(end: End, _: End) -> tuple[int, int]:
    return end.region.address - 1, end.region.rkey


LOCAL = AccessFlags.LOCAL_WRITE
WRONG: dict[str, Wrong] = {
    "local key unknown": Wrong(
        WRITE,
        WcStatus.LOC_PROT_ERR,
        local=lambda near, _: (near.region.address, 8, near.region.lkey ^ 1),
        breaks_the_peer=False,
    ),
    "local range too long": Wrong(
        SEND, WcStatus.LOC_PROT_ERR, local=lambda near, _: near.sge(4089, 8), breaks_the_peer=False
    ),
    "local key of another domain": Wrong(
        WRITE, WcStatus.LOC_PROT_ERR, local=lambda _, foreign: foreign.sge(0, 8), breaks_the_peer=False
    ),
    "answer into read-only memory": Wrong(
        READ, WcStatus.LOC_PROT_ERR, regions=AccessFlags.REMOTE_READ, breaks_the_peer=False
    ),
    "atomic of 4 bytes": Wrong(ADD, WcStatus.LOC_LEN_ERR, local=lambda near, _: near.sge(0, 4), breaks_the_peer=False),
    "read without depth": Wrong(READ, WcStatus.LOC_QP_OP_ERR, reads=0, breaks_the_peer=False),
    "remote key unknown": Wrong(
        WRITE, WcStatus.REM_ACCESS_ERR, remote=lambda far, _: (far.region.address, far.region.rkey ^ 1)
    ),
    "remote key of another domain": Wrong(
        READ, WcStatus.REM_ACCESS_ERR, remote=lambda _, foreign: (foreign.region.address, foreign.region.rkey)
    ),
    "beyond the remote end": Wrong(WRITE, WcStatus.REM_ACCESS_ERR, remote=beyond),
    "before the remote start": Wrong(READ, WcStatus.REM_ACCESS_ERR, remote=before),
    "write to a region without": Wrong(WRITE, WcStatus.REM_ACCESS_ERR, regions=LOCAL | AccessFlags.REMOTE_READ),
    "read from a region without": Wrong(READ, WcStatus.REM_ACCESS_ERR, regions=LOCAL | AccessFlags.REMOTE_WRITE),
    "atomic on a region without": Wrong(ADD, WcStatus.REM_ACCESS_ERR, regions=LOCAL | AccessFlags.REMOTE_WRITE),
    "write to a queue pair without": Wrong(WRITE, WcStatus.REM_INV_REQ_ERR, access=AccessFlags.REMOTE_READ),
    "read from a queue pair without": Wrong(READ, WcStatus.REM_INV_REQ_ERR, access=AccessFlags.REMOTE_WRITE),
    "atomic on a queue pair without": Wrong(ADD, WcStatus.REM_INV_REQ_ERR, access=AccessFlags.REMOTE_WRITE),
    "atomic not aligned": Wrong(
        ADD, WcStatus.REM_INV_REQ_ERR, remote=lambda far, _: (far.region.address + 4, far.region.rkey)
    ),
    "receive too small": Wrong(
        SEND, WcStatus.REM_INV_REQ_ERR, receive=lambda far, _: far.sge(0, 7), received=WcStatus.LOC_LEN_ERR
    ),
    "receive with a bad key": Wrong(
        SEND,
        WcStatus.REM_OP_ERR,
        receive=lambda far, _: (far.region.address, 8, 0),
        received=WcStatus.LOC_PROT_ERR,
    ),
    "receive into read-only memory": Wrong(
        SEND,
        WcStatus.REM_OP_ERR,
        receive=lambda far, _: far.sge(0, 8),
        received=WcStatus.LOC_PROT_ERR,
        regions=AccessFlags.REMOTE_READ,
    ),
    "no receive": Wrong(SEND, WcStatus.RNR_RETRY_EXC_ERR, breaks_the_peer=False),
}


def wrong_pair(context: software.Context, kind: str, wrong: Wrong) -> tuple[End, End, End]:
    domain = make_domain(context, kind)
    near, far = make_end(domain, access=wrong.regions), make_end(domain, access=wrong.regions)
    for qp, peer in ((near.qp, far.qp), (far.qp, near.qp)):
        to_init(qp, wrong.access)
        to_rtr(qp, peer.qp_num)
        to_rts(qp, max_rd_atomic=wrong.reads)
    return near, far, make_end(make_domain(context, kind))


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong(context: software.Context, kind: str, wrong: Wrong) -> None:
    near, far, foreign = wrong_pair(context, kind, wrong)
    near.memory[:], far.memory[:] = b"n" * 4096, b"f" * 4096
    if wrong.receive:
        far.qp.post_recv([wrong.receive(far, foreign)], wr_id=21)
        far.qp.post_recv(wr_id=22)
    address, key = wrong.remote(far, foreign)
    # Not signalled: an error tells all the same, and of what comes behind it, too.
    near.qp.post_send(wrong.opcode, [wrong.local(near, foreign)], wr_id=1, remote_addr=address, rkey=key)
    near.qp.post_send(WRITE, wr_id=2)
    near.qp.post_recv(wr_id=3)
    ends = {completion.wr_id: completion.status for completion in wait_for(near.cq, 3)}
    assert ends == {1: wrong.status, 2: WcStatus.WR_FLUSH_ERR, 3: WcStatus.WR_FLUSH_ERR}
    if wrong.receive:
        found = [(completion.wr_id, completion.status) for completion in wait_for(far.cq, 2)]
        assert found == [(21, wrong.received), (22, WcStatus.WR_FLUSH_ERR)]
    assert near.memory == b"n" * 4096
    assert far.memory == b"f" * 4096
    assert near.qp.query().qp_state is QpState.ERR
    assert far.qp.query().qp_state is (QpState.ERR if wrong.breaks_the_peer else QpState.RTS)
    assert near.cq.poll() == far.cq.poll() == []
