"""Attributes of the software device, its port and its queue pairs."""

import contextlib
import ctypes
import errno
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

import pytest

from aioverbs import AccessFlags, AtomicCap, LinkLayer, Mtu, PortState, QpState, VerbsError
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.attributes import AddressVector, QpCapabilities
from tests.core.pairs import make_pair, to_init


def test_device_attributes(context: software.Context) -> None:
    attributes = context.query_device()
    assert attributes.node_guid == attributes.sys_image_guid
    assert attributes.node_guid[0] & 3 == 2  # one device, and a locally administered address
    assert attributes.atomic_cap is AtomicCap.GLOB
    assert attributes.phys_port_cnt == 1
    assert attributes.max_sge == 32
    assert attributes.max_qp_wr >= 1024
    assert attributes.max_qp_rd_atom == attributes.max_qp_init_rd_atom == 16


def test_port_attributes(context: software.Context) -> None:
    port = context.query_port()
    assert port is context.query_port(1)
    assert port.state is PortState.ACTIVE
    assert port.link_layer is LinkLayer.ETHERNET
    assert port.active_mtu is port.max_mtu is Mtu.MTU_4096
    assert port.max_msg_sz == 1 << 30
    assert (port.gid_tbl_len, port.pkey_tbl_len) == (2, 1)


@contextlib.contextmanager
def port_reporting(context: software.Context, offset: int, value: int) -> Iterator[None]:
    """Put a number into the answer of `ibv_query_port`, at an offset in `struct ibv_port_attr`. `query_port` is the
    first member of `struct verbs_context`.
    """
    place = ctypes.c_void_p.from_address(context.extended_address)
    verb = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint8, ctypes.c_void_p, ctypes.c_size_t)
    before = place.value
    assert before is not None
    known = verb(before)

    def query(pointer: int, port: int, attributes: int, size: int) -> int:
        result = int(known(pointer, port, attributes, size))
        ctypes.c_uint32.from_address(attributes + offset).value = value
        return result

    replaced = verb(query)
    place.value = ctypes.cast(replaced, ctypes.c_void_p).value
    try:
        yield
    finally:
        place.value = before


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [(0, 9, "reports 9 for port 1, which is no PortState"), (8, 99, "reports 99 for port 1, which is no Mtu")],
)
def test_an_unknown_number_in_the_attributes_of_a_port(
    context: software.Context, offset: int, value: int, text: str
) -> None:
    with port_reporting(context, offset, value), pytest.raises(VerbsError, match=text) as caught:
        context.query_port()
    assert (caught.value.verb, caught.value.errno) == ("ibv_query_port", errno.EPROTO)


def test_a_port_without_an_mtu(context: software.Context) -> None:
    """Kernel drivers report 0 for a port without a network interface."""
    with port_reporting(context, 8, 0):
        port = context.query_port()
    assert (port.active_mtu, port.active_mtu.size, port.max_mtu) == (Mtu.NONE, 0, Mtu.MTU_4096)


def test_an_unknown_number_in_the_attributes_of_a_device(context: software.Context) -> None:
    place = ctypes.c_void_p.from_address(context.table_slot("query_device"))
    verb = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    before = place.value
    assert before is not None
    known = verb(before)

    def query(pointer: int, attributes: int) -> int:
        result = int(known(pointer, attributes))
        ctypes.c_uint32.from_address(attributes + 164).value = 9  # `atomic_cap` of `struct ibv_device_attr`
        return result

    replaced = verb(query)
    place.value = ctypes.cast(replaced, ctypes.c_void_p).value
    try:
        with pytest.raises(VerbsError, match="reports 9 for the device, which is no AtomicCap") as caught:
            context.query_device()
    finally:
        place.value = before
    assert (caught.value.verb, caught.value.errno) == ("ibv_query_device", errno.EPROTO)


@pytest.mark.parametrize("max_entries", [-1, -(1 << 31)])
def test_a_negative_size_of_the_gid_table_is_refused(context: software.Context, max_entries: int) -> None:
    with pytest.raises(ValueError, match=f"`max_entries` must not be negative, got {max_entries}"):
        context.query_gid_table(max_entries)


def test_gid_and_pkey_tables(context: software.Context) -> None:
    # The first GID is made from the GUID, as EUI-64; the second maps an IPv4 address.
    assert context.query_gid() == bytes.fromhex("fe80") + bytes(6) + context.query_device().node_guid
    mapped = IPv6Address(context.query_gid(1, 1)).ipv4_mapped
    assert mapped is not None
    assert mapped.is_loopback
    assert mapped != IPv4Address("127.0.0.1")
    assert context.query_pkey() == 0xFFFF


def test_attributes_of_a_context(context: software.Context) -> None:
    assert context.name == "soft0"
    assert context.software
    assert context.context is context
    assert context.num_comp_vectors == 1


def test_granted_capabilities(inline: software.Context) -> None:
    pd = handles.ProtectionDomain(inline)
    cq = handles.CompletionQueue(inline, 100)
    assert cq.cqe == 128
    wanted = QpCapabilities(max_send_wr=3, max_recv_wr=0, max_send_sge=2, max_recv_sge=5, max_inline_data=65)
    qp = handles.QueuePair(pd, cq, cq, wanted)
    granted = qp.capabilities
    assert granted == qp.query().cap
    assert (granted.max_send_wr, granted.max_recv_wr) == (4, 0)
    assert (granted.max_send_sge, granted.max_recv_sge) == (2, 5)
    assert granted.max_inline_data >= 65
    assert handles.QueuePair(pd, cq, cq).capabilities.max_send_wr == 16


def test_query_returns_the_modified_attributes(context: software.Context) -> None:
    qp = make_pair(context)[0].qp
    qp.modify(QpState.RESET)
    assert qp.query().qp_state is QpState.RESET
    assert qp.query().av == AddressVector(port_num=0, hop_limit=0)

    to_init(qp, AccessFlags.REMOTE_READ | AccessFlags.LOCAL_WRITE)
    attributes = qp.query()
    assert attributes.qp_state is QpState.INIT
    assert attributes.qp_access_flags == AccessFlags.REMOTE_READ | AccessFlags.LOCAL_WRITE
    assert (attributes.pkey_index, attributes.port_num) == (0, 1)

    vector = AddressVector(context.query_gid(1, 1), sgid_index=1, hop_limit=9, flow_label=77, traffic_class=3, sl=2)
    qp.modify(
        QpState.RTR,
        path_mtu=Mtu.MTU_1024,
        dest_qp_num=qp.qp_num,
        rq_psn=0xFFFFFF,
        max_dest_rd_atomic=7,
        min_rnr_timer=31,
        av=vector,
    )
    qp.modify(QpState.RTS, timeout=31, retry_cnt=7, rnr_retry=6, sq_psn=0x123456, max_rd_atomic=16)
    attributes = qp.query()
    assert attributes.qp_state is QpState.RTS
    assert attributes.av == vector
    assert attributes.path_mtu == Mtu.MTU_1024
    assert (attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn) == (qp.qp_num, 0xFFFFFF, 0x123456)
    assert (attributes.max_rd_atomic, attributes.max_dest_rd_atomic, attributes.min_rnr_timer) == (16, 7, 31)
    assert (attributes.timeout, attributes.retry_cnt, attributes.rnr_retry) == (31, 7, 6)
