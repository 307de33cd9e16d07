"""One object of each class that an event loop owns: unopened, in use, and at its end."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aioverbs import (
    AccessFlags,
    BufferPool,
    CompletionQueue,
    Connection,
    ConnectionListener,
    ConnectionSettings,
    Device,
    Endpoint,
    EventType,
    LeasedBuffer,
    MemoryRegion,
    MemoryWindow,
    Message,
    QueuePair,
    Resource,
    ResourceDomain,
    Server,
    ThreadModel,
    WorkerPool,
    connect,
    listen,
    open_device,
    rdma_cm,
    reconnect,
    serve,
)
from aioverbs._connection.connect import Connecting
from aioverbs._connection.connection import end_of
from aioverbs._core.handles import handles
from aioverbs._lifecycle.affinity import OwnedBlock, OwnedIterator
from aioverbs._verbs.base_domain import Domain
from aioverbs.rdma_cm.state_machine import CmState
from tests.connections.ends import HOST
from tests.holding import hold, unhold
from tests.manager.connection_manager import connection_manager, request
from tests.pace import patience
from tests.waiting import until

__all__ = ["DOMAINS", "LARGE", "SETTINGS", "Factory", "OwnedObjects", "owned_objects"]

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
SETTINGS = ConnectionSettings(
    buffer_size=1024, receive_depth=4, send_buffers=2, send_depth=16, max_message=1 << 20, keep_alive_s=None
)
DOMAINS = ("SINGLE", "UNSAFE", "SAFE", "PD")  # thread models of resource domains, and a plain protection domain
EQUAL_FINGERPRINTS = 20  # consecutive equal fingerprints after which the loop counts as idle
LARGE = bytes(range(256)) * 64  # exceeds the peer's posted receives, so that sending it waits


async def echo(connection: Connection) -> None:
    async for message in connection:
        await connection.send(message)


@dataclass
class Factory:
    """Subject that is created anew for each call, because it can be used only once."""

    make: Callable[[], Any]

    def __call__(self) -> Any:
        return self.make()


@dataclass
class OwnedObjects:
    """Objects opened by one loop, the owner.

    :param domain: resource domain of the owner.
    :param connection_domain: domain of connections and shared receive queues; unless it is `domain`, other loops may
        use it, too.
    :param subjects: objects that wrong callers use, by name; for each class one object per state that matters.
    :param waiting: tasks of the owner that wait for a result in the meantime.
    """

    device: Device
    domain: ResourceDomain
    cq: CompletionQueue
    qp: QueuePair
    region: MemoryRegion
    window: MemoryWindow
    pool: BufferPool
    endpoint: Endpoint
    connection_domain: Domain
    subjects: dict[str, Any] = field(default_factory=dict)
    waiting: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    leased: list[LeasedBuffer] = field(default_factory=list)
    block_error: BaseException | None = None  # exception passed to `__aexit__`
    srq_messages: Any = None  # messages of the shared receive queue that is kept filled
    sender: Any = None  # queue pair that sends to that queue
    drained: Any = None  # queue pair that the events concern

    async def wait(self, name: str, awaitable: Any) -> None:
        """Start a task of the owner that awaits `awaitable`; it is suspended there when this returns."""

        async def waits() -> Any:
            return await awaitable

        self.waiting[name] = asyncio.create_task(waits(), name=name)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not self.waiting[name].done(), self.waiting[name]

    async def result(self, name: str) -> Any:
        """Return the result that a task of the owner waited for."""
        async with asyncio.timeout(patience(20)):
            return await self.waiting.pop(name)

    async def settle(self) -> None:
        """Wait until the owner's loop is idle."""
        seen: list[dict[str, object]] = []

        def is_quiet() -> bool:
            seen.append(self.fingerprint())
            return len(seen) > EQUAL_FINGERPRINTS and all(each == seen[-1] for each in seen[-EQUAL_FINGERPRINTS:])

        await until(is_quiet)

    def fingerprint(self) -> dict[str, object]:
        """Return the observable state of all objects; callable from any thread."""
        found: dict[str, object] = {
            "objects": self.device.statistics().objects,
            "handles": len(handles.open_handles()),
            "pins": len(self.region.pins),
            "bytes": bytes(self.region.buffer),
            "rkey": self.window.handle.rkey,
            "tasks": [name for name, task in self.waiting.items() if not task.done()],
        }
        for name, subject in self.subjects.items():
            found[name] = tuple(_state_of(subject))
        return found


