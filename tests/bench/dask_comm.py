"""Messages between two processes: comms of Dask with this backend and with tcp, and streams of Tornado and asyncio.

    python tests/bench/dask_comm.py [--loop asyncio|uvloop] [--backend aioverbs ...] [--size 64MiB ...]
        [--iterations 100] [--warm-up 10] [--rounds 9] [--connects 100]

For each size, a message with an array goes there and back. Half of that time is the latency, of which percentiles are
printed; the bandwidth is that of one way at the median. Size 0 stands for a small dict without an array. The backends
take turns, so that a busy machine slows down all of them. `connect` is the time to connect, with the handshake of
`distributed`, and to close.

- ``aioverbs``, ``tcp``: `Comm.write` and `Comm.read`, whose arrays arrive in memory of their own.
- ``ucxx``: the same with the backend of RAPIDS over UCX, if `distributed-ucxx` is installed (`pip install --no-deps
  distributed-ucxx-cu12 ucxx-cu12 libucxx-cu12 "libucx-cu12<1.22" librmm-cu12 rapids-logger`; its own requirements want
  an older `distributed`). UCX uses TCP: its shared memory does not detect lost peers, which the backend asks for.
- ``tornado``: a length and bytes on a `tornado.iostream.IOStream`, read into memory that is there: no comm at all.
- ``asyncio``: the same on asyncio's streams, which return new `bytes`.
- ``memcpy``: the array copied to new memory by this process alone, for comparison.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.util import find_spec
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
SCHEMES = ("aioverbs", "tcp", *(["ucxx"] if find_spec("distributed_ucxx") else []))
BACKENDS = (*SCHEMES, "tornado", "asyncio", "memcpy")
SIZES = ["0", "1KiB", "64KiB", "1MiB", "64MiB"]
PERCENTILES = (50, 90, 99)
_MAX_BYTES = 1 << 31  # buffered by a stream
_TRAFFIC = 1 << 30  # bytes in each direction for each size, unless the number of iterations is given
_ITERATIONS = (9, 2000)  # limits of that number

Exchange = Callable[[], Awaitable[None]]


# ---- The serving process


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


async def _echo_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Return the bytes after each length, until the peer closes the stream."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readexactly(8)
            writer.write(head)
            writer.write(await reader.readexactly(int.from_bytes(head, "little")))
            await writer.drain()
    writer.close()


async def _serve(pipe: Pipe) -> None:
    """Serve all backends, tell their addresses, and wait for the end of the client."""
    listeners = [await listen(f"{scheme}://127.0.0.1", _echo, deserialize=False) for scheme in SCHEMES]
    tornado = _EchoServer(max_buffer_size=_MAX_BYTES)
    tornado.listen(0, "127.0.0.1")
    port = next(iter(tornado._sockets.values())).getsockname()[1]
    streams = await asyncio.start_server(_echo_stream, "127.0.0.1", 0, limit=_MAX_BYTES)
    addresses = {scheme: listener.contact_address for scheme, listener in zip(SCHEMES, listeners, strict=True)}
    pipe.send({**addresses, "tornado": port, "asyncio": streams.sockets[0].getsockname()[1]})
    await asyncio.to_thread(pipe.recv)
    for listener in listeners:
        listener.stop()
    tornado.stop()
    streams.close()


def serve(loop: str, pipe: Pipe) -> None:
    """Run the serving process on an event loop."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(_serve(pipe))


# ---- The measuring process


async def _exchange_by_comm(comm: Any, array: np.ndarray[Any, Any]) -> None:
    """Send an array over a comm and receive it, as an object that Dask does not copy; or a small dict without one."""
    if not array.nbytes:
        await comm.write({"op": "ping", "number": 1})
        assert (await comm.read())["number"] == 1
        return
    await comm.write({"op": "put", "data": to_serialize(array)})
    assert (await comm.read())["data"].nbytes == array.nbytes


async def _exchange_by_tornado(stream: IOStream, array: np.ndarray[Any, Any], memory: memoryview) -> None:
    """Send the bytes of an array over a stream, and receive them."""
    await stream.write(array.nbytes.to_bytes(8, "little"))
    await stream.write(array.data)
    assert int.from_bytes(await stream.read_bytes(8), "little") == array.nbytes
    await stream.read_into(memory)  # type: ignore[arg-type]


async def _exchange_by_asyncio(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, array: np.ndarray[Any, Any]
) -> None:
    """Send the bytes of an array over a stream of asyncio, and receive them."""
    writer.write(array.nbytes.to_bytes(8, "little"))
    writer.write(array.data)
    await writer.drain()
    assert int.from_bytes(await reader.readexactly(8), "little") == array.nbytes
    assert len(await reader.readexactly(array.nbytes)) == array.nbytes


