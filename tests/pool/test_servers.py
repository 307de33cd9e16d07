"""Servers on pools: a worker, thread or process, accepts, handles and closes each connection."""

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
import pytest_asyncio

from aioverbs import (
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    Connection,
    Device,
    HandshakeError,
    ResourceDomain,
    WorkerDiedError,
    WorkerPool,
    connect,
    open_device,
    serve,
)
from aioverbs._connection.handshake import Reason
from aioverbs._pool.placement import LeastLoaded
from aioverbs._server.pending_peer import AcceptState
from aioverbs._server.server import Server
from tests.connections.certificates import contexts
from tests.connections.ends import HOST
from tests.connections.serving import asked, served
from tests.garbage import collect_garbage
from tests.listening import listens
from tests.pace import fewer, patience
from tests.pool import handlers, work
from tests.pool.processes import other_loop
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


both_backends = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
"""Runs a test with a thread pool and with a process pool of its own."""


@pytest_asyncio.fixture(loop_scope="module")
async def device() -> AsyncIterator[Device]:
    async with open_device("soft0") as device:
        yield device


@pytest_asyncio.fixture(loop_scope="module", params=["threads", "processes"])
async def pool(request: pytest.FixtureRequest, device: Device, process_pool: WorkerPool) -> AsyncIterator[WorkerPool]:
    """Open pool of two workers, whose event loops have another type than that of the test."""
    if request.param == "processes":
        yield process_pool
        return
    async with WorkerPool(device, 2, loop=other_loop()) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def domain(device: Device) -> AsyncIterator[ResourceDomain]:
    """Domain of the clients."""
    async with device.resource_domain() as domain:
        yield domain


async def request(connection: Connection, what: str) -> str:
    await connection.send(what.encode())
    return (await connection.receive()).decode()


async def all_disconnected(server: Server) -> None:
    await until(lambda: not server.statistics().connections and not server.statistics().handshakes)


def marks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*"))


@pytest.mark.every_way
async def test_echo_on_each_worker(pool: WorkerPool, domain: ResourceDomain) -> None:
    completed = sum(worker.completed for worker in pool.statistics().workers)
    ids = [worker.process_id for worker in pool.statistics().workers]
    async with served(pool, handlers.echo) as server:
        for _ in range(2):
            async with contextlib.AsyncExitStack() as stack:
                nears = [await stack.enter_async_context(asked(server, domain)) for _ in range(4)]
                workers = [(await near.receive()).decode().split() for near in nears]
                assert [number for number, _ in workers] in (["0", "1"] * 2, ["1", "0"] * 2)
                assert not pool.processes or {int(each) for _, each in workers} == set(ids)
                for size in (0, 5, 5000, 300_000):
                    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
                    sending = [asyncio.create_task(near.send(data)) for near in nears]
                    assert [await near.receive() for near in nears] == [data] * 4
                    await asyncio.gather(*sending)
                assert server.statistics().workers == (2, 2)
                assert [worker.calls for worker in pool.statistics().workers] == [2, 2]
            await all_disconnected(server)
        assert (server.statistics().accepted, server.statistics().refused) == (8, ())
        assert server.statistics().workers == (0, 0)
    assert sum(worker.completed for worker in pool.statistics().workers) == completed + 8


async def test_the_least_loaded_worker_gets_the_next_connection(device: Device) -> None:
    async with (
        WorkerPool(device, 2, placement=LeastLoaded()) as pool,
        served(pool, handlers.obey) as server,
        device.resource_domain() as domain,
    ):
        first, second = [await asked(server, domain) for _ in range(2)]
        workers = [(await request(each, "where")).split()[0] for each in (first, second)]
        assert sorted(workers) == ["0", "1"]

        def calls() -> int:
            return sum(worker.calls for worker in pool.statistics().workers)

        for _ in range(3):
            await second.aclose()
            await until(lambda: (server.statistics().connections, calls()) == (1, 1))
            second = await asked(server, domain)
            assert (await request(second, "where")).split()[0] == workers[1]
        await first.aclose()
        await second.aclose()


async def test_peers_with_one_key_share_a_worker(device: Device) -> None:
    async with (
        WorkerPool(device, 4) as pool,
        served(pool, handlers.obey, key=lambda address: address[0]) as server,
        device.resource_domain() as domain,
        contextlib.AsyncExitStack() as stack,
    ):
        nears = [await stack.enter_async_context(asked(server, domain)) for _ in range(5)]
        assert len({await request(near, "where") for near in nears}) == 1


