"""Choice of the GID that queue pairs send from, with fake tables and on devices."""

import errno
import ipaddress
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aioverbs import (
    AccessFlags,
    ConnectionSettings,
    Endpoint,
    Mtu,
    QpType,
    VerbsError,
    listen,
    reconnect,
)
from aioverbs._core.handles import handles
from aioverbs._providers import sysfs
from aioverbs._verbs.device import Device, devices
from aioverbs._verbs.ports import gid_index, gid_table
from aioverbs.gid_selection import Gid, select_gid_index
from aioverbs.types import GidType
from tests.capabilities import Capability, needs

V1, V2, IB = GidType.ROCE_V1, GidType.ROCE_V2, GidType.IB
LINK, OTHER_LINK, IPV4, GLOBAL = "fe80::1", "febf:ffff::1", "::ffff:10.0.0.1", "2001:db8::1"
REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


def table(*entries: tuple[GidType, str]) -> list[Gid]:
    return [
        Gid(index, ipaddress.IPv6Address(address).packed, gid_type) for index, (gid_type, address) in enumerate(entries)
    ]


PREFERRED: dict[str, tuple[list[Gid], int | None]] = {
    "none": ([], None),
    "empty entries": (table((V2, "::"), (V1, "::")), None),
    "typical NIC": (table((V1, LINK), (V2, LINK), (V1, IPV4), (V2, IPV4)), 3),
    "first of two": (table((V2, IPV4), (V2, "::ffff:10.0.0.2")), 0),
    "RoCE v2 before an IPv4 address": (table((V1, IPV4), (V2, LINK)), 1),
    "global before link-local": (table((V2, LINK), (V2, GLOBAL)), 1),
    "global before any link-local": (table((V2, OTHER_LINK), (V2, GLOBAL)), 1),
    "IPv4 before global": (table((V2, GLOBAL), (V2, IPV4)), 1),
    "RoCE v1 without alternative": (table((V1, LINK), (V1, IPV4)), 1),
    "after an empty entry": (table((V2, "::"), (V2, LINK)), 1),
    "InfiniBand": (table((IB, LINK), (IB, GLOBAL), (IB, IPV4)), 0),
    "IPv4 with a port": (table((V2, LINK), (V2, "::1d2f:ffff:10.0.0.1")), 1),
    "IPv4 with a port before global": (table((V2, GLOBAL), (V2, "::1d2f:ffff:10.0.0.1")), 1),
    "IPv4 with another prefix": (table((V2, GLOBAL), (V2, "::ffff:0:10.0.0.1")), 0),
}


@pytest.mark.parametrize(("gids", "index"), PREFERRED.values(), ids=PREFERRED)
def test_selection_does_not_depend_on_the_order_of_the_table(gids: list[Gid], index: int | None) -> None:
    assert select_gid_index(gids) == select_gid_index(reversed(gids)) == index


def test_a_table_with_empty_first_entries() -> None:
    gids = table((V2, LINK), (V2, LINK), (V2, IPV4))
    assert select_gid_index(gids[1:2]) == 1


class FakePortsContext:
    """Fake context of a device with two ports."""

    name = "mlx5_7"
    software = False

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, bytes, int]] = []
        self.asked = 0
        self.entries_of_port = 16
        self.error: VerbsError | None = None

    @property
    def attributes(self) -> Any:
        return SimpleNamespace(phys_port_cnt=2)

    def query_port(self, number: int) -> Any:
        return SimpleNamespace(gid_tbl_len=self.entries_of_port * number)

    def query_gid_table(self, max_entries: int) -> list[tuple[int, int, bytes, int]]:
        self.asked = max_entries
        if self.error is not None:
            raise self.error
        return self.entries


@pytest.fixture
def fake() -> FakePortsContext:
    return FakePortsContext()


@pytest.fixture
def context(fake: FakePortsContext) -> handles.Context:
    return cast(handles.Context, fake)


def test_each_port_has_its_own_gid(fake: FakePortsContext, context: handles.Context) -> None:
    tables = {1: table((V1, LINK), (V2, LINK), (V2, IPV4)), 2: table((V1, GLOBAL), (V2, GLOBAL))}
    fake.entries = [(port, each.index, each.gid, int(each.gid_type)) for port in tables for each in tables[port]]
    assert gid_table(context, 1) == tables[1]
    assert gid_table(context, 2) == tables[2]
    assert fake.asked == 16 + 32, "of both ports"
    assert (gid_index(context, 1), gid_index(context, 2)) == (2, 1)
    for port in (0, 3):
        with pytest.raises(ValueError, match=f"`port` must be 1 to 2 for mlx5_7, got {port}"):
            gid_index(context, port)
    fake.entries.clear()
    with pytest.raises(ValueError, match="port 2 of mlx5_7 has no GID: give its network interface an address"):
        gid_index(context, 2)


