"""Storms of cancellations: of grants and revocations, registrations, `send_eof` and `accept`.

Completed calls are complete, cancelled ones can be repeated, and nothing is left of either. The point of a cancellation
is drawn as a number of loop iterations or as a time. The long storms are marked slow.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import pytest

from aioverbs import (
    AccessFlags,
    Connection,
    ConnectionListener,
    Device,
    Grant,
    GrantRevokedError,
    MemoryRegion,
    QueuePair,
    RegistrationCache,
    RemoteGrant,
    connect,
    listen,
)
from aioverbs._connection.connection import end_of
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL, Pair, deeper, pair, works
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import until

READ, WRITE = AccessFlags.REMOTE_READ, AccessFlags.REMOTE_WRITE
QUIET = deeper(SMALL, keep_alive_s=None, receive_depth=8)  # what is held is no sign of a dead peer
PIECE = 128
NUMBERS = 32  # of grants: all of them are used again and again
POISON = b"\xee" * PIECE


def short_and_long(rounds: int) -> pytest.MarkDecorator:
    """Parametrize a storm with so many rounds, and with fifty times as many."""
    long = pytest.param(50 * rounds, marks=[pytest.mark.slow, pytest.mark.timeout(1200)], id="long")
    return pytest.mark.parametrize("rounds", [pytest.param(rounds, id="short"), long])


class Weather:
    """Draws the cancellations and counts them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.ended: Counter[str] = Counter()

    async def leave(self, what: str, call: Coroutine[Any, Any, object]) -> bool:
        """Await a call, or cancel it; return whether it was completed."""
        how = self.chance.random()
        if how < 0.3:
            await call
            done = True
        elif how < 0.8:
            done = await self._cancelled_as_asyncio_does(call)
        else:
            with anyio.move_on_after(self.chance.random() * 1e-3) as scope:
                await call
            done = not scope.cancelled_caught
        self.ended[f"{what} {'done' if done else 'cancelled'}"] += 1
        return done

    async def _cancelled_as_asyncio_does(self, call: Coroutine[Any, Any, object]) -> bool:
        task = asyncio.ensure_future(call)
        try:
            await self.turns(6)
            for _ in range(self.chance.randint(1, 3)):
                task.cancel()
                await asyncio.sleep(0)
        finally:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        return not task.cancelled()

    async def turns(self, most: int) -> None:
        """Let the loop iterate, at most so often."""
        for _ in range(self.chance.randrange(most)):
            await asyncio.sleep(0)

    def check(self, *calls: str) -> None:
        """Check that each kind of call was completed and cancelled."""
        for call in calls:
            assert self.ended[f"{call} done"], self.ended
            assert self.ended[f"{call} cancelled"], self.ended


@contextlib.asynccontextmanager
async def tide(device: Device, weather: Weather, *qps: QueuePair) -> AsyncIterator[None]:
    """Delay posted requests now and then, so that they are in flight when their callers are cancelled."""

    async def come_and_go() -> None:
        while True:
            hold(device, *qps)
            await weather.turns(8)
            unhold(device, *qps)
            await asyncio.sleep(0)

    going = asyncio.create_task(come_and_go())
    try:
        yield
    finally:
        going.cancel()
        await asyncio.wait([going])
        unhold(device, *qps)


