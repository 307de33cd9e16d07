"""Second process of a test: a server that does what the first message of each connection says.

It writes its port to standard output, and ends when its standard input ends.
"""

import asyncio
import os
import signal
import sys

import anyio

from aioverbs import AccessFlags, Connection, ConnectionSettings, open_device, serve

SIZE = 1 << 16


async def handle(connection: Connection) -> None:
    match await connection.receive():
        case b"echo":
            async for message in connection:
                await connection.send(message)
        case b"memory":
            async with connection._domain.register(SIZE, AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND) as region:
                region.buffer[:] = bytes(range(256)) * (SIZE // 256)
                access = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
                async with await connection.grant(region, access):
                    while await connection.receive() == b"look":
                        await connection.send(bytes(region.buffer[:64]))
        case b"fork":
            child = os.fork()
            if not child:  # it lives until it is told, or forgotten
                os.close(0)
                os.close(1)
                signal.alarm(60)
                while True:
                    signal.pause()
            await connection.send(str(child).encode())
            await anyio.sleep_forever()
        case b"long":
            data = bytearray(b"long" * (1 << 20))
            while True:
                await connection.send(data)
        case b"silent":
            await anyio.sleep_forever()
        case what:
            raise ValueError(what)


async def main() -> None:
    settings = ConnectionSettings(buffer_size=4096)
    async with (
        open_device() as device,
        device.resource_domain() as domain,
        serve(handle, "127.0.0.1", domain=domain, settings=settings, drain_timeout_s=0) as server,
    ):
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
