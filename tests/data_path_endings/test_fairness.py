"""Awaits that complete at once leave other tasks and callbacks their turns: counted, not timed."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext

import pytest

from aioverbs import Device, MessageModel, QpCapabilities, QueuePair
from tests.data_path_endings.pair import ACCESS, PATIENCE_S, pair_on
from tests.pace import fewer

AWAITS = 256  # most awaits on one queue pair in a turn of the loop
every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


@contextmanager
def counted_turns() -> Iterator[list[None]]:
    """Add an item to the yielded list in each turn of the loop until the end of the block."""
    loop = asyncio.get_running_loop()
    turns: list[None] = []
    handle: asyncio.Handle

    def turn() -> None:
        nonlocal handle
        turns.append(None)
        handle = loop.call_soon(turn)

    handle = loop.call_soon(turn)
    try:
        yield turns
    finally:
        handle.cancel()


@every_model
async def test_callbacks_run_beside_endless_writes(device: Device, model: MessageModel) -> None:
    async with pair_on(device, model) as pair:
        with counted_turns() as turns:
            for _ in range(20 * AWAITS):
                await pair.write()
        assert len(turns) >= 20
        await pair.check_idle()


@pytest.mark.parametrize(
    "kind", ["lease", "cache", "register", "run", "queue pair", "loop domain", "loop domain, open already"]
)
async def test_callbacks_run_beside_endless_calls_that_complete_at_once(device: Device, kind: str) -> None:
    """The budget of awaits per turn also covers registration, opening, and calls on the loop of the owner."""
    async with (
        device.resource_domain() as domain,
        domain.buffer_pool(64, 4) as pool,
        domain.completion_queue(64) as cq,
        device.loop_domain() if kind == "loop domain, open already" else nullcontext(),
    ):
        memory = bytearray(64)
        resource: AbstractAsyncContextManager[object]
        with counted_turns() as turns:
            for _ in range(AWAITS):
                if kind == "run":
                    assert await domain.run(int) == 0
                    continue
                if kind == "lease":
                    resource = pool.lease()
                elif kind == "cache":
                    resource = domain.cache.region(memory)
                elif kind == "register":
                    resource = domain.register(64)
                elif kind.startswith("loop domain"):
                    resource = device.loop_domain()
                else:
                    resource = domain.queue_pair(cq)
                async with resource:
                    pass
        assert len(turns) >= 8


async def test_callbacks_run_while_queue_pairs_with_requests_are_closed(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(2 * AWAITS) as cq,
        domain.buffer_pool(64, 1) as pool,
        pool.lease() as buffer,
    ):
        depths = QpCapabilities(max_send_wr=1, max_recv_wr=1)
        queue_pairs = [domain.queue_pair(cq, capabilities=depths) for _ in range(AWAITS)]
        for qp in queue_pairs:
            await qp.open()
            qp.to_init()
        receives = [qp.receive(buffer) for qp in queue_pairs]
        with counted_turns() as turns:
            for qp in queue_pairs:
                await qp.aclose()
        assert len(turns) >= 2
        assert all(receive.done() for receive in receives)


@every_model
async def test_a_timer_and_an_echo_go_on_beside_endless_writes(device: Device, model: MessageModel) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(64):
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    async with asyncio.timeout(PATIENCE_S), pair_on(device, model) as pair:
        served = await asyncio.start_server(echo, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*served.sockets[0].getsockname())
        finished = False
        writes = 0

        async def write() -> None:
            nonlocal writes
            while not finished:
                await pair.write()
                writes += 1

        writing = asyncio.create_task(write())
        echoes = 0
        while echoes < fewer(50, least=20) or writes < fewer(1000, least=400):
            echoes += 1
            writer.write(b"echo")
            assert await asyncio.wait_for(reader.readexactly(4), PATIENCE_S) == b"echo"
            await asyncio.sleep(0.0001)
        finished = True
        await asyncio.wait_for(writing, PATIENCE_S)
        writer.close()
        await writer.wait_closed()
        served.close()
        await served.wait_closed()
        await pair.check_idle()


@every_model
async def test_a_hundred_queue_pairs_have_equal_shares(
    device: Device, request: pytest.FixtureRequest, model: MessageModel
) -> None:
    pairs = fewer(100, least=20)
    inline = request.node.callspec.params["device"] == "inline"
    async with (
        device.resource_domain(message_model=model) as domain,
        domain.register(4096, ACCESS) as region,
        domain.completion_queue(4096) as cq,
    ):
        small = QpCapabilities(max_send_wr=4, max_recv_wr=1)
        qps: list[QueuePair] = []
        for _ in range(2 * pairs):
            qp = domain.queue_pair(cq, capabilities=small)
            await qp.open()
            qps.append(qp)
        nears, fars = qps[:pairs], qps[pairs:]
        for near, far in zip(nears, fars, strict=True):
            near.connect(far.local_endpoint(), ACCESS)
            far.connect(near.local_endpoint(), ACCESS)
        counts = [0] * pairs
        local, remote = region[:8], region.remote()[64:72]
        finished = asyncio.Event()

        async def write(number: int) -> None:
            while sum(counts) < fewer(30_000):
                await nears[number].write(local, remote)
                counts[number] += 1
            finished.set()

        await asyncio.wait_for(asyncio.gather(*map(write, range(pairs))), PATIENCE_S)
        assert finished.is_set()
        for qp in reversed(qps):
            await qp.aclose()
        # With a device thread, the completions that an await finds depend on the speed of that thread, too.
        most = 2 if inline else 8
        assert max(counts) <= most * min(counts), (min(counts), max(counts))
