"""Share numpy arrays between processes without copies, except for the one RDMA transfer.

    python examples/arrays.py [HOST]

One process creates arrays in registered memory, grants access to that memory and describes the arrays in messages. The
other process allocates arrays of the same shapes in registered memory of its own, reads into them and computes with
them in place.

HOST is 127.0.0.1, or this host's address on an RDMA device, where rdma_cm connects the two.
"""

import asyncio
import json
import subprocess
import sys

import numpy as np
from numpy.typing import NDArray

import aioverbs
from aioverbs import AccessFlags, Connection, MemoryRegion, ResourceDomain

OWNED = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.MW_BIND


def array_of(region: MemoryRegion, dtype: str, shape: list[int]) -> NDArray[np.generic]:
    """Return the memory of a region as an array, without copying it. The region cannot be closed while the array
    exists.
    """
    return np.frombuffer(region.buffer, dtype).reshape(shape)


async def serve_arrays(connection: Connection, domain: ResourceDomain) -> None:
    """Create arrays and describe each one to the peer, which may read it until it sends a message. After the last
    array, send an empty message.

    :param connection: connection to the reader.
    :param domain: domain that registers the arrays' memory.
    """
    rng = np.random.default_rng(7)
    for source in (rng.random((512, 512)), rng.integers(0, 1000, (64, 1024), dtype=np.int32)):
        async with domain.register(source.nbytes, OWNED) as region:
            array = array_of(region, source.dtype.str, list(source.shape))
            array[:] = source
            description = {"dtype": source.dtype.str, "shape": source.shape, "sum": float(source.sum())}
            async with await connection.grant(region, AccessFlags.REMOTE_READ):
                await connection.send(json.dumps(description).encode())
                await connection.receive()  # the peer has read the array
            del array  # a region cannot be closed while arrays use its memory
    await connection.send(b"")


async def read_arrays(connection: Connection, domain: ResourceDomain) -> None:
    """Read the peer's arrays into memory of this process until the peer sends an empty message; print for each whether
    its sum is correct.
    """
    while data := await connection.receive():
        description = json.loads(data)
        granted = await connection.receive_grant()
        async with domain.register(len(granted), AccessFlags.LOCAL_WRITE) as region:
            await connection.read(region, granted)
            array = array_of(region, description["dtype"], description["shape"])
            result = "correct" if float(array.sum()) == description["sum"] else "WRONG"
            print(f"{array.dtype} {array.shape}: {array.nbytes:,} bytes, their sum is {result}")
            del array
        await connection.send(b"thanks")


async def owner(host: str) -> None:
    """Serve arrays until standard input ends; print the port of the server first."""
    async with aioverbs.open_device() as device, device.resource_domain() as domain:

        async def handle(connection: Connection) -> None:
            await serve_arrays(connection, domain)

        async with aioverbs.serve(handle, host, domain=domain) as server:
            print(server.port, flush=True)
            await asyncio.to_thread(sys.stdin.read)


async def reader(host: str, port: int) -> None:
    """Connect to the process that owns the arrays, read them and print whether they are correct."""
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,
        aioverbs.connect(host, port, domain=domain) as connection,
    ):
        await read_arrays(connection, domain)


def main() -> None:
    if sys.argv[1:2] == ["owner"]:
        asyncio.run(owner(sys.argv[2]))
        return
    host = sys.argv[1] if sys.argv[1:] else "127.0.0.1"
    command = [sys.executable, __file__, "owner", host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        asyncio.run(reader(host, int(other.stdout.readline())))
        other.communicate()


if __name__ == "__main__":
    main()
