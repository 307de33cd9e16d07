"""Requests are checked before they are posted; a refused request leaves nothing behind."""

import errno
import mmap
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    ClosedResourceError,
    Device,
    MwType,
    QpCapabilities,
    QpType,
    RegionSlice,
    RemoteRegion,
    VerbsError,
    open_device,
)
from aioverbs._core.data_path.data_path import QpWorkState, QueuePairVerbs
from aioverbs.errors import QueuePairStateError
from tests.capabilities import Capability, needs
from tests.data_path.ends import ACCESS, PEERS, Ends, ends
from tests.holding import go_on, hold, unhold


def remote_part(pair: Ends, length: int = 8) -> RemoteRegion:
    return pair.target.remote()[:length]


INVALID_CALLS: dict[str, tuple[Callable[[Ends], object], type[Exception], str]] = {
    "too few bytes": (
        lambda p: p.near.write(p.source[:5], remote_part(p, 6)),
        ValueError,
        "5 bytes of local memory do not match the 6",
    ),
    "too many bytes": (
        lambda p: p.near.read(p.source[:7], remote_part(p, 6)),
        ValueError,
        "7 bytes of local memory do not match the 6",
    ),
    "no local memory": (
        lambda p: p.near.write(None, remote_part(p, 6)),  # type: ignore[arg-type]
        ValueError,
        "0 bytes of local memory do not match the 6",
    ),
    "bytes": (
        lambda p: p.near.write(b"hello", remote_part(p, 5)),  # type: ignore[arg-type]
        TypeError,
        "got bytes: register it",
    ),
    "a view": (
        lambda p: p.near.send(p.source.buffer),  # type: ignore[arg-type]
        TypeError,
        "got memoryview: register it",
    ),
    "a piece of bytes": (
        lambda p: p.near.send([p.source[:1], b"x"]),  # type: ignore[list-item]
        TypeError,
        "a piece of local memory must be .* got b'x'",
    ),
    "None among the pieces": (
        lambda p: p.near.send([p.source[:1], None]),  # type: ignore[list-item]
        TypeError,
        "a piece of local memory must be .* got None",
    ),
    "too many pieces": (lambda p: p.near.send([p.source[:1]] * 5), ValueError, "5 pieces exceed the 4"),
    "too many pieces to receive": (
        lambda p: p.far.receive([p.target[:1]] * 5),
        ValueError,
        "5 pieces exceed the 4",
    ),
    "no remote memory": (lambda p: p.near.write(p.source[:5], None), TypeError, "remote"),  # type: ignore[arg-type]
    "remote memory of this side": (
        lambda p: p.near.write(p.source[:5], p.target[:5]),  # type: ignore[arg-type]
        TypeError,
        "remote",
    ),
    "immediate too large": (
        lambda p: p.near.send(None, immediate=1 << 32),
        ValueError,
        "`immediate` must fit in 32 bits, got 4294967296",
    ),
    "immediate below 0": (
        lambda p: p.near.send(None, immediate=-1),
        ValueError,
        "`immediate` must fit in 32 bits, got -1",
    ),
    "fractional immediate": (lambda p: p.near.send(None, immediate=1.5), TypeError, "float"),  # type: ignore[arg-type]
    "no immediate": (
        lambda p: p.near.write_with_immediate(p.source[:8], remote_part(p), "1"),  # type: ignore[arg-type]
        TypeError,
        "str",
    ),
    "key too large": (lambda p: p.near.send_with_invalidate(None, 1 << 32), ValueError, "`rkey` must fit in 32 bits"),
    "fractional key": (lambda p: p.near.invalidate(1.0), TypeError, "float"),  # type: ignore[arg-type]
    "atomic of 4 bytes": (lambda p: p.near.fetch_and_add(remote_part(p, 4), 1), ValueError, "takes 8 bytes, .* has 4"),
    "atomic of 16 bytes": (
        lambda p: p.near.compare_and_swap(remote_part(p, 16), 1, 2),
        ValueError,
        "takes 8 bytes, .* has 16",
    ),
    "atomic not aligned": (
        lambda p: p.near.fetch_and_add(p.target.remote()[4:12], 1),
        ValueError,
        "an address that is a multiple of 8",
    ),
    "fractional addend": (
        lambda p: p.near.fetch_and_add(remote_part(p), 0.5),  # type: ignore[arg-type]
        TypeError,
        "float",
    ),
    "addend too large": (
        lambda p: p.near.fetch_and_add(remote_part(p), 1 << 64),
        ValueError,
        "`add` must fit in 64 bits",
    ),
    "compare below 0": (
        lambda p: p.near.compare_and_swap(remote_part(p), -1, 0),
        ValueError,
        "`compare` must fit in 64 bits",
    ),
    "swap too large": (
        lambda p: p.near.compare_and_swap(remote_part(p), 0, 1 << 64),
        ValueError,
        "`swap` must fit in 64 bits",
    ),
    "srq_number on RC": (
        lambda p: p.near.send(None, srq_number=3),
        ValueError,
        "is not of type XRC_SEND: leave `srq_number` out",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), INVALID_CALLS.values(), ids=INVALID_CALLS)
