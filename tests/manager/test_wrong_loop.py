"""Blocks and iterators in use by a loop refuse other loops, and continue to work for their owner."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioverbs import (
    AffinityError,
    Connection,
    ConnectionListener,
    Device,
    EventType,
    ResourceDomain,
    ResourceState,
    Server,
    ThreadModel,
    connect,
    listen,
    reconnect,
    serve,
)
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.waiting import until

pytestmark = [
    # Thread models of the software device: domains owned by a loop, and domains that any loop may use.
    needs(Capability.FAULT_PLAN),
]

every_domain = pytest.mark.parametrize("model", [ThreadModel.SINGLE, ThreadModel.SAFE])


async def refused(call: Callable[[], Awaitable[object]]) -> None:
    """Check that awaiting `call()` on a loop of another thread is refused."""

    async def elsewhere() -> None:
        async with asyncio.timeout(patience(20)):
            with pytest.raises(AffinityError, match="which belongs to thread"):
                await call()

    await asyncio.to_thread(asyncio.run, elsewhere())


async def echo(connection: Connection) -> None:
    async for message in connection:
        await connection.send(message)


def serving(domain: ResourceDomain) -> Server:
    return serve(echo, HOST, domain=domain, settings=SMALL)


def listening(domain: ResourceDomain) -> ConnectionListener:
    return listen(HOST, domain=domain, settings=SMALL)


@every_domain
@pytest.mark.parametrize("error", [None, ValueError("of the block")], ids=["at its end", "by an error"])
async def test_leaving_a_block_of_messages_is_refused_on_other_loops(
    device: Device, model: ThreadModel, error: ValueError | None
) -> None:
    async with (
        device.resource_domain(thread_model=model) as domain,
        domain.buffer_pool(64, 6) as pool,
        domain.shared_receive_queue(4) as srq,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq, srq=srq) as qp,
        domain.register(64) as region,
    ):
        qp.connect(qp.local_endpoint())
        block = srq.messages(pool)
        messages = await block.__aenter__()
        await refused(lambda: block.__aexit__(type(error) if error else None, error, None))
        for _ in range(6):  # more than were posted at first: the queue is still refilled
            await qp.send(region[:8])
            with await anext(messages) as message:
                assert len(message.data) == 8
        await block.__aexit__(None, None, None)
        with pytest.raises(StopAsyncIteration):
            await anext(messages)


async def test_a_block_of_messages_is_entered_once_at_a_time(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.buffer_pool(64, 8) as pool,
        domain.shared_receive_queue(4) as srq,
    ):
        block = srq.messages(pool)
        for _ in range(2):
            async with block:
                with pytest.raises(RuntimeError, match="new one for each block"):
                    await block.__aenter__()
        failed = srq.messages(pool, low=99)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"`low` must be 1 to 4 for 4 receives, got 99"):
                await failed.__aenter__()


@pytest.mark.every_way
async def test_leaving_a_block_of_messages_of_an_ended_loop_does_not_wait(device: Device) -> None:
    """The thread has ended and its loop does not run, so the task that fills the queue never ends."""
    async with (
        device.resource_domain(thread_model=ThreadModel.SAFE) as domain,
        domain.buffer_pool(64, 4) as pool,
        domain.shared_receive_queue(4) as srq,
    ):
        block = srq.messages(pool)
        loop = asyncio.new_event_loop()

        async def enter() -> None:
            await block.__aenter__()
            await asyncio.sleep(0)  # the filling task starts to wait

        thread = threading.Thread(target=lambda: loop.run_until_complete(enter()))
        thread.start()
        thread.join()
        async with asyncio.timeout(patience(20)):
            await block.__aexit__(None, None, None)
        assert pool.statistics().under_dma == 4, "receives stay posted until the queue is closed"
        fillers = asyncio.all_tasks(loop)
        for filler in fillers:
            filler.cancel()
        await asyncio.to_thread(loop.run_until_complete, asyncio.wait(fillers))
        loop.close()


@every_domain
async def test_a_reconnecting_iterator_refuses_other_loops(device: Device, model: ThreadModel) -> None:
    async with (
        device.resource_domain(thread_model=model) as domain,
        serving(domain) as server,
    ):
        connections = reconnect(HOST, server.port, domain=domain, settings=SMALL)
        first = await anext(connections)
        for call in (connections.__anext__, connections.aclose, lambda: connections.athrow(ValueError("of another"))):
            await refused(call)
        await first.send(b"still open")
        assert await first.receive() == b"still open"
        second = await anext(connections)
        assert (first.state, second.state) == (ResourceState.CLOSED, ResourceState.OPEN)
        await connections.aclose()
        assert second.state is ResourceState.CLOSED


async def test_reconnecting_asked_by_another_loop_first(device: Device) -> None:
    """The domain belongs to the owner: the refused call starts nothing, and the owner can start the iterator."""
    async with device.resource_domain() as domain, serving(domain) as server:
        connections = reconnect(HOST, server.port, domain=domain, settings=SMALL)
        await refused(connections.__anext__)
        await refused(connections.aclose)
        assert (await anext(connections)).state is ResourceState.OPEN
        await connections.aclose()


@pytest.mark.every_way
async def test_break_in_a_reconnecting_loop_closes_the_connection(device: Device) -> None:
    async with device.resource_domain() as domain, serving(domain) as server:
        async for connection in reconnect(HOST, server.port, domain=domain, settings=SMALL):  # noqa: B007
            break
        collect_garbage()
        await until(lambda: connection.state is ResourceState.CLOSED)


@every_domain
async def test_iterating_a_listener_is_refused_on_other_loops(device: Device, model: ThreadModel) -> None:
    async with (
        device.resource_domain(thread_model=model) as domain,
        listening(domain) as listener,
    ):
        connections: Any = aiter(listener)
        for _ in range(2):
            near = await connect(HOST, listener.port, domain=domain, settings=SMALL)
            far = await anext(connections)
            await refused(connections.__anext__)
            await refused(connections.aclose)
            near.abort()
            far.abort()
        await listener.aclose()
        assert [each async for each in listener] == []


@every_domain
@pytest.mark.parametrize("error", [None, ValueError("of the block")], ids=["at its end", "by an error"])
async def test_leaving_a_block_of_a_connection_is_refused_on_other_loops(
    device: Device, model: ThreadModel, error: ValueError | None
) -> None:
    async with (
        device.resource_domain(thread_model=model) as domain,
        listening(domain) as listener,
    ):
        block = connect(HOST, listener.port, domain=domain, settings=SMALL)
        with pytest.raises(RuntimeError, match="not in a block"):
            await block.__aexit__(None, None, None)
        near = await block.__aenter__()
        far = await listener.accept()
        await refused(lambda: block.__aexit__(type(error) if error else None, error, None))
        with pytest.raises(RuntimeError, match="already in a block"):
            await block.__aenter__()
        await near.send(b"still open")
        assert await far.receive() == b"still open"
        await block.__aexit__(None, None, None)
        assert near.state is ResourceState.CLOSED
        await far.aclose()


async def test_leaving_a_block_of_a_loop_domain_is_refused_on_other_loops(device: Device) -> None:
    block = device.loop_domain()
    domain = await block.__aenter__()
    await refused(lambda: block.__aexit__(None, None, None))
    async with device.loop_domain() as same:
        assert same is domain
    assert not domain.closed
    await block.__aexit__(None, None, None)
    assert domain.closed


@pytest.mark.parametrize("waits", [False, True], ids=["between two events", "waiting"])
async def test_event_iterators_refuse_other_loops(device: Device, waits: bool) -> None:
    events = device.events()
    faults = device.faults
    waiting = asyncio.create_task(events.__anext__())
    if not waits:
        faults.set_port(False)
        assert (await waiting).event_type is EventType.PORT_ERR
    await asyncio.sleep(0)
    await refused(events.__anext__)
    await refused(events.aclose)
    if not waits:
        waiting = asyncio.create_task(events.__anext__())
    faults.set_port(not waits)
    expected = EventType.PORT_ERR if waits else EventType.PORT_ACTIVE
    assert (await asyncio.wait_for(waiting, patience(20))).event_type is expected
    await events.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_leaving_a_block_that_was_not_entered(device: Device) -> None:
    with pytest.raises(RuntimeError, match="is not in a block"):
        await device.loop_domain().__aexit__(None, None, None)
    async with (
        device.resource_domain() as domain,
        domain.shared_receive_queue(4) as srq,
        domain.buffer_pool(64, 4) as pool,
    ):
        block = srq.messages(pool)
        with pytest.raises(RuntimeError, match="is not in a block"):
            await block.__aexit__(None, None, None)
        async with block:
            pass
        with pytest.raises(RuntimeError, match="is not in a block"):
            await block.__aexit__(None, None, None)


async def test_left_blocks_may_be_entered_on_another_loop(device: Device) -> None:
    async with device.resource_domain(thread_model=ThreadModel.SAFE) as domain, listening(domain) as listener:
        blocks = device.loop_domain(), connect(HOST, listener.port, domain=domain, settings=SMALL)

        async def enter() -> list[Any]:
            seen: list[Any] = []
            for block in blocks:
                async with block as entered:
                    assert entered.owner is not None
                    seen.append(entered.owner.loop)
            assert seen == [asyncio.get_running_loop()] * len(blocks)
            return seen

        here = await enter()
        there = await asyncio.to_thread(asyncio.run, enter())
        assert here != there
