"""Two processes: messages, memory, and detection of a peer that dies or falls silent."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from aioverbs import (
    BrokenResourceError,
    ClosedResourceError,
    Connection,
    ConnectionSettings,
    Device,
    ResourceDomain,
    WorkCompletionError,
    connect,
)
from aioverbs._connection.announced_messages import AnnouncedMessages
from aioverbs._connection.connection import end_of
from tests.conftest import ROOT
from tests.connections.ends import HOST, deeper, receive_while_pages_are_given_back
from tests.connections.other import SIZE
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.resident import mapped_copies, resident_rings
from tests.waiting import until

START = (
    f"import sys, runpy; sys.path.append({str(ROOT)!r}); "
    "runpy.run_module('tests.connections.other', run_name='__main__')"
)
SETTINGS = ConnectionSettings(buffer_size=4096)


@dataclass
class Other:
    """The other process, which runs `tests.connections.other`."""

    process: "subprocess.Popen[bytes]"
    port: int

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Others:
    """The other process of each device. A killed one is started anew."""

    def __init__(self) -> None:
        self._running: dict[str, Other] = {}

    def of(self, device: Device) -> Other:
        found = self._running.get(device.name)
        if found is None or found.process.returncode is not None:
            self._running[device.name] = found = self._start(device.name)
        return found

    def _start(self, device: str) -> Other:
        command = [sys.executable, "-P", "-c", START]
        env = {**os.environ, "AIOVERBS_DEVICE": device}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "it ended"
        return Other(process, int(line))

    def end(self) -> None:
        """End all processes that were not killed, and check their exit."""
        for other in (each for each in self._running.values() if each.process.returncode is None):
            other.process.communicate(timeout=patience(20))
            assert other.process.returncode == 0


@pytest.fixture(autouse=True, scope="module")
def directory_of_sockets() -> Iterator[None]:
    """Use a directory for the sockets of devices, shared by several tests."""
    with tempfile.TemporaryDirectory(prefix="aioverbs-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIOVERBS_SOFT_DIRECTORY", folder)
        yield


@pytest.fixture(scope="module")
def others(directory_of_sockets: None) -> Iterator[Others]:
    others = Others()
    yield others
    others.end()


@pytest.fixture
def there(others: Others, device: Device) -> Other:
    return others.of(device)


@contextlib.asynccontextmanager
async def talking(
    device: Device, there: Other, what: bytes, settings: ConnectionSettings = SETTINGS
) -> AsyncIterator[tuple[Connection, ResourceDomain]]:
    async with (
        device.resource_domain() as domain,
        connect(HOST, there.port, domain=domain, settings=settings) as connection,
    ):
        await connection.send(what)
        yield connection, domain


async def test_messages_between_processes(device: Device, there: Other) -> None:
    async with talking(device, there, b"echo") as (connection, _):
        for size in (0, 1, 4096, 4097, 100_000, 1 << 20):
            data = random.Random(size).randbytes(size)
            sending = asyncio.create_task(connection.send(data))
            assert await connection.receive() == data
            await sending


async def test_one_sided_requests_between_processes(device: Device, there: Other) -> None:
    async with (
        talking(device, there, b"memory") as (connection, domain),
        domain.register(SIZE) as local,
    ):
        granted = await connection.receive_grant()
        await connection.read(local, granted)
        assert bytes(local.buffer) == bytes(range(256)) * (SIZE // 256)
        local.buffer[:8] = b"replaced"
        await connection.write(local[:8], granted[:8])
        assert await connection.fetch_and_add(granted[8:16], 1) == int.from_bytes(bytes(range(8, 16)), sys.byteorder)
        await connection.send(b"look")
        seen = await connection.receive()
        assert seen[:8] == b"replaced"
        assert seen[8] == 9


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_a_killed_peer_is_detected_at_once(device: Device, there: Other, busy: bool) -> None:
    """The kernel closes the TCP connection, long before the device would be found silent."""
    async with talking(device, there, b"echo" if busy else b"silent") as (connection, _):

        async def load() -> None:
            while True:
                await connection.send(b"x" * 10_000)

        loading = asyncio.create_task(load() if busy else asyncio.sleep(0))
        receiving = asyncio.create_task(_until_broken(connection))
        await until(lambda: connection.traffic().messages_received > 5 or not busy)
        there.kill()
        async with asyncio.timeout(patience(10)):
            with pytest.raises(BrokenResourceError):
                await receiving
        with contextlib.suppress(BrokenResourceError):
            await loading
        with pytest.raises(BrokenResourceError):
            await connection.send(b"x")


@pytest.mark.parametrize("how", ["receive", "receive_into", "receive_buffer"])
async def test_a_peer_killed_while_its_long_messages_are_read(device: Device, there: Other, how: str) -> None:
    """Messages are whole until the connection breaks."""
    expected, buffer = b"long" * (1 << 20), bytearray(4 << 20)
    async with talking(device, there, b"long") as (connection, _):

        async def receive() -> None:
            if how == "receive_into":
                assert await connection.receive_into(buffer) == len(buffer)
                assert buffer == expected
            else:
                assert await getattr(connection, how)() == expected

        async def receive_all() -> None:
            while True:
                await receive()

        receiving = asyncio.create_task(receive_all())
        await until(lambda: connection.traffic().messages_received > 2)
        there.kill()
        async with asyncio.timeout(patience(10)):
            with pytest.raises(BrokenResourceError):
                await receiving
            with pytest.raises(BrokenResourceError):
                await receive()


async def test_a_killed_peer_with_a_living_child(device: Device, there: Other) -> None:
    """The child has no connections of the parent: peers detect the death at once, and the port is closed."""
    async with talking(device, there, b"fork") as (connection, domain):
        child = int(await connection.receive())
        try:
            there.kill()
            async with asyncio.timeout(patience(10)):
                with pytest.raises(BrokenResourceError):
                    await connection.receive()
            with pytest.raises(ConnectionRefusedError):
                await connect(HOST, there.port, domain=domain, settings=SETTINGS)
        finally:
            os.kill(child, signal.SIGKILL)


async def _until_broken(connection: Connection) -> None:
    while True:
        await connection.receive()


async def test_a_peer_killed_during_reads(device: Device, there: Other) -> None:
    """Every call ends, and nothing is left."""
    async with (
        talking(device, there, b"memory") as (connection, domain),
        domain.register(SIZE) as local,
    ):
        granted = await connection.receive_grant()
        done = 0

        async def read() -> None:
            nonlocal done
            while True:
                await asyncio.gather(*(connection.read(local, granted) for _ in range(8)))
                done += 1

        reading = asyncio.create_task(read())
        await until(lambda: done > 1)
        there.kill()
        async with asyncio.timeout(patience(10)):
            with pytest.raises((BrokenResourceError, WorkCompletionError)):
                await reading
        with pytest.raises(BrokenResourceError):
            await connection.receive()


@pytest.mark.stops_processes
async def test_a_peer_paused_for_less_than_keep_alive(device: Device, there: Other) -> None:
    """Longer than queue pairs retry by default, during messages and reads."""
    async with talking(device, there, b"echo") as (connection, _):
        for number in range(3):
            await connection.send(bytes([number]))
        there.process.send_signal(signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(connection.send(b"x" * 100_000))
            await asyncio.sleep(0.7)  # queue pairs repeat for 0.5 s by their usual attributes
        finally:
            there.process.send_signal(signal.SIGCONT)
        await waiting
        assert [await connection.receive() for _ in range(4)] == [b"\0", b"\1", b"\2", b"x" * 100_000]


@pytest.mark.stops_processes
async def test_a_peer_stopped_for_longer_than_keep_alive(device: Device, there: Other) -> None:
    """The stopped process keeps its TCP connection, and counts as dead after `keep_alive_s`. An RDMA device goes on
    answering for a stopped process, which therefore counts as alive.
    """
    keep_alive_s = 1.0 if device.software else 2.0
    settings = deeper(SETTINGS, keep_alive_s=keep_alive_s)
    async with talking(device, there, b"echo", settings) as (connection, _):
        await asyncio.sleep(0.05)
        there.process.send_signal(signal.SIGSTOP)
        try:
            limit_s = patience(10) if device.software else 2 * keep_alive_s
            with pytest.raises(BrokenResourceError if device.software else TimeoutError):
                async with asyncio.timeout(limit_s):
                    await connection.receive()
        finally:
            there.process.send_signal(signal.SIGCONT)
        if not device.software:
            await connection.send(b"still here")
            assert await connection.receive() == b"still here"


async def test_long_messages_are_received_without_requests(
    device: Device, there: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the first ones were read: the process has mapped the peer's copies."""
    mapped: list[object] = []
    real = AnnouncedMessages.read_mapped

    async def read_mapped(*arguments: Any) -> bytes | bool:
        copied = await real(*arguments)
        mapped.append(copied)
        return copied

    monkeypatch.setattr(AnnouncedMessages, "read_mapped", read_mapped)
    async with talking(device, there, b"echo") as (connection, _):
        memory = bytearray(1 << 20)
        for number in range(12):
            message = random.Random(number).randbytes((1 << 20) - number)
            await connection.send(message)
            match number % 4:
                case 0:
                    assert await connection.receive() == message
                case 1:
                    assert await connection.receive_with_immediate() == (message, None)
                case 2:
                    assert await connection.receive_buffer() == message
                case _:
                    assert await connection.receive_into(memory) == len(message)
                    assert memory[: len(message)] == message
        if not any(peer.rings for peer in device.peers()):
            pytest.skip("the processes share no memory")
        assert len(mapped) == 12
        assert all(mapped[4:])


