"""Requests wait for free slots of a full queue in the order of their calls; dropping a waiting one withdraws it."""

import asyncio
from collections.abc import Callable

import anyio
import pytest

from aioverbs import (
    AccessFlags,
    ClosedResourceError,
    Device,
    MessageModel,
    MwType,
    QpCapabilities,
    WcStatus,
    WorkCompletionError,
)
from tests.data_path.ends import Ends, ends
from tests.garbage import collect_garbage
from tests.holding import hold, unhold

FEW = QpCapabilities(max_send_wr=4, max_recv_wr=64)
every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


def expect_immediates(pair: Ends, count: int) -> "asyncio.Future[list[int | None]]":
    """Post `count` receives, and return a future of their immediate data."""
    receives = [pair.far.receive(pair.target[:64]) for _ in range(count)]

    async def collect() -> list[int | None]:
        return [(await receive).immediate for receive in receives]

    return asyncio.ensure_future(collect())


NOWAIT: dict[str, Callable[[Ends], object]] = {
    "write": lambda p: p.near.write_nowait(p.source[:8], p.target.remote()[:8]),
    "write_with_immediate": lambda p: p.near.write_with_immediate_nowait(p.source[:8], p.target.remote()[:8], 1),
    "read": lambda p: p.near.read_nowait(p.source[:8], p.target.remote()[:8]),
    "send": lambda p: p.near.send_nowait(p.source[:8]),
    "send_with_invalidate": lambda p: p.near.send_with_invalidate_nowait(p.source[:8], 7),
    "compare_and_swap": lambda p: p.near.compare_and_swap_nowait(p.target.remote()[:8], 1, 2),
    "fetch_and_add": lambda p: p.near.fetch_and_add_nowait(p.target.remote()[:8], 1),
    "invalidate": lambda p: p.near.invalidate_nowait(7),
}


async def test_nowait_requests_raise_when_the_queue_is_full(device: Device) -> None:
    async with ends(device, capabilities=FEW) as pair:
        hold(device, pair.near)
        writes = [pair.near.write_nowait(pair.source[:8], pair.target.remote()[:8]) for _ in range(4)]
        for call in NOWAIT.values():
            with pytest.raises(anyio.WouldBlock):
                call(pair)
        statistics = pair.near.statistics().sends
        assert (statistics.depth, statistics.in_flight, statistics.queued, statistics.posted) == (4, 4, 0, 4)
        assert len(pair.source.pins) == 4
        unhold(device, pair.near)
        for write in writes:
            await write
        assert pair.is_idle()
        await pair.near.write_nowait(pair.source[:8], pair.target.remote()[:8])


async def test_nowait_windows_receives_and_batches_raise_when_full(device: Device) -> None:
    capabilities = QpCapabilities(max_send_wr=4, max_recv_wr=2)
    async with ends(device, capabilities=capabilities) as pair, pair.domain.memory_window(MwType.TYPE_2) as window:
        for _ in range(2):
            _ = pair.far.receive_nowait(pair.target[:8])
        with pytest.raises(anyio.WouldBlock):
            _ = pair.far.receive_nowait(pair.target[:8])
        hold(device, pair.near)
        first = pair.near.write_nowait(pair.source[:8], pair.target.remote()[:8])
        batch = pair.near.batch()
        for _ in range(4):
            batch.write(pair.source[:8], pair.target.remote()[:8])
        with pytest.raises(anyio.WouldBlock):
            _ = batch.post_nowait()
        second = pair.near.bind_window_nowait(window, pair.source[:8], AccessFlags.REMOTE_READ)
        rest = [pair.near.write_nowait(pair.source[:8], pair.target.remote()[:8]) for _ in range(2)]
        with pytest.raises(anyio.WouldBlock):
            _ = pair.near.bind_window_nowait(window, pair.source[:8], AccessFlags.REMOTE_READ)
        unhold(device, pair.near)
        await asyncio.gather(first, second, *rest)
        await batch.post_nowait()
        assert len(pair.source.pins) == 0