async def test_invalid_arguments_are_refused_before_posting(
    device: Device, call: Callable[[Ends], object], error: type[Exception], match: str
) -> None:
    async with ends(device) as pair:
        with pytest.raises(error, match=match):
            call(pair)
        assert pair.is_idle()
        assert pair.near.statistics().sends.posted == pair.far.statistics().receives.posted == 0
        await pair.write(b"well")


class MisreportedLength(list[RegionSlice]):
    """A list that claims to have one element."""

    def __len__(self) -> int:
        return 1


async def test_pieces_are_counted_independently_of_len(device: Device) -> None:
    async with ends(device, capabilities=QpCapabilities(max_send_sge=2)) as pair:
        pieces = MisreportedLength(pair.source[each : each + 1] for each in range(3))
        with pytest.raises(ValueError, match="exceed the 2"):
            _ = pair.near.write(pieces, remote_part(pair, 3))
        assert pair.is_idle()


async def test_memory_without_local_write_is_refused(device: Device) -> None:
    async with ends(device) as pair, pair.domain.register(64, AccessFlags.REMOTE_READ) as region:
        for call in (lambda: pair.near.read(region, remote_part(pair, 64)), lambda: pair.far.receive(region)):
            with pytest.raises(ValueError, match=r"register it with AccessFlags\.LOCAL_WRITE"):
                call()
        assert len(region.pins) == 0
        await pair.near.write(region, remote_part(pair, 64))


async def test_memory_of_another_protection_domain_is_refused(device: Device) -> None:
    async with ends(device) as pair, device.protection_domain() as pd, pd.register(64, ACCESS) as region:
        for call in (
            lambda: pair.near.write(region, remote_part(pair, 64)),
            lambda: pair.near.send([pair.source[:8], region[:8]]),
            lambda: pair.far.receive(region),
        ):
            with pytest.raises(ValueError, match="belongs to a different protection domain than"):
                call()
        assert len(region.pins) == 0
        assert pair.is_idle()


async def test_closed_memory_is_refused(device: Device) -> None:
    async with ends(device) as pair:
        async with pair.domain.register(64, ACCESS) as region:
            part = region[:8]
        for local in (region, part, [pair.source[:4], part]):
            with pytest.raises(ClosedResourceError):
                _ = pair.near.send(local)
            with pytest.raises(ClosedResourceError):
                _ = pair.far.receive(local)
        with pytest.raises(ClosedResourceError):
            _ = pair.near.send(pair.domain.register(64))
        assert pair.is_idle()


async def test_invalid_windows_are_not_bound(device: Device) -> None:
    async with ends(device) as pair, pair.domain.register(64, AccessFlags.LOCAL_WRITE) as region:
        async with pair.domain.memory_window(MwType.TYPE_2) as window:
            with pytest.raises(ValueError, match=r"register it with AccessFlags\.MW_BIND"):
                _ = pair.near.bind_window(window, region, AccessFlags.REMOTE_READ)
            with pytest.raises(TypeError):
                _ = pair.near.bind_window(window, [pair.source], AccessFlags.REMOTE_READ)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="float"):
                _ = pair.near.bind_window(window, pair.source, 1.5)  # type: ignore[arg-type]
        with pytest.raises(ClosedResourceError):
            _ = pair.near.bind_window(window, pair.source, AccessFlags.REMOTE_READ)
        async with (
            open_device(device.name) as another,
            another.resource_domain() as domain,
            domain.register(64, ACCESS) as elsewhere,
            domain.memory_window(MwType.TYPE_2) as window,
        ):
            for region in (pair.source, elsewhere):
                with pytest.raises(ValueError, match="belongs to a different context than"):
                    _ = pair.near.bind_window(window, region, AccessFlags.REMOTE_READ)
            assert len(elsewhere.pins) == 0
        assert pair.is_idle()
        assert pair.near.statistics().sends.posted == 0


