"""Comms, listeners and connectors of the backend."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import dask.config
import numpy as np
import pytest
from distributed.comm.addressing import (
    get_address_host,
    get_address_host_port,
    get_local_address_for,
    resolve_address,
)
from distributed.comm.core import CommClosedError, FatalCommClosedError, connect, listen
from distributed.comm.registry import get_backend
from distributed.protocol.serialize import Serialized, deserialize, serialize, to_serialize
from distributed.security import Security
from distributed.utils import get_ip
from distributed.utils_test import has_ipv6

import aioverbs
from aioverbs._connection.connection import send_constant_nowait
from aioverbs.distributed import AioverbsBackend, AioverbsComm
from aioverbs.distributed.domains import get_domain
from aioverbs.distributed.framing import encode
from aioverbs.distributed.listener import AioverbsListener
from tests.core.children import in_child
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.waiting import until

ADDRESS = "aioverbs://127.0.0.1"


@asynccontextmanager
async def pair(**kwargs: Any) -> AsyncIterator[tuple[AioverbsComm, AioverbsComm]]:
    """Connect two comms: that of the connector, and that of the listener."""
    accepted: asyncio.Queue[AioverbsComm] = asyncio.Queue()
    listener = await listen(ADDRESS, accepted.put, **kwargs)
    a = await connect(listener.contact_address, **kwargs)
    b = await accepted.get()
    listener.stop()
    try:
        yield a, b
    finally:
        await a.close()
        await b.close()


@pytest.mark.parametrize("size", [0, 1, 2100, 70_000, 600_000, 3_000_000])
async def test_arrays_arrive_in_writable_memory_of_their_own(size: int) -> None:
    first, second = np.random.default_rng(size).integers(0, 255, (2, size), dtype="u1")
    async with pair() as (a, b):
        await a.write({"op": "put", "data": [to_serialize(first), to_serialize(second)]})
        one, two = (await b.read())["data"]
    np.testing.assert_array_equal(one, first)
    np.testing.assert_array_equal(two, second)
    one[:] = 0
    np.testing.assert_array_equal(two, second)
    two[:] = 0


async def test_an_object_of_several_shards_arrives_as_one() -> None:
    array = np.arange(1_000_000)
    async with pair() as (a, b):
        a.max_shard_size = 300_000
        await a.write(to_serialize(array))
        np.testing.assert_array_equal(await b.read(), array)


async def test_an_array_of_64_kib_needs_one_buffer() -> None:
    async with pair() as (a, b):
        available = a._connection.traffic().credits
        await a.write({"op": "put", "data": to_serialize(np.ones(1 << 16, "u1"))})
        assert a._connection.traffic().credits == available - 1
        assert (await b.read())["data"].sum() == 1 << 16


async def test_messages_arrive_in_order_whatever_their_size() -> None:
    sizes = [10, 3_000_000, 10, 100_000, 10]
    async with pair() as (a, b):
        for number, size in enumerate(sizes):
            await a.write((number, to_serialize(np.full(size, number))))
        for number, size in enumerate(sizes):
            received, array = await b.read()
            assert (received, len(array), array[-1]) == (number, size, number)


async def test_writing_does_not_wait_for_the_reader() -> None:
    async with pair() as (a, b):
        for _ in range(3):
            await asyncio.wait_for(a.write(to_serialize(np.zeros(3_000_000, "u1"))), 5)
        for _ in range(3):
            assert len(await b.read()) == 3_000_000


async def test_closing_delivers_what_was_written() -> None:
    async with pair() as (a, b):
        await a.write(to_serialize(np.ones(3_000_000, "u1")))
        read = asyncio.create_task(b.read())
        await a.close()
        assert (await read).sum() == 3_000_000
        with pytest.raises(CommClosedError):
            await b.read()


async def test_objects_stay_serialized_where_that_is_asked_for() -> None:
    async with pair(deserialize=False) as (a, b):
        await a.write({"x": to_serialize(123), "y": Serialized(*serialize(456))})
        message = await b.read()
    assert [deserialize(each.header, each.frames) for each in message.values()] == [123, 456]


async def test_an_idle_comm_finds_that_its_peer_has_closed() -> None:
    async with pair() as (a, b):
        await a.close()
        await asyncio.wait_for(b._connection.wait_lost(), 5)
        assert b.closed()
        with pytest.raises(CommClosedError):
            await b.write("x")


@pytest.mark.parametrize("on_thread", [False, True])
async def test_abort_ends_the_calls_of_both_ends(on_thread: bool) -> None:
    async with pair() as (a, b):
        reads = [asyncio.create_task(comm.read()) for comm in (a, b)]
        await asyncio.sleep(0)
        if on_thread:
            await asyncio.to_thread(a.abort)
        else:
            a.abort()
        assert a.closed()
        for read in reads:
            with pytest.raises(CommClosedError):
                await asyncio.wait_for(read, 5)
        a.abort()


async def test_a_closed_comm_serializes_nothing() -> None:
    async with pair() as (a, b):
        a.abort()
        await until(b.closed)
        for comm in (a, b):
            with pytest.raises(CommClosedError):
                await comm.write(to_serialize(asyncio.get_running_loop()), on_error="raise")


async def test_a_cancelled_read_closes_the_comm() -> None:
    async with pair() as (a, b):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(a.read(), 0.01)
        assert a.closed()
        with pytest.raises(CommClosedError):
            await asyncio.wait_for(b.read(), 5)


async def test_a_dropped_comm_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    accepted: asyncio.Queue[AioverbsComm] = asyncio.Queue()
    listener = await listen(ADDRESS, accepted.put)
    comm = await connect(listener.contact_address)
    other = await accepted.get()
    del comm
    collect_garbage()
    with pytest.raises(CommClosedError):
        await asyncio.wait_for(other.read(), 5)
    assert "was dropped without being closed" in caplog.text
    listener.stop()


async def test_a_malformed_message_closes_the_comm() -> None:
    async with pair() as (a, b):
        connection: aioverbs.Connection = a._connection
        await connection.send(b"no head")
        with pytest.raises(CommClosedError, match="the head of a message has 7 bytes"):
            await b.read()
        assert b.closed()


async def test_a_run_of_another_size_closes_the_comm() -> None:
    async with pair() as (a, b):
        connection: aioverbs.Connection = a._connection
        frames: list[bytes | bytearray | memoryview] = [b"h", bytearray(200_000), bytearray(200_000)]
        await connection.send(b"".join(encode(frames)[1][0]))
        await connection.send(b"short")
        with pytest.raises(CommClosedError, match="5 bytes instead of 200,000"):
            await b.read()


async def test_encryption_is_refused() -> None:
    with dask.config.set({"distributed.comm.require-encryption": True}):
        arguments = Security().get_connection_args("worker")
    with pytest.raises(RuntimeError, match="messages go from device to device unencrypted"):
        await listen(ADDRESS, print, **arguments)
    with pytest.raises(RuntimeError, match="encryption required by Dask configuration"):
        await connect(f"{ADDRESS}:1", **arguments)


async def test_addresses() -> None:
    assert isinstance(get_backend("aioverbs"), AioverbsBackend)
    assert get_address_host("aioverbs://10.0.0.1:80") == "10.0.0.1"
    assert get_address_host_port("aioverbs://[::1]:80") == ("::1", 80)
    assert resolve_address("aioverbs://localhost:80") == "aioverbs://127.0.0.1:80"
    assert get_local_address_for("aioverbs://127.0.0.1:80") == "aioverbs://127.0.0.1"
    with pytest.raises(ValueError, match="brackets"):
        get_address_host("aioverbs://::1:80")


@pytest.mark.filterwarnings("ignore:get_ipv6 is deprecated")  # `distributed` itself calls it
@pytest.mark.filterwarnings("ignore:Couldn.t detect a suitable IP address")  # no network but loopback
@pytest.mark.parametrize(
    "host",
    ["", "0.0.0.0", pytest.param("[::]", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6"))],
)
async def test_a_wildcard_has_a_contact_address(host: str) -> None:
    listener = await listen(f"aioverbs://{host}", print)
    with pytest.raises(OSError, match="in use"):
        await listen(listener.listen_address, print)
    contact, _ = get_address_host_port(listener.contact_address)
    assert contact == get_ip("2001:4860:4860::8888" if ":" in host else "8.8.8.8")
    listener.stop()


async def test_a_stopped_listener_frees_its_port_and_leaves_comms_open() -> None:
    accepted: asyncio.Queue[AioverbsComm] = asyncio.Queue()
    listener = await listen(ADDRESS, accepted.put)
    comm = await connect(listener.contact_address)
    listener.stop()
    again = await listen(listener.listen_address, print)
    again.stop()
    await comm.write("x")
    other = await accepted.get()
    assert await other.read() == "x"
    await comm.close()
    await other.close()


async def test_a_listener_survives_a_peer_that_breaks_the_handshake() -> None:
    handled: list[str] = []

    async def handle(comm: AioverbsComm) -> None:
        handled.append(comm.peer_address)
        await comm.close()

    listener = await listen(ADDRESS, handle)
    host, port = get_address_host_port(listener.contact_address)
    (await asyncio.open_connection(host, port))[1].close()
    async with aioverbs.connect(host, port, domain=await get_domain()):
        pass
    comm = await connect(listener.contact_address)
    with pytest.raises(CommClosedError):
        await asyncio.wait_for(comm.read(), patience(10))
    assert handled == [comm.local_address]
    listener.stop()


async def test_the_connection_of_a_handler_that_is_cancelled_at_once_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = await listen(ADDRESS, print)
    start, tasks = listener._start_task, listener._tasks

    def start_and_cancel(coroutine: Any) -> None:
        before = set(tasks)
        start(coroutine)
        for task in tasks - before:
            task.cancel()

    monkeypatch.setattr(listener, "_start_task", start_and_cancel)
    host, port = get_address_host_port(listener.contact_address)
    async with aioverbs.connect(host, port, domain=await get_domain()) as connection:
        async with asyncio.timeout(patience(10)):
            await connection.wait_lost()
    listener.stop()


async def test_a_listener_drops_a_connection_that_was_closed_with_its_domain() -> None:
    listener = await listen(ADDRESS, print)
    async with aioverbs.listen("127.0.0.1", domain=await get_domain()) as others:
        connection = await aioverbs.connect("127.0.0.1", others.port, domain=await get_domain())
        await connection.aclose()
    tasks = set(listener._tasks)
    listener._begin(connection)
    assert listener._tasks == tasks
    listener.stop()


async def test_a_refused_handshake_is_not_repeated() -> None:
    async with aioverbs.listen("127.0.0.1", domain=await get_domain(), secret=b"s") as listener:
        with pytest.raises(FatalCommClosedError, match="secret"):
            await connect(f"{ADDRESS}:{listener.port}", timeout=30)
        assert listener.statistics().refused == (("SECRET", 1),)


async def test_connecting_to_a_busy_listener_is_repeated() -> None:
    async with (
        aioverbs.listen("127.0.0.1", domain=await get_domain(), max_connections=1) as listener,
        aioverbs.connect("127.0.0.1", listener.port, domain=await get_domain()),
    ):
        connecting = asyncio.create_task(connect(f"{ADDRESS}:{listener.port}", timeout=patience(10)))
        await until(lambda: dict(listener.statistics().refused).get("BUSY", 0) > 1)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("message-model", "FAST", "must be one of "),
        ("buffer-size", "1 B", "`buffer_size` must be from 512"),
        ("transport", "udp", "`transport` must be"),
        ("device", "soft0@:1", "address"),
    ],
)
async def test_a_wrong_setting_is_reported(setting: str, value: str, message: str) -> None:
    with (
        dask.config.set({f"distributed.comm.aioverbs.{setting}": value}),
        pytest.raises(ValueError, match=message),
    ):
        await listen(ADDRESS, print)


async def test_settings_are_used() -> None:
    chosen = {"message_model": "low_latency", "buffer-size": "8 KiB", "receive-depth": 5, "send-buffers": 3}
    with dask.config.set({"distributed.comm.aioverbs": chosen, "distributed.comm.timeouts.tcp": "7s"}):
        async with pair() as (a, _):
            settings = a._connection.settings
            model = (await get_domain()).message_model
    assert (settings.buffer_size, settings.receive_depth, settings.send_buffers) == (8192, 5, 3)
    assert settings.keep_alive_s == settings.close_timeout_s == 7
    assert model is aioverbs.MessageModel.LOW_LATENCY


def on_new_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


async def test_each_loop_has_a_domain_which_is_closed_after_the_loop() -> None:
    domains = []

    async def get() -> None:
        domains.append(await get_domain())
        assert await get_domain() is domains[-1]

    for _ in range(3):
        on_new_thread(lambda: asyncio.run(get()))
    assert len(set(map(id, domains))) == 3
    await get()
    assert [domain.closed for domain in domains] == [True, True, True, False]


async def test_a_domain_that_cannot_be_closed_does_not_hinder_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: object) -> None:
        raise OSError("in use")

    on_new_thread(lambda: asyncio.run(get_domain()))
    with monkeypatch.context() as patched:
        patched.setattr(aioverbs.ResourceDomain, "aclose", fail)
        async with pair() as (a, b):
            await a.write("x")
            assert await b.read() == "x"
    assert "could not be closed" in caplog.text


async def test_a_lost_device_is_replaced() -> None:
    domain = await get_domain()
    async with pair() as (a, b):
        aioverbs.shared_device().faults.lose_device()
        await until(lambda: a.closed() and b.closed())
        async with pair() as (c, d):
            await c.write("x")
            assert await d.read() == "x"
    assert await get_domain() is not domain
    assert domain.closed


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_listener_outlives_its_device(is_known: bool) -> None:
    """Whether the process has replaced the lost domain already, or learns of the loss from the next peer."""

    async def handle(comm: AioverbsComm) -> None:
        await comm.write(await comm.read())

    listener = await listen(ADDRESS, handle)
    address = listener.contact_address
    a = await connect(address)
    aioverbs.shared_device().faults.lose_device()
    await until(a.closed)
    if is_known:
        await get_domain()
    for _ in range(2):
        a = await connect(address, timeout=patience(10))
        await a.write("x")
        assert await a.read() == "x"
        await a.close()
    assert listener.contact_address == address
    listener.stop()


async def test_a_listener_logs_once_why_it_cannot_listen_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(AioverbsListener):
        attempts = 0

        async def _listen(self) -> aioverbs.ConnectionListener:
            self.attempts += 1
            if 2 <= self.attempts <= 4:
                raise OSError(errno.EADDRINUSE, "address in use")
            return await super()._listen()

    monkeypatch.setattr("aioverbs.distributed.listener._RETRY_S", 0.001)
    listener = Refusing("127.0.0.1", lambda comm: comm.close())
    await listener.start()
    assert listener._listener is not None
    listener._listener.close()  # as when its device is lost
    await until(lambda: listener.attempts == 5)
    listener.stop()
    assert [each.message for each in caplog.records if "address in use" in each.message] == [
        f"cannot listen again at {listener.listen_address}: [Errno 98] address in use"
    ]


async def test_a_listener_goes_on_if_a_lost_connection_cannot_be_closed(caplog: pytest.LogCaptureFixture) -> None:
    class Lost:
        broken = aioverbs.BrokenResourceError("the peer has gone")

        def abort(self) -> None:
            raise aioverbs.VerbsError("ibv_destroy_qp", errno.EIO)

    AioverbsListener("127.0.0.1", lambda comm: comm.close())._begin(Lost())  # type: ignore[arg-type]
    assert "a connection whose peer has gone could not be closed: ibv_destroy_qp failed: EIO" in caplog.text


def test_a_forked_child_has_a_device_of_its_own() -> None:
    async def exchange() -> None:
        async with pair() as (a, b):
            await a.write("x")
            assert await b.read() == "x"

    asyncio.run(exchange())
    in_child(lambda: asyncio.run(exchange()), limit_s=30)
    asyncio.run(exchange())


async def test_a_comm_whose_message_cannot_be_sent_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as (a, b):
        outbox = a._outbox

        async def fail(_: object) -> None:
            raise ValueError("longer than the peer accepts")

        monkeypatch.setattr(a._connection, "send", fail)
        await a.write(to_serialize(np.zeros(3_000_000)))
        await until(lambda: outbox.failure is not None)
        assert a.closed()
        with pytest.raises(CommClosedError, match="longer than the peer accepts"):
            await a.write("more")
        with pytest.raises(CommClosedError):
            await b.read()
    assert "could not be sent" in caplog.text


async def test_a_comm_that_sent_only_a_part_of_a_message_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []

    def send(connection: aioverbs.Connection, message: Any) -> bool:
        if sent:
            raise aioverbs.VerbsError("ibv_post_send", errno.ENOMEM)
        sent.append(message)
        return send_constant_nowait(connection, message)

    async with pair() as (a, b):
        monkeypatch.setattr("aioverbs.distributed.outbox.send_constant_nowait", send)
        with pytest.raises(aioverbs.VerbsError):
            await a.write([to_serialize(np.zeros(150_000, "u1")) for _ in range(2)])
        assert a.closed()
        with pytest.raises(CommClosedError):
            await b.read()
    assert len(sent) == 1


async def test_a_comm_whose_sender_is_cancelled_is_closed() -> None:
    async with pair() as (a, b):
        await a.write(to_serialize(np.zeros(3_000_000)))
        await asyncio.sleep(0)
        assert a._outbox._sender is not None
        a._outbox._sender.cancel()
        await until(a.closed)
        with pytest.raises(CommClosedError):
            await b.read()


async def test_abort_ends_a_call_of_close() -> None:
    async with pair() as (a, b):
        await a.write(to_serialize(np.zeros(1_000_000)))
        closing = asyncio.create_task(a.close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        a.abort()
        async with asyncio.timeout(patience(10)):
            await closing
            with pytest.raises(CommClosedError):
                await b.read()


async def test_many_arrays_are_received_little_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [np.full(100_000, number, "u1") for number in range(50)]
    lengths = []
    async with pair() as (a, b):
        receive_buffer = b._connection.receive_buffer

        async def receive() -> memoryview:
            message = await receive_buffer()
            lengths.append(len(message))
            return message

        monkeypatch.setattr(b._connection, "receive_buffer", receive)
        await a.write([to_serialize(each) for each in arrays])
        for sent, received in zip(arrays, await b.read(), strict=True):
            np.testing.assert_array_equal(received, sent)
            received[:] = 0
    assert sum(lengths) > 5_000_000
    assert max(lengths) < 1_100_000


async def test_an_array_keeps_no_other_one_alive() -> None:
    first, *rest = (np.full(size, size) for size in (60_000, *[10_000] * 20))
    async with pair() as (a, b):
        await a.write([to_serialize(each) for each in (first, *rest)])
        received = (await b.read())[0]
    base = received
    while base.base is not None and isinstance(base.base, np.ndarray):
        base = base.base
    memory = base.base
    assert memoryview(memory if memory is not None else base).nbytes < 2 * first.nbytes
