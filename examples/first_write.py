"""A write between two queue pairs on one event loop, and the error for a call from another loop.

Uses an RDMA device if there is one, otherwise the software device; AIOVERBS_DEVICE selects another device.
"""

import asyncio

import aioverbs
from aioverbs import AccessFlags

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


async def main() -> None:
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,  # protection domain, and a thread domain for this loop
        domain.register(4096, ACCESS) as source,
        domain.register(4096, ACCESS) as target,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        print(f"{device.name}: {'no locks' if domain.native else 'with the locks of the provider'}")

        source.buffer[:5] = b"hello"
        await near.write(source[:5], target.remote()[:5])
        print(f"written: {bytes(target.buffer[:5])!r}")

        async def write_from_other_loop() -> None:
            await near.write(source[:5], target.remote()[:5])

        try:
            await asyncio.to_thread(asyncio.run, write_from_other_loop())
        except aioverbs.AffinityError as error:
            print(f"stopped: {error}")
        print(device.resources())


if __name__ == "__main__":
    asyncio.run(main())
