"""Ping-pong over a reliable connection, with rdma-core's ``ibv_rc_pingpong`` or with this program as the peer.

    rc_pingpong.py              server, like `ibv_rc_pingpong -g 1`
    rc_pingpong.py HOST         client, like `ibv_rc_pingpong -g 1 HOST`
    rc_pingpong.py --both       server and client

Server and client exchange their queue pair attributes over TCP. The client then sends messages, all different, and
checks that each comes back unchanged; the server sends back everything it receives. The options are those of
``ibv_rc_pingpong``.
"""

import argparse
import asyncio
import os
import socket
import sys
import time

import aioverbs
from aioverbs import Device, Endpoint, Mtu, QpCapabilities, QueuePair, RegionSlice

# Messages over TCP: LID, queue pair number, initial packet sequence number and GID, in hexadecimal, and a zero byte. At
# the end, the client confirms that it has connected.
DONE = b"done\0"
WIRE_SIZE = len("0000:000000:000000:\0") + 2 * 16


def to_wire(endpoint: Endpoint) -> bytes:
    """Return an endpoint encoded as ``ibv_rc_pingpong`` sends it."""
    return f"{endpoint.lid:04x}:{endpoint.qp_num:06x}:{endpoint.psn:06x}:{endpoint.gid.hex()}\0".encode()


def from_wire(data: bytes, mtu: Mtu) -> Endpoint:
    """Return the endpoint that a peer's message contains. The message contains no MTU.

    :param mtu: MTU of the returned endpoint.
    :raises ValueError: the message is malformed.
    """
    lid, qp_num, psn, gid = data.rstrip(b"\0").decode().split(":")
    return Endpoint(bytes.fromhex(gid), int(qp_num, 16), int(psn, 16), mtu, lid=int(lid, 16))


def listen(port: int) -> socket.socket:
    """Return a non-blocking socket that listens on all addresses of this host; the caller must close it.

    :raises OSError: the port is taken.
    """
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port))
    listener.setblocking(False)
    return listener


def connect(qp: QueuePair, data: bytes, options: argparse.Namespace) -> None:
    """Connect a queue pair to the endpoint in the peer's message, and print the numbers of both queue pairs.

    :raises ValueError: the message is malformed.
    """
    remote = from_wire(data, Mtu[f"MTU_{options.mtu}"])
    print(f"{options.device}: queue pair {qp.qp_num} to {remote.qp_num}, GID {remote.gid.hex()}")
    qp.connect(remote)


async def accept_peer(qp: QueuePair, listener: socket.socket, options: argparse.Namespace) -> None:
    """Wait for a client at the TCP socket and connect the queue pair to the client's queue pair.

    :raises asyncio.IncompleteReadError: the client closed the TCP connection before it confirmed.
    :raises ValueError: the client's message is malformed.
    """
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        connect(qp, await reader.readexactly(WIRE_SIZE), options)
        writer.write(to_wire(qp.local_endpoint()))
        await reader.readexactly(len(DONE))
    finally:
        writer.close()


async def connect_to_peer(qp: QueuePair, options: argparse.Namespace) -> None:
    """Connect to the server by TCP and connect the queue pair to the server's queue pair.

    :raises OSError: no server listens at that address.
    :raises asyncio.IncompleteReadError: the server closed the TCP connection.
    :raises ValueError: the server's message is malformed.
    """
    reader, writer = await asyncio.open_connection(options.host or "localhost", options.port)
    try:
        writer.write(to_wire(qp.local_endpoint()))
        connect(qp, await reader.readexactly(WIRE_SIZE), options)
        writer.write(DONE)
        await writer.drain()
    finally:
        writer.close()


async def run_server(
    qp: QueuePair, listener: socket.socket, first: RegionSlice, second: RegionSlice, options: argparse.Namespace
) -> None:
    """Wait for a client, then send each of its messages back.

    The next receive is posted before a message is sent back, since the next message may follow immediately.

    :param listener: socket at which the client connects.
    :param first: memory for one message.
    :param second: memory for another message.
    :raises WorkCompletionError: the client is gone.
    """
    received = qp.receive(first)
    await accept_peer(qp, listener, options)
    for remaining in reversed(range(options.iters)):
        await received
        if remaining:
            received = qp.receive(second)
        await qp.send(first)
        first, second = second, first


