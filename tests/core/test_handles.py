"""The lifecycle of a handle: creation, use, destruction; parents refuse to be destroyed before their children."""

import ctypes

import pytest

from aioverbs import BusyResourceError, ClosedResourceError, QpType
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.testing import destroy_all
from tests.core.contexts import open_context
from tests.core.family import MEMBERS, Family, make, make_all
from tests.raw_verbs import poll

# Members whose parents differ from those of the others.
DISTINCT = [name for name in MEMBERS if name not in ("region of a parent domain", "window of type 2", "uc", "ud")]

COUNTED = {
    "pds": 1,
    "parent_domains": 1,
    "thread_domains": 1,
    "xrc_domains": 1,
    "mrs": 2,
    "mws": 2,
    "ahs": 1,
    "channels": 1,
    "cqs": 3,
    "srqs": 3,
    "qps": 7,
    "overlaps": 0,
}


def use(handle: handles.Handle) -> None:
    """Make a call that succeeds on an open object."""
    match handle:
        case handles.Context():
            assert handle.query_device().phys_port_cnt == 1
        case parent_domain.ThreadDomain():
            pd = handles.ProtectionDomain(handle.context)
            parent_domain.ParentDomain(pd, handle).destroy()
            pd.destroy()
        case handles.ProtectionDomain():
            handles.MemoryRegion(handle, bytearray(1)).destroy()
        case handles.MemoryRegion():
            assert handle.lkey == handle.rkey
        case handles.CompletionChannel():
            assert handle.get_event() is None
        case handles.CompletionQueue():
            assert poll(handle) == []
        case handles.MemoryWindow():
            assert handle.rkey != 0
        case handles.AddressHandle():
            assert not handle.closed
        case handles.XrcDomain():
            handles.QueuePair(xrc_domain=handle, qp_type=QpType.XRC_RECV).destroy()
        case handles.SharedReceiveQueue():
            assert handle.query().limit == 0
        case handles.QueuePair():
            assert handle.query().cap == handle.capabilities
        case _:
            raise AssertionError(f"add a use of {handle!r} here")


def test_every_kind_of_handle_can_be_created_used_and_destroyed(context: software.Context) -> None:
    family = make_all(context)
    assert context.counts() == COUNTED
    assert handles.open_handles() == list(family.values())
    for handle in family.values():
        assert not handle.closed
        assert handle.context is context
        if handle is not context:  # all structures below a context begin with its address
            assert ctypes.c_void_p.from_address(handle.verbs_pointer).value == context.verbs_pointer
        use(handle)
    for handle in reversed(family.values()):
        handle.destroy()
        assert handle.closed
        handle.destroy()
        assert handle not in handles.open_handles()


def test_the_family_has_every_kind(inline: software.Context) -> None:
    kinds = {
        value
        for module in (handles, parent_domain, software)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, handles.Handle)
    }
    assert kinds - {type(handle) for handle in make_all(inline).values()} == {
        handles.Handle,
        handles.Context,
        software.FileRegion,
        software.ImportedRegion,
    }


@pytest.mark.parametrize("child", DISTINCT)
def test_parents_with_a_child_refuse_and_work_on(context: software.Context, child: str) -> None:
    family: Family = {"context": context}
    make(child, family)
    for parent in dict.fromkeys(MEMBERS[child].parents):
        for _ in range(2):
            with pytest.raises(BusyResourceError, match="cannot be destroyed"):
                family[parent].destroy()
            assert not family[parent].closed
            use(family[parent])
            use(family[child])
    destroy_all(family.values())
    assert all(handle.closed for handle in family.values())


@pytest.mark.parametrize("child", DISTINCT)
def test_closed_parents_are_refused(child: str) -> None:
    """The open parents can be destroyed afterwards."""
    member = MEMBERS[child]
    family: Family = {"context": open_context("inline")}
    parents = [make(parent, family) for parent in member.parents]
    for parent in dict.fromkeys(member.parents):
        if parent != "context":
            closed = MEMBERS[parent].make(*(family[name] for name in MEMBERS[parent].parents))
            closed.destroy()
            before = handles.open_handles()
            with pytest.raises(ClosedResourceError):
                member.make(*(closed if name == parent else family[name] for name in member.parents))
            assert handles.open_handles() == before
    destroy_all(family.values())
    with pytest.raises(ClosedResourceError):
        member.make(*parents)
    assert handles.open_handles() == []


def test_a_bare_handle_is_closed() -> None:
    for kind in (handles.Handle, handles.Context, handles.QueuePair, parent_domain.ParentDomain):
        bare = kind.__new__(kind)
        assert bare.closed
        bare.destroy()
        assert repr(bare) == f"<{kind.__name__} (closed)>"


def test_a_context_is_opened_by_name_only() -> None:
    with pytest.raises(TypeError, match=r"software\.Context\.open"):
        handles.Context()