def test_a_gid_of_an_unknown_type_is_left_out(fake: FakePortsContext, context: handles.Context) -> None:
    (known,) = table((V2, IPV4))
    fake.entries = [(1, 0, known.gid, int(V2)), (1, 1, known.gid, 3)]
    assert gid_table(context, 1) == [known]


def test_ports_without_a_gid_table(fake: FakePortsContext, context: handles.Context) -> None:
    fake.entries_of_port = 0
    fake.error = VerbsError("ibv_query_gid_table", errno.EINVAL)  # of the kernel, for no entries
    assert gid_table(context, 1) == []


def test_an_error_of_the_verb_is_raised(fake: FakePortsContext, context: handles.Context) -> None:
    fake.error = VerbsError("ibv_query_gid_table", errno.EINVAL)
    with pytest.raises(VerbsError, match="ibv_query_gid_table failed: EINVAL"):
        gid_index(context, 1)


@pytest.mark.parametrize(
    ("link_layer", "types"),
    [("Ethernet", {"IB/RoCE v1": V1, "RoCE v2": V2}), ("InfiniBand", {"IB/RoCE v1": GidType.IB})],
)
def test_without_the_verb_the_table_is_read_from_the_kernels_files(
    fake: FakePortsContext,
    context: handles.Context,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    link_layer: str,
    types: dict[str, GidType],
) -> None:
    fake.error = VerbsError("ibv_query_gid_table", errno.EOPNOTSUPP)
    monkeypatch.setattr(sysfs, "_FOLDER", tmp_path)
    folder = tmp_path / "mlx5_7/ports/2"
    for name in ("gids", "gid_attrs/types"):
        (folder / name).mkdir(parents=True)
    (folder / "link_layer").write_text(f"{link_layer}\n")
    (folder / "gids/0").write_text(":".join(["0000"] * 8) + "\n")  # an empty entry: reading its type fails
    for index in (1, 2):
        (folder / "gids" / str(index)).write_text(":".join(["0000"] * 8) + "\n")
        (folder / "gid_attrs/types" / str(index)).write_text("\n")
    expected = []
    for index, (kind, known) in enumerate(types.items(), 9):  # of two digits: in the order of numbers, not of names
        (folder / "gids" / str(index)).write_text(f"fe80:0000:0000:0000:0000:0000:0000:{index:04x}\n")
        (folder / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
        expected.append(Gid(index, b"\xfe\x80" + bytes(13) + bytes([index]), known))
    assert gid_table(context, 2) == expected
    with pytest.raises(VerbsError, match="ibv_query_gid_table failed: ENOENT"):
        gid_table(context, 1)


def test_tables_that_are_too_long_for_the_verb(
    fake: FakePortsContext, context: handles.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's answer has a length of 16 bits; libibverbs refuses to ask for more with EINVAL."""
    fake.error = VerbsError("ibv_query_gid_table", errno.EINVAL)
    found = table((V2, IPV4))
    monkeypatch.setattr(sysfs, "gid_table", lambda name, port: found)
    fake.entries_of_port = 682
    with pytest.raises(VerbsError, match="EINVAL"):
        gid_table(context, 1)
    fake.entries_of_port = 683
    assert (gid_table(context, 1), fake.asked) == (found, 2049)


@pytest.mark.parametrize(("link_layer", "kind"), [("Ethernet", V1), ("InfiniBand", GidType.IB)])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOENT])
def test_kernels_without_types_of_gids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link_layer: str, kind: GidType, number: int
) -> None:
    """Reading the type of a GID of InfiniBand fails with EINVAL in old kernels; older ones have no such files."""

    def read_text(path: Path) -> str:
        if "types" in path.parts:
            raise OSError(number, "no type")
        return known(path)

    known = Path.read_text
    monkeypatch.setattr(sysfs, "_FOLDER", tmp_path)
    folder = tmp_path / "mlx4_0/ports/1"
    (folder / "gids").mkdir(parents=True)
    (folder / "link_layer").write_text(f"{link_layer}\n")
    texts = ("fe80:0000:0000:0000:0000:0000:0000:0001", ":".join(["0000"] * 8), "no GID", "fe80", "")
    for index, text in enumerate(texts):
        (folder / "gids" / str(index)).write_text(f"{text}\n")
    (folder / "gids/power").mkdir()
    monkeypatch.setattr(Path, "read_text", read_text)
    assert sysfs.gid_table("mlx4_0", 1) == [Gid(0, ipaddress.IPv6Address("fe80::1").packed, kind)]