async def test_a_bind_fails_if_its_window_is_closed_while_it_waits(device: Device) -> None:
    async with ends(device, capabilities=FEW) as pair:
        async with pair.domain.memory_window(MwType.TYPE_2) as window:
            hold(device, pair.near)
            writes = [pair.near.write(pair.source[:8], pair.target.remote()[:8]) for _ in range(4)]
            bind = pair.near.bind_window(window, pair.source[:8], AccessFlags.REMOTE_READ)
            writes.append(pair.near.write(pair.source[:8], pair.target.remote()[:8]))
        unhold(device, pair.near)
        with pytest.raises(ClosedResourceError):
            await bind
        for write in writes:
            await write
        assert pair.is_idle()


@every_model
async def test_waiting_requests_are_posted_in_order(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model, capabilities=FEW) as pair:
        arrived = expect_immediates(pair, 24)
        hold(device, pair.near)
        sends = [pair.near.send(pair.source[:8], immediate=number) for number in range(24)]
        statistics = pair.near.statistics().sends
        assert (statistics.in_flight, statistics.queued, statistics.high_water) == (4, 20, 4)
        with pytest.raises(anyio.WouldBlock):
            _ = pair.near.send_nowait(None)
        unhold(device, pair.near)
        assert await arrived == list(range(24))
        for send in reversed(sends):
            await send
        assert pair.is_idle()


@every_model
async def test_a_batch_waits_for_all_of_its_slots(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model, capabilities=FEW) as pair:
        arrived = expect_immediates(pair, 3 + 4 + 20)
        hold(device, pair.near)
        sends = [pair.near.send(None, immediate=number) for number in range(3)]
        batch = pair.near.batch()
        for number in range(4):
            batch.send(None, immediate=3 + number)
        posted = batch.post()
        sends += [pair.near.send(None, immediate=7 + number) for number in range(20)]
        statistics = pair.near.statistics().sends
        assert (statistics.in_flight, statistics.queued) == (3, 24), "one slot stays free until the batch fits"
        unhold(device, pair.near)
        assert await arrived == list(range(27))
        await posted
        for send in sends:
            await send


