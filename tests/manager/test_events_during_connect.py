"""Messages, failures and closing while another thread moves the queue pair to RTR."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    Device,
    EventType,
    QpCapabilities,
    QpState,
    QueuePair,
    VerbsError,
    open_device,
)
from aioverbs._connection.connection import end_of
from aioverbs._core.data_path.data_path import Message, Operation
from tests.capabilities import Capability, needs
from tests.connections.ends import pair
from tests.garbage import collect_garbage
from tests.manager.held_verbs import Helpers, SlowVerb
from tests.pace import patience
from tests.waiting import until, wait_until

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE

T = TypeVar("T")


async def done(operation: Operation[T]) -> T:
    async with asyncio.timeout(patience(20)):
        return await operation


def establish(qp: QueuePair, peer: QueuePair) -> "asyncio.Task[None]":
    return asyncio.create_task(qp.establish(peer.local_endpoint(), ACCESS))


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("lost", ["completion queue", "device"])
async def test_receives_end_when_the_queue_pair_fails(device: Device, helpers: Helpers, lost: str) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        domain.queue_pair(cq) as other,
        domain.register(64, ACCESS) as region,
    ):
        other.to_init()
        qp.to_init()
        receives = [asyncio.create_task(done(each.receive(region[:16]))) for each in (qp, other)]
        establishing = establish(qp, qp)
        await until(lambda: helpers.waiting)
        if lost == "device":
            device.faults.lose_device()
        else:
            device.faults.break_completion_queue(cq.handle)
        with pytest.raises(BrokenResourceError):  # not connecting, so it ends at once
            await receives[1]
        assert not receives[0].done()
        assert len(region.pins) == 1  # the device may write to the memory until the reset
        helpers.release()
        with pytest.raises(VerbsError if lost == "device" else BrokenResourceError):
            await establishing
        with pytest.raises(BrokenResourceError):
            await receives[0]
        assert not len(region.pins)


@needs(Capability.FAULT_PLAN)
async def test_messages_that_arrive_before_the_verb_returns(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is already in RTS, and sends more messages than receives are posted."""
    slow = SlowVerb(device, monkeypatch)
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq, receive_depth=1, receive_size=8) as qp,
        domain.queue_pair(cq) as peer,
        domain.register(64, ACCESS) as region,
    ):

        async def read() -> list[bytes]:
            read = []
            async for message in qp.messages():
                with message:
                    read.append(bytes(message.data))
                if len(read) == 2:
                    break
            return read

        peer.connect(qp.local_endpoint(), rnr_retry=7)
        qp.to_init()
        reading = asyncio.create_task(read())
        events = qp.events()
        event = asyncio.create_task(anext(events))
        establishing = establish(qp, peer)
        try:
            await until(lambda: slow.inside)
            region.buffer[:16] = b"message1message2"
            sends = [asyncio.create_task(done(peer.send(region[at : at + 8]))) for at in (0, 8)]
            await sends[0]
            assert (await event).event_type is EventType.COMM_EST
            await until(lambda: qp.statistics().receives.completed == 1)
            await asyncio.sleep(0)
            assert not establishing.done()
        finally:
            slow.release()
        await establishing
        assert await reading == [b"message1", b"message2"]
        await sends[1]
        await events.aclose()


@needs(Capability.FAULT_PLAN)
async def test_a_receive_waits_for_a_free_slot(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowVerb(device, monkeypatch)
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq, None, QpCapabilities(max_recv_wr=1)) as qp,
        domain.queue_pair(cq) as peer,
        domain.register(64, ACCESS) as region,
    ):
        peer.connect(qp.local_endpoint(), rnr_retry=7)
        qp.to_init()
        receives = [asyncio.create_task(done(qp.receive(region[at : at + 8]))) for at in (8, 16)]
        await until(lambda: qp.statistics().receives.queued == 1)
        establishing = establish(qp, peer)
        try:
            await until(lambda: slow.inside)
            await peer.send(region[:8])
            await receives[0]
            assert not receives[1].done()
        finally:
            slow.release()
        await establishing
        await peer.send(region[:8])
        await receives[1]


