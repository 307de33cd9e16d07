"""State transitions of queue pairs, by hand and by `connect`, and errors of wrong transitions."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aioverbs import (
    AccessFlags,
    BusyResourceError,
    ClosedResourceError,
    Device,
    Endpoint,
    EventType,
    LinkLayer,
    MemoryRegion,
    Mtu,
    QpState,
    QpType,
    QueuePair,
    ResourceDomain,
    SendOpcode,
    SharedReceiveQueue,
    TransitionError,
    VerbsError,
    WcStatus,
    WorkCompletionError,
)
from aioverbs._core.handles import handles
from aioverbs._verbs.completion_queue import CompletionQueue
from aioverbs._verbs.qp_modify import Connectable
from aioverbs._verbs.quirks import is_soft_roce
from aioverbs.attributes import AddressVector, DeviceAttributes, PortAttributes
from tests.capabilities import Capability, capabilities, needs, qp_types
from tests.core.pairs import succeed, wait_for
from tests.holding import hold, unhold
from tests.pace import patience
from tests.raw_verbs import post_recv, post_send
from tests.waiting import wait_until

RESET, INIT, RTR, RTS, SQD, ERR = QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS, QpState.SQD, QpState.ERR
RC, UC, UD, XRC_SEND, XRC_RECV = QpType.RC, QpType.UC, QpType.UD, QpType.XRC_SEND, QpType.XRC_RECV
READ, WRITE = AccessFlags.REMOTE_READ, AccessFlags.REMOTE_WRITE
REMOTE = AccessFlags.LOCAL_WRITE | READ | WRITE
GRH_BYTES = 40

every_type = qp_types(RC, UC, UD, XRC_SEND, XRC_RECV)


@dataclass
class QueuePairs:
    """Two queue pairs in RESET that can be connected to each other, and memory; `srq` for XRC."""

    domain: ResourceDomain
    near: QueuePair
    far: QueuePair
    sent: CompletionQueue
    received: CompletionQueue
    region: MemoryRegion
    srq: SharedReceiveQueue | None

    def connect(self, **attributes: Any) -> None:
        near, far = self.near.local_endpoint(), self.far.local_endpoint()
        self.near.connect(far, REMOTE, **attributes)
        self.far.connect(near, REMOTE)


@asynccontextmanager
async def queue_pairs(device: Device, qp_type: QpType = RC) -> AsyncIterator[QueuePairs]:
    """Provide queue pairs; `near` is of type `qp_type`."""
    async with contextlib.AsyncExitStack() as stack:
        opened = stack.enter_async_context
        domain = await opened(device.resource_domain())
        region = await opened(domain.register(4096, REMOTE))
        sent = await opened(domain.completion_queue(64))
        received = await opened(domain.completion_queue(64))
        srq = None
        if qp_type in (XRC_SEND, XRC_RECV):
            xrc = await opened(device.xrc_domain())
            srq = await opened(domain.shared_receive_queue(4, xrc_domain=xrc, cq=received))
            sender, answers = domain.queue_pair(sent, qp_type=XRC_SEND), xrc.queue_pair()
            near, far = (sender, answers) if qp_type is XRC_SEND else (answers, sender)
        else:
            near, far = (domain.queue_pair(sent, received, qp_type=qp_type) for _ in range(2))
        await opened(near)
        await opened(far)
        yield QueuePairs(domain, near, far, sent, received, region, srq)


def port_mtu(device: Device) -> Mtu:
    return Mtu(device.handle.query_port(1).active_mtu)


# ---- Transitions by hand


@every_type
async def test_each_transition_by_hand(device: Device, qp_type: QpType) -> None:
    async with queue_pairs(device, qp_type) as pair:
        near, remote = pair.near, pair.far.local_endpoint()
        connected, requests, responds = qp_type is not UD, qp_type in (RC, XRC_SEND), qp_type in (RC, XRC_RECV)
        assert near.qp_state is RESET

        near.to_init()
        found = near.query()
        assert near.qp_state is found.qp_state is INIT
        assert (found.pkey_index, found.port_num) == (0, 1)
        assert found.qp_access_flags == (AccessFlags.LOCAL_WRITE if connected else 0)
        assert found.qkey == (0 if connected else near.local_endpoint().qkey)
        if connected:
            near.to_init(qp_access_flags=READ)
            assert near.query().qp_access_flags == READ
        else:
            near.to_init(qkey=0x1234)
            assert near.query().qkey == near.local_endpoint().qkey == 0x1234

        if connected:
            near.to_rtr(remote)
            found = near.query()
            assert (found.dest_qp_num, found.rq_psn, found.path_mtu) == (remote.qp_num, remote.psn, port_mtu(device))
            assert (found.av.dgid, found.av.sgid_index, found.av.port_num) == (remote.gid, near.gid_index, 1)
            serves = device.attributes().max_qp_rd_atom
            assert (found.max_dest_rd_atomic, found.min_rnr_timer) == ((serves, 18) if responds else (0, 0))
            assert near.remote_endpoint == remote
        else:
            near.to_rtr()
            assert near.remote_endpoint is None
        assert near.qp_state is near.query().qp_state is RTR

        near.to_rts(sq_psn=77)
        found = near.query()
        assert near.qp_state is found.qp_state is RTS
        assert found.sq_psn == near.local_endpoint().psn == 77
        assert found.timeout == (14 if requests or responds else 0)
        requested = device.attributes().max_qp_init_rd_atom
        assert (found.retry_cnt, found.rnr_retry, found.max_rd_atomic) == ((6, 6, requested) if requests else (0, 0, 0))

        if connected:
            near.to_rts(qp_access_flags=WRITE, cur_qp_state=RTS)
            assert near.query().qp_access_flags == WRITE
        else:
            near.to_rts(qkey=0x4321)
            assert near.query().qkey == near.local_endpoint().qkey == 0x4321

        near.to_sqd()
        assert near.qp_state is near.query().qp_state is SQD
        if requests:
            near.to_sqd(timeout=16, retry_cnt=1)
            found = near.query()
            assert (found.timeout, found.retry_cnt) == (16, 1)
        near.to_rts()
        assert near.qp_state is RTS

        near.to_error()
        assert near.qp_state is near.query().qp_state is ERR
        near.to_error()
        near.to_reset()
        assert near.qp_state is near.query().qp_state is RESET
        assert near.remote_endpoint is None
        assert near.local_endpoint().psn != 77


async def test_peer_attributes_one_by_one(device: Device) -> None:
    async with queue_pairs(device) as pair:
        remote = pair.far.local_endpoint()
        pair.near.to_init(qp_access_flags=REMOTE)
        pair.near.to_rtr(
            av=replace(pair.near.path_to(remote), traffic_class=104),
            path_mtu=Mtu.MTU_1024,
            dest_qp_num=remote.qp_num,
            rq_psn=remote.psn,
        )
        found = pair.near.query()
        assert (found.av.traffic_class, found.path_mtu) == (104, Mtu.MTU_1024)
        assert found.max_dest_rd_atomic == 1, "the default for an unknown peer"
        assert pair.near.remote_endpoint is None
        pair.near.to_rts()
        assert pair.near.query().max_rd_atomic == 1
        pair.far.connect(pair.near.local_endpoint(), REMOTE)
        await pair.near.write(pair.region[:8], pair.region.remote()[8:16])


async def test_a_remote_endpoint_with_further_attributes(device: Device) -> None:
    async with queue_pairs(device) as pair:
        pair.near.to_init()
        pair.near.to_rtr(pair.far.local_endpoint(), path_mtu=Mtu.MTU_512, min_rnr_timer=5)
        found = pair.near.query()
        assert (found.path_mtu, found.min_rnr_timer) == (Mtu.MTU_512, 5)


async def test_modify_while_draining(device: Device) -> None:
    async with queue_pairs(device) as pair:
        near, far = pair.near.local_endpoint(), pair.far.local_endpoint()
        pair.near.connect(far)
        pair.far.connect(near, min_rnr_timer=31)  # RNR timer of half a second, during which the sender waits
        post_send(pair.near.handle, SendOpcode.SEND, [pair.region[:4].sge])
        wait_until(lambda: _is_draining(pair.near))
        with pytest.raises(TransitionError, match=r"sq_draining: .* wait for EventType\.SQ_DRAINED"):
            pair.near.to_sqd(timeout=9)
        assert pair.near.query().timeout == 14
        pair.near.to_error()
        assert wait_for(pair.sent.handle)[0].status is WcStatus.WR_FLUSH_ERR


def _is_draining(qp: QueuePair) -> bool:
    """Move a queue pair to SQD, and return whether it is still draining; move it back otherwise."""
    qp.to_sqd()
    found = qp.query().sq_draining
    if not found:
        qp.to_rts()
    return found


async def test_event_when_drained(device: Device) -> None:
    async with queue_pairs(device) as pair:
        pair.connect()
        events = device.events()
        pair.near.to_sqd(en_sqd_async_notify=True)
        async with asyncio.timeout(patience(10)):
            assert (await anext(events)).event_type is EventType.SQ_DRAINED
        pair.near.to_sqd(timeout=20)
        pair.near.to_rts()
        assert pair.near.query().timeout == 20
        await pair.near.write(pair.region[:8], pair.region.remote()[8:16])


# ---- Connect, and use


@pytest.mark.parametrize("qp_type", [RC, UC], ids=lambda qp_type: qp_type.name)
async def test_connected_queue_pairs_write(device: Device, qp_type: QpType) -> None:
    async with queue_pairs(device, qp_type) as pair:
        pair.connect()
        assert pair.near.qp_state is pair.far.qp_state is RTS
        assert pair.near.remote_endpoint == pair.far.local_endpoint()
        pair.region.buffer[:5] = b"hello"
        await pair.near.write(pair.region[:5], pair.region.remote()[100:105])
        wait_until(lambda: bytes(pair.region.buffer[100:105]) == b"hello")  # an unreliable write completes when sent


@needs(Capability.XRC_DOMAINS)
async def test_xrc_sends(device: Device) -> None:
    async with queue_pairs(device, XRC_SEND) as pair:
        pair.connect()
        assert pair.srq is not None
        post_recv(pair.srq.handle, [pair.region[32:64].sge])
        pair.region.buffer[:4] = b"sent"
        post_send(pair.near.handle, SendOpcode.SEND, [pair.region[:4].sge], remote_srqn=pair.srq.number)
        succeed(pair.received.handle)
        assert bytes(pair.region.buffer[32:36]) == b"sent"


async def test_datagrams_to_an_endpoint(device: Device) -> None:
    async with queue_pairs(device, UD) as pair:
        pair.far.activate()
        pair.near.activate(qkey=0x77)
        assert pair.near.qp_state is pair.near.query().qp_state is RTS
        remote = pair.far.local_endpoint()
        assert remote.qp_type is UD
        assert remote.qkey == pair.far.query().qkey < 1 << 31, "the upper half of the keys is for privileged users"
        assert pair.near.local_endpoint().qkey == 0x77
        post_recv(pair.far.handle, [pair.region[1024:2048].sge])
        pair.region.buffer[:4] = b"sent"
        ah = handles.AddressHandle(pair.region.handle.pd, pair.near.path_to(remote))
        post_send(
            pair.near.handle,
            SendOpcode.SEND,
            [pair.region[:4].sge],
            ah=ah,
            remote_qpn=remote.qp_num,
            remote_qkey=remote.qkey,
        )
        succeed(pair.received.handle)
        ah.destroy()
        assert bytes(pair.region.buffer[1024 + GRH_BYTES : 1028 + GRH_BYTES]) == b"sent"


async def test_connecting_from_init_keeps_attributes_of_init(device: Device) -> None:
    async with queue_pairs(device) as pair:
        pair.near.to_init(qp_access_flags=READ)
        pair.far.to_init()
        near, far = pair.near.local_endpoint(), pair.far.local_endpoint()
        pair.near.connect(far)
        pair.far.connect(near, REMOTE)
        assert pair.near.query().qp_access_flags == READ
        assert pair.far.query().qp_access_flags == REMOTE
    async with queue_pairs(device, UD) as pair:
        pair.near.to_init(qkey=5)
        pair.near.activate()
        assert (pair.near.qp_state, pair.near.query().qkey) == (RTS, 5)


@pytest.mark.parametrize("first", ["error", "reset"])
async def test_reconnecting_a_queue_pair(device: Device, first: str) -> None:
    async with queue_pairs(device) as pair:
        pair.connect()
        psn = pair.near.local_endpoint().psn
        for qp in (pair.near, pair.far):
            if first == "error":
                qp.to_error()
            qp.to_reset()
        assert pair.near.local_endpoint().psn != psn, "or late packets of the first connection would fit the second"
        pair.connect()
        pair.region.buffer[:5] = b"again"
        await pair.near.write(pair.region[:5], pair.region.remote()[100:105])
        assert bytes(pair.region.buffer[100:105]) == b"again"


# ---- Negotiation


async def test_local_endpoint(device: Device) -> None:
    has = device.attributes()
    requested, serves = has.max_qp_init_rd_atom, has.max_qp_rd_atom
    xrc = [(XRC_SEND, requested, 0), (XRC_RECV, 0, serves)]
    if Capability.XRC_DOMAINS not in capabilities(device.name):
        xrc.clear()
    for qp_type, reads, served in ((RC, requested, serves), (UC, 0, 0), (UD, 0, 0), *xrc):
        async with queue_pairs(device, qp_type) as pair:
            endpoint = pair.near.local_endpoint()
            assert (endpoint.qp_type, endpoint.qp_num, endpoint.lid) == (qp_type, pair.near.qp_num, 0)
            assert (endpoint.gid, endpoint.mtu) == (device.handle.query_gid(1, pair.near.gid_index), port_mtu(device))
            assert (endpoint.max_rd_atomic, endpoint.max_dest_rd_atomic) == (reads, served)
            assert bool(endpoint.qkey) == (qp_type is UD)
            assert endpoint == pair.near.local_endpoint() == Endpoint.from_bytes(bytes(endpoint))


async def test_a_peer_with_lower_limits(device: Device) -> None:
    async with queue_pairs(device) as pair:
        less = replace(pair.far.local_endpoint(), max_rd_atomic=2, max_dest_rd_atomic=4, mtu=Mtu.MTU_1024)
        pair.near.connect(less)
        found = pair.near.query()
        assert (found.max_rd_atomic, found.max_dest_rd_atomic, found.path_mtu) == (4, 2, Mtu.MTU_1024)
        pair.near.to_reset()
        more = replace(less, max_rd_atomic=200, max_dest_rd_atomic=200)
        pair.near.connect(more, max_rd_atomic=8)  # some devices support only powers of two
        found = pair.near.query()
        served = 2 if is_soft_roce(device.handle) else min(device.attributes().max_qp_rd_atom, 200)
        assert (found.max_rd_atomic, found.max_dest_rd_atomic) == (8, served)


async def test_rnr_retries_wait_for_a_late_receive(device: Device) -> None:
    async with queue_pairs(device) as pair:
        near = pair.near.local_endpoint()
        pair.near.connect(pair.far.local_endpoint(), rnr_retry=7)  # unlimited retries
        pair.far.connect(near, min_rnr_timer=26)
        pair.region.buffer[:4] = b"late"
        post_send(pair.near.handle, SendOpcode.SEND, [pair.region[:4].sge])
        await asyncio.sleep(0.01)
        post_recv(pair.far.handle, [pair.region[64:128].sge])
        succeed(pair.received.handle)
        assert bytes(pair.region.buffer[64:68]) == b"late"


async def test_rnr_retries_end_without_a_receive(device: Device) -> None:
    async with queue_pairs(device) as pair:
        pair.connect()
        post_send(pair.near.handle, SendOpcode.SEND, [pair.region[:4].sge])
        assert wait_for(pair.sent.handle)[0].status is WcStatus.RNR_RETRY_EXC_ERR
        assert pair.near.qp_state is RTS, "the last known state"
        with pytest.raises(TransitionError, match="from ERR to RTS: there is no such transition"):
            pair.near.to_rts()
        assert pair.near.qp_state is ERR


@dataclass
class FakePort:
    """Fake context of a device whose port differs from the software device's."""

    gid: bytes
    lid: int
    link_layer: LinkLayer
    real: handles.Context
    name: str = "port of no device"
    mtu: Mtu = Mtu.MTU_4096

    def query_port(self, port_num: int) -> PortAttributes:
        return replace(self.real.query_port(port_num), lid=self.lid, link_layer=self.link_layer, active_mtu=self.mtu)

    def query_gid(self, port_num: int, index: int) -> bytes:
        return self.gid

    @property
    def attributes(self) -> DeviceAttributes:
        return self.real.attributes


