"""Two processes: one offers memory, and the other sends a message, writes, reads and counts in that memory.

    python examples/two_processes.py

The first process starts the second, and both exchange their endpoints over a socket pair. On soft0, data moves between
the processes without further setup; on an RDMA device (AIOVERBS_DEVICE=mlx5_0), it moves through the network.
"""

import asyncio
import os
import socket
import sys
from asyncio import StreamReader, StreamWriter

import aioverbs
from aioverbs import AccessFlags, Endpoint, RemoteRegion

SIZE = 1 << 20
ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC

Channel = tuple[StreamReader, StreamWriter]


def send_line(channel: Channel, line: str) -> None:
    """Send a line to the other process without waiting."""
    channel[1].write(f"{line}\n".encode())


async def receive_line(channel: Channel) -> list[str]:
    """Wait for a line from the other process; return its words.

    :raises TimeoutError: no line arrived within 30 seconds.
    :raises RuntimeError: the other process ended.
    """
    line = await asyncio.wait_for(channel[0].readline(), timeout=30)
    if not line:
        raise RuntimeError("the other process ended")
    return line.decode().split()


async def run_process(channel: Channel, *, is_active: bool) -> None:
    """Run one of the two processes: connect to the other one, then either use that process's memory or offer memory to
    it.

    :param channel: socket between both processes.
    :param is_active: whether this process uses the memory of the other one.
    """
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,
        domain.register(SIZE, ACCESS) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
    ):
        send_line(channel, f"{bytes(qp.local_endpoint()).hex()} {region.address} {region.rkey}")
        endpoint, address, rkey = await receive_line(channel)
        qp.connect(Endpoint.from_bytes(bytes.fromhex(endpoint)), ACCESS)
        hello = qp.receive(region[:64])
        send_line(channel, "ready")
        await receive_line(channel)
        if is_active:
            await use_memory(qp, region, RemoteRegion(int(address), SIZE, int(rkey)))
            send_line(channel, "done")
            await receive_line(channel)  # the other process may check its memory until then
        else:
            received = await hello
            print(f"process {os.getpid()} received {bytes(received.data)!r}")
            await receive_line(channel)
            print(f"its memory has {bytes(region.buffer[64:69])!r}, written by the other process")
            for peer in (each for each in device.peers() if not each.connected_by_us) if device.software else ():
                how = "from memory to memory" if peer.direct else f"by {peer.transport} socket"
                print(f"process {peer.process_id} is connected by a {peer.transport} socket; large data moves {how}")
            send_line(channel, "bye")


async def use_memory(qp: aioverbs.QueuePair, region: aioverbs.MemoryRegion, remote: RemoteRegion) -> None:
    """Send a message, then write, count and read in the other process's memory, and print what was counted and read.

    :param qp: queue pair connected to the other process.
    :param region: memory of this process.
    :param remote: memory of the other process.
    """
    region.buffer[:5] = b"hello"
    await qp.send(region[:5])
    await qp.write(region[:5], remote[64:69])
    before = [await qp.fetch_and_add(remote[128:136], 1) for _ in range(3)]
    region.buffer[:] = bytes(SIZE)
    await qp.read(region, remote)
    counted = int.from_bytes(region.buffer[128:136], sys.byteorder)
    print(
        f"process {os.getpid()} counted {before} and read {bytes(region.buffer[64:69])!r} and {counted} back",
        flush=True,
    )


async def main() -> None:
    if sys.argv[1:2] == ["--ask"]:
        channel = await asyncio.open_unix_connection(sock=socket.socket(fileno=int(sys.argv[2])))
        await run_process(channel, is_active=True)
        return
    ours, theirs = socket.socketpair()
    channel = await asyncio.open_unix_connection(sock=ours)
    with theirs:
        number = str(theirs.fileno())
        other = await asyncio.create_subprocess_exec(sys.executable, __file__, "--ask", number, pass_fds=[int(number)])
    try:
        await run_process(channel, is_active=False)
    finally:
        channel[1].close()
        status = await other.wait()
    sys.exit(status)


if __name__ == "__main__":
    asyncio.run(main())