async def test_tls_and_a_secret(pool: WorkerPool, domain: ResourceDomain, tmp_path: Path) -> None:
    server_side, client_side = contexts(tmp_path)
    known = {"secret": b"correct horse", "ssl": client_side}
    if pool.processes:
        with pytest.raises(ValueError, match="a function of a module"):
            served(pool, handlers.echo, ssl=server_side)
    async with served(
        pool, handlers.echo, secret=b"correct horse", ssl=handlers.server_context_factory(tmp_path)
    ) as server:
        for _ in range(2):  # on each worker
            async with asked(server, domain, **known) as near:
                assert await near.receive()
                assert await request(near, "hello") == "hello"
        with pytest.raises(HandshakeError) as caught:
            await asked(server, domain, ssl=client_side, secret=b"another")
        assert caught.value.reason == Reason.SECRET
        with pytest.raises((HandshakeError, BrokenResourceError, OSError)):
            await asked(server, domain, secret=b"correct horse", timeout_s=2)
        await until(lambda: sum(dict(server.statistics().refused).values()) == 2)
        assert dict(server.statistics().refused)["SECRET"] == 1
        assert server.statistics().accepted == 2
        async with asked(server, domain, **known) as near:
            assert await near.receive()


async def test_a_missing_certificate(device: Device, tmp_path: Path) -> None:
    async with WorkerPool(device, 1) as pool:
        with pytest.raises(FileNotFoundError):
            served(pool, handlers.echo, ssl=handlers.server_context_factory(tmp_path))