@every_model
async def test_requests_of_all_kinds_are_posted_in_the_order_of_the_calls(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair, pair.domain.memory_window(MwType.TYPE_2) as window:
        arrived = expect_immediates(pair, 6)
        sends = [pair.near.send(None, immediate=0), pair.near.send(None, immediate=1)]
        bind = pair.near.bind_window(window, pair.source, AccessFlags.REMOTE_READ)
        batch = pair.near.batch()
        batch.send(None, immediate=2)
        batch.send(None, immediate=3)
        posted = batch.post()
        sends.append(pair.near.send(None, immediate=4))
        write = pair.near.write_with_immediate(None, pair.target.remote()[:0], 5)
        await write
        assert [each.done() for each in [*sends, posted]] == 4 * [True]
        assert bind.done(), "a send queue completes in order"
        assert await arrived == list(range(6))


@every_model
async def test_dropping_a_waiting_request_withdraws_it(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model, capabilities=FEW) as pair, pair.domain.register(64) as extra:
        arrived = expect_immediates(pair, 6)
        hold(device, pair.near)
        sends = [pair.near.send(pair.source[:1], immediate=number) for number in range(4)]
        waits = [pair.near.send(extra[number : number + 1], immediate=9) for number in range(3)]
        last = pair.near.send(None, immediate=4)
        assert len(extra.pins) == 3
        del waits[1]
        assert len(extra.pins) == 2
        assert pair.near.statistics().sends.queued == 3
        waits.clear()
        assert len(extra.pins) == 0
        assert pair.near.statistics().sends.queued == 1
        batch = pair.near.batch()
        batch.send(extra, immediate=9)
        posted = batch.post()
        assert len(extra.pins) == 1
        del batch, posted
        assert len(extra.pins) == 0
        await asyncio.sleep(0.01)
        assert (len(pair.source.pins), pair.near.statistics().sends.queued) == (4, 1)
        final = pair.near.send(None, immediate=5)
        unhold(device, pair.near)
        await asyncio.gather(last, final, *sends)
        assert await arrived == list(range(6))
        assert pair.near.statistics().sends.posted == 6


@every_model
async def test_garbage_collection_withdraws_waiting_requests(device: Device, model: MessageModel) -> None:
    """The collector clears lists and other objects of a cycle, in any order, before it frees the requests.

    :param model: decides how the queue posts.
    """
    async with ends(device, message_model=model, capabilities=FEW) as pair, pair.domain.register(64) as extra:
        hold(device, pair.near)
        writes = [pair.write(b"x", number) for number in range(4)]
        batch = pair.near.batch()
        for each in (extra[:8], extra[8:16]):
            batch.write(each, pair.target.remote()[:8])
        waits = [pair.near.send(extra[:1]), pair.near.send(extra[:1]), batch.post()]
        del batch
        assert len(extra.pins) == 4
        cycle: list[object] = [waits]
        cycle.append(cycle)
        del waits, cycle
        assert len(extra.pins) == 4
        collect_garbage()
        assert len(extra.pins) == 0
        assert pair.near.statistics().sends.queued == 0
        unhold(device, pair.near)
        await asyncio.gather(*writes)
        assert pair.is_idle()


@every_model
async def test_dropping_a_posted_request_does_not_withdraw_it(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model, capabilities=FEW) as pair:
        hold(device, pair.near)
        for number in range(4):
            _ = pair.write(bytes([65 + number]), number)
        await asyncio.sleep(0.01)
        assert len(pair.source.pins) == 4
        with pytest.raises(anyio.WouldBlock):
            _ = pair.near.send_nowait(None)
        unhold(device, pair.near)
        await pair.source.pins.wait()  # they complete although nothing awaits them
        assert pair.is_idle()
        assert bytes(pair.target.buffer[:5]) == b"ABCD\0"
        assert pair.near.statistics().sends.completed == 4


@pytest.mark.every_way
async def test_cancelling_a_waiting_request_withdraws_it(device: Device) -> None:
    async with ends(device, capabilities=FEW) as pair:
        hold(device, pair.near)
        for number in range(4):
            _ = pair.write(b"x", number)

        async def use() -> None:
            await pair.write(b"never", 100)

        task = asyncio.create_task(use())
        await asyncio.sleep(0.01)
        assert (len(pair.source.pins), pair.near.statistics().sends.queued) == (5, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (len(pair.source.pins), pair.near.statistics().sends.queued) == (4, 0)
        with anyio.move_on_after(0.01):
            await pair.write(b"never", 100)
        assert (len(pair.source.pins), pair.near.statistics().sends.queued) == (4, 0)
        unhold(device, pair.near)
        await pair.write(b"y", 5)
        assert bytes(pair.target.buffer[:105]) == b"xxxx\0y" + bytes(99)


@pytest.mark.every_way
async def test_awaited_requests_are_posted_when_slots_are_free(device: Device) -> None:
    async with ends(device, capabilities=FEW) as pair:
        hold(device, pair.near)
        for number in range(4):
            _ = pair.write(b"x", number)
        tasks = [asyncio.ensure_future(pair.write(b"z", 4 + number)) for number in range(6)]
        await asyncio.sleep(0.01)
        assert pair.near.statistics().sends.queued == 6
        unhold(device, pair.near)
        await asyncio.gather(*tasks)
        assert bytes(pair.target.buffer[:11]) == b"xxxxzzzzzz\0"
        assert pair.is_idle()


@pytest.mark.every_way
async def test_closing_flushes_waiting_requests(device: Device) -> None:
    async with ends(device, capabilities=FEW) as pair:
        pair.near.to_sqd()  # no request is started any more
        writes = [pair.write(b"x", number) for number in range(6)]
        tasks = [asyncio.ensure_future(write) for write in writes]
        await asyncio.sleep(0.01)
        await pair.near.aclose()
        for task in tasks:
            with pytest.raises(WorkCompletionError) as caught:
                await task
            assert caught.value.status is WcStatus.WR_FLUSH_ERR
        assert pair.is_idle()
        assert bytes(pair.target.buffer[:8]) == bytes(8)


@pytest.mark.every_way
async def test_receives_wait_for_slots(device: Device) -> None:
    capabilities = QpCapabilities(max_recv_wr=2)
    async with ends(device, capabilities=capabilities) as pair:
        receives = [pair.far.receive(pair.target[8 * number : 8 * number + 8]) for number in range(6)]
        assert pair.far.statistics().receives.queued == 4
        del receives[3]
        for number in (0, 1, 2, 4, 5):
            pair.source.buffer[0] = number
            await pair.near.send(pair.source[:1])
        assert [bytes((await receive).data) for receive in receives] == [bytes([number]) for number in (0, 1, 2, 4, 5)]
        assert pair.target.buffer[24] == 0
        assert pair.is_idle()
