"""Two processes: messages, memory, and what is noticed when one of them dies or falls silent."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from aioverbs import (
    BrokenResourceError,
    Connection,
    ConnectionSettings,
    Device,
    ResourceDomain,
    WorkCompletionError,
    connect,
)
from tests.conftest import ROOT
from tests.connections.ends import HOST, deeper
from tests.connections.other import SIZE
from tests.pace import fewer, patience

START = (
    f"import sys, runpy; sys.path.append({str(ROOT)!r}); "
    "runpy.run_module('tests.connections.other', run_name='__main__')"
)
SETTINGS = ConnectionSettings(buffer_size=4096)


@dataclass
class Other:
    process: asyncio.subprocess.Process
    port: int

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@contextlib.asynccontextmanager
async def other(device: Device) -> AsyncIterator[Other]:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-P", "-c", START]
    env = {**os.environ, "AIOVERBS_DEVICE": device.name}
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(patience(20)):
            line = await process.stdout.readline()
        assert line, "it ended"
        yield Other(process, int(line))
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(patience(20)):
                status = await process.wait()
                await process.stdout.read()  # to its end, which is that of its children: uvloop waits for no reader
        except TimeoutError:
            process.kill()
            raise
    assert status in (0, -signal.SIGKILL)


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


async def test_messages(device: Device) -> None:
    async with other(device) as there, talking(device, there, b"echo") as (connection, _):
        for size in (0, 1, 4096, 4097, 100_000, 1 << 20):
            data = random.Random(size).randbytes(size)
            sending = asyncio.create_task(connection.send(data))
            assert await connection.receive() == data
            await sending


async def test_memory(device: Device) -> None:
    async with (
        other(device) as there,
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
async def test_killed(device: Device, busy: bool) -> None:
    """The kernel closes its TCP connection: that is heard at once, whatever is under way, and long before its device is
    found to be silent."""
    async with other(device) as there, talking(device, there, b"echo" if busy else b"silent") as (connection, _):
        loop = asyncio.get_running_loop()

        async def load() -> None:
            while True:
                await connection.send(b"x" * 10_000)

        loading = asyncio.create_task(load() if busy else asyncio.sleep(0))
        receiving = asyncio.create_task(_until_broken(connection))
        await asyncio.sleep(0.05)
        began = loop.time()
        await there.kill()
        with pytest.raises(BrokenResourceError):
            await receiving
        assert loop.time() - began < patience(2)
        with contextlib.suppress(BrokenResourceError):
            await loading
        with pytest.raises(BrokenResourceError):
            await connection.send(b"x")


async def test_killed_while_a_child_of_it_lives(device: Device) -> None:
    """The child has none of its connections: their peers hear of its end as ever, and nobody listens at its port."""
    async with other(device) as there, talking(device, there, b"fork") as (connection, domain):
        child = int(await connection.receive())
        try:
            loop = asyncio.get_running_loop()
            began = loop.time()
            await there.kill()
            with pytest.raises(BrokenResourceError):
                await connection.receive()
            assert loop.time() - began < patience(2)
            with pytest.raises(ConnectionRefusedError):
                await connect(HOST, there.port, domain=domain, settings=SETTINGS)
        finally:
            os.kill(child, signal.SIGKILL)


async def _until_broken(connection: Connection) -> None:
    while True:
        await connection.receive()


async def test_killed_again_and_again(device: Device) -> None:
    """At some moment of a conversation with memory and messages: everything ends, and nothing is left."""
    for seed in range(fewer(3)):
        chance = random.Random(seed)
        async with (
            other(device) as there,
            talking(device, there, b"memory") as (connection, domain),
            domain.register(SIZE) as local,
        ):
            granted = await connection.receive_grant()

            async def read(connection: Connection = connection, local=local, granted=granted) -> None:  # type: ignore[no-untyped-def]
                while True:
                    await asyncio.gather(*(connection.read(local, granted) for _ in range(8)))

            reading = asyncio.create_task(read())
            await asyncio.sleep(chance.random() * 0.05)
            await there.kill()
            with pytest.raises((BrokenResourceError, WorkCompletionError)):
                async with asyncio.timeout(patience(10)):
                    await reading
            with pytest.raises(BrokenResourceError):
                await connection.receive()


@pytest.mark.stops_processes
async def test_one_that_stands_still_for_a_while(device: Device) -> None:
    """For longer than queue pairs repeat by themselves, in the middle of messages and of reads."""
    async with other(device) as there, talking(device, there, b"echo") as (connection, _):
        for number in range(3):
            await connection.send(bytes([number]))
        there.process.send_signal(signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(connection.send(b"x" * 100_000))
            await asyncio.sleep(1.5)
        finally:
            there.process.send_signal(signal.SIGCONT)
        await waiting
        assert [await connection.receive() for _ in range(4)] == [b"\0", b"\1", b"\2", b"x" * 100_000]


@pytest.mark.stops_processes
async def test_one_that_is_stopped(device: Device) -> None:
    """It says nothing, and its kernel keeps the TCP connection: it is dead within the stated time. An RDMA device goes
    on answering for a process that is stopped, which is alive therefore."""
    keep_alive_s = 2.0
    settings = deeper(SETTINGS, keep_alive_s=keep_alive_s)
    async with other(device) as there, talking(device, there, b"echo", settings) as (connection, _):
        await asyncio.sleep(0.05)
        there.process.send_signal(signal.SIGSTOP)
        try:
            limit_s = patience(2 * keep_alive_s) if device.software else 2 * keep_alive_s
            with pytest.raises(BrokenResourceError if device.software else TimeoutError):
                async with asyncio.timeout(limit_s):
                    await connection.receive()
        finally:
            there.process.send_signal(signal.SIGCONT)
        if not device.software:
            await connection.send(b"still here")
            assert await connection.receive() == b"still here"
