"""One of many client processes that write to one server process, with a few queue pairs each.

    python fabric_client.py QUEUE_PAIRS LENGTH SECONDS

The client prints its endpoints, reads the endpoints and the memory region of the server, and waits until all clients
are connected. It then writes on all queue pairs for the given time, and prints the number of writes of each.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack

import uvloop

from aioverbs import AccessFlags, Endpoint, QpCapabilities, QueuePair, RegionSlice, RemoteRegion, open_device

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


async def ask(count: int, length: int, seconds: float) -> None:
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        domain.register(count * length, ACCESS) as region,
        domain.completion_queue(4 * count) as cq,
        AsyncExitStack() as stack,
    ):
        region.buffer[:] = bytes(len(region))
        capabilities = QpCapabilities(max_send_wr=2, max_recv_wr=1)
        qps = [await stack.enter_async_context(domain.queue_pair(cq, capabilities=capabilities)) for _ in range(count)]
        print(json.dumps([bytes(qp.local_endpoint()).hex() for qp in qps]), flush=True)
        description = json.loads(sys.stdin.readline())
        for qp, endpoint in zip(qps, description["endpoints"], strict=True):
            qp.connect(Endpoint.from_bytes(bytes.fromhex(endpoint)), ACCESS)
        remote = RemoteRegion(description["address"], length, description["rkey"])
        loop = asyncio.get_running_loop()

        async def write(qp: QueuePair, local: RegionSlice, until: float) -> int:
            done = 0
            while loop.time() < until:
                await qp.write(local, remote)
                done += 1
            return done

        places = [region[at : at + length] for at in range(0, len(region), length)]
        await asyncio.gather(*(qp.write(local, remote) for qp, local in zip(qps, places, strict=True)))
        print("ready", flush=True)
        sys.stdin.readline()
        until = loop.time() + seconds
        counts = await asyncio.gather(*(write(qp, local, until) for qp, local in zip(qps, places, strict=True)))
        print(*counts, flush=True)
        sys.stdin.readline()


def main() -> None:
    count, length, seconds = sys.argv[1:]
    uvloop.run(ask(int(count), int(length), float(seconds)))


if __name__ == "__main__":
    main()
