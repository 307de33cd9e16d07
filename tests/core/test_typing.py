"""The types in the stubs, checked by mypy, are the types at run time, checked here."""

from typing import assert_type

from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.attributes import DeviceAttributes, PortAttributes, QpAttributes, QpCapabilities
from tests.core.allocators import Recording
from tests.core.contexts import children


def test_stub_types_match_runtime_types(inline: software.Context) -> None:
    pd = handles.ProtectionDomain(inline)
    domain = parent_domain.ParentDomain(pd, parent_domain.ThreadDomain(inline), Recording())
    channel = handles.CompletionChannel(inline)
    cq = handles.CompletionQueue(inline, 16, channel, parent_domain=domain)
    region = handles.MemoryRegion(pd, bytearray(8))
    qp = handles.QueuePair(domain, cq, cq)

    values: list[tuple[object, type]] = [
        (assert_type(inline.name, str), str),
        (assert_type(inline.software, bool), bool),
        (assert_type(inline.verbs_pointer, int), int),
        (assert_type(inline.query_device(), DeviceAttributes), DeviceAttributes),
        (assert_type(inline.query_port(), PortAttributes), PortAttributes),
        (assert_type(inline.query_gid(), bytes), bytes),
        (assert_type(inline.query_pkey(), int), int),
        (assert_type(inline.counts()["overlaps"], int), int),
        (assert_type(region.lkey, int), int),
        (assert_type(region.address, int), int),
        (assert_type(region.pd, handles.ProtectionDomain), handles.ProtectionDomain),
        (assert_type(domain.base, handles.ProtectionDomain), handles.ProtectionDomain),
        (assert_type(domain.td, parent_domain.ThreadDomain | None), parent_domain.ThreadDomain),
        (assert_type(domain.held, int), int),
        (assert_type(channel.fileno(), int), int),
        (assert_type(channel.get_event(), handles.CompletionQueue | None), type(None)),
        (assert_type(cq.channel, handles.CompletionChannel | None), handles.CompletionChannel),
        (assert_type(cq.parent_domain, handles.ProtectionDomain | None), parent_domain.ParentDomain),
        (assert_type(cq.cqe, int), int),
        (assert_type(qp.capabilities, QpCapabilities), QpCapabilities),
        (assert_type(qp.query(), QpAttributes), QpAttributes),
        (assert_type(qp.qp_num, int), int),
        (assert_type(qp.closed, bool), bool),
        (assert_type(handles.open_handles(), list[handles.Handle]), list),
    ]
    for value, expected in values:
        assert isinstance(value, expected)
    assert len(children(inline)) == 7