async def run_client(qp: QueuePair, first: RegionSlice, second: RegionSlice, options: argparse.Namespace) -> None:
    """Send messages, check that each comes back unchanged, and print how long that took.

    :param first: memory for the sent message.
    :param second: memory for the returned message.
    :raises RuntimeError: a message came back changed.
    :raises WorkCompletionError: the server is gone.
    """
    received = qp.receive(second)
    await connect_to_peer(qp, options)
    first.buffer[:] = os.urandom(options.size)
    started = time.perf_counter()
    for number in range(options.iters):
        first.buffer[: min(8, options.size)] = number.to_bytes(8, "little")[: options.size]
        sent = qp.send(first)
        await received
        if second.buffer != first.buffer:
            raise RuntimeError(f"returned message {number} differs from the sent one")
        if number + 1 < options.iters:
            received = qp.receive(second)
        await sent
    elapsed = time.perf_counter() - started
    volume = 2 * options.size * options.iters
    print(f"{volume} bytes in {elapsed:.2f} seconds = {volume * 8 / elapsed / 1e6:.2f} Mbit/sec")
    print(f"{options.iters} iters in {elapsed:.2f} seconds = {elapsed / options.iters * 1e6:.2f} usec/iter")


async def run_side(device: Device, listener: socket.socket | None, options: argparse.Namespace) -> None:
    """Open the resources of one side and run it: the server if ``listener`` is a socket, the client if it is None."""
    depths = QpCapabilities(max_send_wr=1, max_recv_wr=1)
    async with (
        device.resource_domain() as domain,
        domain.register(2 * options.size) as region,
        domain.completion_queue(2) as cq,
        domain.queue_pair(cq, capabilities=depths, port=options.ib_port, gid_index=options.gid_idx) as qp,
    ):
        qp.to_init()  # receives can be posted from this state onwards
        first, second = region[: options.size], region[options.size :]
        if listener is not None:
            await run_server(qp, listener, first, second, options)
            print(f"answered {options.iters} messages")
        else:
            await run_client(qp, first, second, options)


async def main(options: argparse.Namespace) -> None:
    async with aioverbs.open_device(options.device) as device, asyncio.timeout(options.timeout or None):
        options.device = device.name
        if options.host is not None:
            await run_side(device, None, options)
            return
        with listen(options.port) as listener:
            port = listener.getsockname()[1]
            print(f"waiting at port {port}", flush=True)
            async with asyncio.TaskGroup() as ends:
                ends.create_task(run_side(device, listener, options))
                if options.both:
                    options.port = port
                    ends.create_task(run_side(device, None, options))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line and return its options; exit with status 2 if it is invalid.

    :param arguments: arguments to parse; None for those of this process.
    """
    parser = argparse.ArgumentParser(description="Ping-pong over RC, also with rdma-core's ibv_rc_pingpong.")
    parser.add_argument("host", nargs="?", help="host of the server; without it, run as the server")
    parser.add_argument("--both", action="store_true", help="run server and client")
    parser.add_argument("-p", "--port", type=int, default=18515, help="TCP port; 0: any, for a server (%(default)s)")
    parser.add_argument("-d", "--device", "--ib-dev", help="RDMA device (the first active one)")
    parser.add_argument("-i", "--ib-port", type=int, default=1, help="port of the device (%(default)s)")
    parser.add_argument("-g", "--gid-idx", type=int, help="index of the port's GID (the best one)")
    parser.add_argument("-s", "--size", type=int, default=4096, help="message size in bytes (%(default)s)")
    sizes = [mtu.name.removeprefix("MTU_") for mtu in Mtu]
    parser.add_argument("-m", "--mtu", choices=sizes, default="1024", help="path MTU (%(default)s)")
    parser.add_argument("-n", "--iters", type=int, default=1000, help="number of round trips (%(default)s)")
    parser.add_argument("-t", "--timeout", type=float, default=60, help="time limit in seconds; 0: none (%(default)s)")
    options = parser.parse_args(arguments)
    if options.size < 1 or options.iters < 1:
        parser.error("--size and --iters must be at least 1")
    if options.both and options.host is not None:
        parser.error("--both runs on this host: omit HOST")
    return options


if __name__ == "__main__":
    try:
        asyncio.run(main(parse()))
    except TimeoutError:
        sys.exit("rc_pingpong: timed out: increase --timeout")