async def test_receivers_of_mapped_messages_take_turns(device: Device, there: Other) -> None:
    """Each copies for so long that the loop serves others before the next one."""
    count, message = 8, bytes(1 << 20)
    async with contextlib.AsyncExitStack() as stack:
        ends = [(await stack.enter_async_context(talking(device, there, b"echo")))[0] for _ in range(count)]
        for _ in range(2):
            for each in ends:
                await each.send(message)
                assert await each.receive() == message
        for each in ends:
            await each.send(message)
        await until(lambda: all(len(end_of(each).channel.receiver.inbox) for each in ends))
        turns, is_over = 0, False

        def next_turn() -> None:
            nonlocal turns
            turns += 1
            if not is_over:
                asyncio.get_running_loop().call_soon(next_turn)

        next_turn()
        assert await asyncio.gather(*(each.receive() for each in ends)) == [message] * count
        is_over = True
        assert turns >= count / 2


async def test_rings_of_a_quiet_connection_have_no_pages(device: Device, there: Other) -> None:
    async with talking(device, there, b"echo") as (connection, _):
        await connection.send(b"begin")
        assert await connection.receive() == b"begin"
        if not any(peer.rings for peer in device.peers()):
            pytest.skip("the processes share no rings")
        channel = end_of(connection).channel
        for _ in range(3):
            channel.give_back_pages()
            before = resident_rings()
            for number in range(100):
                await connection.send(bytes([number]) * 3000)
                assert await connection.receive() == bytes([number]) * 3000
            used = resident_rings() - before
            assert used >= 48 * 1024  # some 32 KiB of the own ring, and as many of the peer's
            limit = before + used - 24 * 1024

            def are_given_back(limit: int = limit) -> bool:
                channel.give_back_pages()
                return resident_rings() <= limit

            await until(are_given_back)  # once the last acknowledgement has arrived


