"""Server and client of rdma-core's rping: the server fetches pings with RDMA READ and returns them with RDMA WRITE.

    python examples/rping.py -s -a 10.77.0.1 -C 3 -v        and        rping -c -a 10.77.0.1 -C 3 -V
    rping -s -a 10.77.0.1 -C 3 -v                           and        python examples/rping.py -c -a 10.77.0.1 -C 3 -V

Messages for one ping (each has an address, an rkey and a length):

    client --SEND(source region)-------> server
    client <------RDMA READ------------- server
    client <------SEND("go on")--------- server
    client --SEND(sink region)---------> server
    client <------RDMA WRITE------------ server
    client <------SEND("go on")--------- server

This needs RDMA devices: the software device has no IP addresses.
"""

import argparse
import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    MemoryRegion,
    Message,
    QueuePair,
    RemoteRegion,
    ResourceDomain,
    WorkCompletionError,
    open_device,
    rdma_cm,
)

INFO = struct.Struct(">QII")
ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
MIN_SIZE, MAX_SIZE = 26, 65535  # limits of a ping in bytes, as in rping


def ping_data(number: int, size: int) -> bytes:
    """Return a ping of ``size`` bytes as rping's client sends it: a header with ``number``, a sequence of letters whose
    first letter moves on with each ping, and a zero byte.
    """
    head = b"rdma-ping-%d: " % number
    letters = range(65, 123)
    first = number % len(letters)
    body = itertools.islice(itertools.cycle(letters), first, first + size - len(head) - 1)
    return head + bytes(body) + b"\0"


class Side:
    """Common part of both sides: a queue pair that keeps receives posted, and memory. Made by `open_side`.

    :param info: memory of outgoing messages.
    :param data: memory that pings are read into or written to.
    """

    def __init__(self, domain: ResourceDomain, qp: QueuePair, info: MemoryRegion, data: MemoryRegion) -> None:
        self.domain, self.qp, self.data = domain, qp, data
        self._info = info
        self._messages = qp.messages()

    async def send(self, region: RemoteRegion | None = None) -> None:
        """Send a message with the location of a region, or with zeros, which tell the peer to continue. Return once the
        message has been sent.

        :param region: the region; None for zeros.
        :raises WorkCompletionError: the peer is gone.
        """
        info = INFO.pack(region.address, region.rkey, region.length) if region is not None else bytes(INFO.size)
        self._info.buffer[: INFO.size] = info
        await self.qp.send(self._info[:])

    async def receive(self) -> RemoteRegion:
        """Wait for the peer's next message; return the region in it, which is empty if the message is the signal to
        continue.

        :raises BrokenResourceError: the peer is gone.
        :raises WorkCompletionError: the peer is gone.
        """
        message: Message = await anext(self._messages)
        with message:
            address, rkey, length = INFO.unpack(message.data)
        return RemoteRegion(address, length, rkey)


@contextlib.asynccontextmanager
async def open_side(name: str, size: int) -> AsyncIterator[Side]:
    """Open everything that one side needs on a device; yield a `Side`, and close everything when the block ends.

    :param name: name of the device.
    :param size: size of the largest ping in bytes.
    """
    async with (
        open_device(name) as device,
        device.resource_domain() as domain,
        domain.register(INFO.size) as info,
        domain.register(size, ACCESS) as data,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq, receive_depth=2, receive_size=INFO.size) as qp,
    ):
        yield Side(domain, qp, info, data)


async def serve_pings(side: Side, verbose: bool) -> int:
    """Serve pings until the client disconnects; return their number.

    :raises ValueError: a ping is larger than the memory.
    """
    for number in itertools.count():
        try:
            source = await side.receive()
        except (WorkCompletionError, BrokenResourceError):  # disconnected: the receives were flushed
            return number
        if source.length > len(side.data.buffer):
            raise ValueError(
                f"received a ping of {source.length} bytes, but the buffer has {len(side.data.buffer)}: increase -S"
            )
        await side.qp.read(side.data[: source.length], source)
        ping_text = bytes(side.data.buffer[: source.length]).partition(b"\0")[0]
        if verbose:
            print("server ping data:", ping_text.decode(), flush=True)
        await side.send()
        sink = await side.receive()
        await side.qp.write(side.data[: len(ping_text) + 1], sink[: len(ping_text) + 1])
        await side.send()
    raise AssertionError