def pattern(task: int, time: int) -> bytes:
    """Return the content of a piece of memory at a given time."""
    return bytes([task, time >> 8, time & 0xFF, 7]) * (PIECE // 4)


# ---- Grants


class Grants:
    """Near grants memory, far reads it, near revokes; in several tasks at once."""

    def __init__(self, ends: Pair, weather: Weather) -> None:
        self.ends = ends
        self.weather = weather
        self.futures: dict[bytes, asyncio.Future[RemoteGrant]] = {}  # by what is granted

    def grant_future(self, remote: bytes) -> "asyncio.Future[RemoteGrant]":
        """Return the future of the far end's grant."""
        return self.futures.setdefault(remote, asyncio.get_running_loop().create_future())

    async def receive_grants(self) -> None:
        """Receive grants, and be cancelled now and then."""

        async def take() -> None:
            granted = await self.ends.far.receive_grant()
            self.grant_future(bytes(granted.remote)).set_result(granted)

        while True:
            await self.weather.leave("receive_grant", take())

    async def work(self, task: int, memory: MemoryRegion, local: MemoryRegion, rounds: int) -> None:
        """Grant, read, and take back, so often."""
        for time in range(rounds):
            data = pattern(task, time)
            memory.buffer[:] = data
            made: list[Grant] = []

            async def give(made: list[Grant] = made) -> None:
                made.append(await self.ends.near.grant(memory, READ))

            if not await self.weather.leave("grant", give()):
                assert not made, "who was cancelled has granted nothing"
                continue
            (grant,) = made
            granted = await self.grant_future(bytes(grant.remote))
            del self.futures[bytes(grant.remote)]
            reading = asyncio.create_task(self._read(granted, local, data, 1 + self.weather.chance.randrange(4)))
            if self.weather.chance.random() < 0.4:  # whom it is told to in time, whatever it reads meanwhile
                reading.cancel() if self.weather.chance.random() < 0.2 else None
                await grant.revoke(timeout_s=patience(30))
                self.weather.ended["revoke under load"] += 1
            else:
                await asyncio.wait([reading])
                at_once = range(self.weather.chance.randint(1, 2))
                revoked = (self.weather.leave("revoke", grant.revoke(timeout_s=patience(30))) for _ in at_once)
                if not any(await asyncio.gather(*revoked)) and not grant.revoked:  # none had begun
                    await grant.revoke()
            assert grant.revoked
            memory.buffer[:] = POISON  # nobody reads it any more
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.result()

    async def _read(self, granted: RemoteGrant, local: MemoryRegion, data: bytes, times: int) -> None:
        for _ in range(times):
            try:
                reading = self.ends.far.read(local, granted[:])
            except GrantRevokedError:
                return
            await reading
            assert bytes(local.buffer) == data, "it was taken back, and read afterwards"


@needs(Capability.FAULT_PLAN, Capability.OBJECT_COUNTS)
@short_and_long(40)
@pytest.mark.parametrize("access", [READ | AccessFlags.MW_BIND, READ], ids=["windows", "registrations"])
async def test_storm_of_grants(
    device: Device, monkeypatch: pytest.MonkeyPatch, access: AccessFlags, rounds: int
) -> None:
    monkeypatch.setattr("aioverbs._connection.grants._NUMBER_COUNT", NUMBERS)
    weather = Weather(1)
    async with (
        asyncio.timeout(patience(50 + rounds)),
        pair(device, QUIET) as ends,
        contextlib.AsyncExitStack() as stack,
    ):
        opened = stack.enter_async_context
        access |= AccessFlags.LOCAL_WRITE
        memory = [[await opened(ends.domain.register(PIECE, each)) for each in (access, access)] for _ in range(4)]
        before = device.statistics().objects
        storm = Grants(ends, weather)
        hearing = asyncio.create_task(storm.receive_grants())
        async with tide(device, weather, ends.near.qp, ends.far.qp), asyncio.TaskGroup() as group:
            for task, (granted, local) in enumerate(memory):
                group.create_task(storm.work(task, granted, local, rounds))
        hearing.cancel()
        await asyncio.wait([hearing])
        near, far = end_of(ends.near).grants, end_of(ends.far).grants
        assert near is not None
        assert far is not None
        await until(lambda: not near._local_grants and not far._remote_grants and not far._unread)
        assert storm.futures == {}
        # No key is left. A window whose bind was in flight when its task was cancelled is closed afterwards.
        await until(lambda: device.statistics().objects == before)
        assert not any(len(each.pins) for both in memory for each in both)
        await works(ends.near, ends.far)
        weather.check("grant", "receive_grant", "revoke")
        assert weather.ended["revoke under load"]


# ---- Registrations


class Drops:
    """Buffers that are registered, written from and dropped, so that they can be resized."""

    def __init__(self, connection: Connection, cache: RegistrationCache, sink: RemoteGrant, weather: Weather) -> None:
        self.connection = connection
        self.cache = cache
        self.sink = sink
        self.weather = weather

    async def work(self, task: int, there: memoryview, rounds: int) -> None:
        """Use a buffer and drop it, so often.

        :param there: what the peer has of it.
        """
        known = bytes(PIECE)
        for time in range(1, rounds + 1):
            buffer, new = bytearray(pattern(task, time)), pattern(task, time)
            done = await self._write(buffer, slice(task * PIECE, (task + 1) * PIECE))
            while not await self.weather.leave("drop", self.cache.drop(buffer)):
                await self.weather.turns(4)
            found = bytes(there)
            assert found == new if done else found in (known, new)
            known = found
            buffer[:] = POISON
            buffer.append(0)  # which an export forbids
            await self.weather.turns(4)
            assert bytes(there) == known, "it was written from after it was dropped"

    async def _write(self, buffer: bytearray, part: slice) -> bool:
        # Whether that is known to be done: else it is left to itself.
        async with self.cache.region(buffer) as region:
            writing = self.connection.write(region, self.sink[part])
            if self.weather.chance.random() < 0.3:
                await writing
                return True
        return False


@needs(Capability.FAULT_PLAN)
@short_and_long(40)
async def test_storm_of_registrations(device: Device, rounds: int) -> None:
    weather, tasks = Weather(2), 6
    async with (
        asyncio.timeout(patience(50 + rounds)),
        pair(device, QUIET) as ends,
        ends.domain.register(tasks * PIECE, AccessFlags.LOCAL_WRITE | WRITE) as memory,
        await ends.near.grant(memory, WRITE),
    ):
        sink, cache = await ends.far.receive_grant(), ends.domain.cache
        storm = Drops(ends.far, cache, sink, weather)
        async with tide(device, weather, ends.far.qp), asyncio.TaskGroup() as group:
            for task in range(tasks):
                there = memory.buffer[task * PIECE : (task + 1) * PIECE]
                group.create_task(storm.work(task, there, rounds))
        found = cache.statistics()
        assert (found.entries, found.bytes, len(cache._evicted)) == (0, 0, 0)
        assert not ends.far.qp.statistics().sends.failed
        await works(ends.near, ends.far)
        weather.check("drop")


# ---- Ends of sending, and who accepts


class Guests:
    """Clients that connect, send and end, and tasks that accept them."""

    def __init__(self, listener: ConnectionListener, weather: Weather) -> None:
        self.listener = listener
        self.weather = weather
        self.heard: dict[int, list[bytes]] = {}
        self.served: list[asyncio.Task[None]] = []

    async def take(self) -> None:
        """Take one who comes."""
        connection = await self.listener.accept()
        self.served.append(asyncio.create_task(self._serve(connection)))

    async def accept(self) -> None:
        """Take who comes, and be cancelled now and then."""
        while True:
            await self.weather.leave("accept", self.take())
            await asyncio.sleep(0)

    async def turn_away(self) -> None:
        """Be cancelled in the very turn in which somebody is there, whom another one is to take then."""
        while True:
            taking = asyncio.create_task(self.take())
            try:
                await asyncio.sleep(0)
                waiter = self.listener._waiters[-1] if self.listener._waiters else taking
                while not waiter.done():  # noqa: ASYNC110
                    await asyncio.sleep(0)
            finally:
                taking.cancel()
                await asyncio.wait([taking])
            while self.listener._ready:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def stay(self) -> None:
        """Take who comes."""
        while True:
            await self.take()

    async def _serve(self, connection: Connection) -> None:
        async with connection:
            messages = []
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    await self.weather.turns(12)
                    messages.append(await connection.receive())
            number = int(messages[0].split()[0])
            assert number not in self.heard, "one was accepted twice"
            self.heard[number] = messages
            await connection.send(b"heard")

    async def come(self, number: int, domain: Any) -> None:
        """Send messages, some of which are cancelled, and the end, until it is sent."""
        chance = self.weather.chance
        async with connect(HOST, self.listener.port, domain=domain, settings=QUIET) as connection:
            first = b"%d comes" % number
            await connection.send(first)
            sent = [(first, True)]
            for count in range(chance.randrange(5)):
                data = b"%d %d " % (number, count) * chance.choice([1, 100, 2000])
                sent.append((data, await self.weather.leave("send", connection.send(data))))
            while True:
                for _ in range(connection.traffic().credits - 1):  # then the end has to wait
                    sent.append((b"%d has more, %d" % (number, len(sent)), True))
                    await connection.send(sent[-1][0])
                if await self.weather.leave("send_eof", connection.send_eof()):
                    break
            assert await connection.receive() == b"heard"
        heard = self.heard[number]
        assert heard == [data for data, _ in sent if data in heard], "in their order, and nothing else"
        assert all(data in heard for data, whole in sent if whole), "and all that was sent"


@contextlib.asynccontextmanager
async def accepting(*who: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run tasks that accept clients."""
    tasks = [asyncio.create_task(each()) for each in who]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@needs(Capability.OBJECT_COUNTS)
@short_and_long(15)
async def test_storm_of_accepting_and_send_eof(device: Device, rounds: int) -> None:
    weather, count = Weather(3), rounds
    async with (
        asyncio.timeout(patience(50 + rounds)),
        device.resource_domain() as domain,
        listen(HOST, domain=domain, settings=QUIET) as listener,
    ):
        storm = Guests(listener, weather)
        async with accepting(storm.accept, storm.accept), asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(storm.come(number, domain))
                await weather.turns(10)
        async with accepting(storm.stay, storm.turn_away):
            for number in range(count, 2 * count):  # one by one: nobody else wakes who is to take it
                await storm.come(number, domain)
        await asyncio.gather(*storm.served)
        assert sorted(storm.heard) == list(range(2 * count))
        assert (len(listener._ready), listener.statistics().accepted) == (0, 2 * count)
        await until(lambda: dict(device.statistics().objects)["qps"] == 1)  # of the spare end
        weather.check("accept", "send", "send_eof")