@pytest.mark.parametrize("port", [0, 3, -1, 256])
async def test_the_gid_table_of_a_missing_port_is_the_same_error_everywhere(
    context: handles.Context, device: Device, port: int
) -> None:
    for each, count in ((context, 2), (device.handle, device.handle.attributes.phys_port_cnt)):
        with pytest.raises(ValueError, match=f"`port` must be 1 to {count} for .*, got {port}"):
            gid_table(each, port)


async def test_gid_table_of_the_device(device: Device) -> None:
    found = gid_table(device.handle, 1)
    assert [device.handle.query_gid(1, each.index) for each in found] == [each.gid for each in found]
    assert all(any(each.gid) for each in found)
    (listed,) = (each for each in devices() if each.name == device.name)
    assert listed.ports[0].gid_index == gid_index(device.handle, 1) == select_gid_index(found)
    assert [index for index, _ in listed.ports[0].gids] == [each.index for each in found]


async def test_queue_pairs_send_from_the_default_or_another_gid(device: Device) -> None:
    index = gid_index(device.handle, 1)
    for gid in gid_table(device.handle, 1):
        async with (
            device.resource_domain() as domain,
            domain.register(64, REMOTE) as region,
            domain.completion_queue(128) as cq,
            domain.queue_pair(cq, gid_index=gid.index) as near,
            domain.queue_pair(cq, gid_index=gid.index) as far,
            domain.queue_pair(cq) as third,
        ):
            assert (near.gid_index, third.gid_index) == (gid.index, index)
            assert near.local_endpoint().gid == far.local_endpoint().gid == gid.gid
            assert third.local_endpoint().gid == device.handle.query_gid(1, index)
            near.connect(far.local_endpoint(), REMOTE)
            far.connect(near.local_endpoint(), REMOTE)
            third.connect(third.local_endpoint(), REMOTE)
            assert [qp.query().av.sgid_index for qp in (near, far, third)] == [gid.index, gid.index, index]
            for qp, data in ((near, b"ok"), (third, b"so")):
                region.buffer[:2] = data
                await qp.write(region[:2], region.remote()[32:34])
                assert bytes(region.buffer[32:34]) == data


@pytest.mark.parametrize("index", [-1, 1000])
async def test_an_index_beyond_the_table(device: Device, index: int) -> None:
    """The error is final: `reconnect` does not retry, as it does when a device fails."""
    message = f"^`gid_index` must be 0 to [0-9]+ for port 1 of {re.escape(device.handle.name)}, got {index}: "
    settings = ConnectionSettings(gid_index=index)
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq:
        with pytest.raises(ValueError, match=message):
            await domain.queue_pair(cq, gid_index=index).open()
        async with domain.queue_pair(cq, qp_type=QpType.UD) as qp:
            with pytest.raises(ValueError, match=message):
                await domain.address_handle(qp.local_endpoint(), gid_index=index).open()
        async with listen("127.0.0.1", domain=domain) as listener:
            with pytest.raises(ValueError, match=message):
                await anext(reconnect("127.0.0.1", listener.port, domain=domain, settings=settings))


async def test_datagrams_are_sent_from_the_chosen_gid(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.register(128) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq, qp_type=QpType.UD) as near,
        domain.queue_pair(cq, qp_type=QpType.UD) as far,
        domain.address_handle(far.local_endpoint()) as handle,
    ):
        for qp in (near, far):
            qp.activate()
        receive = far.receive(region[64:])
        await near.send(region[:8], to=handle.to())
        assert (await receive).byte_len == 8


async def test_an_empty_entry(device: Device) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq:
        empty = len(gid_table(device.handle, 1))
        length = min(device.port().gid_tbl_len, 256)  # indices that an address vector can hold
        with pytest.raises(ValueError, match=f"`port` must be 1 to 1 for {device.name}, got 2"):
            await domain.queue_pair(cq, port=2).open()
        if empty < length:
            async with domain.queue_pair(cq, gid_index=length - 1) as without:
                with pytest.raises((ValueError, VerbsError), match=r"GID|ibv_query_gid"):
                    without.local_endpoint()
        with pytest.raises(ValueError, match=r"`port` must be 1 to 1 for .*, got 2"):
            await domain.address_handle(Endpoint(bytes(range(16)), 1, 2, Mtu.MTU_1024), port=2).open()


@needs(Capability.FAULT_PLAN)
async def test_a_table_that_cannot_be_read(device: Device) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq, domain.queue_pair(cq) as qp:
        device.faults.fail("query_gid", 5)
        with pytest.raises(VerbsError, match="ibv_query_gid failed: EIO"):
            qp.local_endpoint()
        assert qp.local_endpoint().gid == device.handle.query_gid(1, qp.gid_index)
