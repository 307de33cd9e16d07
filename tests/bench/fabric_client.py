"""One of many processes that ask one other, by a few queue pairs each.

    python fabric_client.py QUEUE_PAIRS LENGTH SECONDS

It says its endpoints, hears those of the other end with its memory, and that all are there; then it writes by all queue
pairs for so long, and says how many writes each one did.
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
        room = QpCapabilities(max_send_wr=2, max_recv_wr=1)
        qps = [await stack.enter_async_context(domain.queue_pair(cq, capabilities=room)) for _ in range(count)]
        print(json.dumps([bytes(qp.local_endpoint()).hex() for qp in qps]), flush=True)
        told = json.loads(sys.stdin.readline())
        for qp, endpoint in zip(qps, told["endpoints"], strict=True):
            qp.connect(Endpoint.from_bytes(bytes.fromhex(endpoint)), ACCESS)
        remote = RemoteRegion(told["address"], length, told["rkey"])
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