class FakeQueuePair(Connectable):
    """Queue pair on a fake port."""

    qp_type = RC
    _port = 1
    _gid_index = 1

    def __init__(self, port: FakePort) -> None:
        super().__init__()
        self.port = port

    @property
    def handle(self) -> handles.QueuePair:
        return cast(handles.QueuePair, SimpleNamespace(context=self.port, qp_num=5))


async def test_infiniband_and_a_port_without_a_gid(device: Device) -> None:
    gid = bytes(range(16))
    qp = FakeQueuePair(FakePort(gid, 7, LinkLayer.INFINIBAND, device.handle))
    endpoint = qp.local_endpoint()
    assert (endpoint.gid, endpoint.lid, endpoint.qp_num) == (gid, 7, 5)
    path = qp.path_to(replace(endpoint, lid=9, gid=gid[:8] + bytes(8)))
    assert path == AddressVector(dlid=9, sgid_index=1, port_num=1)
    with pytest.raises(ValueError, match=r"port 1 of port of no device has no GID at index 1: give the `gid_index`"):
        FakeQueuePair(FakePort(bytes(16), 0, LinkLayer.ETHERNET, device.handle)).local_endpoint()
    assert FakeQueuePair(FakePort(bytes(16), 7, LinkLayer.INFINIBAND, device.handle)).local_endpoint().lid == 7
    without_mtu = FakePort(gid, 0, LinkLayer.ETHERNET, device.handle, mtu=Mtu.NONE)
    with pytest.raises(ValueError, match="port 1 of port of no device has no MTU: bring its network interface up"):
        FakeQueuePair(without_mtu).local_endpoint()