def _state_of(subject: Any) -> Any:
    if isinstance(subject, OwnedIterator):
        generator: Any = subject._generator
        yield generator.ag_frame is None, generator.ag_running
    if isinstance(subject, OwnedBlock):
        yield subject._is_in_use, subject._is_entered
    if isinstance(subject, Connecting):
        yield subject._is_in_use, subject._connection
    if isinstance(subject, WorkerPool):
        yield subject._drain_s
    if isinstance(subject, rdma_cm.Channel | rdma_cm.Identifier | rdma_cm.Listener):
        handle: Any = subject._handle
        yield subject._lifecycle.label, tuple(handle.verbs) if handle is not None else ()
    if isinstance(subject, rdma_cm.Identifier):
        at = subject._state_machine
        yield subject._from_listener, *((at.state, at._busy, at._qp, len(at._events)) if at is not None else ())
    if isinstance(subject, rdma_cm.Listener) and subject._requests is not None:
        yield len(subject._requests._pending), subject._requests.closed
    if isinstance(subject, Resource):
        yield subject.state
    if hasattr(subject, "statistics") and not isinstance(subject, Connection):
        yield subject.statistics()
    if isinstance(subject, Connection):
        channel, grants = end_of(subject).channel, end_of(subject).grants
        yield channel.statistics()
        yield (
            len(subject._lifecycle.children),
            channel.eof_sent,
            channel.closed,
            channel.broken,
            channel.receiver.unread.receiving,
        )
        yield channel.sender.frames.in_line, len(channel.receiver.inbox), len(channel.sender._pending_controls)
        yield tuple(grants._local_grants), tuple(grants._remote_grants), len(grants._unread)
    for name in ("ended", "revoked", "addresses"):
        if hasattr(subject, name):
            yield getattr(subject, name)
    if isinstance(subject, QueuePair):
        yield subject.qp_state
    if hasattr(subject, "__len__"):
        yield len(subject)
    if isinstance(subject, ConnectionListener):
        yield subject._open, subject._closed, len(subject._ready), len(subject._waiters)
    if isinstance(subject, Server):
        yield subject._closed, subject._stopping
    if isinstance(subject, Message):
        yield bytes(subject.data)


async def _connected(domain: Domain, stack: AsyncExitStack) -> tuple[Connecting, Connection, Connection]:
    """Return the block that closes a connection, that connection, and its peer."""
    async with listen(HOST, domain=domain, settings=SETTINGS) as listener:
        block = connect(HOST, listener.port, domain=domain, settings=SETTINGS)
        near = await stack.enter_async_context(block)
        return block, near, await stack.enter_async_context(await listener.accept())


@asynccontextmanager
async def owned_objects(place: str) -> AsyncGenerator[OwnedObjects, None]:
    """Provide all objects, each in use.

    :param place: one of `DOMAINS`. With others than "SINGLE", only objects that belong to a loop on any domain.
    """
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
        connection_domain: Domain = domain
        if place != "SINGLE":
            connection_domain = (
                pd if place == "PD" else await opened(device.resource_domain(pd, thread_model=ThreadModel[place]))
            )
        owned = OwnedObjects(device, domain, cq, qp, region, window, pool, qp.local_endpoint(), connection_domain)
        await _add_filled_queue(owned, stack)
        await _add_connections(owned, stack)
        await _add_listeners(owned, stack)
        if connection_domain is domain:
            owned.subjects |= {"device": device, "pd": pd, "td": td, "parent": parent, "domain": domain, "cq": cq}
            owned.subjects |= {"qp": qp, "parent's cq": await opened(parent.completion_queue(64))}
            owned.subjects["process pool"] = await opened(WorkerPool(device, 1, processes=True))
            await _add_operations(owned, stack)
            await _add_messages(owned, stack)
            await _add_events(owned, stack)
            await _add_loop_domain(owned, stack)
            await _add_identifiers(owned, stack)
            _add_unopened(owned)
        await owned.settle()
        try:
            yield owned
        finally:
            await _close(owned)


async def _add_operations(owned: OwnedObjects, stack: AsyncExitStack) -> None:
    """Add operations that are done, in flight, and not awaited yet; and batches."""
    held = await stack.enter_async_context(owned.domain.queue_pair(owned.cq))
    held.connect(held.local_endpoint(), ACCESS)
    hold(owned.device, held)
    region, remote = owned.region, owned.region.remote()
    done = owned.qp.write(region[:8], remote[8:16])
    await done
    awaited, fresh = held.write(region[16:24], remote[24:32]), held.write(region[32:40], remote[40:48])
    part, posted = owned.qp.batch(), owned.qp.batch()
    part.write(region[:8], remote[48:56])
    posted.write(region[:8], remote[56:64])
    owned.subjects |= {
        "held qp": held,
        "completed operation": done,
        "awaited operation": awaited,
        "operation not awaited": fresh,
        "empty batch": owned.qp.batch(),
        "batch": part,
        "posted batch": posted,
        "operation of a batch": posted.post(),
    }
    await owned.wait("operation", awaited)


