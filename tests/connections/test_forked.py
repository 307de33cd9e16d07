"""A task forks a child that ends by an exception: asyncio cancels the parent's tasks in it, and waits for them.

What the parent listens at, and who is connected there, goes on.
"""

import sys

from tests.pace import patience
from tests.running import run

# It is ended at once: asyncio's own end of the child's loop takes what wakes the parent's from other threads.
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
        await near.abort()
        try:
            await far.receive()
        except BrokenResourceError:
            print("heard of the end")
        await far.abort()
    print("closed", flush=True)
    os._exit(0)

asyncio.run(main())
"""


def test_listeners_and_servers_go_on() -> None:
    done = run([sys.executable, "-P", "-W", "ignore", "-c", PARENT], patience(50))
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said == ["3", "BrokenResourceError", "b'as ever'", "b'as ever'", "heard of the end", "closed"]
