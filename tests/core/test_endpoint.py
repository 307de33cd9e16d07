"""Endpoints: their wire format, the values they refuse, and the path from one to another."""

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from aioverbs import Endpoint, Mtu, QpType
from aioverbs.attributes import AddressVector

GID = bytes(range(16))
ENDPOINTS = st.builds(
    Endpoint,
    gid=st.binary(min_size=16, max_size=16),
    qp_num=st.integers(0, 0xFFFFFF),
    psn=st.integers(0, 0xFFFFFF),
    mtu=st.sampled_from([each for each in Mtu if each]),
    qp_type=st.sampled_from(QpType),
    max_rd_atomic=st.integers(0, 255),
    max_dest_rd_atomic=st.integers(0, 255),
    qkey=st.integers(0, 0xFFFFFFFF),
    lid=st.integers(0, 0xFFFF),
)


@given(endpoint=ENDPOINTS)
def test_an_endpoint_survives_encoding(endpoint: Endpoint) -> None:
    assert Endpoint.from_bytes(bytes(endpoint)) == endpoint
    assert Endpoint.from_bytes(bytearray(bytes(endpoint))) == endpoint


def test_the_wire_format_is_fixed() -> None:
    endpoint = Endpoint(
        GID, 0x010203, 0x040506, Mtu.MTU_1024, qp_type=QpType.UD, max_rd_atomic=7, max_dest_rd_atomic=8, qkey=9, lid=10
    )
    fields = "01 04", GID.hex(), "00010203", "00040506", "00000009", "000a", "03", "07", "08"
    assert bytes(endpoint) == bytes.fromhex(" ".join(fields))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "must have 35 bytes, got 0"),
        (b"\1" + bytes(35), "must have 35 bytes, got 36"),
        (b"\2" + bytes(60), "must have version 1, got 2"),
        (b"\1\2" + bytes(33), "`mtu` must be that of a port which has one"),
        (b"\1\2" + bytes(30) + b"\6\0\0", "6 is not a valid Mtu"),
        (b"\1\1" + bytes(30) + b"\3\0\0", "1 is not a valid QpType"),
        (b"\1\2" + GID + b"\1" + bytes(13) + b"\3\0\0", "`qp_num` must fit in 24 bits"),
    ],
)
def test_invalid_wire_data_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Endpoint.from_bytes(data)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Endpoint(b"", 1, 1, Mtu.MTU_256), "`gid` must have 16 bytes, got 0"),
        (lambda: Endpoint(GID, 1 << 24, 1, Mtu.MTU_256), "`qp_num` must fit in 24 bits, got 16777216"),
        (lambda: Endpoint(GID, 1, -1, Mtu.MTU_256), "`psn` must fit in 24 bits, got -1"),
        (lambda: Endpoint(GID, 1, 1, Mtu.MTU_256, qkey=1 << 32), "`qkey` must fit in 32 bits"),
        (lambda: Endpoint(GID, 1, 1, Mtu.MTU_256, lid=1 << 16), "`lid` must fit in 16 bits"),
        (lambda: Endpoint(GID, 1, 1, Mtu.MTU_256, max_rd_atomic=256), "`max_rd_atomic` must fit in 8 bits"),
        (lambda: Endpoint(GID, 1, 1, Mtu.MTU_256, max_dest_rd_atomic=-1), "`max_dest_rd_atomic` must fit in 8 bits"),
    ],
)
def test_invalid_fields_are_refused(make: Callable[[], Endpoint], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def end(gid: bytes = GID, lid: int = 0) -> Endpoint:
    return Endpoint(gid, 1, 1, Mtu.MTU_1024, lid=lid)


OTHER_SUBNET = bytes(8) + GID[8:]


@pytest.mark.parametrize(
    ("local", "remote", "dgid", "dlid"),
    [
        pytest.param(end(), end(OTHER_SUBNET), OTHER_SUBNET, 0, id="Ethernet"),
        pytest.param(end(lid=3), end(GID[:8] + bytes(8), lid=4), b"", 4, id="one subnet"),
        pytest.param(end(lid=3), end(bytes(16), lid=4), b"", 4, id="no GID"),
        pytest.param(end(lid=3), end(OTHER_SUBNET, lid=4), OTHER_SUBNET, 4, id="two subnets"),
    ],
)
def test_the_path_to_a_remote_endpoint(local: Endpoint, remote: Endpoint, dgid: bytes, dlid: int) -> None:
    vector = local.path_to(remote, port_num=2, sgid_index=5)
    assert vector == AddressVector(dgid=dgid, sgid_index=5, port_num=2, dlid=dlid)


def test_incompatible_endpoints_have_no_path() -> None:
    for local, remote in ((end(), end(lid=4)), (end(lid=3), end())):
        with pytest.raises(ValueError, match="one endpoint has a LID"):
            local.path_to(remote, port_num=1, sgid_index=0)
    with pytest.raises(ValueError, match="has no GID, which a path over Ethernet requires"):
        end().path_to(end(bytes(16)), port_num=1, sgid_index=0)
