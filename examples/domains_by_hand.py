"""The parts of a resource domain: a protection domain, a thread domain, and a parent domain of both.

Two event loops in two threads share a protection domain, and therefore a memory region. Each has its own thread domain.
"""

import asyncio

import aioverbs
from aioverbs import AccessFlags

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


async def worker(
    device: aioverbs.Device, pd: aioverbs.ProtectionDomain, region: aioverbs.MemoryRegion, part: slice
) -> None:
    """Write a part of a region to a place 1,024 bytes further on, using queues that only this thread uses.

    :param device: device on which this thread creates its thread domain.
    :param pd: protection domain that all threads share.
    :param region: memory registered with ``pd``.
    :param part: range of the region to write, a slice with start and stop.
    """
    async with (
        device.thread_domain() as td,
        pd.parent_domain(td) as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        remote = region.remote()[part.start + 1024 : part.stop + 1024]
        await near.write(region[part], remote)
        print(f"{td.owner}: wrote {len(remote)} bytes, thread domain {'native' if td.native else 'not native'}")


async def main() -> None:
    async with (
        aioverbs.open_device() as device,
        device.protection_domain() as pd,
        pd.register(bytearray(b"ab" * 512 + bytes(1024)), ACCESS) as region,
    ):
        workers = [worker(device, pd, region, slice(start, start + 512)) for start in (0, 512)]
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, each) for each in workers))
        print(f"arrived: {bytes(region.buffer[1024:]) == b'ab' * 512}")


if __name__ == "__main__":
    asyncio.run(main())
