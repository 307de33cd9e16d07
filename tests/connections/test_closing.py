"""Ends of connections: delivery of sent data, death of the peer, cancelled and forgotten connections."""

import asyncio
import contextlib
import random
import warnings
from typing import Any

import anyio
import pytest

from aioverbs import (
    BrokenResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    Connection,
    ConnectionSettings,
    Device,
    DeviceRemovedError,
    ThreadModel,
    connect,
    listen,
    open_device,
)
from aioverbs._connection import liveness
from aioverbs._connection.connection import end_of
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL, Cancel, deeper, every_way_to_cancel, pair, use_up
from tests.garbage import collect_garbage
from tests.manager.held_verbs import StayingAllocator, thread_inside
from tests.pace import fewer, patience
from tests.waiting import until

MESSAGES = [bytes([n]) * (n * 200) for n in range(3)]


async def flood(connection: Connection) -> None:
    """Send more than a peer accepts that does not read."""
    for _ in range(10):
        await connection.send(bytes(5000))


async def stuck(connection: Connection) -> None:
    """Wait until a sender waits for a credit that is never returned: the peer has room for the first message only."""
    before, seen = None, connection.traffic()
    while seen != before or seen.credits > 1 or not (seen.waits and seen.messages_sent):
        await asyncio.sleep(0.02)  # nobody tells: it is the other end's doing
        before, seen = seen, connection.traffic()


@pytest.mark.every_way
async def test_closing_delivers_everything_sent(device: Device) -> None:
    """Also if the peer has not read any of it yet."""
    async with pair(device) as ends:
        for message in MESSAGES:
            await ends.near.send(message)
        await ends.near.aclose()
        await asyncio.sleep(0.05)
        for message in MESSAGES:
            assert await ends.far.receive() == message
        for _ in range(2):
            with pytest.raises(anyio.EndOfStream):
                await ends.far.receive()
        await until(lambda: ends.far.broken is not None)
        with pytest.raises(BrokenResourceError, match="closed the connection"):
            await ends.far.send(b"too late")
        with pytest.raises(ClosedResourceError):
            await ends.near.send(b"closed")
        with pytest.raises(ClosedResourceError):
            await ends.near.receive()


@pytest.mark.every_way
async def test_closing_waits_for_a_concurrent_send(device: Device) -> None:
    async with pair(device) as ends:
        big = random.Random(1).randbytes(30_000)
        sending = asyncio.create_task(ends.near.send(big))
        await asyncio.sleep(0)
        closing = asyncio.create_task(ends.near.aclose())
        assert await ends.far.receive() == big
        with pytest.raises(anyio.EndOfStream):
            await ends.far.receive()
        await sending
        await closing


@pytest.mark.every_way
async def test_closing_gives_up_after_close_timeout_s(device: Device) -> None:
    """The peer does not read: undelivered data is lost, and the peer is notified of that."""
    async with pair(device, deeper(SMALL, close_timeout_s=0.1)) as ends:
        sending = asyncio.create_task(flood(ends.near))
        await stuck(ends.near)
        async with asyncio.timeout(patience(5)):
            sent = ends.near.traffic().messages_sent
            await ends.near.aclose()
        with pytest.raises((ClosedResourceError, BrokenResourceError)):
            await sending
        for _ in range(sent):
            assert len(await ends.far.receive()) == 5000
        with pytest.raises(BrokenResourceError, match="gone"):
            await ends.far.receive()


@pytest.mark.every_way
@every_way_to_cancel
async def test_a_cancelled_send_eof_has_no_effect(device: Device, cancel: Cancel) -> None:
    """The peer is not notified: more messages can be sent, and the end after them."""
    async with pair(device) as ends:
        count = await use_up(ends.near)
        waits = ends.near.traffic().waits
        await cancel(ends.near.send_eof(), lambda: ends.near.traffic().waits > waits)
        for _ in range(count):
            assert await ends.far.receive() == b"one of them"
        await ends.near.send(b"more")
        await ends.near.send_eof()
        assert await ends.far.receive() == b"more"
        with pytest.raises(anyio.EndOfStream):
            await ends.far.receive()
        with pytest.raises(ClosedResourceError, match="send_eof"):
            await ends.near.send(b"too late")


@pytest.mark.every_way
async def test_both_ends_close_at_once(device: Device) -> None:
    for _ in range(fewer(5)):
        async with pair(device) as ends:
            await ends.near.send(b"1")
            await ends.far.send(b"2")
            async with asyncio.timeout(patience(5)):
                await asyncio.gather(ends.near.aclose(), ends.far.aclose())
            assert ends.near.closed
            assert ends.far.closed


