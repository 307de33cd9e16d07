"""One handle of every kind, with its parents."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aioverbs import MwType, QpType
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.attributes import AddressVector
from tests.core.pairs import ALL_ACCESS


@dataclass(frozen=True)
class Member:
    """A kind of handle: its constructor, and the names of its parents."""

    make: Callable[..., handles.Handle]
    parents: tuple[str, ...]


def _region(pd: handles.ProtectionDomain) -> handles.MemoryRegion:
    return handles.MemoryRegion(pd, bytearray(64), ALL_ACCESS)


def _extended_queue(
    context: software.Context, channel: handles.CompletionChannel, domain: parent_domain.ParentDomain
) -> handles.CompletionQueue:
    return handles.CompletionQueue(context, 16, channel, extended=True, parent_domain=domain)


def _queue(context: software.Context, channel: handles.CompletionChannel | None = None) -> handles.CompletionQueue:
    return handles.CompletionQueue(context, 16, channel)


def _address_handle(pd: handles.ProtectionDomain) -> handles.AddressHandle:
    return handles.AddressHandle(pd, AddressVector(pd.context.query_gid(1, 1), sgid_index=1))


def _srq(pd: handles.ProtectionDomain) -> handles.SharedReceiveQueue:
    return handles.SharedReceiveQueue(pd, 16)


def _xrc_srq(
    pd: handles.ProtectionDomain, xrc_domain: parent_domain.XrcDomain, cq: handles.CompletionQueue
) -> handles.SharedReceiveQueue:
    return handles.SharedReceiveQueue(pd, 16, xrc_domain=xrc_domain, cq=cq)


def _qp_of_srq(
    pd: handles.ProtectionDomain,
    send_cq: handles.CompletionQueue,
    recv_cq: handles.CompletionQueue,
    srq: handles.SharedReceiveQueue,
) -> handles.QueuePair:
    return handles.QueuePair(pd, send_cq, recv_cq, srq=srq)


def _xrc_receiver(xrc_domain: parent_domain.XrcDomain) -> handles.QueuePair:
    return handles.QueuePair(xrc_domain=xrc_domain, qp_type=QpType.XRC_RECV)


# A child for each way to hold a reference to a parent; parents come first.
MEMBERS: dict[str, Member] = {
    "pd": Member(handles.ProtectionDomain, ("context",)),
    "td": Member(parent_domain.ThreadDomain, ("context",)),
    "domain": Member(parent_domain.ParentDomain, ("pd", "td")),
    "region": Member(_region, ("pd",)),
    "region of a parent domain": Member(_region, ("domain",)),
    "channel": Member(handles.CompletionChannel, ("context",)),
    "queue": Member(_queue, ("context", "channel")),
    "queue without a channel": Member(_queue, ("context",)),
    "extended queue": Member(_extended_queue, ("context", "channel", "domain")),
    "window": Member(partial(handles.MemoryWindow, mw_type=MwType.TYPE_1), ("pd",)),
    "window of type 2": Member(partial(handles.MemoryWindow, mw_type=MwType.TYPE_2), ("domain",)),
    "ah": Member(_address_handle, ("pd",)),
    "xrc domain": Member(parent_domain.XrcDomain, ("context",)),
    "srq": Member(_srq, ("pd",)),
    "srq of a parent domain": Member(_srq, ("domain",)),
    "xrc srq": Member(_xrc_srq, ("pd", "xrc domain", "queue")),
    "qp": Member(handles.QueuePair, ("pd", "queue", "queue without a channel")),
    "qp of a parent domain": Member(handles.QueuePair, ("domain", "extended queue", "extended queue")),
    "qp of a srq": Member(_qp_of_srq, ("pd", "queue", "queue", "srq")),
    "uc": Member(partial(handles.QueuePair, qp_type=QpType.UC), ("pd", "queue", "queue")),
    "ud": Member(partial(handles.QueuePair, qp_type=QpType.UD), ("pd", "queue", "queue")),
    "xrc sender": Member(partial(handles.QueuePair, qp_type=QpType.XRC_SEND), ("pd", "queue")),
    "xrc receiver": Member(_xrc_receiver, ("xrc domain",)),
}

Family = dict[str, handles.Handle]


def make(name: str, family: Family) -> handles.Handle:
    """Create a member, after those of its parents that the family does not have yet."""
    if name not in family:
        family[name] = MEMBERS[name].make(*(make(parent, family) for parent in MEMBERS[name].parents))
    return family[name]


def make_all(context: software.Context, family: Family | None = None) -> Family:
    """Create one of each handle on a context; members of `family` are reused."""
    family = family if family is not None else {}
    family["context"] = context
    for name in MEMBERS:
        make(name, family)
    return family
