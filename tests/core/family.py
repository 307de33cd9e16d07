"""One of every handle, with what it was made from."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aioverbs import MwType, QpType
from aioverbs._core import domains, engine
from aioverbs.attributes import AddressVector
from tests.core.pairs import ALL_ACCESS


@dataclass(frozen=True)
class Member:
    """A kind of handle: how it is made, and the names of the members that it is made from."""

    make: Callable[..., engine.Handle]
    parents: tuple[str, ...]


def _region(pd: engine.ProtectionDomain) -> engine.MemoryRegion:
    return engine.MemoryRegion(pd, bytearray(64), ALL_ACCESS)


def _extended_queue(
    context: engine.Context, channel: engine.CompletionChannel, domain: domains.ParentDomain
) -> engine.CompletionQueue:
    return engine.CompletionQueue(context, 16, channel, extended=True, parent_domain=domain)


def _queue(context: engine.Context, channel: engine.CompletionChannel | None = None) -> engine.CompletionQueue:
    return engine.CompletionQueue(context, 16, channel)


def _way(pd: engine.ProtectionDomain) -> engine.AddressHandle:
    return engine.AddressHandle(pd, AddressVector(pd.context.query_gid(1, 1), sgid_index=1))


def _srq(pd: engine.ProtectionDomain) -> engine.SharedReceiveQueue:
    return engine.SharedReceiveQueue(pd, 16)


def _xrc_srq(
    pd: engine.ProtectionDomain, xrc_domain: domains.XrcDomain, cq: engine.CompletionQueue
) -> engine.SharedReceiveQueue:
    return engine.SharedReceiveQueue(pd, 16, xrc_domain=xrc_domain, cq=cq)


def _qp_of_srq(
    pd: engine.ProtectionDomain,
    send_cq: engine.CompletionQueue,
    recv_cq: engine.CompletionQueue,
    srq: engine.SharedReceiveQueue,
) -> engine.QueuePair:
    return engine.QueuePair(pd, send_cq, recv_cq, srq=srq)


def _xrc_receiver(xrc_domain: domains.XrcDomain) -> engine.QueuePair:
    return engine.QueuePair(xrc_domain=xrc_domain, qp_type=QpType.XRC_RECV)


# A child that pins a parent in each way there is; the parents stand before it.
MEMBERS: dict[str, Member] = {
    "pd": Member(engine.ProtectionDomain, ("context",)),
    "td": Member(domains.ThreadDomain, ("context",)),
    "domain": Member(domains.ParentDomain, ("pd", "td")),
    "region": Member(_region, ("pd",)),
    "region of a parent domain": Member(_region, ("domain",)),
    "channel": Member(engine.CompletionChannel, ("context",)),
    "queue": Member(_queue, ("context", "channel")),
    "queue without a channel": Member(_queue, ("context",)),
    "extended queue": Member(_extended_queue, ("context", "channel", "domain")),
    "window": Member(partial(engine.MemoryWindow, mw_type=MwType.TYPE_1), ("pd",)),
    "window of type 2": Member(partial(engine.MemoryWindow, mw_type=MwType.TYPE_2), ("domain",)),
    "ah": Member(_way, ("pd",)),
    "xrc domain": Member(domains.XrcDomain, ("context",)),
    "srq": Member(_srq, ("pd",)),
    "srq of a parent domain": Member(_srq, ("domain",)),
    "xrc srq": Member(_xrc_srq, ("pd", "xrc domain", "queue")),
    "qp": Member(engine.QueuePair, ("pd", "queue", "queue without a channel")),
    "qp of a parent domain": Member(engine.QueuePair, ("domain", "extended queue", "extended queue")),
    "qp of a srq": Member(_qp_of_srq, ("pd", "queue", "queue", "srq")),
    "uc": Member(partial(engine.QueuePair, qp_type=QpType.UC), ("pd", "queue", "queue")),
    "ud": Member(partial(engine.QueuePair, qp_type=QpType.UD), ("pd", "queue", "queue")),
    "xrc sender": Member(partial(engine.QueuePair, qp_type=QpType.XRC_SEND), ("pd", "queue")),
    "xrc receiver": Member(_xrc_receiver, ("xrc domain",)),
}

Family = dict[str, engine.Handle]


def make(name: str, family: Family) -> engine.Handle:
    """Make a member and, before it, what it is made from, as far as the family does not have it yet."""
    if name not in family:
        family[name] = MEMBERS[name].make(*(make(parent, family) for parent in MEMBERS[name].parents))
    return family[name]


def make_all(context: engine.Context, family: Family | None = None) -> Family:
    """A context with one of each, those that `family` has already left as they are."""
    family = family if family is not None else {}
    family["context"] = context
    for name in MEMBERS:
        make(name, family)
    return family


# Every parent with each child that it can have.
KINSHIPS = [(parent, child) for child, member in MEMBERS.items() for parent in dict.fromkeys(member.parents)]
