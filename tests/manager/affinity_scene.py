"""One of each kind of object that a loop owns: not opened yet, at something, and what becomes of it at its end."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from aioverbs import (
    AccessFlags,
    BufferPool,
    CompletionQueue,
    Connection,
    ConnectionListener,
    ConnectionSettings,
    Device,
    Endpoint,
    LeasedBuffer,
    MemoryRegion,
    MemoryWindow,
    Message,
    Operation,
    QpState,
    QueuePair,
    Resource,
    ResourceDomain,
    Server,
    WorkerPool,
    connect,
    listen,
    open_device,
    reconnecting,
    serve,
)
from aioverbs._core import engine
from tests.connections.ends import HOST
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import until

__all__ = ["Made", "Scene", "scene", "works"]

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
SETTINGS = ConnectionSettings(
    buffer_size=1024, receive_depth=4, send_buffers=2, send_depth=16, max_message=1 << 20, keep_alive_s=None
)
QUIET = 20  # looks, between which everything that is ready goes on
LARGE = bytes(range(256)) * 64  # more than the peer's receives have room for: sending it waits


async def echo(connection: Connection) -> None:
    async for message in connection:
        await connection.send(message)


@dataclass
class Made:
    """What is asked once, and made anew each time."""

    make: Callable[[], Any]

    def __call__(self) -> Any:
        return self.make()


@dataclass
class Scene:
    """All of it, by the loop that opened it.

    :param subjects: what is asked, by name; of each kind those that differ in what they are at.
    :param waiting: what the owner waits for meanwhile.
    """

    device: Device
    domain: ResourceDomain
    cq: CompletionQueue
    qp: QueuePair
    region: MemoryRegion
    window: MemoryWindow
    pool: BufferPool
    endpoint: Endpoint
    subjects: dict[str, Any] = field(default_factory=dict)
    waiting: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    leased: list[LeasedBuffer] = field(default_factory=list)

    async def wait(self, name: str, awaitable: Any) -> None:
        """Have a task of the owner wait for something; it has begun when this returns."""

        async def waits() -> Any:
            return await awaitable

        self.waiting[name] = asyncio.create_task(waits(), name=name)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not self.waiting[name].done(), self.waiting[name]

    async def came(self, name: str) -> Any:
        """What the owner waited for."""
        async with asyncio.timeout(patience(20)):
            return await self.waiting.pop(name)

    async def settle(self) -> None:
        """Until the owner's loop has nothing more to do of its own accord."""
        seen: list[dict[str, object]] = []

        def is_quiet() -> bool:
            seen.append(self.fingerprint())
            return len(seen) > QUIET and all(each == seen[-1] for each in seen[-QUIET:])

        await until(is_quiet)

    def fingerprint(self) -> dict[str, object]:
        """What there is to see of everything, from any thread."""
        found: dict[str, object] = {
            "objects": self.device.statistics().objects,
            "handles": len(engine.open_handles()),
            "pins": len(self.region.pins),
            "bytes": bytes(self.region.buffer),
            "rkey": self.window.handle.rkey,
            "tasks": [name for name, task in self.waiting.items() if not task.done()],
        }
        for name, subject in self.subjects.items():
            found[name] = tuple(_seen(subject))
        return found


def _seen(subject: Any) -> Any:
    if isinstance(subject, Resource):
        yield subject.state
    if hasattr(subject, "statistics") and not isinstance(subject, Connection):
        yield subject.statistics()
    if isinstance(subject, Connection):
        traffic, grants = subject._traffic, subject._grants
        assert traffic is not None
        assert grants is not None
        yield traffic.statistics()
        yield len(subject._life.children), traffic.end_sent, traffic.closed, traffic.broken, traffic._asking
        yield traffic._lock.locked(), len(traffic.inbox), len(traffic._controls)
        yield tuple(grants._given), tuple(grants._taken), len(grants._news)
    for name in ("ended", "revoked", "addresses"):
        if hasattr(subject, name):
            yield getattr(subject, name)
    if isinstance(subject, QueuePair):
        yield subject.qp_state
    if hasattr(subject, "__len__"):
        yield len(subject)
    if isinstance(subject, ConnectionListener):
        yield subject._open, subject._over, len(subject._ready), len(subject._waiters)
    if isinstance(subject, Server):
        yield subject._over, subject._stopping
    if isinstance(subject, Message):
        yield bytes(subject.data)


async def _connected(domain: ResourceDomain, stack: AsyncExitStack) -> tuple[Connection, Connection]:
    async with listen(HOST, domain=domain, settings=SETTINGS) as listener:
        near = await stack.enter_async_context(connect(HOST, listener.port, domain=domain, settings=SETTINGS))
        return near, await stack.enter_async_context(await listener.accept())