# ---- Mistakes

ELSEWHERE = Endpoint(bytes(range(16)), 1, 2, Mtu.MTU_1024)
WAY = AddressVector(bytes(range(16)), sgid_index=1)

Act = Callable[[QueuePair], None]


@dataclass(frozen=True)
class Mistake:
    """Wrong call in a state that was reached by valid transitions, and the expected error."""

    qp_type: QpType
    state: QpState
    act: Act
    message: str
    kind: type[Exception] = TransitionError


MISTAKES = [
    Mistake(RC, RESET, lambda qp: qp.to_rtr(ELSEWHERE), r"reachable from RESET: RESET, INIT$"),
    Mistake(RC, RESET, lambda qp: qp.to_rts(), r"from RESET to RTS: there is no such transition"),
    Mistake(UC, RESET, lambda qp: qp.to_sqd(), r"from RESET to SQD: there is no such transition"),
    Mistake(RC, RESET, lambda qp: qp.to_error(), r"from RESET to ERR: there is no such transition"),
    Mistake(RC, RESET, lambda qp: qp.to_init(qkey=1), r"not allowed in this transition: qkey$"),
    Mistake(
        UD, RESET, lambda qp: qp.to_init(qp_access_flags=READ), r"not allowed in this transition: qp_access_flags$"
    ),
    Mistake(UD, RESET, lambda qp: qp.to_init(qkey=1 << 32), r"qkey: must be 0 to 4294967295, got 4294967296$"),
    Mistake(RC, RESET, lambda qp: qp.to_init(port_num=2), r"port_num: must be 1 to 1, got 2$"),
    Mistake(RC, RESET, lambda qp: qp.to_init(pkey_index=1), r"pkey_index: must be 0 to 0, got 1$"),
    Mistake(
        RC, RESET, lambda qp: qp.to_init(qp_access_flags=AccessFlags.MW_BIND), r"qp_access_flags: must be .*, got 0x10"
    ),
    Mistake(
        RC, INIT, lambda qp: qp.to_rtr(), r"missing: av, dest_qp_num, path_mtu, rq_psn \(pass the remote endpoint to"
    ),
    Mistake(RC, INIT, lambda qp: qp.to_rtr(rq_psn=1, av=WAY), r"missing: dest_qp_num, path_mtu \(pass the remote"),
    Mistake(
        XRC_SEND, INIT, lambda qp: qp.to_rtr(replace(ELSEWHERE, qp_type=XRC_RECV), min_rnr_timer=1), r"not allowed in"
    ),
    Mistake(RC, INIT, lambda qp: qp.to_rtr(ELSEWHERE, min_rnr_timer=32), r"min_rnr_timer: must be 0 to 31, got 32"),
    Mistake(
        RC,
        INIT,
        lambda qp: qp.to_rtr(ELSEWHERE, max_dest_rd_atomic=17),
        r"max_dest_rd_atomic: must be 0 to 16, got 17$",
    ),
    Mistake(
        RC, INIT, lambda qp: qp.to_rtr(ELSEWHERE, av=replace(WAY, dgid=b"")), r"av.dgid: must be the GID of the peer"
    ),
    Mistake(
        RC,
        INIT,
        lambda qp: qp.to_rtr(ELSEWHERE, av=replace(WAY, sgid_index=2)),
        r"av.sgid_index: must be 0 to 1, got 2$",
    ),
    Mistake(RC, INIT, lambda qp: qp.to_rts(), r"from INIT to RTS: there is no such transition; .* INIT, RTR, ERR$"),
    Mistake(UD, INIT, lambda qp: qp.to_rtr(replace(ELSEWHERE, qp_type=UD)), r"which is connectionless", ValueError),
    Mistake(RC, RTR, lambda qp: qp.to_rts(retry_cnt=8), r"retry_cnt: must be 0 to 7, got 8$"),
    Mistake(RC, RTR, lambda qp: qp.to_rts(rnr_retry=8, timeout=32), r"timeout: .*, got 32; rnr_retry: .*, got 8$"),
    Mistake(UC, RTR, lambda qp: qp.to_rts(timeout=4), r"not allowed in this transition: timeout$"),
    Mistake(UD, RTR, lambda qp: qp.to_rts(sq_psn=1 << 24), r"sq_psn: must be 0 to 16777215, got 16777216$"),
    Mistake(RC, RTS, lambda qp: qp.to_init(), r"from RTS to INIT: there is no such .* RESET, RTS, SQD, ERR$"),
    Mistake(RC, RTS, lambda qp: qp.to_rts(timeout=3), r"not allowed in this transition: timeout$"),
    Mistake(RC, RTS, lambda qp: qp.to_rts(cur_qp_state=SQD), r"cur_qp_state: SQD, but the queue pair is in RTS$"),
    Mistake(RC, RTS, lambda qp: qp.connect(ELSEWHERE), r"from RTS to INIT: there is no such transition"),
    Mistake(UD, RTS, lambda qp: qp.activate(), r"from RTS to INIT: there is no such transition"),
    Mistake(UC, SQD, lambda qp: qp.to_sqd(timeout=3), r"not allowed in this transition: timeout$"),
    Mistake(RC, ERR, lambda qp: qp.to_rts(), r"from ERR to RTS: there is no such transition; .* RESET, ERR$"),
    Mistake(
        RC, RESET, lambda qp: qp.connect(ELSEWHERE, timeout=99), r"from RTR to RTS: timeout: must be 0 to 31, got 99"
    ),
    Mistake(
        UC, RESET, lambda qp: qp.connect(replace(ELSEWHERE, qp_type=UC), rnr_retry=1), r"not allowed .*: rnr_retry$"
    ),
    Mistake(RC, RESET, lambda qp: qp.connect(ELSEWHERE, READ, qp_access_flags=WRITE), r"give one of them$", TypeError),
    Mistake(RC, RESET, lambda qp: qp.connect(replace(ELSEWHERE, qp_type=UC)), r"to type RC, not UC$", ValueError),
    Mistake(XRC_SEND, RESET, lambda qp: qp.connect(ELSEWHERE), r"connects to type XRC_RECV, not RC$", ValueError),
    Mistake(XRC_RECV, RESET, lambda qp: qp.connect(ELSEWHERE), r"connects to type XRC_SEND, not RC$", ValueError),
    Mistake(
        UD, RESET, lambda qp: qp.connect(qp.local_endpoint()), r"is of type UD, which is connectionless", ValueError
    ),
    Mistake(RC, RESET, lambda qp: qp.activate(), r"of type RC: connect\(\) it with a remote endpoint$", ValueError),
    Mistake(RC, RESET, lambda qp: qp.connect(replace(ELSEWHERE, lid=3)), r"one endpoint has a LID", ValueError),
    Mistake(RC, RESET, lambda qp: qp.connect(replace(ELSEWHERE, gid=bytes(16))), r"requires$", ValueError),
]


