"""Connected queue pairs, and waiting for their completions."""

from dataclasses import dataclass

from aioverbs import AccessFlags, Mtu, QpState, QpType, WcStatus
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.attributes import AddressVector, QpCapabilities
from tests.pace import patience
from tests.raw_verbs import Completion, poll
from tests.waiting import wait_until

ALL_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
CAPABILITIES = QpCapabilities(max_send_wr=128, max_recv_wr=128, max_send_sge=4, max_recv_sge=4, max_inline_data=64)
PATIENCE_S = patience(20)

Sge = tuple[int, int, int]


def make_domain(context: software.Context, kind: str) -> handles.ProtectionDomain:
    """Create a protection domain to make queues on: "plain", or a parent domain with a "thread domain"."""
    pd = handles.ProtectionDomain(context)
    return pd if kind == "plain" else parent_domain.ParentDomain(pd, parent_domain.ThreadDomain(context))


def make_queue(
    context: handles.Context,
    domain: handles.ProtectionDomain,
    cqe: int = 256,
    channel: handles.CompletionChannel | None = None,
    *,
    extended: bool = False,
) -> handles.CompletionQueue:
    """Create a completion queue on a domain of either kind."""
    parent = domain if isinstance(domain, parent_domain.ParentDomain) else None
    return handles.CompletionQueue(context, cqe, channel, extended=extended, parent_domain=parent)


def to_init(qp: handles.QueuePair, access: AccessFlags = ALL_ACCESS) -> None:
    qp.modify(QpState.INIT, pkey_index=0, port_num=1, qp_access_flags=access)


def to_rtr(
    qp: handles.QueuePair,
    peer: int,
    *,
    psn: int = 0,
    max_dest_rd_atomic: int = 16,
    min_rnr_timer: int = 1,
    path_mtu: Mtu = Mtu.MTU_4096,
) -> None:
    qp.modify(
        QpState.RTR,
        path_mtu=path_mtu,
        dest_qp_num=peer,
        rq_psn=psn,
        max_dest_rd_atomic=max_dest_rd_atomic,
        min_rnr_timer=min_rnr_timer,
        av=AddressVector(dgid=qp.context.query_gid(1, 1), sgid_index=1),
    )


def to_rts(
    qp: handles.QueuePair,
    *,
    psn: int = 0,
    timeout: int = 8,
    retry_cnt: int = 0,
    rnr_retry: int = 0,
    max_rd_atomic: int = 16,
) -> None:
    qp.modify(
        QpState.RTS,
        timeout=timeout,
        retry_cnt=retry_cnt,
        rnr_retry=rnr_retry,
        sq_psn=psn,
        max_rd_atomic=max_rd_atomic,
    )


def connect_to(qp: handles.QueuePair, peer: handles.QueuePair, access: AccessFlags = ALL_ACCESS) -> None:
    """Take a queue pair in RESET to RTS, without retries, so that failures are reported quickly."""
    to_init(qp, access)
    to_rtr(qp, peer.qp_num)
    to_rts(qp)


def connect(near: handles.QueuePair, far: handles.QueuePair, access: AccessFlags = ALL_ACCESS) -> None:
    """Connect two queue pairs with each other."""
    connect_to(near, far, access)
    connect_to(far, near, access)


def wait_for(cq: handles.CompletionQueue, count: int = 1) -> list[Completion]:
    """Poll until `count` completions have arrived, with a time limit."""
    completions: list[Completion] = []

    def enough() -> bool:
        completions.extend(poll(cq, count - len(completions)))
        return len(completions) == count

    if count:
        wait_until(enough)
    return completions


def succeed(cq: handles.CompletionQueue) -> Completion:
    """Return the next completion, and check that it is a success."""
    (completion,) = wait_for(cq)
    assert completion.status is WcStatus.SUCCESS, completion
    return completion


def next_event(context: software.Context) -> handles.AsyncEvent:
    """Wait for the next asynchronous event, and return it."""
    events: list[handles.AsyncEvent] = []

    def event_arrived() -> bool:
        event = context.get_async_event()
        events.extend([event] if event else [])
        return bool(events)

    wait_until(event_arrived)
    return events[0]


@dataclass
class End:
    """A queue pair with a completion queue and registered memory of its own."""

    qp: handles.QueuePair
    cq: handles.CompletionQueue
    memory: bytearray
    region: handles.MemoryRegion

    @property
    def pd(self) -> handles.ProtectionDomain:
        """The protection domain of this end."""
        return self.region.pd

    def sge(self, offset: int = 0, length: int | None = None) -> Sge:
        """Return a scatter/gather entry for a part of the memory, by default all of it."""
        return self.region.address + offset, self.region.length if length is None else length, self.region.lkey


def make_end(
    domain: handles.ProtectionDomain,
    *,
    size: int = 4096,
    access: AccessFlags = ALL_ACCESS,
    extended: bool = False,
    channel: handles.CompletionChannel | None = None,
    capabilities: QpCapabilities = CAPABILITIES,
    sq_sig_all: bool = False,
    qp_type: QpType = QpType.RC,
    srq: handles.SharedReceiveQueue | None = None,
) -> End:
    cq = make_queue(domain.context, domain, 256, channel, extended=extended)
    qp = handles.QueuePair(domain, cq, cq, capabilities, sq_sig_all=sq_sig_all, qp_type=qp_type, srq=srq)
    memory = bytearray(size)
    return End(qp, cq, memory, handles.MemoryRegion(domain, memory, access))


def make_pair(
    context: software.Context, kind: str = "plain", *, size: int = 4096, extended: bool = False
) -> tuple[End, End]:
    """Create two connected ends on one domain."""
    domain = make_domain(context, kind)
    near, far = make_end(domain, size=size, extended=extended), make_end(domain, size=size, extended=extended)
    connect(near.qp, far.qp)
    return near, far
