"""The C memory of queues, batches and operations is freed with them."""

import ctypes
from collections.abc import Awaitable, Callable

import pytest

from aioverbs import Batch, Device, MessageModel, QpCapabilities
from tests.data_path.ends import Ends, ends
from tests.garbage import collect_garbage
from tests.holding import hold, unhold

NOISE_BYTES = 8 << 10  # growth of the interpreter's own memory
SENDS = QpCapabilities(max_send_wr=100, max_recv_wr=1, max_send_sge=16)


class Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def allocated_bytes() -> int:
    """Return the size in bytes of all memory that malloc() has returned and that was not freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


async def receive_often(device: Device) -> None:
    for _ in range(8):
        async with ends(device, capabilities=QpCapabilities(max_send_wr=1, max_recv_wr=100)) as pair:
            receives = [pair.near.receive(None) for _ in range(100)]
            assert pair.near.statistics().receives.in_flight == len(receives)


async def receive_often_from_a_shared_queue(device: Device) -> None:
    async with device.resource_domain() as domain, domain.shared_receive_queue(1024) as srq:
        receives = [srq.receive(None) for _ in range(1024)]
        assert srq.statistics().in_flight == len(receives)


def batch_of_writes(pair: Ends, pieces: int) -> Batch:
    batch = pair.near.batch()
    for _ in range(100):
        batch.write([pair.source[:1]] * pieces, pair.target.remote()[:pieces])
    return batch


async def post_a_batch(device: Device) -> None:
    async with ends(device, capabilities=SENDS) as pair:
        await batch_of_writes(pair, pieces=1).post()


async def drop_a_batch(device: Device) -> None:
    async with ends(device, capabilities=SENDS) as pair:
        batch_of_writes(pair, pieces=1)


async def post_long_lists(device: Device) -> None:
    async with ends(device, capabilities=SENDS) as pair:
        await batch_of_writes(pair, pieces=16).post()


async def wait_for_a_place(device: Device) -> None:
    async with ends(device, capabilities=QpCapabilities(max_send_wr=4)) as pair:
        hold(device, pair.near)
        writes = [pair.near.write(pair.source[:1], pair.target.remote()[:1]) for _ in range(100)]
        assert pair.near.statistics().sends.queued > 0
        unhold(device, pair.near)
        for write in writes:
            await write


async def post_a_chain(device: Device) -> None:
    for _ in range(4):
        async with ends(device, message_model=MessageModel.HIGH_BANDWIDTH) as pair:
            await pair.near.write(pair.source[:1], pair.target.remote()[:1])


USES: list[Callable[[Device], Awaitable[None]]] = [
    receive_often,
    receive_often_from_a_shared_queue,
    post_a_batch,
    drop_a_batch,
    post_long_lists,
    wait_for_a_place,
    post_a_chain,
]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
async def test_nothing_is_left_after(device: Device, use: Callable[[Device], Awaitable[None]]) -> None:
    await use(device)
    collect_garbage()
    before = allocated_bytes()
    await use(device)
    collect_garbage()
    grown = allocated_bytes() - before
    assert grown < NOISE_BYTES
