"""A server on a worker pool: its connections are spread over the workers, and share memory that was registered once."""

import asyncio
import functools

import aioverbs
from aioverbs import AccessFlags, Connection, Device, MemoryRegion, current_worker

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND


async def serve_connection(region: MemoryRegion, connection: Connection) -> None:
    """Handle a connection, on the worker to which it was assigned, until the client closes it.

    Grant the client the region, send the worker's number, then answer each message with its upper-case form.

    :param region: memory that the client may read.
    :param connection: connection to the client.
    """
    async with await connection.grant(region, AccessFlags.REMOTE_READ):
        await connection.send(f"worker {current_worker().number}".encode())
        async for request in connection:
            await connection.send(request.upper())


async def run_client(device: Device, port: int) -> str:
    """Connect to the server, read its memory and exchange a message; return a text with both results and the worker's
    name.
    """
    async with (
        device.resource_domain() as domain,
        aioverbs.connect("127.0.0.1", port, domain=domain) as connection,
        domain.register(64) as local,
    ):
        name = await connection.receive()
        await connection.read(local[:6], (await connection.receive_grant())[:6])
        await connection.send(b"and messages")
        return f"{name.decode()} has {bytes(local.buffer[:6])!r} {(await connection.receive()).decode()}"


async def main() -> None:
    async with (
        aioverbs.open_device() as device,
        aioverbs.WorkerPool(device, size=2) as pool,
        pool.pd.register(4096, ACCESS) as region,
        aioverbs.serve(functools.partial(serve_connection, region), "127.0.0.1", pool=pool) as server,
    ):
        region.buffer[:6] = b"stored"
        print(*[await run_client(device, server.port) for _ in range(2)], sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
