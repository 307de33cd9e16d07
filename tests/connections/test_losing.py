"""Lost connections: `broken`, `wait_lost`, one first cause for all calls, and no warning for those that are dropped."""

import asyncio
import gc
import warnings
from collections.abc import Callable

import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    ClosedResourceError,
    Connection,
    Device,
    ResourceState,
    WcStatus,
    WorkCompletionError,
    connect,
    listen,
)
from aioverbs._connection.connection import end_of
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL, deeper, pair
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import until

ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
GRANTED = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


@pytest.mark.every_way
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "aborted"])
async def test_wait_lost_returns_the_exception(device: Device, closes: bool) -> None:
    async with pair(device) as ends:
        waiting = [asyncio.create_task(ends.near.wait_lost()) for _ in range(2)]
        await asyncio.sleep(0)
        before = ends.near.broken
        assert before is None
        if closes:
            await ends.far.aclose()
        else:
            ends.far.abort()
        async with asyncio.timeout(patience(10)):
            first, second = await asyncio.gather(*waiting)
        assert first is second is ends.near.broken
        assert "closed the connection" in str(first) if closes else "gone" in str(first)
        assert await ends.near.wait_lost() is first


@pytest.mark.every_way
async def test_wait_lost_raises_if_this_end_closes(device: Device) -> None:
    async with pair(device) as ends:
        waiting = asyncio.create_task(ends.near.wait_lost())
        await asyncio.sleep(0)
        ends.near.abort()
        with pytest.raises(ClosedResourceError):
            await waiting
        assert ends.near.broken is None
        with pytest.raises(ClosedResourceError):
            await ends.near.wait_lost()


async def test_a_cancelled_wait_lost_changes_nothing(device: Device) -> None:
    async with pair(device) as ends:
        waiting = asyncio.create_task(ends.near.wait_lost())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await ends.near.send(b"as ever")
        assert await ends.far.receive() == b"as ever"


@pytest.mark.every_way
async def test_all_calls_raise_the_first_cause(device: Device) -> None:
    async with pair(device) as ends, ends.domain.register(64, ALL) as memory:
        await ends.far.grant(memory[32:], GRANTED)
        remote = await ends.near.receive_grant()
        local = memory[:8]
        waiting = asyncio.create_task(ends.near.receive())
        await asyncio.sleep(0)
        ends.far.abort()
        lost = await ends.near.wait_lost()
        calls: list[Callable[[], object]] = [
            lambda: ends.near.write(local, remote[:8]),
            lambda: ends.near.read(local, remote[:8]),
            lambda: ends.near.compare_and_swap(remote[:8], 0, 1),
            lambda: ends.near.fetch_and_add(remote[:8], 1),
            lambda: ends.near.write_with_immediate(local, remote[:8], 1),
            lambda: ends.near.send(b"too late"),
            ends.near.receive,
            ends.near.send_eof,
            ends.near.receive_grant,
            lambda: ends.near.grant(memory, AccessFlags.REMOTE_READ),
            lambda: waiting,
        ]
        for call in calls:
            with pytest.raises(BrokenResourceError) as caught:
                await call()  # type: ignore[misc]
            assert caught.value is lost


@pytest.mark.every_way
async def test_one_sided_requests_find_the_peer_gone(device: Device) -> None:
    """Nothing but the request itself reports that: it raises what all later calls raise."""
    async with pair(device, deeper(SMALL, keep_alive_s=0.2)) as ends, ends.domain.register(64, ALL) as memory:
        await ends.far.grant(memory[32:], GRANTED)
        remote = await ends.near.receive_grant()
        end_of(ends.far).control.abort = lambda: True  # type: ignore[method-assign, union-attr]
        ends.far.qp.to_error()
        requests = [ends.near.read(memory[:8], remote[:8]) for _ in range(3)]
        errors = await asyncio.gather(*map(_outcome, requests))
        assert {type(each) for each in errors} == {BrokenResourceError}
        assert set(map(id, errors)) == {id(ends.near.broken)}
        assert ends.near.broken is not None
        assert isinstance(ends.near.broken.__cause__, WorkCompletionError)
        assert ends.near.broken.__cause__.status is not WcStatus.WR_FLUSH_ERR, "this is the first cause"
        del end_of(ends.far).control.abort  # type: ignore[union-attr]


async def _outcome(request: object) -> BaseException:
    with pytest.raises(BrokenResourceError) as caught:
        await request  # type: ignore[misc]
    return caught.value


@needs(Capability.FAULT_PLAN)
async def test_requests_in_flight_when_this_end_closes(device: Device) -> None:
    async with pair(device) as ends, ends.domain.register(64, ALL) as memory:
        await ends.far.grant(memory[32:], GRANTED)
        remote = await ends.near.receive_grant()
        hold(device, ends.near.qp)
        reading = asyncio.ensure_future(ends.near.read(memory[:8], remote[:8]))
        waiting = [asyncio.ensure_future(ends.near.read(memory[:8], remote[:8])) for _ in range(30)]  # for a slot
        await asyncio.sleep(0)
        ends.near.abort()
        for each in waiting[-10:]:
            with pytest.raises(ClosedResourceError):
                await each
        unhold(device)
        await asyncio.wait([reading, *waiting])
        for each in (reading, *waiting):
            assert each.exception() is None or isinstance(each.exception(), ClosedResourceError)


@pytest.mark.every_way
@pytest.mark.parametrize("drop", ["collected", "left to the domain"])
async def test_a_lost_connection_can_be_dropped(device: Device, drop: str) -> None:
    """Without a warning, and it is closed."""
    async with device.resource_domain() as domain, listen(HOST, domain=domain, settings=SMALL) as listener:
        other = await device.resource_domain().open()
        near: Connection | None = await connect(HOST, listener.port, domain=other, settings=SMALL)
        assert near is not None
        (await listener.accept()).abort()
        await near.wait_lost()
        node = near._lifecycle
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if drop == "collected":
                near = None
                gc.collect()
                await until(lambda: node.state is ResourceState.CLOSED)
            await other.aclose()
        assert node.state is ResourceState.CLOSED
        assert not [str(each.message) for each in caught if "Connection" in str(each.message)]