def _bring_to(pair: QueuePairs, state: QpState) -> None:
    remote = None if pair.near.qp_type is UD else pair.far.local_endpoint()
    moves: list[tuple[QpState, Callable[[], None]]] = [
        (INIT, pair.near.to_init),
        (RTR, lambda: pair.near.to_rtr(remote)),
        (RTS, pair.near.to_rts),
        (SQD, pair.near.to_sqd),
        (ERR, pair.near.to_error),
    ]
    for step, move in moves:
        if state >= step and not (state is ERR and step is SQD):
            move()
    assert pair.near.query().qp_state is state


@needs(Capability.FAULT_PLAN)
async def test_mistakes_are_refused_without_changes(device: Device) -> None:
    faults = device.faults
    for mistake in MISTAKES:
        async with queue_pairs(device, mistake.qp_type) as pair:
            _bring_to(pair, mistake.state)
            before = pair.near.query()
            faults.count_calls()
            with pytest.raises(mistake.kind, match=mistake.message) as caught:
                mistake.act(pair.near)
            assert faults.calls("query_qp") == 1
            assert faults.calls("modify_qp") == 0, mistake
            faults.count_calls(False)
            assert f"<QueuePair {pair.near.qp_num} (open)>" in str(caught.value) or mistake.kind is not TransitionError
            assert pair.near.query() == before
            assert pair.near.qp_state is mistake.state


