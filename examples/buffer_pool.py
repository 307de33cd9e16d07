"""Registered buffers that are leased for each transfer, and a cache of registrations for the user's own buffers.

Uses an RDMA device if there is one, otherwise the software device; AIOVERBS_DEVICE selects another device.
"""

import asyncio

import aioverbs
from aioverbs import AccessFlags

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


async def main() -> None:
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,
        domain.buffer_pool(64, 4) as pool,
        domain.register(1024, ACCESS) as target,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)

        async def send(number: int) -> None:
            text = f"message {number}".encode()
            async with pool.lease() as buffer:  # waits while all buffers are leased
                buffer.buffer[: len(text)] = text
                start = number * 64
                await near.write(buffer[: len(text)], target.remote()[start : start + len(text)])

        await asyncio.gather(*(send(number) for number in range(16)))
        print(f"received: {bytes(target.buffer[7 * 64 : 7 * 64 + 9])!r}")
        statistics = pool.statistics()
        print(f"16 messages, {statistics.free} buffers, {'some' if statistics.leased else 'none'} leased")

        log = bytearray(b"a bytearray of one's own")
        for _ in range(3):
            async with domain.cache.region(log) as region:
                await near.write(region, target.remote()[: len(log)])
        cached = domain.cache.statistics()
        print(f"{bytes(target.buffer[: len(log)])!r}: registered {cached.misses} time, found {cached.hits} times")
        await domain.cache.drop(log)
        log += b", which may be resized again"


if __name__ == "__main__":
    asyncio.run(main())