async def _add_messages(owned: OwnedObjects, stack: AsyncExitStack) -> None:
    """Add queue pairs that keep receives posted, and shared receive queues."""
    reader = await stack.enter_async_context(owned.domain.queue_pair(owned.cq, receive_depth=4, receive_size=64))
    reader.connect(reader.local_endpoint(), ACCESS)
    owned.region.buffer[64:72] = b"messages"
    for _ in range(2):
        await reader.send(owned.region[64:72])
    inbox = reader.messages()
    message = await anext(inbox)
    empty = await stack.enter_async_context(owned.domain.queue_pair(owned.cq, receive_depth=4, receive_size=64))
    empty.connect(empty.local_endpoint(), ACCESS)
    await owned.wait("message", anext(empty.messages()))
    srq = await stack.enter_async_context(owned.domain.shared_receive_queue(4))
    owned.subjects |= {
        "reader": reader,
        "inbox": inbox,
        "message": message,
        "empty reader": empty,
        "awaited inbox": empty.messages(),
        "inbox of an srq": owned.srq_messages,
        "srq": srq,
        "xrc srq": await stack.enter_async_context(
            owned.domain.shared_receive_queue(
                4, xrc_domain=await stack.enter_async_context(owned.device.xrc_domain()), cq=owned.cq
            )
        ),
    }


async def _add_filled_queue(owned: OwnedObjects, stack: AsyncExitStack) -> None:
    """Add a shared receive queue that is kept filled from a pool."""
    filled = await stack.enter_async_context(owned.connection_domain.shared_receive_queue(4))
    block = filled.messages(owned.pool)
    owned.srq_messages = await stack.enter_async_context(block)
    while owned.pool.statistics().free:  # from here on, `pool.lease()` waits
        owned.leased.append(owned.pool.lease_nowait())
    cq = await stack.enter_async_context(owned.connection_domain.completion_queue(64))
    sender = await stack.enter_async_context(owned.connection_domain.queue_pair(cq))
    receiver = await stack.enter_async_context(owned.connection_domain.queue_pair(cq, srq=filled))
    sender.connect(receiver.local_endpoint(), ACCESS)
    receiver.connect(sender.local_endpoint(), ACCESS)
    owned.sender = sender
    owned.subjects["block of messages"] = block
    if owned.connection_domain is owned.domain:
        owned.subjects |= {"filled srq": filled, "qp of an srq": receiver}


async def _add_connections(owned: OwnedObjects, stack: AsyncExitStack) -> None:
    """Add connections with received messages and grants, with waiting receivers, and with a send that lacks credits."""
    _, near, far = await _connected(owned.connection_domain, stack)
    block, quiet, other = await _connected(owned.connection_domain, stack)
    grants = [await near.grant(owned.region, AccessFlags.REMOTE_READ) for _ in range(2)]
    granted = await far.receive_grant()
    stream = far.as_byte_stream()
    await near.send(b"abcdef")
    assert await stream.receive(2) == b"ab"
    await near.send(b"unread")  # unread, so it withholds the credits for a further message
    await owned.wait("sending", near.send(LARGE))
    await owned.wait("receiving", near.receive())
    await owned.wait("a grant", near.receive_grant())
    owned.subjects |= {
        "near": near,
        "far": far,
        "connection": quiet,
        "block of a connection": block,
        "its peer": other,
        "grant": grants[0],
        "second grant": grants[1],
        "granted": granted,
        "byte stream": stream,
        "awaited byte stream": near.as_byte_stream(),
        "byte stream of a connection": quiet.as_byte_stream(),
    }


async def _add_listeners(owned: OwnedObjects, stack: AsyncExitStack) -> None:
    """Add a listener with a pending `accept`, one with a connection to accept, and a server with peers."""
    listener = await stack.enter_async_context(listen(HOST, domain=owned.connection_domain, settings=SETTINGS))
    ready = await stack.enter_async_context(listen(HOST, domain=owned.connection_domain, settings=SETTINGS))
    server = await stack.enter_async_context(serve(echo, HOST, domain=owned.connection_domain, settings=SETTINGS))
    owned.subjects["connection not accepted yet"] = await stack.enter_async_context(
        connect(HOST, ready.port, domain=owned.connection_domain, settings=SETTINGS)
    )
    owned.subjects["served"] = await stack.enter_async_context(
        connect(HOST, server.port, domain=owned.connection_domain, settings=SETTINGS)
    )
    await until(lambda: ready._ready)
    await until(lambda: server.statistics().connections)
    await owned.wait("accepting", listener.accept())
    await owned.wait("serving", server.wait_closed())
    again = reconnect(HOST, server.port, domain=owned.connection_domain, settings=SETTINGS)
    stack.push_async_callback(again.aclose)
    owned.subjects["reconnected connection"] = await anext(again)
    owned.subjects |= {
        "listener": listener,
        "listener with a connection": ready,
        "server": server,
        "reconnecting with a connection": again,
    }