async def test_closing_ends_as_soon_as_the_peer_is_gone(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that aborts when it sees the end may do so before its device acknowledges that end."""
    monkeypatch.setattr(liveness, "_LINGER_S", 1000)
    async with pair(device, deeper(SMALL, close_timeout_s=1000)) as ends:
        channel = end_of(ends.near).channel
        wait_delivered = channel.sender.wait_delivered

        async def abort_and_wait() -> None:
            ends.far.abort()
            await wait_delivered()

        monkeypatch.setattr(channel.sender, "wait_delivered", abort_and_wait)
        async with asyncio.timeout(patience(5)):
            await ends.near.aclose()


@pytest.mark.every_way
async def test_abort_breaks_the_peers_connection(device: Device) -> None:
    async with pair(device) as ends:
        await ends.near.send(b"this was delivered")
        await end_of(ends.near).channel.sender.wait_delivered()
        ends.near.abort()
        assert await ends.far.receive() == b"this was delivered"
        with pytest.raises(BrokenResourceError, match="gone"):
            await ends.far.receive()


async def test_anyio_aclose_forcefully(device: Device) -> None:
    async with pair(device) as ends:
        await anyio.aclose_forcefully(ends.near)
        assert ends.near.closed
        with pytest.raises((BrokenResourceError, anyio.EndOfStream)):
            await ends.far.receive()


async def test_async_with_closes_the_connection(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        listen(HOST, domain=domain, settings=SMALL) as listener,
    ):
        async with connect(HOST, listener.port, domain=domain, settings=SMALL) as near:
            far = await listener.accept()
            await near.send(b"x")
        assert near.closed
        async with far:
            assert await far.receive() == b"x"
            with pytest.raises(anyio.EndOfStream):
                await far.receive()
        assert far.closed
        with pytest.raises(ClosedResourceError):
            await far.open()


@pytest.mark.every_way
async def test_closing_the_domain_closes_the_connection(device: Device) -> None:
    async with device.resource_domain() as domain, listen(HOST, domain=domain, settings=SMALL) as listener:
        other = await device.resource_domain().open()
        near = await connect(HOST, listener.port, domain=other, settings=SMALL)
        far = await listener.accept()
        with pytest.warns(ResourceWarning, match="Connection with .* was still open"):
            await other.aclose()
        assert near.closed
        with pytest.raises(ClosedResourceError):
            await near.receive()
        with pytest.raises(BrokenResourceError):
            await far.receive()
        await far.aclose()


@needs(Capability.PARENT_DOMAINS)
async def test_closing_again_after_a_verb_of_another_thread(device: Device) -> None:
    """The first attempt fails, and ends only the messages."""
    staying, settings = StayingAllocator(), deeper(SMALL, close_timeout_s=0)
    async with (
        device.resource_domain(thread_model=ThreadModel.UNSAFE, allocator=staying) as domain,
        listen(HOST, domain=domain, settings=settings) as listener,
    ):
        near = await connect(HOST, listener.port, domain=domain, settings=settings)
        far = await listener.accept()
        async with thread_inside(domain, staying):
            with pytest.raises(ConcurrentAccessError):
                await near.aclose()
            closed = [near.closed]
            with pytest.raises(ClosedResourceError):
                await near.send(b"too late")
        await near.aclose()
        assert [*closed, near.closed] == [False, True]
        with pytest.raises(BrokenResourceError):
            await far.receive()
        far.abort()


@pytest.mark.every_way
async def test_a_forgotten_connection_warns_and_closes(device: Device) -> None:
    async with device.resource_domain() as domain, listen(HOST, domain=domain, settings=SMALL) as listener:
        near: Connection | None = await connect(HOST, listener.port, domain=domain, settings=SMALL)
        far = await listener.accept()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            near = None
            collect_garbage()
        assert near is None
        assert [str(each.message) for each in caught if "Connection" in str(each.message)]
        with pytest.raises(BrokenResourceError):
            await far.receive()
        await far.aclose()


async def test_keepalive_detects_a_dead_queue_pair(device: Device) -> None:
    """The connection is idle, the peer's queue pair is destroyed, and the TCP connection does not report it."""
    settings = deeper(SMALL, keep_alive_s=0.4)
    async with pair(device, settings) as ends:
        end_of(ends.far).control.abort = lambda: True  # type: ignore[method-assign, union-attr]
        ends.far.qp.to_error()
        async with asyncio.timeout(patience(10)):  # instead of those that it may be silent for by default
            with pytest.raises(BrokenResourceError, match=r"RETRY_EXC_ERR|REM_"):
                await ends.near.receive()
        del end_of(ends.far).control.abort  # type: ignore[union-attr]


async def test_a_silent_peer_stays_connected(device: Device) -> None:
    settings = deeper(SMALL, keep_alive_s=0.2)
    async with pair(device, settings) as ends:
        await asyncio.sleep(0.6)
        await ends.near.send(b"still here")
        assert await ends.far.receive() == b"still here"


# ---- Cancellation


@pytest.mark.every_way
async def test_a_cancelled_receive_loses_nothing(device: Device) -> None:
    async with pair(device) as ends:
        count = fewer(60)

        async def send() -> None:
            for number in range(count):
                await ends.near.send(number.to_bytes(2) * (1 + number % 900))
                await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        chance = random.Random(5)
        for number in range(count):
            while True:
                receiving = asyncio.create_task(ends.far.receive())
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                receiving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    assert (await receiving)[:2] == number.to_bytes(2)
                    break
        await sending


@pytest.mark.every_way
async def test_a_cancelled_send_arrives_whole_or_not_at_all(device: Device) -> None:
    """Later messages arrive, wherever the send is cancelled."""
    async with pair(device) as ends:
        chance = random.Random(6)
        got: list[bytes] = []

        async def receive() -> None:
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    got.append(await ends.far.receive())

        receiving = asyncio.create_task(receive())
        sent: list[tuple[bytes, bool]] = []
        for number in range(fewer(80)):
            data = number.to_bytes(2) + random.Random(number).randbytes(chance.choice([10, 1500, 5000, 20_000]))
            sending = asyncio.create_task(ends.near.send(data))
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait([sending])
            sent.append((data, not sending.cancelled()))
        await ends.near.send(b"last")
        await ends.near.aclose()
        await receiving
        assert got.pop() == b"last"
        arrived = set(got)
        assert arrived <= {data for data, _ in sent}
        assert arrived >= {data for data, whole in sent if whole}
        assert got == [data for data, _ in sent if data in arrived], "in their order"


@pytest.mark.parametrize("turns", range(0, 24, 3))
async def test_cancelled_connect_leaves_nothing(device: Device, turns: int) -> None:
    """Cancelled after each number of loop iterations. The listener goes on."""
    async with device.resource_domain() as domain, listen(HOST, domain=domain, settings=SMALL) as listener:

        async def connecting() -> None:
            async with connect(HOST, listener.port, domain=domain, settings=SMALL):
                await asyncio.sleep(60)

        task = asyncio.create_task(connecting())
        for _ in range(turns):
            await asyncio.sleep(0.0002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with connect(HOST, listener.port, domain=domain, settings=SMALL) as near:
            await near.send(b"x")
            async with asyncio.timeout(patience(10)):
                while True:
                    async with await listener.accept() as far:
                        with contextlib.suppress(BrokenResourceError, anyio.EndOfStream):
                            assert await far.receive() == b"x"
                            break


@pytest.mark.parametrize("turns", range(6))
async def test_cancelled_close_still_closes(device: Device, turns: int) -> None:
    async with pair(device) as ends:
        blocked = asyncio.create_task(flood(ends.near))
        await stuck(ends.near)
        closing = asyncio.create_task(ends.near.aclose())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        if turns:
            assert ends.near.closed
            with pytest.raises((ClosedResourceError, BrokenResourceError)):
                await blocked
        else:
            blocked.cancel()
            await asyncio.wait([blocked])


@pytest.mark.every_way
async def test_closing_ends_all_waiting_calls(device: Device) -> None:
    async with pair(device) as ends, ends.domain.register(64) as memory:
        waits: list[Any] = [ends.near.receive(), flood(ends.near), ends.near.receive_grant()]
        tasks = [asyncio.create_task(each) for each in waits]
        await stuck(ends.near)
        ends.near.abort()
        async with asyncio.timeout(patience(5)):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, ClosedResourceError | BrokenResourceError) for each in results), results
        with pytest.raises(ClosedResourceError):
            await ends.near.grant(memory, 4)  # type: ignore[arg-type]


