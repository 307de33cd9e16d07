"""Choice of the GID that queue pairs send from, with fake tables and on devices."""

import errno
import ipaddress
import re
import sys
import types
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
from aioverbs._providers import hardware
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


def half(data: bytes) -> int:
    """Return half of a GID as pyverbs does: an integer in host byte order."""
    return int.from_bytes(data, "little" if memoryview(b"\1\0").cast("H")[0] == 1 else "big")


class FakePyverbsContext:
    """Fake pyverbs context of a device with two ports."""

    def __init__(self, entries: list[tuple[int, Gid]]) -> None:
        self.entries, self.asked, self.closed = entries, 0, False

    def query_gid_table(self, max_entries: int) -> list[Any]:
        self.asked = max_entries
        return [
            SimpleNamespace(
                gid_subnet_prefix=half(each.gid[:8]),
                gid_interface_id=half(each.gid[8:]),
                gid_index=each.index,
                gid_type=int(each.gid_type),
                port_num=port,
            )
            for port, each in self.entries
        ]

    def close(self) -> None:
        self.closed = True


class FakePortsContext:
    """Fake context of a device with two ports."""

    name = "mlx5_7"
    software = False

    @property
    def attributes(self) -> Any:
        return SimpleNamespace(phys_port_cnt=2)

    def query_port(self, number: int) -> Any:
        return SimpleNamespace(gid_tbl_len=16 * number)


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> handles.Context:
    error = types.ModuleType("pyverbs.pyverbs_error")
    error.PyverbsError = type("PyverbsError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyverbs", types.ModuleType("pyverbs"))
    monkeypatch.setitem(sys.modules, "pyverbs.pyverbs_error", error)
    return cast(handles.Context, FakePortsContext())


def test_each_port_has_its_own_gid(context: handles.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = table((V1, LINK), (V2, LINK), (V2, IPV4)), table((V1, GLOBAL), (V2, GLOBAL))
    fake = FakePyverbsContext([(1, each) for each in first] + [(2, each) for each in second])
    monkeypatch.setattr(hardware, "_pyverbs_contexts", {context: fake})
    assert gid_table(context, 1) == first
    assert gid_table(context, 2) == second
    assert fake.asked == 16 + 32, "of both ports"
    assert (gid_index(context, 1), gid_index(context, 2)) == (2, 1)
    for port in (0, 3):
        with pytest.raises(ValueError, match=f"`port` must be 1 to 2 for mlx5_7, got {port}"):
            gid_index(context, port)
    fake.entries.clear()
    with pytest.raises(ValueError, match="port 2 of mlx5_7 has no GID: give its network interface an address"):
        gid_index(context, 2)


def test_a_context_not_made_by_pyverbs(context: handles.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example over another process's descriptor: the device is opened by pyverbs for the query."""
    fake, opened = FakePyverbsContext([(1, each) for each in table((V2, IPV4))]), []

    def opens(name: str) -> FakePyverbsContext:
        opened.append(name)
        return fake

    monkeypatch.setattr(hardware, "_open", opens)
    assert gid_index(context, 1) == 0
    assert (opened, fake.closed) == (["mlx5_7"], True)


@pytest.mark.parametrize(("code", "number"), [(-22, errno.EINVAL), (95, errno.EOPNOTSUPP), (-1, errno.EIO)])
def test_an_error_of_pyverbs_is_raised(
    context: handles.Context, monkeypatch: pytest.MonkeyPatch, code: int, number: int
) -> None:
    fake = FakePyverbsContext([])
    error = sys.modules["pyverbs.pyverbs_error"].PyverbsError()
    error.error_code = code

    def fail(max_entries: int) -> None:
        raise error

    monkeypatch.setattr(fake, "query_gid_table", fail)
    monkeypatch.setattr(hardware, "_pyverbs_contexts", {context: fake})
    with pytest.raises(VerbsError, match="ibv_query_gid_table failed") as caught:
        gid_index(context, 1)
    assert (caught.value.errno, caught.value.__cause__) == (number, error)


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