async def send_pings(side: Side, count: int, size: int, verbose: bool, validate: bool) -> int:
    """Send pings and wait for each to be returned; return their number.

    :param count: number of pings; 0 if there is no limit.
    :param size: size of each ping in bytes.
    :param validate: whether to compare the returned pings with those that were sent.
    :raises ValueError: a returned ping differs.
    :raises WorkCompletionError: the server is gone.
    """
    async with side.domain.register(size, ACCESS) as start:
        for number in itertools.count():
            if count and number == count:
                return number
            start.buffer[:] = ping_data(number, size)
            await side.send(start.remote())
            await side.receive()  # the server has read the ping
            await side.send(side.data.remote())
            await side.receive()  # the server has written the ping
            if validate and side.data.buffer != start.buffer:
                raise ValueError("the returned data differs from the sent data")
            if verbose:
                print("ping data:", bytes(side.data.buffer).partition(b"\0")[0].decode(), flush=True)
    raise AssertionError


async def run_server(address: str, port: int, size: int, verbose: bool) -> int:
    """Serve one client until it disconnects; return the number of pings.

    :raises OSError: listening at the address failed.
    :raises ValueError: a ping is larger than the memory.
    """
    async with rdma_cm.Channel() as channel, channel.listener(address, port) as listener:
        print("listening at", *listener.address[:2], flush=True)
        async with await anext(listener) as client:
            assert client.device_name is not None
            async with open_side(client.device_name, size) as side:
                await client.accept(side.qp, ACCESS)
                count = await serve_pings(side, verbose)
                await client.disconnect()
                return count


async def run_client(address: str, port: int, size: int, count: int, verbose: bool, validate: bool) -> int:
    """Connect to a server and send pings; return their number.

    :raises OSError: the server cannot be reached.
    :raises ValueError: a returned ping differs.
    :raises WorkCompletionError: the server is gone.
    """
    async with rdma_cm.Channel() as channel, channel.identifier() as server:
        await server.resolve(address, port)
        assert server.device_name is not None
        async with open_side(server.device_name, size) as side:
            await server.connect(side.qp, ACCESS)
            done = await send_pings(side, count, size, verbose, validate)
            await server.disconnect()
            return done


def main() -> None:
    parser = argparse.ArgumentParser(description="RDMA ping, with the options of rdma-core's rping")
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument("-s", dest="server", action="store_true", help="run as the server")
    side.add_argument("-c", dest="server", action="store_false", help="run as the client")
    parser.add_argument("-a", dest="address", default="0.0.0.0", help="the server's address")
    parser.add_argument("-p", dest="port", type=int, default=7174, help="the server's port")
    parser.add_argument("-C", dest="count", type=int, default=0, help="number of pings, for the client; 0: no limit")
    parser.add_argument("-S", dest="size", type=int, default=64, help=f"bytes of a ping, {MIN_SIZE} to {MAX_SIZE}")
    parser.add_argument("-v", dest="verbose", action="store_true", help="print the pings")
    parser.add_argument("-V", dest="validate", action="store_true", help="check the returned data")
    options = parser.parse_args()
    if not MIN_SIZE <= options.size <= MAX_SIZE:
        parser.error(f"-S must be from {MIN_SIZE} to {MAX_SIZE}, got {options.size}")
    if options.server:
        done = asyncio.run(run_server(options.address, options.port, options.size, options.verbose))
    else:
        arguments = options.address, options.port, options.size, options.count, options.verbose, options.validate
        done = asyncio.run(run_client(*arguments))
    print(f"{done} pings", flush=True)


if __name__ == "__main__":
    main()