@needs(Capability.FAULT_PLAN)
async def test_an_error_of_the_device_is_raised(device: Device) -> None:
    async with queue_pairs(device) as pair:
        remote = pair.far.local_endpoint()
        device.faults.fail("modify_qp", errno.EIO, first=2)
        with pytest.raises(VerbsError, match="ibv_modify_qp failed: EIO"):
            pair.near.connect(remote, READ)
        device.faults.clear()
        assert pair.near.qp_state is pair.near.query().qp_state is INIT
        assert pair.near.remote_endpoint is None
        pair.near.connect(remote)
        assert pair.near.qp_state is RTS
        assert pair.near.query().qp_access_flags == READ


async def test_reset_with_work_in_flight_is_refused(device: Device) -> None:
    async with queue_pairs(device) as pair:
        pair.connect()
        hold(device, pair.near)
        writing = asyncio.ensure_future(pair.near.write(pair.region[:8], pair.region.remote()[8:16]))
        await asyncio.sleep(0)
        with pytest.raises(BusyResourceError, match=r"1 work requests in flight, .* to_error\(\) and wait"):
            pair.near.to_reset()
        assert pair.near.query().qp_state in (RTS, SQD)
        unhold(device, pair.near)
        await writing
        pair.near.to_reset()
        assert pair.near.qp_state is RESET


async def test_to_error_flushes_work_in_flight(device: Device) -> None:
    async with queue_pairs(device) as pair:
        pair.connect(timeout=20)
        pair.far.to_reset()  # no answer for four seconds
        writing = asyncio.ensure_future(pair.near.write(pair.region[:8], pair.region.remote()[8:16]))
        await asyncio.sleep(0)
        pair.near.to_error()
        with pytest.raises(WorkCompletionError) as caught:
            await writing
        assert caught.value.status is WcStatus.WR_FLUSH_ERR
        pair.near.to_reset()


async def test_a_closed_queue_pair_has_no_states(device: Device) -> None:
    async with queue_pairs(device) as pair:
        remote = pair.far.local_endpoint()
        async with pair.domain.queue_pair(pair.sent) as qp:
            pass
        for act in (
            lambda: qp.connect(remote),
            lambda: qp.to_init(),
            lambda: qp.to_reset(),
            lambda: qp.local_endpoint(),
            lambda: qp.query(),
        ):
            with pytest.raises(ClosedResourceError):
                act()
