"""Each public error, provoked as a user would: `pytest -s tests/manager/test_error_messages.py` prints the messages.

A message says what is wrong, with the value, and what to do. Each row of `MISTAKES` has words of both parts.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from aioverbs import (
    USE_DEFAULT,
    AccessFlags,
    CompletionQueue,
    ConnectionSettings,
    Device,
    MemoryRegion,
    QpCapabilities,
    QueuePair,
    ResourceDomain,
    WorkerPool,
    connect,
    errors,
    open_device,
    serve,
)
from aioverbs._providers import hardware
from tests.core.children import in_child

HOST = "127.0.0.1"
ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ


@dataclass
class Scene:
    """A device, and objects on it as a program has them open."""

    stack: AsyncExitStack
    device: Device
    domain: ResourceDomain
    cq: CompletionQueue
    qp: QueuePair  # connected to itself
    region: MemoryRegion


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        device = await stack.enter_async_context(open_device("soft0"))
        domain = await stack.enter_async_context(device.resource_domain())
        cq = await stack.enter_async_context(domain.completion_queue(64))
        capabilities = QpCapabilities(max_send_wr=4, max_recv_wr=4)
        qp = await stack.enter_async_context(domain.queue_pair(cq, capabilities=capabilities))
        region = await stack.enter_async_context(domain.register(4096, ACCESS))
        qp.connect(qp.local_endpoint(), ACCESS, timeout=10, retry_cnt=0, rnr_retry=0)
        yield Scene(stack, device, domain, cq, qp, region)


class ResizingAllocator:
    """Call `during` while the provider asks for memory."""

    def __init__(self) -> None:
        self.during: Callable[[], object] | None = None

    def allocate(self, size: int, alignment: int, resource_type: int, pd: object, context: object) -> Any:
        if self.during is not None:
            self.during()
        return USE_DEFAULT

    def free(self, address: int, resource_type: int, pd: object, context: object) -> None:
        raise AssertionError("it allocated nothing")


async def on_another_loop(function: Callable[[], Awaitable[object] | object]) -> None:
    """Call on the loop of another thread, and raise here what that raises."""

    async def call() -> None:
        found = function()
        if inspect.isawaitable(found):
            await found

    await asyncio.to_thread(asyncio.run, call())


async def use_after_close(scene: Scene) -> None:
    region = await scene.domain.register(64).open()
    await region.aclose()
    await scene.qp.write(region, scene.region.remote()[:64])


async def close_under_receives(scene: Scene) -> None:
    region = await scene.domain.register(64, ACCESS).open()
    scene.stack.push_async_exit(region)
    receive = scene.qp.receive(region)
    try:
        await region.aclose()
    finally:
        scene.qp.to_error()
        with pytest.raises(errors.WorkCompletionError):
            await receive


async def use_in_a_child(scene: Scene) -> None:
    def child() -> str:
        try:
            scene.region.access  # noqa: B018
            scene.qp.to_error()
        except errors.ForkedProcessError as error:
            return str(error)
        return "no error"

    raise errors.ForkedProcessError(in_child(child).partition(" was opened before the fork")[0])


async def read_beyond_the_region(scene: Scene) -> None:
    remote = scene.region.remote()
    await scene.qp.read(scene.region[:8], type(remote)(remote.address + 4096, 8, remote.rkey))


async def send_without_a_receive(scene: Scene) -> None:
    await scene.qp.send(scene.region[:8])


async def post_a_batch_that_fails(scene: Scene) -> None:
    remote = scene.region.remote()
    async with scene.qp.batch() as batch:
        batch.write(scene.region[:8], type(remote)(remote.address, 8, 12345))


async def connect_with_another_secret(scene: Scene) -> None:
    async with (
        serve(lambda peer: peer.send(b""), HOST, domain=scene.domain, secret=b"one" * 8) as server,
        connect(HOST, server.port, domain=scene.domain, secret=b"two" * 8),
    ):
        pass


async def use_a_revoked_grant(scene: Scene) -> None:
    async def handler(peer: object) -> None:
        grant = await peer.grant(scene.region, AccessFlags.REMOTE_READ)  # type: ignore[attr-defined]
        await peer.receive()  # type: ignore[attr-defined]
        await grant.revoke()
        await peer.send(b"revoked")  # type: ignore[attr-defined]
        await peer.receive()  # type: ignore[attr-defined]

    async with (
        serve(handler, HOST, domain=scene.domain) as server,
        connect(HOST, server.port, domain=scene.domain) as connection,
        scene.domain.register(64, ACCESS) as local,
    ):
        granted = await connection.receive_grant()
        await connection.send(b"revoke it")
        await connection.receive()
        try:
            await connection.read(local[:8], granted[:8])
        finally:
            await connection.send(b"done")


async def call_a_worker_that_dies(scene: Scene) -> None:
    async with WorkerPool(scene.device, 1, on_worker_death="fail") as pool:
        await pool.run(raise_system_exit)


def raise_system_exit() -> None:
    raise SystemExit(3)


async def send_more_than_max_message(scene: Scene) -> None:
    settings = ConnectionSettings(max_message=1 << 20)
    async with (
        serve(lambda peer: peer.receive(), HOST, domain=scene.domain, settings=settings) as server,
        connect(HOST, server.port, domain=scene.domain, settings=settings) as connection,
    ):
        try:
            await connection.send(bytes(2 << 20))
        finally:
            await connection.send(b"done")


async def lose_the_device(scene: Scene) -> None:
    scene.device.faults.lose_device()
    await scene.qp.write(scene.region[:8], scene.region.remote()[:8])


async def resize_while_resizing(scene: Scene) -> None:
    allocator = ResizingAllocator()
    async with scene.device.resource_domain(allocator=allocator) as domain, domain.completion_queue(64) as cq:
        caught: list[Exception] = []

        def resize() -> None:
            try:
                cq.resize(1000)
            except errors.ConcurrentAccessError as error:
                caught.append(error)

        allocator.during = resize
        cq.resize(128)
        allocator.during = None
    raise caught[0]


async def open_a_device(name: str) -> None:
    async with open_device(name):
        pass


async def open_an_unknown_device(scene: Scene) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "open_context", refuse_name)
        await open_a_device("mlx9_9")


def refuse_name(name: str) -> None:
    raise errors.DeviceNotFoundError(name)


async def use_before_open(scene: Scene) -> None:
    await scene.domain.queue_pair(scene.cq).write(scene.region[:8], scene.region.remote()[:8])


async def write_unconnected(scene: Scene) -> None:
    async with scene.domain.queue_pair(scene.cq) as qp:
        await qp.write(scene.region[:8], scene.region.remote()[:8])


async def write_when_broken(scene: Scene) -> None:
    with pytest.raises(errors.WorkCompletionError):
        await send_without_a_receive(scene)
    await scene.qp.write(scene.region[:8], scene.region.remote()[:8])


async def skip_attributes(scene: Scene) -> None:
    async with scene.domain.queue_pair(scene.cq) as qp:
        qp.to_init()
        qp.to_rtr()


# The mistake of a program, the error, words with the value in question, and words with the advice.
MISTAKES: dict[str, tuple[Callable[[Scene], Awaitable[object]], type[Exception], str, str]] = {
    "another thread's loop": (
        lambda s: on_another_loop(lambda: s.qp.write(s.region[:8], s.region.remote()[:8])),
        errors.AffinityError,
        "ibv_post_send on <QueuePair",
        "`await domain.run(function)` runs a function there",
    ),
    "an overlapping call": (
        resize_while_resizing,
        errors.ConcurrentAccessError,
        "<CompletionQueue",
        "one call at a time",
    ),
    "use after close": (use_after_close, errors.ClosedResourceError, "memory is deregistered", "register it again"),
    "use in the child of a fork": (use_in_a_child, errors.ForkedProcessError, "<QueuePair", "open the device again"),
    "memory under receives": (
        close_under_receives,
        errors.BusyResourceError,
        "work requests still use this memory to receive (receives posted: 1)",
        "close or reset",
    ),
    "a read beyond a region": (read_beyond_the_region, errors.WorkCompletionError, "REM_ACCESS_ERR", "the rkey"),
    "a send without a receive": (send_without_a_receive, errors.WorkCompletionError, "RNR_RETRY_EXC_ERR", "post more"),
    "a batch with a wrong key": (post_a_batch_that_fails, errors.BatchError, "request 0 of 1", "the rkey"),
    "another secret": (connect_with_another_secret, errors.HandshakeError, "different secrets", "pass the same one"),
    "a revoked grant": (use_a_revoked_grant, errors.GrantRevokedError, "RemoteRegion(address=", "ask the peer"),
    "a worker that ends": (call_a_worker_that_dies, errors.WorkerDiedError, "worker 0", "SystemExit(3)"),
    "a message beyond max_message": (send_more_than_max_message, ValueError, "2,097,152", "at most 1,048,576"),
    "a lost device": (lose_the_device, errors.VerbsError, "EIO", "open it again"),
    "a name of no device": (open_an_unknown_device, errors.DeviceNotFoundError, "mlx9_9", "soft0"),
    "no address": (lambda s: open_a_device("soft0@no where:1"), ValueError, "no where", "write an address"),
    "a resource before it is opened": (use_before_open, errors.ClosedResourceError, "(new)", "`async with`"),
    "a queue pair before it is connected": (write_unconnected, errors.QueuePairStateError, "RESET", "connect"),
    "a queue pair that broke": (write_when_broken, errors.BrokenResourceError, "<QueuePair", "caused by"),
    "attributes that are missing": (skip_attributes, errors.TransitionError, "INIT to RTR", "missing: av"),
}
# These need an RDMA device or pyverbs; `tests/packaging/test_errors.py` has their messages.
NEED_HARDWARE = {
    "BorrowedObjectClosedError",
    "ConnectionRejectedError",
    "DeviceRemovedError",
    "LibraryNotFoundError",
    "UnreachableError",
}


def test_each_public_error_has_a_mistake() -> None:
    assert {kind.__name__ for _, kind, _, _ in MISTAKES.values()} | NEED_HARDWARE >= set(errors.__all__)


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_message_has_the_value_and_advice(scene: Scene, mistake: str) -> None:
    provoke, kind, value, advice = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        await provoke(scene)
    message = str(caught.value)
    print(f"\n{mistake}: {type(caught.value).__name__}: {message}")
    assert type(caught.value) is kind
    assert value in message
    assert advice in message