@asynccontextmanager
async def scene() -> AsyncGenerator[Scene, None]:
    """All of them, each at something."""
    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        device = await opened(open_device("soft0"))
        pd = await opened(device.protection_domain())
        td = await opened(device.thread_domain())
        parent = await opened(pd.parent_domain(td))
        domain = await opened(device.resource_domain(pd))
        cq = await opened(domain.completion_queue(512))
        qp = await opened(domain.queue_pair(cq))
        qp.connect(qp.local_endpoint(), ACCESS)
        region = await opened(domain.register(256, ACCESS | AccessFlags.MW_BIND))
        window = await opened(domain.memory_window())
        pool = await opened(domain.buffer_pool(64, 8))
        of = Scene(device, domain, cq, qp, region, window, pool, qp.local_endpoint())
        of.subjects |= {"device": device, "pd": pd, "td": td, "parent": parent, "domain": domain, "cq": cq, "qp": qp}
        of.subjects["parent's cq"] = await opened(parent.completion_queue(64))
        await _work(of, stack)
        await _messages(of, stack)
        await _connections(of, stack)
        await _listening(of, stack)
        of.subjects["process pool"] = await opened(WorkerPool(device, 1, processes=True))
        _not_opened(of)
        await of.settle()
        try:
            yield of
        finally:
            await _close(of)


async def _work(of: Scene, stack: AsyncExitStack) -> None:
    """Operations that are done, that are under way, and that nobody awaits yet; batches."""
    held = await stack.enter_async_context(of.domain.queue_pair(of.cq))
    held.connect(held.local_endpoint(), ACCESS)
    hold(of.device, held)
    region, remote = of.region, of.region.remote()
    done = of.qp.write(region[:8], remote[8:16])
    await done
    awaited, fresh = held.write(region[16:24], remote[24:32]), held.write(region[32:40], remote[40:48])
    part, posted = of.qp.batch(), of.qp.batch()
    part.write(region[:8], remote[48:56])
    posted.write(region[:8], remote[56:64])
    of.subjects |= {
        "held qp": held,
        "operation that is over": done,
        "operation that is awaited": awaited,
        "operation that nobody awaits": fresh,
        "batch of nothing": of.qp.batch(),
        "batch": part,
        "batch that was posted": posted,
        "operation of a batch": posted.post(),
    }
    await of.wait("operation", awaited)


async def _messages(of: Scene, stack: AsyncExitStack) -> None:
    """Queue pairs that keep receives posted, and shared receive queues: one that is kept filled, and another one."""
    reader = await stack.enter_async_context(of.domain.queue_pair(of.cq, receive_depth=4, receive_size=64))
    reader.connect(reader.local_endpoint(), ACCESS)
    of.region.buffer[64:72] = b"messages"
    for _ in range(2):
        await reader.send(of.region[64:72])
    inbox = reader.messages()
    message = await anext(inbox)
    empty = await stack.enter_async_context(of.domain.queue_pair(of.cq, receive_depth=4, receive_size=64))
    empty.connect(empty.local_endpoint(), ACCESS)
    await of.wait("message", anext(empty.messages()))
    filled = await stack.enter_async_context(of.domain.shared_receive_queue(4))
    arrivals = await stack.enter_async_context(filled.messages(of.pool))
    srq = await stack.enter_async_context(of.domain.shared_receive_queue(4))
    while of.pool.statistics().free:  # who wants another one waits
        of.leased.append(of.pool.lease_nowait())
    of.subjects |= {
        "reader": reader,
        "inbox": inbox,
        "message": message,
        "empty reader": empty,
        "inbox that is awaited": empty.messages(),
        "filled srq": filled,
        "inbox of an srq": arrivals,
        "srq": srq,
        "qp of an srq": await stack.enter_async_context(of.domain.queue_pair(of.cq, srq=filled)),
        "xrc srq": await stack.enter_async_context(
            of.domain.shared_receive_queue(
                4, xrc_domain=await stack.enter_async_context(of.device.xrc_domain()), cq=of.cq
            )
        ),
    }


async def _connections(of: Scene, stack: AsyncExitStack) -> None:
    """With messages and grants that came, with some that are waited for, and with one that cannot be sent yet."""
    near, far = await _connected(of.domain, stack)
    quiet, other = await _connected(of.domain, stack)
    grants = [await near.grant(of.region, AccessFlags.REMOTE_READ) for _ in range(2)]
    granted = await far.receive_grant()
    stream = far.as_byte_stream()
    await near.send(b"abcdef")
    assert await stream.receive(2) == b"ab"
    await near.send(b"unread")  # as long as it is, there are no credits for more
    await of.wait("sending", near.send(LARGE))
    await of.wait("receiving", near.receive())
    await of.wait("a grant", near.receive_grant())
    of.subjects |= {
        "near": near,
        "far": far,
        "connection": quiet,
        "its peer": other,
        "grant": grants[0],
        "second grant": grants[1],
        "granted": granted,
        "byte stream": stream,
        "byte stream that is awaited": near.as_byte_stream(),
        "byte stream of a connection": quiet.as_byte_stream(),
    }


