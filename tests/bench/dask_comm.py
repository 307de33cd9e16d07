"""Comms of Dask: this backend, Dask's own tcp backend and Tornado's streams, between two processes.

    python tests/bench/dask_comm.py [--loop asyncio|uvloop] [--rounds 9] [--size 64MiB ...]

For each size, a message with an array goes there and back: half of the time of a round trip, and the bandwidth of one
way. Contenders are measured in turn, and medians are printed. `connect` is the time to connect, with the handshake of
`distributed`, and to close.

- ``aioverbs``, ``tcp``: `Comm.write` and `Comm.read`, whose arrays arrive in memory of their own.
- ``tornado``: a length and bytes on a `tornado.iostream.IOStream`, read into memory that is there: no comm at all.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import uvloop
from dask.utils import format_bytes, parse_bytes
from distributed.comm.core import connect, listen
from distributed.protocol.serialize import to_serialize
from tornado.iostream import IOStream, StreamClosedError
from tornado.tcpclient import TCPClient
from tornado.tcpserver import TCPServer

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}
SCHEMES = ("aioverbs", "tcp")
SIZES = ["1KiB", "64KiB", "1MiB", "64MiB"]
_MAX_BYTES = 1 << 31  # buffered by a stream

Exchange = Callable[[], Awaitable[None]]


async def _echo(comm: Any) -> None:
    """Return each message as it came, still serialized, until the peer closes the comm."""
    try:
        while True:
            await comm.write(await comm.read())
    except OSError:
        await comm.close()


class _EchoServer(TCPServer):
    """Return the bytes after each length."""

    async def handle_stream(self, stream: IOStream, address: Any) -> None:
        stream.set_nodelay(True)
        memory = memoryview(bytearray())
        try:
            while True:
                length = int.from_bytes(await stream.read_bytes(8), "little")
                if len(memory) != length:
                    memory = memoryview(bytearray(length))
                await stream.read_into(memory)  # type: ignore[arg-type]
                await stream.write(length.to_bytes(8, "little"))
                await stream.write(memory)
        except StreamClosedError:
            stream.close()


async def _serve(pipe: Pipe) -> None:
    """Serve all contenders, tell their addresses, and wait for the end of the client."""
    listeners = [await listen(f"{scheme}://127.0.0.1", _echo, deserialize=False) for scheme in SCHEMES]
    server = _EchoServer(max_buffer_size=_MAX_BYTES)
    server.listen(0, "127.0.0.1")
    port = next(iter(server._sockets.values())).getsockname()[1]
    pipe.send([*(listener.contact_address for listener in listeners), port])
    await asyncio.to_thread(pipe.recv)
    for listener in listeners:
        listener.stop()
    server.stop()


def serve(loop: str, pipe: Pipe) -> None:
    """Run the serving process on an event loop."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(_serve(pipe))


async def _comm_exchange(comm: Any, array: np.ndarray[Any, Any]) -> None:
    """Send an array over a comm and receive it, as an object that Dask does not copy."""
    await comm.write({"op": "put", "data": to_serialize(array)})
    received = (await comm.read())["data"]
    assert received.nbytes == array.nbytes


async def _stream_exchange(stream: IOStream, array: np.ndarray[Any, Any], memory: memoryview) -> None:
    """Send the bytes of an array over a stream, and receive them."""
    await stream.write(array.nbytes.to_bytes(8, "little"))
    await stream.write(array.data)
    assert int.from_bytes(await stream.read_bytes(8), "little") == array.nbytes
    await stream.read_into(memory)  # type: ignore[arg-type]


async def _time(exchange: Exchange, times: int) -> float:
    """Return the seconds for half an exchange."""
    begin = time.perf_counter()
    for _ in range(times):
        await exchange()
    return (time.perf_counter() - begin) / times / 2


async def _connect(address: str) -> None:
    """Connect and close."""
    comm = await connect(address)
    await comm.close()


async def _measure(addresses: list[Any], sizes: list[int], rounds: int) -> None:
    """Measure and print all contenders."""
    comms = {scheme: await connect(address) for scheme, address in zip(SCHEMES, addresses, strict=False)}
    stream = await TCPClient().connect("127.0.0.1", addresses[-1], max_buffer_size=_MAX_BYTES)
    stream.set_nodelay(True)
    print(f"{'size':>9} {'contender':>9} {'half round trip':>16} {'one way':>12} {'to tcp':>7}")
    for size in sizes:
        array = np.random.default_rng(0).integers(0, 255, size, dtype="u1")
        memory = memoryview(bytearray(size))
        exchanges: dict[str, Exchange] = {
            scheme: partial(_comm_exchange, comm, array) for scheme, comm in comms.items()
        }
        exchanges["tornado"] = partial(_stream_exchange, stream, array, memory)
        times = max(1, min(200, (64 << 20) // size))
        found: dict[str, list[float]] = {name: [] for name in exchanges}
        for number in range(rounds + 1):
            for name, exchange in exchanges.items():
                seconds = await _time(exchange, times)
                if number:  # the first round warms up
                    found[name].append(seconds)
        _print(format_bytes(size), found, size)
    connects: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
    for _ in range(rounds):
        for scheme, address in zip(SCHEMES, addresses, strict=False):
            connects[scheme].append(await _time(partial(_connect, address), 20) * 2)
    _print("connect", connects)
    for comm in comms.values():
        await comm.close()
    stream.close()


def _print(what: str, found: dict[str, list[float]], size: int = 0) -> None:
    """Print the medians of contenders, and how many times as fast as tcp each is."""
    medians = {name: statistics.median(each) for name, each in found.items()}
    for name, seconds in medians.items():
        rate = f"{size / seconds / 2**30:.2f} GiB/s" if size else ""
        print(f"{what:>9} {name:>9} {seconds * 1e6:13.1f} us {rate:>12} {medians['tcp'] / seconds:6.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loop", choices=LOOPS, default="asyncio")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", action="append", type=parse_bytes)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(options.loop, theirs))
    server.start()
    addresses = ours.recv()
    with asyncio.Runner(loop_factory=LOOPS[options.loop]) as runner:
        runner.run(_measure(addresses, options.size or list(map(parse_bytes, SIZES)), options.rounds))
    ours.send(None)
    server.join()


if __name__ == "__main__":
    main()
