"""A process that loses its device: all its waiters end, and all its resources can be closed.

python -m tests.rdma.removed DEVICE ADDRESS PORT
"""

import asyncio
import sys

from aioverbs import (
    BrokenResourceError,
    DeviceRemovedError,
    MemoryRegion,
    QueuePair,
    Received,
    WorkCompletionError,
    connect,
    listen,
)
from aioverbs.rdma_cm import Channel
from tests.rdma.cm import ACCESS, connected, side_on


async def receive(qp: QueuePair, region: MemoryRegion) -> Received:
    return await qp.receive(region[:])


async def main(name: str, address: str, port: int) -> None:
    async with (
        side_on(name) as side,
        Channel() as channel,
        channel.listener(address, port) as listener,
        side.queue_pair() as qp,
        side.queue_pair() as peer_qp,
        side.domain.register(64, ACCESS) as region,
        channel.identifier() as requested,
        listen(address, port + 1, domain=side.domain, transport="rdmacm") as connections,
        await connect(address, port + 1, domain=side.domain, transport="rdmacm") as near,
        await connections.accept() as far,
    ):
        active, passive = await connected(channel, listener, side, qp, peer_qp)
        await requested.resolve(address, port)
        waiting = {
            "active": asyncio.create_task(active.wait_disconnected()),
            "passive": asyncio.create_task(passive.wait_disconnected()),
            "listener": asyncio.create_task(anext(listener)),
            "near": asyncio.create_task(near.receive()),
            "far": asyncio.create_task(far.receive()),
            "receive": asyncio.create_task(receive(peer_qp, region)),
        }
        await asyncio.sleep(0)
        print("ready", flush=True)
        async with asyncio.timeout(30):
            ended = dict(zip(waiting, await asyncio.gather(*waiting.values(), return_exceptions=True), strict=True))
        # The kernel removes one end first; the other end may see the disconnect before its own removal.
        either = [ended["active"], ended["passive"]]
        assert any(isinstance(each, DeviceRemovedError) for each in either), ended
        assert all(each is None or isinstance(each, DeviceRemovedError) for each in either), ended
        # Both ends of a connection report the cause, by exception and by text.
        for each in (ended["near"], ended["far"]):
            assert isinstance(each, BrokenResourceError), ended
            assert ": the device was removed" in str(each) or ": the peer disconnected" in str(each), ended
        assert any(isinstance(each, DeviceRemovedError) for each in (ended["near"], ended["far"])), ended
        assert isinstance(ended["listener"], DeviceRemovedError), ended
        assert isinstance(ended["receive"], WorkCompletionError | BrokenResourceError), ended
        print("removed", flush=True)
        await active.aclose()
        await passive.aclose()
    print("closed", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
