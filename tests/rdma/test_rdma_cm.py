"""rdma_cm against the kernel's connection manager: both ends on one event loop."""

import asyncio
import contextlib
import itertools
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from aioverbs import (
    AffinityError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConnectionRejectedError,
    QpState,
    QpType,
    QueuePair,
    QueuePairStateError,
    Resource,
    ThreadModel,
    TransitionError,
    UnreachableError,
    VerbsError,
    WcStatus,
    WorkCompletionError,
    open_device,
)
from aioverbs._core.handles import rdma_cm as core
from aioverbs.rdma_cm import Channel, Identifier, Listener
from aioverbs.rdma_cm.events import CmEventType
from tests.rdma.cm import ACCESS, Side, connected, counts, free_port, nothing_left, sides
from tests.waiting import wait_until

pytestmark = pytest.mark.rdma

Ends = tuple[Side, Side]
REFUSED = 28


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    with nothing_left():
        async with sides() as both:
            yield both


@pytest_asyncio.fixture
async def channel(ends: Ends) -> AsyncIterator[Channel]:
    async with Channel() as channel:
        yield channel


@pytest_asyncio.fixture
async def listener(channel: Channel, ends: Ends) -> AsyncIterator[Listener]:
    async with channel.listener(ends[1].address, free_port()) as listener:
        yield listener


@contextlib.asynccontextmanager
async def resolved(channel: Channel, near: Side, listener: Listener | tuple[str, int]) -> AsyncIterator[Identifier]:
    async with channel.identifier() as identifier:
        host, port = listener if isinstance(listener, tuple) else listener.address[:2]
        await identifier.resolve(host, port, source=near.address)
        yield identifier


# ---- Connections


@pytest.mark.parametrize("model", ThreadModel, ids=lambda model: model.name)
async def test_connect_accept_and_disconnect(model: ThreadModel) -> None:
    with nothing_left():
        async with (
            sides(model) as (near, far),
            Channel() as channel,
            channel.listener(far.address, free_port()) as listener,
            near.queue_pair() as qp,
            far.queue_pair(receive_depth=4, receive_size=64) as peer_qp,
            near.domain.register(64) as source,
            far.domain.register(64, ACCESS) as target,
            channel.identifier() as active,
        ):
            assert (active.device_name, active.port_num, active.peer_address) == (None, 0, None)
            await active.resolve(*listener.address[:2], source=near.address)
            assert (active.device_name, active.port_num) == (near.device.name, 1)
            assert active.peer_address == listener.address

            async def answer() -> None:
                async with await anext(listener) as passive:
                    assert passive.private_data[:5] == b"hello"
                    assert passive.peer_address == active.local_address
                    await passive.accept(peer_qp, ACCESS, private_data=b"welcome")
                    message = await anext(peer_qp.messages())
                    with message:
                        assert bytes(message.data) == b"over"
                    await passive.wait_disconnected()
                    assert peer_qp.query().qp_state is QpState.ERR

            answering = asyncio.create_task(answer())
            reply = await active.connect(qp, private_data=b"hello")
            assert reply[:7] == b"welcome"
            assert active.private_data == reply
            assert not any(reply[7:])
            source.buffer[:4] = b"over"
            await qp.write(source[:4], target.remote()[:4])
            assert bytes(target.buffer[:4]) == b"over"
            found = qp.query()
            assert (found.retry_cnt, found.rnr_retry, found.min_rnr_timer) == (6, 6, 18)
            await qp.send(source[:4])
            await active.disconnect()
            assert not active.connected
            assert qp.qp_state is QpState.ERR
            await active.disconnect()
            await active.wait_disconnected()
            await answering


