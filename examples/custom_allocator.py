"""Where the memory of queues and doorbell records comes from: an allocator of one's own, and a built-in one.

On an RDMA device where there is one, else on the software device: AIOVERBS_DEVICE chooses. Not all devices ask.
"""

import asyncio
import ctypes
import mmap
import sys

import aioverbs


class Mappings:
    """An allocator in Python: a mapping for each piece. Shared memory, so that no fork copies it."""

    def __init__(self) -> None:
        self._pieces: dict[int, mmap.mmap] = {}

    def allocate(
        self, size: int, alignment: int, resource_type: int, pd: object, context: object
    ) -> int | aioverbs.UseDefault | None:
        """Zeroed memory at an address that is a multiple of `alignment`; what is asked for tells `resource_type`.

        `context` is what the domain was made with. Both are None for buffers.
        """
        if alignment > mmap.PAGESIZE:
            return aioverbs.USE_DEFAULT  # let the provider do it
        mapping = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._pieces[address] = mapping
        print(f"  {size} bytes at {address:#x} for {aioverbs.ResourceKind.decode(resource_type)} of {context}")
        return address

    def free(self, address: int, resource_type: int, pd: object, context: object) -> None:
        """Take a piece back."""
        del self._pieces[address]


async def use(device: aioverbs.Device, allocator: aioverbs.Allocator) -> None:
    """Make some queues whose memory comes from an allocator."""
    async with (
        device.resource_domain(allocator=allocator, context="the example") as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq),
    ):
        if not domain.parent.native_allocators:
            sys.exit(f"{device.name} does not ask where its memory is to come from; AIOVERBS_DEVICE=soft0 does")
        print("asked")


async def main() -> None:
    async with aioverbs.open_device() as device:
        print("one of our own:")
        await use(device, Mappings())
        print("an arena, which packs small pieces, recorded:")
        allocator = aioverbs.RecordingAllocator(aioverbs.ArenaAllocator())
        await use(device, allocator)
        for kind, usage in allocator.usage().items():
            print(f"  {kind}: {usage}")


if __name__ == "__main__":
    asyncio.run(main())
