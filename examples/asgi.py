"""A web service whose objects are in another process, from which its workers read them by RDMA.

    python examples/asgi.py [HOST]                 a store, a server with two workers, and a client
    python examples/asgi.py store HOST [PORT]      the store only; it prints its address, and ends with its input

    STORE=HOST:PORT uvicorn --app-dir examples --workers 2 asgi:app
    cd examples; STORE=HOST:PORT gunicorn --preload --workers 2 --worker-class uvicorn_worker.UvicornWorker asgi:app

    curl -T FILE http://127.0.0.1:8000/objects/NAME      and       curl http://127.0.0.1:8000/objects/NAME

The store is the cache of key_value.py. HOST is 127.0.0.1, or this host's address on an RDMA device (AIOVERBS_DEVICE
names the device), where rdma_cm connects the two. Importing this module creates no aioverbs object, since servers may
fork afterwards, and an object created before a fork belongs to the parent. Each worker opens a device, a domain and a
connection of its own in its lifespan.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
from key_value import NEIGHBOURS, SLOT, Cache, serving
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import aioverbs
from aioverbs import BufferPool, ResourceDomain

START_TIMEOUT_S = 30.0  # timeout for reaching the store when a worker starts
CONNECTION_ERRORS = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    aioverbs.WorkCompletionError,
)


class Store:
    """A worker's connection to the store, which is renewed whenever it is lost.

    `cache` uses the present connection and is set before the event `reached`. Setting the event `lost` makes `run`
    connect again.
    """

    cache: Cache

    def __init__(self) -> None:
        self.reached, self.lost = asyncio.Event(), asyncio.Event()

    async def run(self, domain: ResourceDomain, pool: BufferPool, host: str, port: int) -> None:
        """Stay connected to the store until cancelled, and connect again whenever `lost` is set.

        A request that finds the connection broken sets `lost`.

        :param domain: domain that owns the connections.
        :param pool: pool of buffers with space for `NEIGHBOURS` slots each.
        :param host: the store's address.
        :param port: the store's TCP port.
        """
        reconnections = aioverbs.reconnect(host, port, domain=domain, backoff=aioverbs.Backoff(longest_s=1))
        async with contextlib.aclosing(reconnections) as connections:
            async for connection in connections:
                with contextlib.suppress(*CONNECTION_ERRORS):
                    self.cache = Cache(connection, await connection.receive_grant(), pool)
                    self.reached.set()
                    self.lost.clear()
                    await self.lost.wait()


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Store]]:
    """Open a worker's device, domain and connection for the lifetime of the worker; yield the state that its requests
    share.

    :raises TimeoutError: the store cannot be reached.
    """
    host, _, port = os.environ["STORE"].rpartition(":")
    async with (
        aioverbs.open_device() as device,
        device.loop_domain() as domain,
        domain.buffer_pool(NEIGHBOURS * SLOT, 16) as pool,
        asyncio.TaskGroup() as tasks,
    ):
        store = Store()
        running = tasks.create_task(store.run(domain, pool, host, int(port)))
        async with asyncio.timeout(START_TIMEOUT_S):
            await store.reached.wait()
        yield {"store": store}
        running.cancel()


def reply(status: int, data: bytes = b"") -> Response:
    """Return a response that names this process as the worker that answered."""
    return Response(data, status, {"x-worker": str(os.getpid())}, media_type="application/octet-stream")


async def get_object(request: Request) -> Response:
    """Answer ``GET /objects/NAME`` with the object.

    :raises HTTPException: 404, if there is no such object.
    """
    data = await request.state.store.cache.get(request.path_params["name"].encode())
    if data is None:
        raise HTTPException(404, "no such object")
    return reply(200, data)


async def put_object(request: Request) -> Response:
    """Store the body of ``PUT /objects/NAME``; answer 204, or 507 if there is no free slot for it.

    :raises HTTPException: 413, if the object is too large.
    """
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > SLOT:
            break
    try:
        stored = await request.state.store.cache.put(request.path_params["name"].encode(), bytes(data))
    except ValueError as error:
        raise HTTPException(413, str(error)) from error
    return reply(204 if stored else 507)


async def unavailable(request: Request, error: Exception) -> Response:
    """Answer 503 to a request that failed with one of `CONNECTION_ERRORS`, and make the worker connect again."""
    request.state.store.lost.set()
    return PlainTextResponse("the store cannot be reached", 503, {"retry-after": "1"})


app = Starlette(
    routes=[
        Route("/objects/{name}", get_object, methods=["GET"]),
        Route("/objects/{name}", put_object, methods=["PUT"]),
    ],
    exception_handlers=dict.fromkeys(CONNECTION_ERRORS, unavailable),
    lifespan=lifespan,
)


async def store(host: str, port: int = 0) -> None:
    """Run the store until standard input ends; print its address first."""
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,
        serving(domain, host, port) as chosen,
    ):
        print(f"{host}:{chosen}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


def use_service(url: str) -> None:
    """Put and get some objects as a client of the service; print how many came back unchanged, and which workers
    answered.
    """

    def request_object(name: str, data: bytes | None = None) -> tuple[bytes, str]:
        request = urllib.request.Request(f"{url}/objects/{name}", data, method="GET" if data is None else "PUT")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read(), answer.headers["x-worker"]

    objects = {f"object-{number}": os.urandom(50 * number) for number in range(20)}
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(request_object, objects, objects.values()))
        got = list(threads.map(request_object, objects))
    same = sum(data == answer for data, (answer, _) in zip(objects.values(), got, strict=True))
    print(f"put {len(objects)} objects, got {same} of them unchanged")
    print(f"from the workers {', '.join(sorted({worker for _, worker in got}))}")


def run_all(host: str = "127.0.0.1") -> None:
    """Start the store and the web server as processes, use the service, then end both processes."""
    command = [sys.executable, __file__, "store", host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as storing:
        assert storing.stdout is not None
        env = {**os.environ, "STORE": storing.stdout.readline().strip()}
        # Clients that connect to this listening socket early wait until a worker accepts.
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port, fd = listening.getsockname()[1], listening.fileno()
            command = [sys.executable, "-P", "-m", "uvicorn", "--log-level", "warning", "--workers", "2"]
            command += ["--app-dir", str(Path(__file__).parent), "--fd", str(fd), "asgi:app"]
            server = subprocess.Popen(command, env=env, pass_fds=[fd])
        try:
            use_service(f"http://127.0.0.1:{port}")
        finally:
            server.terminate()
            server.wait()
            storing.communicate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["store"]:
        asyncio.run(store(sys.argv[2], *map(int, sys.argv[3:])))
    else:
        run_all(*sys.argv[1:])