async def _copy_twice(array: np.ndarray[Any, Any]) -> None:
    """Copy an array to new memory, there and back."""
    for _ in range(2):
        array.copy()


async def _connect(address: str) -> None:
    """Connect and close."""
    comm = await connect(address)
    await comm.close()


async def _time(exchange: Exchange, times: int, found: list[float]) -> None:
    """Add the seconds of exchanges to a list."""
    for _ in range(times):
        begin = time.perf_counter()
        await exchange()
        found.append(time.perf_counter() - begin)


async def _interleave(
    exchanges: Mapping[str, Exchange], iterations: int, warm_up: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of exchanges of each backend, which take turns.

    :param exchanges: exchanges by the names of the backends.
    :param iterations: number of exchanges of each backend that are measured, at least.
    :param warm_up: number of exchanges of each backend before that.
    :param rounds: number of turns of each backend.
    """
    found: dict[str, list[float]] = {name: [] for name in exchanges}
    for exchange in exchanges.values():
        await _time(exchange, warm_up, [])
    for _ in range(rounds):
        for name, exchange in exchanges.items():
            await _time(exchange, -(-iterations // rounds), found[name])
    return found


async def _measure(addresses: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Measure and print all backends."""
    chosen = options.backend or BACKENDS
    comms = {scheme: await connect(addresses[scheme]) for scheme in SCHEMES if scheme in chosen}
    tornado = await TCPClient().connect("127.0.0.1", addresses["tornado"], max_buffer_size=_MAX_BYTES)
    tornado.set_nodelay(True)
    reader, writer = await asyncio.open_connection("127.0.0.1", addresses["asyncio"], limit=_MAX_BYTES)
    columns = "".join(f"{f'p{each} us':>11}" for each in PERCENTILES)
    print(f"{'size':>9} {'backend':>9} {columns} {'one way':>12} {'to tcp':>7}")
    for size in options.size or map(parse_bytes, SIZES):
        array = np.random.default_rng(0).integers(0, 255, size, dtype="u1")
        exchanges: dict[str, Exchange] = {
            scheme: partial(_exchange_by_comm, comm, array) for scheme, comm in comms.items()
        }
        if size:
            exchanges["tornado"] = partial(_exchange_by_tornado, tornado, array, memoryview(bytearray(size)))
            exchanges["asyncio"] = partial(_exchange_by_asyncio, reader, writer, array)
            exchanges["memcpy"] = partial(_copy_twice, array)
        iterations = options.iterations or max(_ITERATIONS[0], min(_ITERATIONS[1], _TRAFFIC // max(size, 1)))
        wanted = {name: exchange for name, exchange in exchanges.items() if name in chosen}
        found = await _interleave(wanted, iterations, options.warm_up, options.rounds)
        halves = {name: [each / 2 for each in seconds] for name, seconds in found.items()}
        _print(format_bytes(size) if size else "dict", halves, size)
    if options.connects:
        connects = {scheme: partial(_connect, addresses[scheme]) for scheme in comms}
        _print("connect", await _interleave(connects, options.connects, options.warm_up, options.rounds))
    for comm in comms.values():
        await comm.close()
    tornado.close()
    writer.close()


def _print(what: str, found: Mapping[str, list[float]], size: int = 0) -> None:
    """Print percentiles of the backends, and how many times as fast as tcp each is.

    :param what: name of the measurement.
    :param found: seconds by the names of the backends.
    :param size: bytes of a message; 0 to print no bandwidth.
    """
    medians = {name: float(np.median(seconds)) for name, seconds in found.items()}
    for name, seconds in found.items():
        columns = "".join(f"{each * 1e6:11.1f}" for each in np.percentile(seconds, PERCENTILES))
        rate = f"{size / medians[name] / 2**30:.2f} GiB/s" if size else ""
        ratio = f"{medians['tcp'] / medians[name]:6.2f}x" if "tcp" in medians else ""
        print(f"{what:>9} {name:>9} {columns} {rate:>12} {ratio:>7}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loop", choices=LOOPS, default="asyncio")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="one of several; all without")
    parser.add_argument("--size", action="append", type=parse_bytes, help="bytes of an array; 0 for a small dict")
    parser.add_argument("--iterations", type=int, help="round trips measured for each size")
    parser.add_argument("--warm-up", type=int, default=10, help="round trips before that")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each backend")
    parser.add_argument("--connects", type=int, default=100, help="number of connects; 0 for none")
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(options.loop, theirs))
    server.start()
    addresses = ours.recv()
    with asyncio.Runner(loop_factory=LOOPS[options.loop]) as runner:
        runner.run(_measure(addresses, options))
    ours.send(None)
    server.join()


if __name__ == "__main__":
    main()
