"""The program of the second process: memory for remote access, and messages that are echoed.

It reads commands from the socket whose descriptor is its argument, one a line, and answers each with a line.
"""

import asyncio
import contextlib
import select
import socket
import sys
from typing import Any

from aioverbs import AccessFlags, Endpoint, MemoryRegion, MessageModel, QueuePair, RegionSlice, open_device
from tests.fabric.words import words
from tests.soft_context import soft_context

SIZE = 4 << 20
ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC


def pattern(at: int, length: int) -> bytes:
    """Return the initial content of the memory, in which every 8 bytes have a unique value."""
    return words(at // 8, length)


def block_until_readable(until: socket.socket) -> None:
    """Block, and the event loop with this call, until `until` is readable."""
    select.select([until], [], [])


async def echo(qp: QueuePair) -> None:
    async for message in qp.messages():
        with message:
            local = message.local
            assert isinstance(local, RegionSlice)
            await qp.send(local[: message.byte_len])


async def main(sock: socket.socket, model: MessageModel) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    async with (
        contextlib.AsyncExitStack() as stack,
        open_device("soft0") as device,
        device.resource_domain(message_model=model) as domain,
        domain.register(SIZE, ACCESS) as region,
        domain.completion_queue(1024) as cq,
    ):
        tasks: list[asyncio.Task[None]] = []
        lent_region: MemoryRegion | None = None
        qps: list[QueuePair] = []
        lent_memory = bytearray(4096)
        region.buffer[:] = pattern(0, SIZE)
        while command := (await reader.readline()).decode().split():
            match command:
                case ["memory"]:
                    answer = f"{region.address} {region.rkey}"
                case ["connect", endpoint, *attributes]:
                    qp = await stack.enter_async_context(domain.queue_pair(cq, receive_depth=16, receive_size=4096))
                    attribute_values: dict[str, Any] = {
                        name: int(value) for name, _, value in (a.partition("=") for a in attributes)
                    }
                    qp.connect(Endpoint.from_bytes(bytes.fromhex(endpoint)), ACCESS, **attribute_values)
                    qps.append(qp)
                    tasks.append(asyncio.create_task(echo(qp)))
                    answer = bytes(qp.local_endpoint()).hex()
                case ["lend"]:
                    lent_memory[:] = b"\xa5" * len(lent_memory)
                    lent_region = await domain.register(lent_memory, ACCESS).open()
                    answer = f"{lent_region.address} {lent_region.rkey}"
                case ["take"] if lent_region is not None:
                    await lent_region.aclose()
                    lent_memory[:] = b"\x5a" * len(lent_memory)
                    answer = bytes(lent_memory[:64]).hex()
                case ["look", at, length]:
                    answer = bytes(region.buffer[int(at) : int(at) + int(length)]).hex()
                case ["sleep"]:
                    writer.write(b"asleep\n")
                    await writer.drain()
                    block_until_readable(sock)
                    answer = (await reader.readline()).decode().strip()
                case ["refusals"]:
                    fabric = soft_context(device).fabric()
                    reasons = "; ".join(refusal.reason for refusal in device.refusals())
                    answer = f"{fabric.refused_peers} {fabric.refused_frames} {reasons}"
                case _:
                    raise ValueError(command)
            writer.write(f"{answer}\n".encode())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for qp in reversed(qps):
            await qp.aclose()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main(socket.socket(fileno=int(sys.argv[1])), MessageModel[sys.argv[2]]))