async def test_messages_arrive_while_rings_are_given_back(device: Device, there: Other) -> None:
    async with talking(device, there, b"echo") as (connection, _):
        await receive_while_pages_are_given_back(connection, connection, connection)


@pytest.mark.stops_processes
async def test_cancelled_messages_to_a_stopped_peer_leave_nothing(device: Device, there: Other) -> None:
    """The window of each copy is bound behind a message that the peer's device does not acknowledge."""
    collect_garbage()
    others = mapped_copies()
    async with talking(device, there, b"echo", deeper(SETTINGS)) as (connection, _):
        there.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(0.05)
            await connection.send(b"second")
            for _ in range(3):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await connection.send(b"long" * 100_000)
            assert mapped_copies() == others + 3 * device.software
        finally:
            there.process.send_signal(signal.SIGCONT)
        assert await connection.receive() == b"second"
        await until(lambda: mapped_copies() == others)


@pytest.mark.stops_processes
@pytest.mark.parametrize("how", ["abort", "aclose"])
async def test_closing_does_not_wait_for_a_stopped_peer(device: Device, there: Other, how: str) -> None:
    """The window of a message's copy is bound behind a message that the peer's device does not acknowledge."""
    settings = deeper(SETTINGS, close_timeout_s=0.1)
    async with talking(device, there, b"echo", settings) as (connection, _):
        await connection.send(b"first")
        assert await connection.receive() == b"first"
        there.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(0.05)
            await connection.send(b"second")
            sending = asyncio.create_task(connection.send(b"long" * 100_000))
            await asyncio.sleep(0.05)
            if how == "abort":
                connection.abort()
            async with asyncio.timeout(patience(5)):
                await connection.aclose()
                await asyncio.wait([sending])
            if device.software:
                with pytest.raises((ClosedResourceError, BrokenResourceError)):
                    await sending
        finally:
            there.process.send_signal(signal.SIGCONT)
