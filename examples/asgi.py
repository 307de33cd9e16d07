"""A web service whose objects lie in another process: its workers read them there by RDMA.

    python examples/asgi.py [HOST]                 a store, a server of two workers, and somebody who uses it
    python examples/asgi.py store HOST [PORT]      the store only; it prints where it is, and ends with its input

    STORE=HOST:PORT uvicorn --app-dir examples --workers 2 asgi:app
    cd examples; STORE=HOST:PORT gunicorn --preload --workers 2 --worker-class uvicorn_worker.UvicornWorker asgi:app

    curl -T FILE http://127.0.0.1:8000/objects/NAME      and       curl http://127.0.0.1:8000/objects/NAME

HOST is 127.0.0.1, or this host's address on an RDMA device (AIOVERBS_DEVICE names the device), where rdma_cm connects
the two. Nothing of aioverbs is made when this is imported, since servers may fork after that: what is opened before a
fork is the parent's. Each worker opens a device, a domain and a connection of its own in its lifespan.

Objects are put by messages and got by one-sided reads. A worker remembers where an object lies; the object's head tells
whether it still lies there, so that the store is asked the first time only, and when somebody put it anew.
"""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import urllib.request
import zlib
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import aioverbs
from aioverbs import AccessFlags, BufferPool, Connection, Granted, MemoryRegion, ResourceDomain

SLOT = 256 * 1024  # bytes
SLOTS = 128
HEAD = struct.Struct("<QI")  # number of the put, checksum of the object; all 0: nothing is here
LONGEST = SLOT - HEAD.size
READS = 100  # of an object that is put again and again
START_S = 30.0  # for the store to be reached when a worker starts

PUT, FIND = b"+", b"?"
FULL, UNKNOWN, LOST = b"full", b"unknown", b""


class Place(NamedTuple):
    """Where an object lies, for as long as its head has that number."""

    slot: int
    number: int
    length: int


PLACE = struct.Struct("<QQQ")


# ---- The store


class Objects:
    """Objects by name, in memory that workers read. Only the store's loop writes there."""

    def __init__(self, region: MemoryRegion) -> None:
        self._memory = region.buffer
        self._places: dict[bytes, Place] = {}
        self._free = deque(range(SLOTS))
        self._number = int.from_bytes(os.urandom(7), "little")  # no store has the numbers of one that was here before

    def put(self, name: bytes, data: bytes) -> Place | None:
        """Where it lies now; None: there is no room. Until it lies there whole, the one before is found."""
        if not self._free:
            return None
        self._number += 1
        place = Place(self._free.popleft(), self._number, len(data))
        start = place.slot * SLOT + HEAD.size
        self._memory[start : start + len(data)] = data
        self._set_head(place.slot, place.number, zlib.crc32(data))
        before, self._places[name] = self._places.get(name), place
        if before is not None:
            self._set_head(before.slot, 0, 0)
            self._free.append(before.slot)
        return place

    def _set_head(self, slot: int, number: int, checksum: int) -> None:
        self._memory[slot * SLOT : slot * SLOT + HEAD.size] = HEAD.pack(number, checksum)

    def answer(self, request: bytes) -> bytes:
        """Do what a message asks for."""
        end = 2 + request[1]
        name, data = request[2:end], request[end:]
        if request[:1] == PUT:
            place = self.put(name, data)
            return FULL if place is None else PLACE.pack(*place)
        found = self._places.get(name)
        return UNKNOWN if found is None else PLACE.pack(*found)