async def test_given_attributes_override_negotiated_ones(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, far.queue_pair() as peer_qp, resolved(channel, near, listener) as active:
        passive = asyncio.create_task(anext(listener))
        connecting = asyncio.create_task(
            active.connect(qp, timeout=12, retry_cnt=3, rnr_retry=7, min_rnr_timer=5, max_rd_atomic=2)
        )
        async with await passive as passive_identifier:
            await passive_identifier.accept(peer_qp, max_dest_rd_atomic=4, max_rd_atomic=1)
            await connecting
            found = qp.query()
            assert (found.timeout, found.retry_cnt, found.rnr_retry) == (12, 3, 7)
            assert (found.min_rnr_timer, found.max_rd_atomic, found.max_dest_rd_atomic) == (5, 2, 1)
            assert peer_qp.query().max_dest_rd_atomic == 4


async def test_listening_on_all_addresses(channel: Channel, ends: Ends) -> None:
    near, far = ends
    async with channel.listener() as listener, channel.listener("::") as six:
        host, port = listener.address[:2]
        assert host == "0.0.0.0"
        assert six.address[0] == "::"
        assert port
        assert six.address[1]
        async with resolved(channel, near, (far.address, port)) as active, near.queue_pair() as qp:
            assert active.local_address is not None
            assert active.local_address[0] == near.address
            connecting = asyncio.create_task(active.connect(qp))
            async with await anext(listener) as passive:
                assert passive.device_name == far.device.name
                await passive.reject()
            with pytest.raises(ConnectionRejectedError):
                await connecting


async def test_requests_in_flight_end_when_the_peer_leaves(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, far.queue_pair() as peer_qp, far.domain.register(64, ACCESS) as region:
        active, passive = await connected(channel, listener, near, qp, peer_qp)
        receiving = peer_qp.receive(region[:])
        await active.aclose()
        with pytest.raises(WorkCompletionError) as caught:
            await receiving
        assert caught.value.status is WcStatus.WR_FLUSH_ERR
        await passive.wait_disconnected()
        await passive.aclose()


async def test_many_connections_at_once(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, far = ends
    count = 16

    async def ask() -> None:
        async with near.queue_pair() as qp, resolved(channel, near, listener) as active:
            await active.connect(qp)
            await active.wait_disconnected()

    async def answer(passive: Identifier) -> None:
        async with passive, far.queue_pair() as peer_qp:
            await passive.accept(peer_qp)
            await passive.disconnect()

    async def answer_all() -> None:
        async with asyncio.TaskGroup() as answering:
            for _ in range(count):
                answering.create_task(answer(await anext(listener)))

    await asyncio.gather(answer_all(), *(ask() for _ in range(count)))


async def test_both_ends_disconnect_at_once(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, far.queue_pair() as peer_qp:
        active, passive = await connected(channel, listener, near, qp, peer_qp)
        await asyncio.gather(active.disconnect(), passive.disconnect())
        await asyncio.gather(active.aclose(), passive.aclose())


# ---- Failures to connect


async def test_a_rejected_connection(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, resolved(channel, near, listener) as active:
        connecting = asyncio.create_task(active.connect(qp))
        async with await anext(listener) as passive:
            await passive.reject(b"not today")
            with pytest.raises(QueuePairStateError, match="must be requested by a peer, but is ended"):
                await passive.accept(qp)
        with pytest.raises(ConnectionRejectedError, match="the listening program rejected it") as caught:
            await connecting
        assert caught.value.reason == REFUSED
        assert caught.value.private_data[:10] == b"not today\0"
        assert qp.query().qp_state is QpState.INIT
        with pytest.raises(QueuePairStateError, match="is not connected"):
            await active.disconnect()
        for resolves in (False, True):  # identifier and queue pair can be used for another attempt
            if resolves:
                await active.resolve(*listener.address[:2], source=near.address)
            connecting = asyncio.create_task(active.connect(qp))
            await (await anext(listener)).aclose()
            with pytest.raises(ConnectionRejectedError):
                await connecting
        async with far.queue_pair() as peer_qp:
            connecting = asyncio.create_task(active.connect(qp))
            async with await anext(listener) as passive:
                await passive.accept(peer_qp)
                await connecting
                assert active.connected
                await active.disconnect()
        qp.to_reset()
        async with resolved(channel, near, listener) as again:
            connecting = asyncio.create_task(again.connect(qp))
            await (await anext(listener)).aclose()  # closed without an answer
            with pytest.raises(ConnectionRejectedError):
                await connecting


async def test_connecting_without_a_listener(channel: Channel, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, channel.identifier() as active:
        await active.resolve(far.address, free_port(), source=near.address)
        with pytest.raises(ConnectionRejectedError, match="no program listens at that port"):
            await active.connect(qp)


async def test_unreachable_peer(channel: Channel) -> None:
    async with channel.identifier() as loopback:
        with pytest.raises(UnreachableError, match="loopback"):
            await loopback.resolve("127.0.0.1", 7174)
    async with channel.identifier() as nowhere:
        with pytest.raises((UnreachableError, TimeoutError)):
            await nowhere.resolve("203.0.113.1", 7174, timeout_s=1)
    async with channel.identifier() as nobody:
        with pytest.raises(socket.gaierror):
            await nobody.resolve("no-such-host.invalid", 7174)


async def test_resolving_an_absent_host(channel: Channel, ends: Ends) -> None:
    neighbour = ends[1].address.rpartition(".")[0] + ".222"
    async with channel.identifier() as active:
        began = time.monotonic()
        with pytest.raises((UnreachableError, TimeoutError)):
            await active.resolve(neighbour, 7174, timeout_s=0.5)
        assert time.monotonic() - began < 5


async def test_a_peer_that_does_not_answer(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, far.queue_pair() as peer_qp:
        async with resolved(channel, near, listener) as active:
            with pytest.raises(TimeoutError, match=r"connect: the peer did not answer within 300 ms"):
                await active.connect(qp, timeout_s=0.3)
        async with await anext(listener) as passive:  # after the request has timed out
            with pytest.raises((ConnectionRejectedError, BrokenResourceError, VerbsError, TimeoutError)):
                await passive.accept(peer_qp, timeout_s=5)


class Mute:
    """A peer that accepts and then processes no more events."""

    def __init__(self, side: Side) -> None:
        self.channel = core.EventChannel()
        self.listener = core.Identifier(self.channel)
        self.listener.bind_addr((side.address, 0))
        self.listener.listen(16)
        self.address = self.listener.local_address
        self.identifiers: list[core.Identifier] = []

    def accept(self, qp: QueuePair) -> None:
        passive = len(self.identifiers)
        wait_until(lambda: self._take() > passive)
        identifier = self.identifiers[-1]
        qp.to_init(port_num=identifier.port_num)
        qp.to_rtr(**identifier.init_qp_attr(QpState.RTR))
        qp.to_rts(**identifier.init_qp_attr(QpState.RTS))
        identifier.accept(qp_num=qp.qp_num, responder_resources=1, initiator_depth=1)

    def _take(self) -> int:
        event = self.channel.take_event()
        if event is not None and event.event_type == CmEventType.CONNECT_REQUEST and event.identifier is not None:
            self.identifiers.append(event.identifier)
        return len(self.identifiers)

    def destroy(self) -> None:
        for each in (*self.identifiers, self.listener, self.channel):
            each.destroy()


async def test_a_peer_that_does_not_answer_a_disconnect(ends: Ends) -> None:
    """Waiting for its answer is limited, and closing many such connections takes no longer than closing one."""
    near, far = ends
    async with contextlib.AsyncExitStack() as stack:
        mute = Mute(far)
        stack.callback(mute.destroy)
        channel = await Channel().open()
        identifiers = []
        for _ in range(4):
            qp = await stack.enter_async_context(near.queue_pair())
            peer_qp = await stack.enter_async_context(far.queue_pair())
            active = await channel.identifier().open()
            assert mute.address is not None
            await active.resolve(*mute.address[:2], source=near.address)
            connecting = asyncio.create_task(active.connect(qp))
            await asyncio.sleep(0)
            mute.accept(peer_qp)
            await connecting
            identifiers.append(active)
        with pytest.raises(TimeoutError, match=r"disconnect: the peer did not answer within 200 ms"):
            await identifiers[0].disconnect(timeout_s=0.2)
        began = time.monotonic()
        await identifiers[0].aclose()
        with pytest.warns(ResourceWarning, match="was closed before it"):
            await channel.aclose()
        assert time.monotonic() - began < 3.5


async def test_invalid_arguments_are_refused_before_contacting_the_peer(
    channel: Channel, listener: Listener, ends: Ends
) -> None:
    near, far = ends
    async with (
        near.queue_pair() as qp,
        far.queue_pair() as peer_qp,
        near.domain.queue_pair(near.cq, qp_type=QpType.UC) as uc,
        open_device("soft0") as soft,
        soft.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as soft_qp,
        channel.identifier() as active,
    ):
        with pytest.raises(QueuePairStateError, match="connect: the identifier must be resolved, but is new"):
            await active.connect(qp)
        with pytest.raises(QueuePairStateError, match="is not connected"):
            await active.disconnect()
        with pytest.raises(ValueError, match="`port` must be from 0 to 65535"):
            await active.resolve(far.address, 65536)
        await active.aclose()
        active = await channel.identifier().open()
        await active.resolve(*listener.address[:2], source=near.address)
        with pytest.raises(VerbsError, match="the software device has no IP address"):
            await active.connect(soft_qp)
        with pytest.raises(ValueError, match="of type UC"):
            await active.connect(uc)
        with pytest.raises(ValueError, match="at most 56 bytes, got 57"):
            await active.connect(qp, private_data=bytes(57))
        with pytest.raises(TransitionError, match="retry_cnt: must be 0 to 7, got 8"):
            await active.connect(qp, retry_cnt=8)
        with pytest.raises(TransitionError, match="not allowed in this transition: qkey"):
            await active.connect(qp, qkey=1)
        if near.device.name != far.device.name:
            with pytest.raises(ValueError, match="but the route to the peer uses"):
                await active.connect(peer_qp)
        with pytest.raises(QueuePairStateError, match=r"accept: .* is resolved"):
            await active.accept(qp)
        with pytest.raises(QueuePairStateError, match=r"resolve: .* is resolved"):
            await active.resolve(far.address, 1)
        assert qp.query().qp_state is QpState.RESET
        qp.to_init()
        qp.to_error()
        with pytest.raises(TransitionError, match=re.escape(f"cannot move {qp!r} of type RC from ERR to RTR")):
            await active.connect(qp)
        await active.aclose()
        with pytest.raises(ClosedResourceError):
            await active.connect(qp)
        with pytest.raises(VerbsError, match="EADDRINUSE"):
            await channel.listener(far.address, listener.address[1]).open()
        with pytest.raises(VerbsError, match="rdma_bind_addr"):
            await channel.listener("203.0.113.1").open()
        with pytest.raises(ValueError, match="backlog"):
            channel.listener(backlog=0)


async def test_concurrent_calls_raise_busy(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, _ = ends
    async with near.queue_pair() as qp, resolved(channel, near, listener) as active:
        connecting = asyncio.create_task(active.connect(qp))
        async with await anext(listener):
            with pytest.raises(BusyResourceError, match="another call is in flight"):
                await active.connect(qp)
        with pytest.raises(ConnectionRejectedError):
            await connecting


async def test_identifiers_refuse_other_loops(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, channel.identifier() as active:

        async def elsewhere(what: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(AffinityError):
                await what()

        await asyncio.to_thread(asyncio.run, elsewhere(lambda: active.resolve(*listener.address[:2])))
        await asyncio.to_thread(asyncio.run, elsewhere(channel.aclose))
    async with resolved(channel, near, listener) as active, near.queue_pair() as qp:
        await asyncio.to_thread(asyncio.run, elsewhere(lambda: active.connect(qp)))
        # Nothing has changed: the owner continues as if there had been no call.
        connecting = asyncio.create_task(active.connect(qp))
        async with await anext(listener) as answering, far.queue_pair() as another:
            for refused in (answering.reject, lambda: answering.accept(another)):
                await asyncio.to_thread(asyncio.run, elsewhere(refused))
            await answering.accept(another)
            await connecting
            for refused in (active.disconnect, active.wait_disconnected):
                await asyncio.to_thread(asyncio.run, elsewhere(refused))
            assert active.connected
            assert answering.connected
            await active.disconnect()


# ---- Cancellation


async def cancel(task: "asyncio.Task[object]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def state_of(qp: QueuePair) -> QpState:
    """Return the state of a queue pair, as soon as no other thread modifies it."""
    while True:
        with contextlib.suppress(BusyResourceError):
            return qp.query().qp_state
        await asyncio.sleep(0.001)


async def test_cancelled_resolve(channel: Channel, ends: Ends) -> None:
    neighbour = ends[1].address.rpartition(".")[0] + ".223"
    async with channel.identifier() as active:
        task = asyncio.create_task(active.resolve(neighbour, 7174))
        await asyncio.sleep(0.1)
        await cancel(task)


async def test_cancelled_connect(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, far.queue_pair() as peer_qp:
        for turns in (0, 1, 2, 5, 10):
            async with resolved(channel, near, listener) as active:
                task = asyncio.create_task(active.connect(qp))
                passive = await anext(listener)
                answering = asyncio.create_task(passive.accept(peer_qp, timeout_s=5))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await asyncio.gather(answering, return_exceptions=True)
            await passive.aclose()
            for each in (qp, peer_qp):
                if await state_of(each) is not QpState.RESET:
                    each.to_error()
                    each.to_reset()


async def test_cancelled_accept(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, far.queue_pair() as peer_qp, resolved(channel, near, listener) as active:
        connecting = asyncio.create_task(active.connect(qp))
        async with await anext(listener) as passive:
            task = asyncio.create_task(passive.accept(peer_qp))
            await asyncio.sleep(0)
            await cancel(task)
            async with asyncio.timeout(10):
                while await state_of(peer_qp) is not QpState.ERR:  # noqa: ASYNC110  (the helper tells the identifier)
                    await asyncio.sleep(0.001)
        await asyncio.wait([connecting])
        connecting.exception()


async def test_cancelled_and_closed_waiters(channel: Channel, listener: Listener, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, far.queue_pair() as peer_qp:
        active, passive = await connected(channel, listener, near, qp, peer_qp)
        waiting = asyncio.create_task(active.wait_disconnected())
        await asyncio.sleep(0)
        await cancel(waiting)
        waiting = asyncio.create_task(active.wait_disconnected())
        listening = asyncio.create_task(anext(listener))
        await asyncio.sleep(0)
        await active.aclose()
        await waiting
        await passive.aclose()
        await listener.aclose()
        with pytest.raises(StopAsyncIteration):
            await listening
    async with resolved(channel, near, (far.address, free_port())) as connecting, near.queue_pair() as qp:
        task = asyncio.create_task(connecting.connect(qp))
        await asyncio.sleep(0)
        await connecting.aclose()
        with pytest.raises(ClosedResourceError, match="closed during the call"):
            await task


# ---- The end, in every order


@pytest.mark.rdma_all
@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::3], ids=str)
async def test_every_order_of_closing(order: tuple[int, ...]) -> None:
    with nothing_left():
        async with sides() as (near, far), Channel() as channel:
            listener = await channel.listener(far.address, free_port()).open()
            qp, peer_qp = await near.queue_pair().open(), await far.queue_pair().open()
            active, passive = await connected(channel, listener, near, qp, peer_qp)
            resources: list[Resource] = [active, passive, qp, peer_qp, listener]
            for each in order:
                await resources[each].aclose()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
async def test_closing_parents_first(order: tuple[int, ...]) -> None:
    """Close the channel and both devices below a connection and a pending request."""
    with nothing_left():
        async with sides() as (near, far):
            channel = await Channel().open()
            listener = await channel.listener(far.address, free_port()).open()
            qp, peer_qp = await near.queue_pair().open(), await far.queue_pair().open()
            active, passive = await connected(channel, listener, near, qp, peer_qp)
            another, another_qp = await channel.identifier().open(), await near.queue_pair().open()
            await another.resolve(*listener.address[:2], source=near.address)
            task = asyncio.create_task(another.connect(another_qp))
            await asyncio.sleep(0.2)
            parents: list[Resource] = [channel, near.device, far.device]
            for each in order:
                with pytest.warns(ResourceWarning, match="was closed before it"):
                    await parents[each].aclose()
            assert active.closed
            assert passive.closed
            (error,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(error, ClosedResourceError | ConnectionRejectedError | BrokenResourceError)


async def test_forgotten_objects_are_closed(listener: Listener, channel: Channel, ends: Ends) -> None:
    near, far = ends
    async with near.queue_pair() as qp, far.queue_pair() as peer_qp:
        active, passive = await connected(channel, listener, near, qp, peer_qp)
        left = [active]
        del active
        with pytest.warns(ResourceWarning, match="it was forgotten"):
            left.clear()
        await passive.wait_disconnected()
        await passive.aclose()
        async with asyncio.timeout(10):
            while channel.statistics().children > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def test_a_channel_of_a_closed_loop() -> None:
    """The loop that closes the channel takes over."""
    channel = Channel()

    async def begin() -> None:
        await channel.open()
        await channel.identifier().open()

    with nothing_left():
        with pytest.warns(ResourceWarning, match="it was forgotten"):
            asyncio.run(begin())
        asyncio.run(channel.aclose())


def test_a_forked_child_leaves_the_channel_alone() -> None:
    async def main() -> None:
        async with Channel() as channel:
            pid = os.fork()
            if not pid:
                os._exit(0 if channel.closed else 1)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert status == 0

    asyncio.run(main())


# ---- Large numbers


def descriptors() -> int:
    """Return the number of open file descriptors."""
    return len(os.listdir("/proc/self/fd"))


async def connect_and_disconnect(near: Side, far: Side, channel: Channel, listener: Listener, number: int) -> None:
    async with near.queue_pair() as qp, far.queue_pair() as peer_qp:
        active, passive = await connected(channel, listener, near, qp, peer_qp)
        first, second = (active, passive) if number % 2 else (passive, active)
        await first.disconnect()
        await second.wait_disconnected()
        await asyncio.gather(active.aclose(), passive.aclose())


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
async def test_connects_and_disconnects_leave_nothing(
    channel: Channel, listener: Listener, ends: Ends, count: int
) -> None:
    """`nox -s rdma -- --soak` makes 10,000 connections on both kinds of loops. Resources are counted after every
    hundred.
    """
    await connect_and_disconnect(*ends, channel, listener, 0)  # librdmacm keeps devices open once it has used them
    before = descriptors(), counts()
    for number in range(1, count + 1):
        await connect_and_disconnect(*ends, channel, listener, number)
        if not number % 100:
            assert (descriptors(), counts()) == before, number
