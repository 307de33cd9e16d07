"""Lost connections: `broken`, `wait_lost`, one first cause for all calls, and no warning for those that are dropped."""

import asyncio
import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    ClosedResourceError,
    Connection,
    Device,
    QpState,
    ResourceState,
    WcOpcode,
    WcStatus,
    WorkCompletionError,
    connect,
    listen,
)
from aioverbs._connection.connection import end_of
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL, deeper, pair
from tests.garbage import collect_garbage
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
        errors = [await _outcome(call) for call in calls]
        assert {(type(each), str(each), each.__cause__) for each in errors} == {(type(lost), str(lost), lost)}
        assert len({*map(id, errors), id(lost)}) == len(calls) + 1, "each call raises an exception of its own"
        assert lost.__traceback__ is None


@pytest.mark.every_way
async def test_one_sided_requests_find_the_peer_gone(device: Device) -> None:
    """Nothing but the request itself reports that: it raises what all later calls raise."""
    async with pair(device, deeper(SMALL, keep_alive_s=0.2)) as ends, ends.domain.register(64, ALL) as memory:
        await ends.far.grant(memory[32:], GRANTED)
        remote = await ends.near.receive_grant()
        end_of(ends.far).control.abort = lambda: True  # type: ignore[method-assign, union-attr]
        ends.far.qp.to_error()
        requests = [ends.near.read(memory[:8], remote[:8]) for _ in range(3)]
        errors = await asyncio.gather(*requests, return_exceptions=True)
        lost = ends.near.broken
        assert lost is not None
        assert {(type(each), each and each.__cause__) for each in errors} == {(BrokenResourceError, lost)}
        assert isinstance(lost.__cause__, WorkCompletionError)
        assert lost.__cause__.status is not WcStatus.WR_FLUSH_ERR, "this is the first cause"
        del end_of(ends.far).control.abort  # type: ignore[union-attr]


async def _outcome(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BrokenResourceError) as caught:
        await call()
    return caught.value


async def test_the_first_cause_stays_when_a_request_is_refused(device: Device) -> None:
    async with pair(device) as ends, ends.domain.register(64, ALL) as memory:
        await ends.far.grant(memory[32:], GRANTED)
        remote = await ends.near.receive_grant()
        ends.near.qp.to_error()
        error = await _outcome(lambda: ends.near.read(memory[:8], remote[:8]))
        lost = ends.near.broken
        assert error.__cause__ is lost is not None
        assert isinstance(lost.__cause__, BrokenResourceError), "the queue pair's own"


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
                collect_garbage()
                await until(lambda: node.state is ResourceState.CLOSED)
            await other.aclose()
        assert node.state is ResourceState.CLOSED
        assert not [str(each.message) for each in caught if "Connection" in str(each.message)]


async def test_a_failed_request_that_another_thread_asks_about_first(device: Device) -> None:
    """Before the owner knows that the connection is lost: the connection was not closed by this end."""
    async with pair(device) as ends:
        channel = end_of(ends.near).channel
        failure = WorkCompletionError(WcStatus.RETRY_EXC_ERR, WcOpcode.RDMA_WRITE, 0, ends.near.qp.qp_num)
        error = await asyncio.to_thread(channel._explain, failure)
        assert type(error) is BrokenResourceError
        assert error.__cause__ is failure
        assert ends.near.broken is None


async def test_an_exception_while_the_loss_is_reported(device: Device) -> None:
    """`wait_lost` returns, and the queue pair fails, all the same."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    async with pair(device) as ends:
        mistake = RuntimeError("a planted mistake")

        end = end_of(ends.near)
        on_ended = end.on_ended

        def fail() -> None:
            on_ended()
            if not reported:
                raise mistake

        end.on_ended = fail  # type: ignore[method-assign]
        ends.far.abort()
        async with asyncio.timeout(patience(10)):
            await ends.near.wait_lost()
        assert reported == [mistake]
        assert ends.near.qp.query().qp_state is QpState.ERR


class _Mark:
    """Object of a caller: as long as it exists, something keeps the frame of the call."""


@pytest.mark.every_way
@pytest.mark.parametrize(
    "call",
    [
        lambda near, memory, remote: near.send(bytes(10)),
        lambda near, memory, remote: near.receive(),
        lambda near, memory, remote: near.receive_grant(),
        lambda near, memory, remote: near.write(memory[:8], remote[:8]),
        lambda near, memory, remote: near.fetch_and_add(remote[:8], 1),
        lambda near, memory, remote: near.write_with_immediate(memory[:8], remote[:8], 1),
        lambda near, memory, remote: near.grant(memory, GRANTED),
    ],
    ids=["send", "receive", "receive_grant", "write", "fetch_and_add", "write_with_immediate", "grant"],
)
@pytest.mark.parametrize("begins", ["before the loss", "after the loss"])
async def test_failed_calls_on_a_lost_connection_keep_nothing(
    device: Device, call: Callable[..., Any], begins: str
) -> None:
    """Neither the frames of the callers, nor the connection once it is dropped."""
    marks = []

    async def fail(*arguments: Any) -> None:
        mark = _Mark()
        marks.append(weakref.ref(mark))
        with contextlib.suppress(BrokenResourceError, WorkCompletionError):  # the latter if the grant ended first
            while True:  # some requests are completed before the loss
                await call(*arguments)

    async def use() -> Any:
        near = await connect(HOST, listener.port, domain=other, settings=SMALL)
        far = await listener.accept()
        await far.grant(memory[32:], GRANTED)
        remote = await near.receive_grant()
        waiting = [asyncio.create_task(fail(near, local, remote))] if begins == "before the loss" else []
        await asyncio.sleep(0)
        far.abort()
        await near.wait_lost()
        for _ in range(3):
            await fail(near, local, remote)
        await asyncio.gather(*waiting)
        collect_garbage()
        assert [each() for each in marks] == [None] * len(marks)
        return near._lifecycle

    async with (
        device.resource_domain() as domain,
        device.resource_domain() as other,
        domain.register(64, ALL) as memory,
        other.register(64, ALL) as local,
        listen(HOST, domain=domain, settings=SMALL) as listener,
    ):
        node = await use()
        collect_garbage()
        await until(lambda: node.state is ResourceState.CLOSED)


@pytest.mark.every_way
async def test_a_revocation_that_the_loss_ends_keeps_nothing(device: Device) -> None:
    marks = []
    async with pair(device) as ends, ends.domain.register(64, ALL) as memory:
        granted = await ends.near.grant(memory[:8], GRANTED)

        async def revoke() -> None:
            mark = _Mark()
            marks.append(weakref.ref(mark))
            with pytest.raises(BrokenResourceError) as caught:
                await granted.revoke()
            assert caught.value.__cause__ is ends.near.broken

        revoking = [asyncio.create_task(revoke()) for _ in range(2)]
        await asyncio.sleep(0)
        ends.far.abort()
        await asyncio.gather(*revoking)
        del revoking
        collect_garbage()
        assert [each() for each in marks] == [None, None]