async def test_a_failing_handler_breaks_its_connection(
    pool: WorkerPool, domain: ResourceDomain, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(pool, handlers.obey) as server:
        async with asked(server, domain) as near:
            with pytest.raises(BrokenResourceError):
                await request(near, "fail")
        async with asked(server, domain) as near:
            assert await request(near, "finish") == "goodbye"
            with pytest.raises(anyio.EndOfStream):
                await near.receive()
        await all_disconnected(server)
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "the handler of the connection with 127.0.0.1:" in record.message
    assert record.exc_info is not None
    error = record.exc_info[1]
    assert isinstance(error, RuntimeError)
    assert "what went wrong" in str(error)
    text = "".join(getattr(error, "__notes__", [])) or str(error.__traceback__)
    assert not pool.processes or "in obey" in text


@pytest.mark.parametrize(
    ("pool", "how"), [("threads", "leave"), ("processes", "leave"), ("processes", "die")], indirect=["pool"]
)
async def test_a_dead_worker_breaks_only_its_connections(pool: WorkerPool, domain: ResourceDomain, how: str) -> None:
    """Peers of the dead worker find their connections broken. Others do not notice, and a new connection works."""
    deaths = pool.statistics().deaths
    async with served(pool, handlers.obey, handshake_timeout_s=patience(10)) as server:
        nears = [await asked(server, domain) for _ in range(6)]
        counts = [0] * 6
        workers = {at: (await request(near, "where")).split()[0] for at, near in enumerate(nears)}

        async def load(at: int) -> None:
            while True:
                await request(nears[at], "where")
                counts[at] += 1

        loads = [asyncio.create_task(load(at)) for at in range(1, 6)]
        await until(lambda: all(counts[1:]))
        await nears[0].send(how.encode())
        lost = [at for at in range(1, 6) if workers[at] == workers[0]]
        for at in (0, *lost):
            with pytest.raises(BrokenResourceError):
                async with asyncio.timeout(patience(10)):
                    await (loads[at - 1] if at else nears[0].receive())
        unaffected = [at for at in range(1, 6) if at not in lost]
        before = list(counts)
        await until(lambda: all(counts[at] > before[at] + 5 for at in unaffected))
        await until(lambda: server.statistics().connections == 3 and pool.statistics().deaths == deaths + 1)
        assert sorted(server.statistics().workers) == [0, 3]
        for _ in range(2):
            async with asked(server, domain) as near:
                assert await request(near, "where")
        for at in unaffected:
            loads[at - 1].cancel()
        await asyncio.wait(loads)
        for near in nears:
            near.abort()
        await all_disconnected(server)


def cancel_others_and_exit() -> None:
    """Cancel the handlers of the worker before the end of the loop cancels them and the worker's main task."""
    handling = [task for task in asyncio.all_tasks() if "_run" in repr(task.get_coro())]
    assert len(handling) == 2
    for task in handling:
        task.cancel()
    sys.exit(3)


@pytest.mark.every_way
async def test_a_worker_that_exits_closes_its_connections(
    device: Device, domain: ResourceDomain, recwarn: pytest.WarningsRecorder
) -> None:
    """Closing begins although the worker cancels all tasks that are left, including those that close a connection."""
    async with WorkerPool(device, 1, loop=other_loop()) as pool, served(pool, handlers.obey) as server:
        nears = [await asked(server, domain) for _ in range(2)]
        for near in nears:
            assert await request(near, "where")
        with pytest.raises(WorkerDiedError, match=r"SystemExit\(3\) stopped its event loop"):
            await pool.run(cancel_others_and_exit)
        for near in nears:
            with pytest.raises(BrokenResourceError):
                await near.receive()
            near.abort()
        await all_disconnected(server)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.every_way
async def test_stop_waits_for_handlers(pool: WorkerPool, domain: ResourceDomain) -> None:
    async with served(pool, handlers.obey) as server:
        port = server.port
        nears = [await asked(server, domain) for _ in range(4)]
        stopping = asyncio.create_task(server.drain(60))
        await until(lambda: not listens(port))
        with pytest.raises(ConnectionRefusedError):
            await connect(HOST, port, domain=domain)
        assert not stopping.done()
        for near in nears:
            assert await request(near, "finish") == "goodbye"
        await stopping
        await server.wait_closed()
        for near in nears:
            await near.aclose()


@contextlib.asynccontextmanager
async def loaded(server: Server, domain: ResourceDomain, folder: Path) -> AsyncIterator[None]:
    """Keep a server busy with two handlers that stay and four that answer again and again.

    Handlers that stay are cancelled in the block, and end before the block does.
    """
    nears = [await asked(server, domain) for _ in range(6)]
    counts = [0] * 6

    async def load(at: int) -> None:
        with contextlib.suppress(BrokenResourceError, anyio.EndOfStream):
            while True:
                await request(nears[at], "where")
                counts[at] += 1

    loads = [asyncio.create_task(load(at)) for at in range(2, 6)]
    for at in range(2):
        (folder / str(at)).mkdir()
        await nears[at].send(f"stay {folder / str(at)}".encode())
    await until(lambda: marks(folder) == ["begun"] * 2 and all(counts[2:]))
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(patience(10)):
        yield
    assert asyncio.get_running_loop().time() - began >= 0.2
    assert marks(folder) == ["begun"] * 2 + ["ended"] * 2
    assert (server.statistics().connections, server.statistics().workers) == (0, (0, 0))
    await asyncio.gather(*loads)
    for near in nears[:2]:
        with pytest.raises((BrokenResourceError, anyio.EndOfStream)):
            await near.receive()
    for near in nears:
        await near.aclose()


@pytest.mark.every_way
@pytest.mark.parametrize("by", ["deadline", "cancellation"])
async def test_closing_cancels_handlers_that_do_not_end(
    pool: WorkerPool, domain: ResourceDomain, by: str, tmp_path: Path
) -> None:
    server = await served(pool, handlers.obey, drain_timeout_s=0.2 if by == "deadline" else 60).open()
    async with loaded(server, domain, tmp_path):
        if by == "deadline":
            await server.aclose()
        else:
            with anyio.move_on_after(0.2):
                await server.aclose()
    await server.aclose()


async def test_close_ends_connections_on_workers(pool: WorkerPool, domain: ResourceDomain) -> None:
    """The port is free at once; the workers' loops end the connections."""
    server = await served(pool, handlers.obey).open()
    port = server.port
    near = await asked(server, domain)
    assert await request(near, "where")
    server.close()
    assert not listens(port)
    async with asyncio.timeout(patience(10)):
        with pytest.raises((BrokenResourceError, anyio.EndOfStream)):
            await near.receive()
        await server.wait_closed()
    await server.aclose()
    near.abort()


@both_backends
async def test_closing_the_pool_stops_the_server(
    device: Device, domain: ResourceDomain, processes: bool, tmp_path: Path
) -> None:
    pool = await WorkerPool(device, 2, processes=processes).open()
    server = await served(pool, handlers.obey, drain_timeout_s=0.2).open()
    async with loaded(server, domain, tmp_path):
        await pool.stop()
        await server.wait_closed()
    await server.aclose()
    await pool.aclose()


@both_backends
async def test_a_blocked_handler_is_left_to_the_pool(
    device: Device, domain: ResourceDomain, processes: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The server does not wait for the blocked worker; its pool ends the worker."""
    pool = await WorkerPool(device, 1, grace_s=0.1, processes=processes).open()
    server = await served(pool, handlers.obey, drain_timeout_s=0).open()
    near = await asked(server, domain)
    await near.send(f"block {tmp_path}".encode())
    await until((tmp_path / "blocking").exists)
    await server.aclose()
    assert f"handlers did not end after their cancellation and were left to {pool!r}" in caplog.text
    if processes:
        await pool.stop(0)
    else:
        with pytest.raises(BusyResourceError, match="these workers have not ended"):
            await pool.stop(0)
        work.mark(str(tmp_path), "go on")
        await until(lambda: not pool._supervisor.has_workers())
        await pool.aclose()
    with pytest.raises(BrokenResourceError):
        await near.receive()
    await near.aclose()


@both_backends
async def test_a_failing_pool_stops_the_server(device: Device, domain: ResourceDomain, processes: bool) -> None:
    pool = await WorkerPool(device, 1, on_worker_death="fail", processes=processes).open()
    server = await served(pool, handlers.obey, drain_timeout_s=0.1).open()
    port = server.port
    near = await asked(server, domain)
    await near.send(b"leave")
    with pytest.raises(BrokenResourceError, match="broken: worker 0"):
        await server.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await connect(HOST, port, domain=domain)
    await near.aclose()
    await server.aclose()
    await pool.aclose()


async def test_serving_with_a_closed_pool(device: Device) -> None:
    pool = WorkerPool(device, 1)
    with pytest.raises(ClosedResourceError):
        await served(pool, handlers.echo).open()


# ---- Peers


async def test_a_stalling_peer_is_dropped_after_the_timeout(pool: WorkerPool, domain: ResourceDomain) -> None:
    failed = sum(worker.failed for worker in pool.statistics().workers)
    async with (
        served(pool, handlers.obey, handshake_timeout_s=patience(1)) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        silent = [await asyncio.open_connection(HOST, server.port) for _ in range(4)]
        for _, writer in silent:
            stack.callback(writer.close)
        silent[0][1].write(b"aiov\1")
        for reader, _ in silent:
            async with asyncio.timeout(patience(10)):
                with contextlib.suppress(ConnectionResetError):  # if the server closed the socket with unread data
                    assert await reader.read() == b""
        await until(lambda: server.statistics().refused == (("TimeoutError", 4),))
        async with asked(server, domain) as near:
            assert await request(near, "where")
        assert sum(worker.failed for worker in pool.statistics().workers) == failed


async def test_limits_hold_for_all_workers_during_a_flood(pool: WorkerPool, domain: ResourceDomain) -> None:
    """The limits count all workers together. No honest peer is kept out, and hostile peers are forgotten."""
    async with served(pool, handlers.obey, max_handshakes=4, handshake_timeout_s=patience(30)) as server:
        silent = [await asyncio.open_connection(HOST, server.port) for _ in range(4)]
        await until(lambda: server.statistics().handshakes == 4)
        for pending in server._acceptor._tasks.values():
            pending.silence = 1000  # as if the peers had connected that long ago
        for _ in range(fewer(3)):
            async with asked(server, domain) as near:  # the oldest handshake is dropped
                assert await request(near, "where")
        assert server.statistics().refused == (("TimeoutError", 1),)
        silent[1][1].write(bytes(600))
        for _, writer in (silent[0], *silent[2:]):
            writer.transport.abort()
        await until(lambda: server.statistics().handshakes == 0)
        silent[1][1].close()
        async with asked(server, domain) as near:
            assert await request(near, "where")


async def test_max_connections_is_enforced(device: Device) -> None:
    async with (
        WorkerPool(device, 2) as pool,
        served(pool, handlers.obey, max_connections=3) as server,
        device.resource_domain() as domain,
    ):
        nears = [await asked(server, domain) for _ in range(3)]
        with pytest.raises(HandshakeError, match="has reached its maximum number of connections"):
            await asked(server, domain)
        await nears.pop().aclose()
        await until(lambda: (server.statistics().handshakes, server.statistics().connections) == (0, 2))
        nears.append(await asked(server, domain))
        assert await request(nears[-1], "where")
        for near in nears:
            await near.aclose()


async def test_many_connections_leak_no_descriptors(pool: WorkerPool, domain: ResourceDomain) -> None:
    """Neither this process nor the worker processes keep descriptors."""
    async with (
        served(pool, handlers.echo, max_handshakes=1000) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        # Software devices close idle connections between each other. Permanent users keep the number of those constant.
        permanent = [await stack.enter_async_context(asked(server, domain)) for _ in range(4)]
        assert len({await near.receive() for near in permanent}) == 2, "both workers have some of them"

        async def connect_once(meeting: asyncio.Barrier) -> None:
            async with asked(server, domain) as near:
                assert await near.receive()
                await meeting.wait()

        async def connect_many(count: int, *, concurrency: int) -> list[int]:
            meeting = asyncio.Barrier(concurrency)
            await asyncio.gather(*(connect_once(meeting) for _ in range(count)))
            await until(
                lambda: server.statistics().connections == len(permanent) and not server.statistics().handshakes
            )
            collect_garbage()
            return [await pool.run(handlers.descriptors, worker=worker) for worker in range(2)]

        # A domain keeps the completion queues that it needed once: later there are never more connections at once.
        before = *await connect_many(10, concurrency=10), handlers.descriptors()
        for _ in range(2):
            now = *await connect_many(10, concurrency=1), handlers.descriptors()
            assert all(each <= earlier for each, earlier in zip(now, before, strict=True)), (now, before)
        assert server.statistics().accepted == 30 + len(permanent)


async def test_a_peer_of_a_busy_worker_times_out(pool: WorkerPool, domain: ResourceDomain, tmp_path: Path) -> None:
    """Other peers are not affected."""
    async with served(pool, handlers.obey, handshake_timeout_s=patience(60)) as server:
        blocked = await asked(server, domain)
        place = await request(blocked, "where")
        await blocked.send(f"block {tmp_path}".encode())
        await until((tmp_path / "blocking").exists)
        async with asked(server, domain) as near:
            assert await request(near, "where") != place
        waiting = asyncio.ensure_future(asked(server, domain))
        await until(lambda: server.statistics().handshakes == 1)
        (pending,) = (each for each in server._acceptor._tasks.values() if each.state is AcceptState.HANDSHAKING)
        await until(lambda: pending.timeout is not None)
        timeout = pending.timeout
        assert timeout is not None
        timeout.reschedule(asyncio.get_running_loop().time())  # as if its time was over
        await until(timeout.expired)
        work.mark(str(tmp_path), "go on")
        with pytest.raises((HandshakeError, BrokenResourceError, OSError)):
            await waiting
        assert await request(blocked, "where") == place
        await until(lambda: server.statistics().refused == (("TimeoutError", 1),))
        await blocked.aclose()


async def test_sockets_wait_for_a_busy_process(device: Device, domain: ResourceDomain, tmp_path: Path) -> None:
    count = 400
    async with (
        WorkerPool(device, 1, processes=True) as pool,
        served(pool, handlers.obey, max_handshakes=1000, handshake_timeout_s=30) as server,
    ):
        blocked = await asked(server, domain)
        await blocked.send(f"block {tmp_path}".encode())
        socks = []
        for _ in range(count):
            sock = socket.create_connection((HOST, server.port))
            socks.append(sock)
            await asyncio.sleep(0)
        await until(lambda: server.statistics().handshakes == count)
        work.mark(str(tmp_path), "go on")
        assert await request(blocked, "where")
        for sock in socks:
            sock.close()
        await until(lambda: not server.statistics().handshakes)
        assert server.statistics().refused == (("BrokenResourceError", count),)
        await blocked.aclose()


async def test_handlers_that_cannot_be_pickled(process_pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="pickle") as caught:
        served(process_pool, lambda connection: connection.aclose())
    assert "a module's function" in "".join(caught.value.__notes__)


async def test_pools_refuse_rdma_cm(device: Device) -> None:
    with pytest.raises(ValueError, match="cannot serve peers by rdma_cm"):
        serve(handlers.echo, HOST, pool=WorkerPool(device, 1), transport="rdmacm")


async def test_handlers_of_thread_workers_need_no_pickling(device: Device) -> None:
    """Any callable with any state works, and nothing is sent to this thread."""
    seen: list[int] = []

    async def handler(connection: Connection) -> None:
        seen.append(threading.get_ident())
        await connection.send(b"x")

    async with (
        WorkerPool(device, 2, loop="uvloop") as pool,
        served(pool, handler) as server,
        device.resource_domain() as domain,
    ):
        for _ in range(4):
            async with asked(server, domain) as near:
                await near.receive()
        await all_disconnected(server)
    assert len(set(seen)) == 2
    assert threading.get_ident() not in seen
