"""Listeners, servers and connections in a forked child: they stay the parent's, and go on there."""

import asyncio
import sys

import pytest

from aioverbs import Device, ForkedProcessError, connect, listen
from tests.connections.ends import HOST, SMALL, works
from tests.connections.serving import asked, served
from tests.core.children import in_child
from tests.pace import patience
from tests.running import run

# A task forks a child that ends by an exception: asyncio cancels the parent's tasks in it, and waits for them.
# The parent is ended at once: asyncio's own end of the child's loop takes what wakes it from other threads.
PARENT = """
import asyncio, os, socket, sys
from aioverbs import BrokenResourceError, connect, listen, open_device, serve

HOST = "127.0.0.1"

async def echo(connection):
    async for message in connection:
        await connection.send(message)

async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)

async def ask(connection):
    await connection.send(b"as ever")
    return await connection.receive()

async def main():
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        serve(echo, HOST, domain=domain, handshake_timeout_s=600) as server,
        listen(HOST, domain=domain) as listener,
    ):
        near = await connect(HOST, listener.port, domain=domain)
        far = await listener.accept()
        waiting = asyncio.create_task(listener.accept())
        silent = socket.create_connection((HOST, server.port))
        await until(lambda: server.statistics().handshakes)
        child = os.fork()
        if not child:
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        silent.close()
        await until(lambda: not server.statistics().handshakes)
        print(*[why for why, _ in server.statistics().refused])
        async with connect(HOST, server.port, domain=domain) as connection:
            print(await ask(connection))
        async with connect(HOST, listener.port, domain=domain) as one, await waiting as other:
            await one.send(b"as ever")
            print(await other.receive())
        near.abort()
        try:
            await far.receive()
        except BrokenResourceError:
            print("heard of the end")
        far.abort()
    print("closed", flush=True)
    os._exit(0)

asyncio.run(main())
"""


def test_parent_listeners_survive_a_fork() -> None:
    done = run([sys.executable, "-P", "-W", "ignore", "-c", PARENT], patience(50))
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said == ["3", "BrokenResourceError", "b'as ever'", "b'as ever'", "heard of the end", "closed"]


async def test_closing_in_a_forked_child_does_nothing(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        served(domain) as server,
        listen(HOST, domain=domain, settings=SMALL) as listener,
        connect(HOST, listener.port, domain=domain, settings=SMALL) as near,
        await listener.accept() as far,
    ):
        stream = far.as_byte_stream()

        async def close() -> None:
            async with asyncio.timeout(patience(5)):
                await near.aclose()
                await far.__aexit__(None, None, None)
                await stream.aclose()
                await listener.aclose()
                await server.aclose()

        async def drain() -> None:
            for method in (server.drain, server.wait_closed):
                with pytest.raises(ForkedProcessError):
                    await method()

        in_child(lambda: asyncio.run(close()))
        await asyncio.to_thread(in_child, lambda: asyncio.run(drain()))  # the thread of the server's loop is missing
        await works(near, far)
        async with connect(HOST, listener.port, domain=domain, settings=SMALL) as late, await listener.accept() as peer:
            await works(late, peer)
        async with asked(server, domain) as connection:
            await connection.send(b"hello")
            assert await connection.receive() == b"hello"
