"""Allocators for the memory of queues and doorbell records: a custom one and a built-in one.

Uses an RDMA device if there is one, otherwise the software device; AIOVERBS_DEVICE selects another device. Some
providers do not call allocators.
"""

import asyncio
import ctypes
import mmap
import sys

import aioverbs


class Mappings:
    """An allocator in Python that creates a mapping for each request.

    The memory is shared, so a fork does not copy it.
    """

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def allocate(
        self, size: int, alignment: int, resource_type: int, pd: object, context: object
    ) -> int | aioverbs.UseDefault | None:
        """Allocate zeroed memory.

        :param size: number of bytes.
        :param alignment: number of which the address must be a multiple.
        :param resource_type: number that says what the memory is for.
        :param pd: protection domain that the memory is for; None for buffers.
        :param context: context with which the domain was created; None for buffers.
        :returns: the address; `aioverbs.USE_DEFAULT` to let the provider allocate.
        :raises OSError: there is not enough memory.
        """
        if alignment > mmap.PAGESIZE:
            return aioverbs.USE_DEFAULT  # let the provider allocate
        mapping = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mappings[address] = mapping
        print(f"  {size} bytes at {address:#x} for {aioverbs.ResourceKind.decode(resource_type)} of {context}")
        return address

    def free(self, address: int, resource_type: int, pd: object, context: object) -> None:
        """Unmap the memory at an address that `allocate` returned."""
        del self._mappings[address]


async def create_queues(device: aioverbs.Device, allocator: aioverbs.Allocator) -> None:
    """Create queues whose memory comes from an allocator, and close them. Exit the program if the device does not call
    allocators.
    """
    async with (
        device.resource_domain(allocator=allocator, context="the example") as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq),
    ):
        if not domain.parent.native_allocators:
            sys.exit(f"{device.name} does not call allocators; AIOVERBS_DEVICE=soft0 does")
        print("queues created")


async def main() -> None:
    async with aioverbs.open_device() as device:
        print("a custom allocator:")
        await create_queues(device, Mappings())
        print("an arena, which packs small allocations, recorded:")
        allocator = aioverbs.RecordingAllocator(aioverbs.ArenaAllocator())
        await create_queues(device, allocator)
        for kind, usage in allocator.usage().items():
            print(f"  {kind}: {usage}")


if __name__ == "__main__":
    asyncio.run(main())
