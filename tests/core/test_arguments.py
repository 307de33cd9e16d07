"""Invalid arguments are refused with an exception that names the problem, and nothing is done."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aioverbs import QpState, QpType, VerbsError
from aioverbs._core.alloc import allocators
from aioverbs._core.data_path import data_path
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.attributes import AddressVector, QpCapabilities
from tests.core.contexts import children, opened
from tests.core.family import Family, make_all

# Any on purpose: the tests pass arguments of wrong types.
Objects = Any
Call = Callable[[Objects], object]


@pytest.fixture
def objects() -> Iterator[Objects]:
    """One of each handle by a short name, and one of each of another context."""
    with opened("inline") as context, opened("inline") as other:
        family: Family = make_all(context)
        names = {name.replace(" ", "_"): handle for name, handle in family.items()}
        others = {f"other_{name.replace(' ', '_')}": handle for name, handle in make_all(other).items()}
        yield SimpleNamespace(**names, **others, none=None, text="16", fraction=0.5, call=lambda kind: kind())


def parametrize_cases(cases: dict[str, tuple[Call, type[Exception], str]]) -> pytest.MarkDecorator:
    values = [pytest.param(*case, id=name) for name, case in cases.items()]
    return pytest.mark.parametrize(("call", "error", "text"), values)


CONSTRUCTORS: dict[str, tuple[Call, type[Exception], str]] = {
    "pd of a pd": (
        lambda o: handles.ProtectionDomain(o.pd),
        TypeError,
        "expected aioverbs._core.handles.handles.Context",
    ),
    "pd of nothing": (lambda o: o.call(handles.ProtectionDomain), TypeError, "exactly 1 positional"),
    "parent domain of a context": (lambda o: parent_domain.ParentDomain(o.context), TypeError, "ProtectionDomain"),
    "parent domain of two contexts": (
        lambda o: parent_domain.ParentDomain(o.pd, o.other_td),
        ValueError,
        "a different context",
    ),
    "parent domain with a pd as td": (lambda o: parent_domain.ParentDomain(o.pd, o.pd), TypeError, "ThreadDomain"),
    "XRC domain of None": (lambda o: parent_domain.XrcDomain(o.none), TypeError, "NoneType"),
    "XRC domain of a bad descriptor": (
        lambda o: parent_domain.XrcDomain(o.context, 1 << 20),
        VerbsError,
        "xrcd failed: EBADF",
    ),
    "queue of None": (lambda o: handles.CompletionQueue(o.none, 1), TypeError, "NoneType"),
    "queue of 0": (lambda o: handles.CompletionQueue(o.context, 0), ValueError, "`cqe` must be at least 1, got 0"),
    "queue of far too many": (lambda o: handles.CompletionQueue(o.context, 1 << 31), OverflowError, "too large"),
    "queue on another's channel": (
        lambda o: handles.CompletionQueue(o.context, 1, o.other_channel),
        ValueError,
        "a different context",
    ),
    "queue on another's domain": (
        lambda o: handles.CompletionQueue(o.context, 1, parent_domain=o.other_domain),
        ValueError,
        "a different context",
    ),
    "queue on a missing vector": (lambda o: handles.CompletionQueue(o.context, 1, comp_vector=1), VerbsError, "EINVAL"),
    "qp of None": (lambda o: handles.QueuePair(o.none, o.queue, o.queue), ValueError, "of type RC needs pd"),
    "qp without a queue": (lambda o: handles.QueuePair(o.pd, o.queue, o.none), ValueError, "of type RC needs recv_cq"),
    "qp on another's queue": (
        lambda o: handles.QueuePair(o.pd, o.queue, o.other_queue),
        ValueError,
        "different context",
    ),
    "qp far too deep": (
        lambda o: handles.QueuePair(o.pd, o.queue, o.queue, QpCapabilities(max_send_wr=1 << 32)),
        OverflowError,
        "too large",
    ),
    "qp of negative depth": (
        lambda o: handles.QueuePair(o.pd, o.queue, o.queue, QpCapabilities(max_send_sge=-1)),
        OverflowError,
        "negative",
    ),
    "qp of other capabilities": (
        lambda o: handles.QueuePair(o.pd, o.queue, o.queue, o.text),
        AttributeError,
        "max_send_wr",
    ),
    "qp of a missing type": (
        lambda o: handles.QueuePair(o.pd, o.queue, o.queue, qp_type=QpType.RAW_PACKET),
        VerbsError,
        "ibv_create_qp failed: EOPNOTSUPP",
    ),
    "qp of an unknown type": (
        lambda o: handles.QueuePair(o.pd, o.queue, o.queue, qp_type=99),
        ValueError,
        "99 is not a valid QpType",
    ),
}


@parametrize_cases(CONSTRUCTORS)
def test_invalid_arguments_of_constructors_are_refused(
    objects: Objects, call: Call, error: type[Exception], text: str
) -> None:
    before, counts = handles.open_handles(), objects.context.counts()
    with pytest.raises(error, match=text):
        call(objects)
    assert handles.open_handles() == before
    assert objects.context.counts() == counts
    # The fixture destroys the parents afterwards, which fails if they were still referenced.


METHODS: dict[str, tuple[Call, type[Exception], str]] = {
    "negative delay": (
        lambda o: software.Context.open(execution="thread", delay_ns=-1),
        ValueError,
        "must be 0, or",
    ),
    "delay without thread": (lambda o: software.Context.open(delay_ns=1), ValueError, "with execution='thread', got 1"),
    "delay inline": (lambda o: o.context.set_delay(1), VerbsError, "soft_set_delay failed: EINVAL"),
    "port 256": (lambda o: o.context.query_port(256), ValueError, "from 0 to 255, got 256"),
    "port -1": (lambda o: o.context.query_gid(-1), ValueError, "from 0 to 255, got -1"),
    "missing port": (lambda o: o.context.query_port(2), VerbsError, "ibv_query_port failed: EINVAL"),
    "missing GID": (lambda o: o.context.query_gid(1, 1000), VerbsError, "ibv_query_gid failed: EINVAL"),
    "missing partition key": (lambda o: o.context.query_pkey(1, 1), VerbsError, "ibv_query_pkey failed: EINVAL"),
    "missing slot": (lambda o: o.context.table_slot("alloc_td"), ValueError, "not in the table"),
    "notify without channel": (lambda o: o.queue_without_a_channel.request_notify(), VerbsError, "EINVAL"),
    "ack of none": (lambda o: o.queue.ack_events(), ValueError, "has 0 unacknowledged events, got a `count` of 1"),
    "ack of -1": (lambda o: o.queue.ack_events(-1), ValueError, "got a `count` of -1"),
    "port too big": (lambda o: o.qp.modify(QpState.INIT, port_num=256), OverflowError, "too large"),
    "no address vector": (lambda o: o.qp.modify(av=b"x" * 16), AttributeError, "dlid"),
    "GID of 3 bytes": (
        lambda o: o.qp.modify(av=SimpleNamespace(**fields(AddressVector()), dgid=b"abc")),
        ValueError,
        "`dgid` must have 16 bytes, got 3",
    ),
}


def fields(value: AddressVector) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__slots__ if name != "dgid"}


@parametrize_cases(METHODS)
def test_invalid_arguments_of_methods_are_refused(
    objects: Objects, call: Call, error: type[Exception], text: str
) -> None:
    counts, qp = objects.context.counts(), objects.qp.query()
    with pytest.raises(error, match=text):
        call(objects)
    assert objects.context.counts() == counts
    assert objects.qp.query() == qp


FRACTIONS: dict[str, Call] = {
    "places of a completion queue": lambda o: handles.CompletionQueue(o.context, 1 + o.fraction),
    "events to acknowledge": lambda o: o.queue.ack_events(0.5),
    "port": lambda o: o.context.query_port(1.5),
    "PSN": lambda o: o.qp.modify(rq_psn=0.5),
    "descriptor": lambda o: parent_domain.XrcDomain(o.context, 1 + o.fraction),
    "NUMA node": lambda o: allocators.NumaAllocator(o.fraction),
    "units of a turn": lambda o: data_path.spend(o.fraction),
}


@pytest.mark.parametrize("call", FRACTIONS.values(), ids=FRACTIONS)
def test_fractions_are_refused_for_integers(objects: Objects, call: Call) -> None:
    counts, qp = objects.context.counts(), objects.qp.query()
    with pytest.raises(TypeError, match="integer"):
        call(objects)
    assert objects.context.counts() == counts
    assert objects.qp.query() == qp


def test_a_failure_after_the_verb_destroys_the_object(inline: software.Context) -> None:
    pd = handles.ProtectionDomain(inline)
    before = inline.counts()

    class Interrupted(AddressVector):
        def __getattribute__(self, name: str) -> Any:
            if inline.counts() != before:
                raise KeyboardInterrupt
            return super().__getattribute__(name)

    with pytest.raises(KeyboardInterrupt):
        handles.AddressHandle(pd, Interrupted(inline.query_gid(1, 1), sgid_index=1))
    assert inline.counts() == before
    assert children(inline) == [pd]