@contextlib.asynccontextmanager
async def storing(domain: ResourceDomain, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """A store on a domain, for the time of the block; its port."""
    access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.MW_BIND
    async with domain.register(SLOTS * SLOT, access) as region:
        objects = Objects(region)

        async def serve_one(connection: Connection) -> None:
            await connection.grant(region, AccessFlags.REMOTE_READ)
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    request, number = await connection.receive_with_immediate()
                    await connection.send(objects.answer(request), immediate=number)

        # Workers do not hang up, and there is nothing to wait for: each question is answered when it is heard.
        async with aioverbs.serve(serve_one, host, port, domain=domain, drain_timeout_s=0) as server:
            yield server.port


# ---- A worker


class Unavailable(Exception):
    """The store is not there, or was gone before it answered."""


class Store:
    """The store, as a worker sees it, connected again whenever it was lost."""

    def __init__(self, pool: BufferPool) -> None:
        self.reached = asyncio.Event()
        self._pool = pool
        self._link: tuple[Connection, Granted] | None = None
        self._places: dict[bytes, Place] = {}
        self._asked: dict[int, asyncio.Future[bytes]] = {}  # by the number that is asked with and answered with
        self._last = 0

    async def run(self, domain: ResourceDomain, host: str, port: int) -> None:
        """Be connected, and give answers to who asked, until this is cancelled."""
        again = aioverbs.reconnecting(host, port, domain=domain, backoff=aioverbs.Backoff(longest_s=1))
        async with contextlib.aclosing(again) as connections:
            async for connection in connections:
                with contextlib.suppress(aioverbs.BrokenResourceError, anyio.EndOfStream):
                    await self._use(connection)

    async def _use(self, connection: Connection) -> None:
        self._link = connection, await connection.receive_grant()
        self.reached.set()
        try:
            while True:
                answer, number = await connection.receive_with_immediate()
                asked = self._asked.get(number or 0)
                if asked is not None and not asked.done():
                    asked.set_result(answer)
        finally:
            self._link = None
            self._places.clear()
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_result(LOST)

    def _linked(self) -> tuple[Connection, Granted]:
        if self._link is None:
            raise Unavailable
        return self._link

    async def _ask(self, what: bytes, name: bytes, data: bytes = b"") -> bytes:
        """What the store says; any number of tasks may ask at once."""
        connection, _ = self._linked()
        self._last = number = (self._last + 1) % (1 << 32)
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await connection.send(what + bytes([len(name)]) + name + data, immediate=number)
            answer = await self._asked[number]
        except aioverbs.BrokenResourceError as error:
            raise Unavailable from error
        finally:
            del self._asked[number]
        if answer == LOST:
            raise Unavailable
        if len(answer) == PLACE.size:
            self._places[name] = Place(*PLACE.unpack(answer))
        return answer

    async def put(self, name: bytes, data: bytes) -> bool:
        """Whether there was room."""
        return await self._ask(PUT, name, data) != FULL

    async def get(self, name: bytes) -> bytes | None:
        """An object, None where there is none of that name."""
        for _ in range(READS):
            if name not in self._places and await self._ask(FIND, name) == UNKNOWN:
                return None
            data = await self._read(self._places[name])
            if data is not None:
                return data
            self._places.pop(name, None)
        raise Unavailable

    async def _read(self, place: Place) -> bytes | None:
        """What lies there; None where that is something else by now. The store's program does nothing for it."""
        size = HEAD.size + place.length
        async with self._pool.lease() as buffer:
            connection, memory = self._linked()
            try:
                await connection.read(buffer[:size], memory[place.slot * SLOT : place.slot * SLOT + size])
            except (aioverbs.BrokenResourceError, aioverbs.WorkCompletionError) as error:
                raise Unavailable from error
            number, checksum = HEAD.unpack_from(buffer.buffer)
            data = bytes(buffer.buffer[HEAD.size : size])
        return data if number == place.number and zlib.crc32(data) == checksum else None


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Store]]:
    """All that a worker has."""
    host, _, port = os.environ["STORE"].rpartition(":")
    async with (
        aioverbs.open_device() as device,
        device.loop_domain() as domain,
        domain.buffer_pool(SLOT, 16) as pool,
        asyncio.TaskGroup() as tasks,
    ):
        store = Store(pool)
        running = tasks.create_task(store.run(domain, host, int(port)))
        async with asyncio.timeout(START_S):
            await store.reached.wait()
        yield {"store": store}
        running.cancel()


def name_of(request: Request) -> bytes:
    name: bytes = request.path_params["name"].encode()
    if len(name) > 255:
        raise HTTPException(414, "the name of an object has 255 bytes at most")
    return name


async def get_object(request: Request) -> Response:
    store: Store = request.state.store
    data = await store.get(name_of(request))
    if data is None:
        raise HTTPException(404, "there is no such object")
    return Response(data, headers={"x-worker": str(os.getpid())}, media_type="application/octet-stream")


async def put_object(request: Request) -> Response:
    store: Store = request.state.store
    name, data = name_of(request), bytearray()
    async for part in request.stream():
        data += part
        if len(data) > LONGEST:
            raise HTTPException(413, f"an object has {LONGEST} bytes at most")
    if not await store.put(name, bytes(data)):
        raise HTTPException(507, "there is no room for another object")
    return Response(status_code=204, headers={"x-worker": str(os.getpid())})


async def unavailable(request: Request, error: Exception) -> Response:
    return PlainTextResponse("the store cannot be reached", 503, {"retry-after": "1"})


app = Starlette(
    routes=[
        Route("/objects/{name}", get_object, methods=["GET"]),
        Route("/objects/{name}", put_object, methods=["PUT"]),
    ],
    exception_handlers={Unavailable: unavailable},
    lifespan=lifespan,
)


# ---- The command


async def store(host: str, port: int = 0) -> None:
    """Until the input ends."""
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,
        storing(domain, host, port) as chosen,
    ):
        print(f"{host}:{chosen}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


def use(url: str) -> None:
    """What somebody does with the service."""

    def ask(name: str, data: bytes | None = None) -> tuple[bytes, str]:
        request = urllib.request.Request(f"{url}/objects/{name}", data, method="GET" if data is None else "PUT")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read(), answer.headers["x-worker"]

    objects = {f"object-{number}": os.urandom(5000 * number) for number in range(20)}
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, objects, objects.values()))
        got = list(threads.map(ask, objects))
    same = sum(data == answer for data, (answer, _) in zip(objects.values(), got, strict=True))
    print(f"put {len(objects)} objects, got {same} of them as they were put")
    print(f"from the workers {', '.join(sorted({worker for _, worker in got}))}")


def everything(host: str = "127.0.0.1") -> None:
    command = [sys.executable, __file__, "store", host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as storing:
        assert storing.stdout is not None
        env = {**os.environ, "STORE": storing.stdout.readline().strip()}
        # The server is given a socket that listens: who comes early waits there for a worker.
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port, fd = listening.getsockname()[1], listening.fileno()
            command = [sys.executable, "-P", "-m", "uvicorn", "--log-level", "warning", "--workers", "2"]
            command += ["--app-dir", str(Path(__file__).parent), "--fd", str(fd), "asgi:app"]
            server = subprocess.Popen(command, env=env, pass_fds=[fd])
        try:
            use(f"http://127.0.0.1:{port}")
        finally:
            server.terminate()
            server.wait()
            storing.communicate()


def main() -> None:
    match sys.argv[1:]:
        case ["store", host, *port]:
            asyncio.run(store(host, *map(int, port)))
        case []:
            everything()
        case [host]:
            everything(host)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