async def _listening(of: Scene, stack: AsyncExitStack) -> None:
    """Listeners, one that has a connection for who asks and one that is asked; a server with a peer."""
    listener = await stack.enter_async_context(listen(HOST, domain=of.domain, settings=SETTINGS))
    ready = await stack.enter_async_context(listen(HOST, domain=of.domain, settings=SETTINGS))
    server = await stack.enter_async_context(serve(echo, HOST, domain=of.domain, settings=SETTINGS))
    of.subjects["connection that nobody took"] = await stack.enter_async_context(
        connect(HOST, ready.port, domain=of.domain, settings=SETTINGS)
    )
    of.subjects["served"] = await stack.enter_async_context(
        connect(HOST, server.port, domain=of.domain, settings=SETTINGS)
    )
    await until(lambda: ready._ready)
    await until(lambda: server.statistics().connections)
    await of.wait("accepting", listener.accept())
    await of.wait("serving", server.wait_closed())
    of.subjects |= {"listener": listener, "listener with a connection": ready, "server": server}


def _not_opened(of: Scene) -> None:
    """What would belong to the owner, of whatever kind it is made of."""
    subjects, domain = of.subjects, of.domain
    parent, cq = subjects["parent"], subjects["parent's cq"]
    port = subjects["listener"].port
    ways: dict[str, Any] = {"domain": domain, "settings": SETTINGS}
    subjects |= {
        "new parent domain": subjects["pd"].parent_domain(subjects["td"]),
        "new cq": domain.completion_queue(64),
        "new cq of a parent domain": parent.completion_queue(64),
        "new qp": domain.queue_pair(of.cq),
        "new qp of a parent domain": parent.queue_pair(cq),
        "new qp of a pd": subjects["pd"].queue_pair(of.cq),
        "new srq": domain.shared_receive_queue(4),
        "new listener": listen(HOST, **ways),
        "new server": serve(echo, HOST, **ways),
        "connecting": connect(HOST, port, **ways),
        "reconnecting": Made(lambda: reconnecting(HOST, port, **ways)),
    }


async def works(of: Scene) -> None:
    """All that the owner waited for comes, and everything does what it is for."""
    subjects, region = of.subjects, of.region
    for name, task in of.waiting.items():
        assert not task.done(), f"{name}: {task}"
    assert subjects["held qp"].query().qp_state is of.qp.query().qp_state is QpState.RTS
    unhold(of.device)
    await of.came("operation")
    fresh: Operation[None] = subjects["operation that nobody awaits"]
    await fresh
    await subjects["operation of a batch"]
    region.buffer[:8] = b"as ever."
    await subjects["batch"].post()
    assert bytes(region.buffer[48:56]) == b"as ever."
    assert not len(region.pins)
    assert bytes(subjects["message"].data) == bytes((await anext(subjects["inbox"])).data) == b"messages"
    subjects["message"].release()
    await subjects["empty reader"].send(region[:8])
    assert bytes((await of.came("message")).data) == b"as ever."
    assert subjects["filled srq"].query().max_wr >= 4
    of.cq.resize(600)
    near, far, stream = subjects["near"], subjects["far"], subjects["byte stream"]
    assert await stream.receive() == b"cdef"
    assert await far.receive() == b"unread"
    assert await far.receive() == LARGE
    await of.came("sending")
    await far.send(b"to near")
    assert await of.came("receiving") == b"to near"
    second = await far.receive_grant()
    local = region[128:136]
    for granted in (subjects["granted"], second):
        await far.read(local, granted[:8])
        assert bytes(local.buffer) == b"as ever."
    back = await far.grant(region, AccessFlags.REMOTE_READ)
    assert (await of.came("a grant")).remote == back.remote
    for grant in (subjects["grant"], subjects["second grant"], back):
        await grant.revoke()
    await _exchange(subjects["connection"], subjects["its peer"])
    await _exchange(near, far)
    await subjects["connection"].send_eof()
    try:
        await subjects["its peer"].receive()
        raise AssertionError("there is no end")
    except anyio.EndOfStream:
        pass
    await _accept(of)


async def _exchange(one: Connection, other: Connection) -> None:
    await one.send(b"here")
    assert await other.receive() == b"here"
    await other.send(b"there")
    assert await one.receive() == b"there"


async def _accept(of: Scene) -> None:
    subjects = of.subjects
    async with await subjects["listener with a connection"].accept() as far:
        await _exchange(subjects["connection that nobody took"], far)
    async with subjects["connecting"] as near, await of.came("accepting") as far:
        await _exchange(near, far)
    await subjects["served"].send(b"still served")
    assert await subjects["served"].receive() == b"still served"
    await subjects["served"].aclose()
    await subjects["server"].stop()
    await of.came("serving")
    assert await subjects["process pool"].run(abs, -7) == 7


async def _close(of: Scene) -> None:
    unhold(of.device)
    for task in of.waiting.values():
        task.cancel()
    if of.waiting:
        await asyncio.wait(of.waiting.values())
    for buffer in of.leased:
        buffer.release()