async def test_reopening_reuses_buffers_and_completion_queues(device: Device) -> None:
    settings = ConnectionSettings(buffer_size=4096)
    async with device.resource_domain() as domain, listen(HOST, domain=domain, settings=settings) as listener:
        seen = set()
        for number in range(fewer(30, least=6)):
            async with (
                connect(HOST, listener.port, domain=domain, settings=settings) as near,
                await listener.accept() as far,
            ):
                await near.send(b"x")
                assert await far.receive() == b"x"
                if number > 2:
                    seen.add((len(domain._lifecycle.children), len(domain.base._lifecycle.children)))
        assert len(seen) == 1


@pytest.mark.every_way
@needs(Capability.FAULT_PLAN)
async def test_a_lost_device_raises_device_removed_error(device: Device) -> None:
    async with (
        open_device("soft0") as other,
        device.resource_domain() as domain,
        other.resource_domain() as peer_domain,
        listen(HOST, domain=peer_domain, settings=SMALL) as listener,
    ):
        near = await connect(HOST, listener.port, domain=domain, settings=SMALL)
        far = await listener.accept()
        receiving = asyncio.create_task(far.receive())
        await asyncio.sleep(0)
        other.faults.lose_device()
        for asked in (receiving, far.send(b"more")):
            with pytest.raises(DeviceRemovedError, match="DEVICE_FATAL"):
                await asked
        with pytest.raises(BrokenResourceError) as caught:  # here is only known that the peer is gone
            await near.receive()
        assert not isinstance(caught.value, DeviceRemovedError)
        near.abort()
        far.abort()
