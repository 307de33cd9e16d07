"""Memory of a scheduler of Dask with many connections, with this backend and with tcp.

    python tests/bench/dask_memory.py [--connections 200] [--calls 500]

Each connection comes from a process of its own, which calls the scheduler and then stays connected. The memory is what
is resident of the scheduler's process after that, with the pages that it shares with the clients.
"""

import argparse
import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from distributed import Scheduler, rpc

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

from tests.resident import resident_bytes

SCHEMES = ("tcp", "aioverbs")
_PR_SET_PDEATHSIG = 1
_IDLE_S = 20.0  # after the last call, before the memory is read: by then, connections have given back pages


async def _call(address: str, calls: int, done: int) -> None:
    """Call a scheduler, say so, and stay connected."""
    scheduler = rpc(address)
    for _ in range(calls):
        await scheduler.identity(n_workers=0)
    os.write(done, b".")
    await asyncio.Event().wait()


def _start_client(calls: int, done: int) -> int:
    """Fork a client, which waits for an address; return the descriptor that takes it."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(reader)
        return writer
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        asyncio.run(_call(os.read(reader, 1000).decode(), calls, done))
    finally:
        os._exit(1)


async def _schedule(scheme: str, clients: list[int], done: int) -> None:
    """Run a scheduler, and print its memory before and after the clients have connected."""
    async with Scheduler(protocol=scheme, host="127.0.0.1", dashboard=False) as scheduler:
        before = resident_bytes()
        for client in clients:
            os.write(client, scheduler.address.encode())
        left = len(clients)
        while left:
            left -= len(await asyncio.to_thread(os.read, done, left))
        await asyncio.sleep(_IDLE_S)
        after = resident_bytes()
    each = (after - before) / len(clients)
    print(f"{scheme:>9}: {after / (1 << 20):.1f} MiB, {each / 1024:.0f} KiB for each connection", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--calls", type=int, default=500, help="calls of each client")
    parser.add_argument("--scheme", choices=SCHEMES, help="measure one only, in this process")
    options = parser.parse_args()
    if options.scheme is None:
        for scheme in SCHEMES:
            subprocess.run([sys.executable, "-P", __file__, *sys.argv[1:], "--scheme", scheme], check=True)
        return
    reader, writer = os.pipe()
    clients = [_start_client(options.calls, writer) for _ in range(options.connections)]
    os.close(writer)
    asyncio.run(_schedule(options.scheme, clients, reader))


if __name__ == "__main__":
    main()
