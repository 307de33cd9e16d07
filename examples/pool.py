"""Two workers with an event loop and queue pairs each, which write into memory that was registered once."""

import asyncio

import aioverbs
from aioverbs import AccessFlags, MemoryRegion, current_worker

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


async def write_word(region: MemoryRegion, name: str, at: int) -> str:
    """Write a word into the shared region, on the worker that runs this call.

    :param region: memory registered with the pool's protection domain.
    :param name: the word, of at most five letters.
    :param at: offset in the region.
    :returns: text that names the word and the worker.
    """
    domain = current_worker().domain  # the worker's own domain, on top of the pool's protection domain
    async with (
        domain.register(64) as source,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        source.buffer[:5] = name.encode()
        await near.write(source[:5], region.remote()[at : at + 5])
    return f"{name} by worker {current_worker().number}"


async def main() -> None:
    async with (
        aioverbs.open_device() as device,
        aioverbs.WorkerPool(device, size=2) as pool,
        pool.pd.register(4096, ACCESS) as region,
    ):
        first, second = await asyncio.gather(
            pool.run(write_word, region, "hello", 0),
            pool.run(write_word, region, "world", 8),
        )
        print(first, "and", second)
        print(bytes(region.buffer[:5]), bytes(region.buffer[8:13]))


if __name__ == "__main__":
    asyncio.run(main())