async def test_a_message_collected_or_released_during_connect(device: Device, helpers: Helpers) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq, receive_depth=2, receive_size=8) as qp,
        domain.queue_pair(cq) as peer,
        domain.register(64, ACCESS) as region,
    ):
        qp.connect(peer.local_endpoint())
        peer.connect(qp.local_endpoint())
        messages: list[Message] = []
        for _ in (1, 2):
            await peer.send(region[:8])
            messages.append(await anext(qp.messages()))
        for each in (qp, peer):
            each.to_error()
            each.to_reset()
        establishing = establish(qp, peer)
        await until(lambda: helpers.waiting)
        messages.pop().release()
        messages.clear()
        collect_garbage()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        helpers.release()
        await establishing
        await until(lambda: qp.statistics().receives.in_flight == 2)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_closing_waits_for_the_verb(device: Device, helpers: Helpers, cancelled: bool) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq, None, QpCapabilities(max_recv_wr=1)) as qp,
        domain.register(64, ACCESS) as region,
    ):
        qp.to_init()
        receives = [asyncio.create_task(done(qp.receive(region[:16]))) for _ in (1, 2)]
        await until(lambda: qp.statistics().receives.queued == 1)
        establishing = establish(qp, qp)
        await until(lambda: helpers.waiting)
        closing = asyncio.create_task(qp.aclose())
        for _ in range(5):
            await asyncio.sleep(0)
            if cancelled:
                closing.cancel()
        assert not closing.done()
        assert qp.statistics().receives.queued == 1
        helpers.release()
        with pytest.raises(ClosedResourceError):
            await establishing
        if cancelled:
            with pytest.raises(asyncio.CancelledError):
                await closing
        else:
            await closing
        assert qp.closed
        for each in await asyncio.gather(*receives, return_exceptions=True):
            assert isinstance(each, Exception)


async def test_no_other_caller_before_the_connecting_task(device: Device, helpers: Helpers) -> None:
    """The verb has returned, but the connecting task has not resumed yet."""
    helpers.after = True
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq, domain.queue_pair(cq) as qp:
        establishing = establish(qp, qp)
        await until(lambda: helpers.waiting)
        with pytest.raises(BusyResourceError):
            qp.to_reset()
        helpers.release()
        await establishing
        assert qp.query().qp_state is qp.qp_state is QpState.RTS


async def test_manual_transitions_after_a_cancelled_connect(device: Device, helpers: Helpers) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        domain.queue_pair(cq) as connected,
    ):
        connected.connect(connected.local_endpoint(), ACCESS)
        establishing = establish(qp, qp)
        await until(lambda: helpers.waiting)
        establishing.cancel()
        await asyncio.sleep(0)
        helpers.release()
        with pytest.raises(asyncio.CancelledError):
            await establishing
        assert qp.qp_state is QpState.RTR
        assert qp.remote_endpoint == qp.local_endpoint()
        qp.to_rts()
        assert qp.query().max_rd_atomic == connected.query().max_rd_atomic


@contextlib.contextmanager
def changing(qp: QueuePair) -> Iterator[None]:
    """Let another thread change the state of a queue pair in the meantime, as far as the others can tell."""
    change = qp.handle.begin_modify()
    try:
        yield
    finally:  # closing the queue pair would wait for it
        assert not change.end()


async def test_a_connection_during_its_queue_pairs_connect(device: Device) -> None:
    async with pair(device) as ends:
        far = end_of(ends.far).channel
        assert far is not None
        before = far.receive_queue.completed
        with changing(far.qp):
            for number in range(3):  # in up to three frames
                await ends.near.send(bytes([number]))
            await until(lambda: far.receive_queue.completed > before)
            far.sender.send_keepalive()  # the next one tries again
        for number in range(3):
            assert await ends.far.receive() == bytes([number])
        for number in range(10):  # more than its number of receives
            await ends.near.send(bytes([number]))
            assert await ends.far.receive() == bytes([number])
        with changing(far.qp):
            far.fail("of the test")
            with pytest.raises(BrokenResourceError, match="of the test"):
                await ends.far.receive()
        await until(lambda: far.qp.query().qp_state is QpState.ERR)


@pytest.mark.parametrize("cancels", [True, False])
def test_the_loop_ends_during_connect(monkeypatch: pytest.MonkeyPatch, cancels: bool) -> None:
    """The loop ends like `asyncio.run`, which cancels all tasks, or is closed with tasks pending."""
    kept: list[Any] = []
    verbs: list[SlowVerb] = []
    errors: list[dict[str, Any]] = []

    async def begin() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        device = await open_device("soft0").open()
        slow = SlowVerb(device, monkeypatch)
        domain = await device.resource_domain().open()
        cq = await domain.completion_queue(64).open()
        qp = await domain.queue_pair(cq).open()
        establishing = establish(qp, qp)
        await until(lambda: slow.inside)
        verbs.append(slow)
        kept.extend([device, domain, cq, qp, establishing])

    async def end() -> None:
        device, *others, establishing = kept
        closing = [asyncio.create_task(each.aclose()) for each in [*reversed(others), device]]
        if not cancels:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not closing[0].done()
            verbs[0].release()
        async with asyncio.timeout(patience(20)):
            await asyncio.gather(*closing)
        assert all(each.closed for each in [device, *others])
        assert establishing.done() == cancels

    if cancels:

        def release() -> None:
            wait_until(lambda: kept and kept[-1].cancelling())
            verbs[0].release()

        releasing = threading.Thread(target=release)
        releasing.start()
        asyncio.run(begin())
        releasing.join()
        assert kept[-1].cancelled()
    else:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        loop.close()
    asyncio.run(end())
    assert not errors
