"""Second of two processes that share a protection domain; it executes commands from its input, line by line.

Arguments: the device, and the descriptor of a socket. Each input line is a command, each output line a result. The
first command is to share or to import, and so is the next one after everything was closed.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator

from aioverbs import (
    AccessFlags,
    Device,
    Endpoint,
    MemoryRegion,
    ProtectionDomain,
    QueuePair,
    import_device,
    open_device,
)
from tests.rdma.imports import imports

KEY = 0xFEDCBA9876543210
ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


@contextlib.asynccontextmanager
async def queue_pair(device: Device, pd: ProtectionDomain) -> AsyncIterator[QueuePair]:
    """Open a queue pair with all that it needs.

    It posts nothing: a process posts to soft-RoCE by writing to its descriptor, which the kernel allows only for the
    process that opened the descriptor. For NICs, doorbells are registers.
    """
    async with device.resource_domain(pd) as domain, domain.completion_queue(64) as cq, domain.queue_pair(cq) as qp:
        yield qp


async def main(name: str, fd: int) -> None:
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    stack = contextlib.AsyncExitStack()
    before = set(os.listdir("/proc/self/fd"))
    device: Device
    pd: ProtectionDomain
    region: MemoryRegion
    while command := (await asyncio.to_thread(sys.stdin.readline)).split():
        match command:
            case ["share"]:
                device = await open_device(name).open()
                pd = await device.protection_domain().open()
                async with pd.share(KEY) as shared:
                    print(shared.id, flush=True)
                    await shared.send(sock)
                region = await pd.register(4096, ACCESS).open()
            case ["import", number]:
                shared_id = int(number)
                device = await import_device(sock, shared_id, KEY).open()
                pd = await device.shared_protection_domain(shared_id, KEY).open()
                region = await pd.register(4096, ACCESS).open()
                print(device.name, flush=True)
            case ["memory"]:
                print(region.address, region.rkey, flush=True)
            case ["look", count]:
                print(bytes(region.buffer[: int(count)]).decode(), flush=True)
            case ["work"]:
                async with pd.register(64), queue_pair(device, pd) as qp:
                    qp.connect(qp.local_endpoint(), ACCESS)
                print("done", flush=True)
            case ["connect", peer]:
                qp = await stack.enter_async_context(queue_pair(device, pd))
                qp.connect(Endpoint.from_bytes(bytes.fromhex(peer)), ACCESS)
                print(bytes(qp.local_endpoint()).hex(), flush=True)
            case ["disconnect"]:
                await stack.aclose()
                print("closed", flush=True)
            case ["close", "region"]:
                await region.aclose()
                print("closed", flush=True)
            case ["close", "pd"]:
                await pd.aclose()
                print("closed", flush=True)
            case ["close", "device"]:
                await device.aclose()
                print("closed", *sorted(set(os.listdir("/proc/self/fd")) - before), flush=True)
            case _:
                raise ValueError(command)


def run() -> None:
    """Run the process."""
    with imports():
        asyncio.run(main(sys.argv[1], int(sys.argv[2])))
