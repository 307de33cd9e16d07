"""A constructor refuses to run a second time, whether the object is open, closed or failed."""

import operator

import pytest

from aioverbs import VerbsError
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.attributes import AddressVector, QpCapabilities
from tests.core.contexts import children
from tests.core.family import make_all


def construct(handle: handles.Handle, *arguments: object) -> None:
    operator.methodcaller("__init__", *arguments)(handle)


def arguments(handle: handles.Handle) -> tuple[object, ...]:
    """Return constructor arguments for another object like this one."""
    match handle:
        case parent_domain.ParentDomain():
            return handle.base, handle.td
        case handles.MemoryRegion():
            return handle.pd, bytearray(8)
        case handles.CompletionQueue():
            return handle.context, 8
        case handles.MemoryWindow():
            return handle.pd, handle.mw_type
        case handles.AddressHandle():
            return handle.pd, AddressVector()
        case handles.SharedReceiveQueue():
            return handle.pd, 1
        case handles.QueuePair():
            return handle.pd, handle.send_cq, handle.recv_cq
        case _:
            return (handle.context,)


def test_an_open_handle_is_not_initialised_again(context: software.Context) -> None:
    family = make_all(context)
    before, ledger = context.counts(), handles.open_handles()
    for name, handle in family.items():
        if name != "context":
            with pytest.raises(RuntimeError, match="created before"):
                construct(handle, *arguments(handle))
    assert context.counts() == before
    assert handles.open_handles() == ledger


def test_a_closed_handle_is_not_initialised_again(context: software.Context) -> None:
    for handle in reversed(make_all(context).values()):
        if handle is not context:
            again = arguments(handle)
            handle.destroy()
            with pytest.raises(RuntimeError, match="created before"):
                construct(handle, *again)
    assert children(context) == []


def test_a_failed_handle_is_not_initialised_again(context: software.Context) -> None:
    pd = handles.ProtectionDomain(context)
    cq = handles.CompletionQueue(context, 1)
    qp = handles.QueuePair.__new__(handles.QueuePair)
    with pytest.raises(VerbsError):
        construct(qp, pd, cq, cq, QpCapabilities(max_send_wr=1 << 30))
    assert qp.closed
    assert repr(qp) == "<QueuePair of soft0 (closed)>"
    with pytest.raises(RuntimeError, match="created before"):
        construct(qp, pd, cq, cq)
    qp.destroy()
    assert children(context) == [pd, cq]