async def _add_events(owned: OwnedObjects, stack: AsyncExitStack) -> None:
    """Add two iterators of a queue pair's events: one is awaited, the other has yielded an event."""
    owned.drained = qp = await stack.enter_async_context(owned.domain.queue_pair(owned.cq))
    qp.connect(qp.local_endpoint(), ACCESS)
    events, awaited = owned.device.events(qp), qp.events()
    for each in (events, awaited):
        stack.push_async_callback(each.aclose)
    qp.to_sqd(en_sqd_async_notify=True)
    assert (await anext(events)).event_type is EventType.SQ_DRAINED
    qp.to_rts()
    await owned.wait("an event", anext(awaited))
    owned.subjects |= {"events": events, "awaited events": awaited, "drained qp": qp}


async def _add_loop_domain(owned: OwnedObjects, stack: AsyncExitStack) -> None:
    """Add the domain of the owner's loop, and the block that provides it."""
    block = owned.device.loop_domain()
    owned.subjects |= {"loop domain": await stack.enter_async_context(block), "block of the loop domain": block}


async def _add_identifiers(owned: OwnedObjects, stack: AsyncExitStack) -> None:
    """Add an rdma_cm channel with identifiers in each state, a listener with a request, and one that waits for one."""
    stack.enter_context(connection_manager())
    channel = await stack.enter_async_context(rdma_cm.Channel())
    listener, asked = channel.listener(), channel.listener()
    qp = await stack.enter_async_context(owned.domain.queue_pair(owned.cq))
    qp.connect(qp.local_endpoint(), ACCESS)
    for each in (listener, asked):
        await stack.enter_async_context(each)
    for _ in range(3):
        request(asked)
    for stage in (CmState.NEW, CmState.RESOLVED, CmState.CONNECTED):
        identifier = await stack.enter_async_context(channel.identifier())
        assert identifier._state_machine is not None
        identifier._state_machine.state = stage
        owned.subjects[f"identifier in state {stage.value}"] = identifier
    connected = owned.subjects["identifier in state connected"]
    connected._state_machine._qp = qp
    owned.subjects |= {
        "channel": channel,
        "rdma_cm listener": listener,
        "rdma_cm listener with a request": asked,
        "identifier of a listener": await anext(asked),
        "opened identifier of a listener": await (await anext(asked)).open(),
        "new identifier": channel.identifier(),
        "new rdma_cm listener": channel.listener("127.0.0.1"),
        "qp connected by rdma_cm": qp,
    }
    await owned.wait("a peer", anext(listener))
    await owned.wait("a disconnection", connected.wait_disconnected())


def _add_unopened(owned: OwnedObjects) -> None:
    """Add unopened objects that would belong to the owner, made from each kind of parent."""
    subjects, domain = owned.subjects, owned.domain
    parent, cq = subjects["parent"], subjects["parent's cq"]
    port = subjects["listener"].port
    ways: dict[str, Any] = {"domain": domain, "settings": SETTINGS}
    subjects |= {
        "new parent domain": subjects["pd"].parent_domain(subjects["td"]),
        "new cq": domain.completion_queue(64),
        "new cq of a parent domain": parent.completion_queue(64),
        "new qp": domain.queue_pair(owned.cq),
        "new qp of a parent domain": parent.queue_pair(cq),
        "new qp of a pd": subjects["pd"].queue_pair(owned.cq),
        "new srq": domain.shared_receive_queue(4),
        "new listener": listen(HOST, **ways),
        "new server": serve(echo, HOST, **ways),
        "connecting": connect(HOST, port, **ways),
        "reconnect": Factory(lambda: reconnect(HOST, port, **ways)),
        "new block of messages": Factory(lambda: subjects["srq"].messages(owned.pool)),
    }


async def _close(owned: OwnedObjects) -> None:
    unhold(owned.device)
    for task in owned.waiting.values():
        task.cancel()
    if owned.waiting:
        await asyncio.wait(owned.waiting.values())
    for buffer in owned.leased:
        buffer.release()