async def test_datagrams_need_an_open_address_handle(device: Device) -> None:
    async with ends(device, QpType.UD) as pair:
        with pytest.raises(ValueError, match="pass the destination of the datagram as `to`"):
            _ = pair.near.send(pair.source[:8])
        async with pair.domain.address_handle(pair.far.local_endpoint()) as handle:
            destination = handle.to()
            for qp_num, qkey in ((1 << 24, 0), (-1, 0), (0, 1 << 32)):
                with pytest.raises(ValueError, match=r"must fit in \d+ bits"):
                    handle.to(qp_num, qkey)
            with pytest.raises(TypeError):
                handle.to(1.5, 0)  # type: ignore[arg-type]
        with pytest.raises(ClosedResourceError):
            handle.to()
        with pytest.raises(ClosedResourceError):
            _ = pair.near.send(pair.source[:8], to=destination)
        assert pair.is_idle()
    async with ends(device) as connected:
        with pytest.raises(ValueError, match="is not of type UD: leave `to` out"):
            _ = connected.near.send(connected.source[:8], to=destination)
        assert connected.is_idle()


@pytest.mark.every_way
async def test_an_address_handle_is_pinned_while_datagrams_are_in_flight(device: Device) -> None:
    async with ends(device, QpType.UD) as pair:
        handle = await pair.domain.address_handle(pair.far.local_endpoint()).open()
        hold(device, pair.near)
        _ = pair.near.send(pair.source[:8], to=handle.to())
        assert len(handle.pins) == 1
        unhold(device, pair.near)
        await handle.aclose()
        assert len(handle.pins) == 0


async def test_queue_pairs_that_are_not_connected_refuse_requests(device: Device) -> None:
    async with ends(device) as pair, pair.domain.queue_pair(pair.cq) as fresh:
        with pytest.raises(QueuePairStateError, match="is in state RESET: first connect it or move it to RTS"):
            _ = fresh.write(pair.source[:8], remote_part(pair))
        with pytest.raises(QueuePairStateError, match="is in state RESET: first connect it or move it to INIT"):
            _ = fresh.receive(pair.target[:8])
        fresh.to_init()
        receive = fresh.receive(pair.target[:8])
        with pytest.raises(QueuePairStateError, match="is in state INIT"):
            _ = fresh.send(pair.source[:8])
        batch = fresh.batch()
        batch.write(pair.source[:8], remote_part(pair))
        with pytest.raises(QueuePairStateError, match="is in state INIT"):
            _ = batch.post()
        del batch
        assert not receive.done()
        assert len(pair.source.pins) == 0
    with pytest.raises(ClosedResourceError):
        _ = fresh.send(None)
    with pytest.raises(ClosedResourceError):
        fresh.batch().send(None)
    with pytest.raises(ClosedResourceError):
        _ = pair.domain.queue_pair(pair.cq).send(None)


@needs(Capability.FAULT_PLAN)
async def test_a_failed_verb_leaves_nothing_behind(device: Device) -> None:
    async with ends(device) as pair, pair.domain.memory_window(MwType.TYPE_1) as window:
        for verb, call in (
            ("post_send", lambda: pair.write(b"hello")),
            ("post_send", lambda: pair.near.fetch_and_add(remote_part(pair), 1)),
            ("post_recv", lambda: pair.receive()),
            ("bind_mw", lambda: pair.near.bind_window(window, pair.source, AccessFlags.REMOTE_READ)),
        ):
            device.faults.fail(verb, errno.ENOMEM)
            with pytest.raises(VerbsError, match="ENOMEM"):
                call()
            assert pair.is_idle()
        assert pair.near.statistics().sends.posted == 0
        for number in range(40):  # no slot is lost, nor any buffer of an atomic's result
            assert await pair.near.fetch_and_add(remote_part(pair), 1) == number


# ---- Valid arguments


@pytest.mark.every_way
async def test_pieces_are_gathered_and_scattered(device: Device) -> None:
    async with ends(device) as pair:
        pair.source.buffer[:26] = bytes(range(65, 91))
        pieces = [pair.source[4:6], pair.source[0:0], (pair.source[:2]), pair.source[10:13]]
        await pair.near.write(pieces, remote_part(pair, 7))
        assert bytes(pair.target.buffer[:8]) == b"EFABKLM\0"
        await pair.near.read([pair.source[101:103], pair.source[200:205]], remote_part(pair, 7))
        assert bytes(pair.source.buffer[100:104]) == b"\0EF\0"
        assert bytes(pair.source.buffer[199:206]) == b"\0ABKLM\0"
        scattered = (pair.target[100:103], pair.target[300:302], pair.target[400:500])
        receive = pair.far.receive(scattered)
        await pair.near.send(tuple(pieces))
        received = await receive
        assert (received.local, received.byte_len) == (scattered, 7)
        assert bytes(pair.target.buffer[100:104]) == b"EFA\0"
        assert bytes(pair.target.buffer[300:303]) == b"BK\0"
        assert bytes(pair.target.buffer[400:403]) == b"LM\0"
        with pytest.raises(ValueError, match="3 pieces"):
            _ = received.data
        receive = pair.far.receive([pair.target[:8]])
        await pair.near.send(pieces)
        assert bytes((await receive).data) == b"EFABKLM"
        assert pair.is_idle()


@pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UD], ids=lambda qp_type: qp_type.name)
async def test_requests_of_zero_bytes_are_executed(device: Device, qp_type: QpType) -> None:
    async with ends(device, qp_type) as pair:
        nothing: list[Any] = [None, pair.source[5:5], [], [pair.source[:0], pair.source[7:7]]]
        for local in nothing:
            receive = pair.far.receive(None)
            await pair.near.send(local, **pair.addressing)
            received = await receive
            assert received.byte_len == len(received.data) == 0
            if qp_type is QpType.RC:
                await pair.near.write(local, remote_part(pair, 0))
                await pair.near.read(local, remote_part(pair, 0))
                receive = pair.far.receive(pair.target[:8])
                await pair.near.write_with_immediate(local, remote_part(pair, 0), 7)
                assert (await receive).immediate == 7
        assert bytes(pair.target.buffer) == bytes(4096)
        assert pair.is_idle()


@pytest.mark.every_way
async def test_small_requests_go_inline(device: Device) -> None:
    """Inline data is copied by the time the call returns: changing the buffer afterwards has no effect."""
    capabilities = QpCapabilities(max_send_sge=4, max_inline_data=64)
    async with ends(device, capabilities=capabilities) as pair:
        most = pair.near.capabilities.max_inline_data
        assert most >= 64
        pair.near.to_sqd()  # nothing is started
        pair.source.buffer[:1024] = b"a" * 1024
        small = pair.near.write([pair.source[: most - 1], pair.source[1000:1001]], remote_part(pair, most))
        large = pair.near.write(pair.source[: most + 1], pair.target.remote()[1024 : 1025 + most])
        pair.source.buffer[:1024] = b"b" * 1024
        go_on(device, pair.near)
        await small
        await large
        assert bytes(pair.target.buffer[: most + 1]) == b"a" * most + b"\0"
        assert bytes(pair.target.buffer[1024 : 1025 + most]) == b"b" * (most + 1)
        assert pair.is_idle()


@needs(Capability.SHARED_DOMAINS)
async def test_memory_of_a_shared_protection_domain_is_accepted(device: Device) -> None:
    async with (
        open_device("soft0") as other,
        device.protection_domain() as pd,
        pd.share(5) as shared,
        other.shared_protection_domain(shared.id, 5) as same,
        pd.register(64, ACCESS) as here,
        same.register(64, ACCESS) as there,
        pd.completion_queue(64) as cq,
        pd.queue_pair(cq) as qp,
    ):
        qp.connect(qp.local_endpoint(), PEERS)
        there.buffer[:2] = b"ok"
        await qp.write(there[:2], here.remote()[:2])
        assert bytes(here.buffer[:2]) == b"ok"


async def test_a_message_longer_than_max_msg_sz_is_refused(device: Device) -> None:
    """Use many pieces that name the same memory: no device has that much memory registered."""
    most = device.port().max_msg_sz
    pieces = min(device.attributes().max_sge, 16)
    with mmap.mmap(-1, most // pieces + mmap.PAGESIZE) as memory:
        async with (
            ends(device, capabilities=QpCapabilities(max_send_sge=pieces)) as pair,
            pair.domain.register(memory, ACCESS) as region,
        ):
            with pytest.raises(ValueError, match=f"may have at most {most:,} bytes"):
                _ = pair.near.write([region] * pieces, RemoteRegion(0, pieces * len(memory), 0))
            with pytest.raises(ValueError, match=f"may have at most {most:,} bytes"):
                _ = pair.near.send([region] * pieces)
            assert len(region.pins) == 0
            await pair.near.write(pair.source[:8], remote_part(pair))


async def test_a_read_with_too_many_pieces_is_refused(device: Device) -> None:
    """Use a limit of 2 pieces for reads: some devices allow fewer pieces for reads than for other requests."""
    async with ends(device) as pair:
        dispatcher = pair.cq._cq_dispatcher
        verbs = QueuePairVerbs()
        base = pair.source.handle.pd
        verbs._requests_begin(QpWorkState(pair.near.handle, base, dispatcher, None, send_depth=1, read_sge=2))
        pieces = [pair.source[:4], pair.source[4:6], pair.source[6:8]]
        with pytest.raises(ValueError, match="takes at most 2 pieces, got 3"):
            _ = verbs.read(pieces, remote_part(pair))
        assert len(pair.source.pins) == 0
        await pair.near.read(pieces, remote_part(pair))
