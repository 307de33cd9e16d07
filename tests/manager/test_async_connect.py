"""`QueuePair.establish` does not block the loop while the verb resolves the peer's address."""

import asyncio
import errno
import threading
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    BusyResourceError,
    ClosedResourceError,
    Device,
    QpCapabilities,
    QpState,
    ResourceState,
    ThreadModel,
    TransitionError,
    VerbsError,
    WorkCompletionError,
)
from aioverbs._core.handles import handles
from aioverbs._verbs import neighbour_lookup
from tests.capabilities import Capability, needs
from tests.connections.ends import pair
from tests.core.contexts import opened
from tests.garbage import collect_garbage
from tests.manager.held_verbs import Helpers
from tests.waiting import until

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


async def test_the_loop_runs_and_the_queue_pair_is_reserved(device: Device, helpers: Helpers) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        domain.register(64, ACCESS) as region,
    ):
        establishing = asyncio.create_task(qp.establish(qp.local_endpoint(), ACCESS))
        await until(lambda: helpers.waiting)
        for use in (
            qp.query,
            qp.to_error,
            qp.to_reset,
            lambda: qp.connect(qp.local_endpoint()),
            lambda: qp.receive_nowait(region[:]),
            lambda: qp.send_nowait(region[:]),
            qp.handle.destroy,
        ):
            with pytest.raises(BusyResourceError, match="that another thread has called"):
                use()
        assert not qp.handle.closed
        helpers.release()
        await establishing
        assert qp.query().qp_state is qp.qp_state is QpState.RTS
        region.buffer[:8] = b"as ever."
        await qp.write(region[:8], region.remote()[8:16])
        assert bytes(region.buffer[8:16]) == b"as ever."


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancellation_waits_for_the_verb(device: Device, helpers: Helpers, times: int) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq:
        async with domain.queue_pair(cq) as qp:
            establishing = asyncio.create_task(qp.establish(qp.local_endpoint(), ACCESS))
            await until(lambda: helpers.waiting)
            for _ in range(times):
                establishing.cancel()
                await asyncio.sleep(0)
            assert not establishing.done()
            helpers.release()
            with pytest.raises(asyncio.CancelledError):
                await establishing
            assert qp.query().qp_state is QpState.RTR
        assert qp.closed


async def test_a_close_that_is_cancelled_during_the_verb_flushes_receives(device: Device, helpers: Helpers) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        domain.register(64, ACCESS) as region,
    ):
        qp.to_init()
        receive = qp.receive(region[:])
        establishing = asyncio.create_task(qp.establish(qp.local_endpoint(), ACCESS))
        await until(lambda: helpers.waiting)
        closing = asyncio.create_task(qp.aclose())
        await until(lambda: qp.state is ResourceState.CLOSING)
        closing.cancel()
        await asyncio.sleep(0)
        helpers.release()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert qp.closed
        with pytest.raises(WorkCompletionError, match="WR_FLUSH_ERR"):
            await receive
        await asyncio.wait([establishing])
        assert isinstance(establishing.exception(), ClosedResourceError)


async def test_a_close_that_is_cancelled_during_the_verb_raises_that_if_it_fails(
    device: Device, helpers: Helpers
) -> None:
    def fail() -> None:
        raise BusyResourceError("another loop reads the completion queue")

    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(cq, srq=srq) as qp,
    ):
        establishing = asyncio.create_task(qp.establish(qp.local_endpoint(), ACCESS))
        await until(lambda: helpers.waiting)
        closing = asyncio.create_task(qp.aclose())
        await until(lambda: qp.state is ResourceState.CLOSING)
        drain: Any = qp._lifecycle.drain
        poll, drain.__self__._poll_recv_cq = drain.__self__._poll_recv_cq, fail
        closing.cancel()
        await asyncio.sleep(0)
        helpers.release()
        with pytest.raises(asyncio.CancelledError) as caught:
            await closing
        assert isinstance(caught.value.__cause__, BusyResourceError)
        assert qp.state is ResourceState.OPEN
        drain.__self__._poll_recv_cq = poll
        await asyncio.wait([establishing])
        # The verb of its next step fails, if it goes on only after the close: the queue pair is open, but in ERR.
        assert isinstance(establishing.exception(), ClosedResourceError | VerbsError)


async def test_a_handshake_does_not_wait_for_others_of_the_server(device: Device, helpers: Helpers) -> None:
    """256 connects at once: the first one finishes while the verbs of all others still block."""
    safe = device.resource_domain(thread_model=ThreadModel.SAFE)  # released helpers call verbs concurrently
    async with safe as domain, domain.completion_queue(4096) as cq:
        depths = QpCapabilities(max_send_wr=1, max_recv_wr=1)
        queue_pairs = [await domain.queue_pair(cq, None, depths).open() for _ in range(256)]
        connecting = [asyncio.create_task(qp.establish(qp.local_endpoint())) for qp in queue_pairs]
        await until(lambda: len(helpers.waiting) == 256)
        helpers.waiting.pop().set()
        await until(lambda: any(task.done() for task in connecting))
        helpers.release()
        await asyncio.gather(*connecting)
        for qp in queue_pairs:
            await qp.aclose()


async def test_number_of_concurrent_connects_is_limited(
    device: Device, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbour_lookup, "_MAX_HELPERS", 8)
    async with device.resource_domain() as domain, domain.completion_queue(1024) as cq:
        queue_pairs = [await domain.queue_pair(cq).open() for _ in range(12)]
        all_of_them = asyncio.gather(*(qp.establish(qp.local_endpoint(), ACCESS) for qp in queue_pairs))
        await until(lambda: len(helpers.waiting) == 8)
        await asyncio.sleep(0.05)
        assert len(helpers.waiting) == 8
        for done in range(1, 13):  # one at a time: the software device refuses overlapping verbs of a thread domain
            await until(lambda: helpers.waiting)
            helpers.release_first()
            while sum(qp.qp_state is QpState.RTS for qp in queue_pairs) < done:  # noqa: ASYNC110  (set by a helper)
                await asyncio.sleep(0.001)
        await all_of_them
        for qp in queue_pairs:
            await qp.aclose()


@needs(Capability.FAULT_PLAN)
async def test_an_error_of_the_device_is_raised(device: Device, helpers: Helpers) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq, domain.queue_pair(cq) as qp:
        qp.to_init()
        device.faults.fail("modify_qp", 110)
        establishing = asyncio.create_task(qp.establish(qp.local_endpoint(), ACCESS))
        await until(lambda: helpers.waiting)
        helpers.release()
        with pytest.raises(VerbsError, match="ibv_modify_qp failed: ETIMEDOUT"):
            await establishing
        assert qp.query().qp_state is QpState.INIT
        qp.connect(qp.local_endpoint(), ACCESS)
        with pytest.raises(TransitionError):
            await qp.establish(qp.local_endpoint(), ACCESS)


async def test_a_cancellation_has_the_exception_of_the_function_as_its_cause(helpers: Helpers) -> None:
    def fail() -> None:
        raise VerbsError("ibv_modify_qp", errno.ETIMEDOUT)

    task = asyncio.create_task(neighbour_lookup.run_in_helper_thread("ibv_modify_qp", fail))
    await until(lambda: helpers.waiting)
    task.cancel()
    helpers.release()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert isinstance(caught.value.__cause__, VerbsError)


class FailingThread(threading.Thread):
    """Thread that cannot be started, as at the process's limit."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


async def test_failure_to_start_a_thread(device: Device, helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq, domain.queue_pair(cq) as qp:
        with monkeypatch.context() as patched:
            patched.setattr(threading, "Thread", FailingThread)
            with pytest.raises(
                VerbsError, match=r"ibv_modify_qp failed: EAGAIN .*: no helper thread can be started"
            ) as caught:
                await qp.establish(qp.local_endpoint())
        assert caught.value.errno == errno.EAGAIN
        assert qp.query().qp_state is QpState.INIT
        establishing = asyncio.create_task(qp.establish(qp.local_endpoint()))
        await until(lambda: helpers.waiting)
        helpers.release()
        await establishing


async def test_connections(device: Device, helpers: Helpers) -> None:
    """Each handshake of a connection waits only for its own helper thread."""

    async def let_go() -> None:
        for both in (1, 2):
            await until(lambda: len(helpers.waiting) == both)  # noqa: B023
            helpers.release()

    letting_go = asyncio.create_task(let_go())
    async with pair(device) as ends:
        await letting_go
        await ends.near.send(b"hello")
        assert await ends.far.receive() == b"hello"


def test_a_modification_runs_once() -> None:
    with opened("inline") as context:
        pd = handles.ProtectionDomain(context)
        cq = handles.CompletionQueue(context, 4)
        qp = handles.QueuePair(pd, cq, cq)
        change = qp.begin_modify(QpState.INIT, pkey_index=0, port_num=1, qp_access_flags=0)
        with pytest.raises(BusyResourceError):
            qp.begin_modify(QpState.INIT)
        assert not change.end()  # the verb was not called
        assert qp.query().qp_state is QpState.RESET
        change.run()  # as if the loop had been closed before the helper ran
        assert qp.query().qp_state is QpState.RESET
        change = qp.begin_modify(QpState.INIT, pkey_index=0, port_num=1, qp_access_flags=0)
        change.run()
        with pytest.raises(BusyResourceError):  # until `end` is called
            qp.modify(QpState.RESET)
        assert change.end()
        assert qp.state is QpState.INIT
        with pytest.raises(RuntimeError, match="was called before"):
            change.run()
        with pytest.raises(TypeError, match=r"come from QueuePair\.begin_modify"):
            handles.Modification()
        for handle in (qp, cq, pd):
            handle.destroy()
        with pytest.raises(ClosedResourceError):
            qp.begin_modify(QpState.INIT)


@pytest.mark.parametrize("calls", [False, True])
def test_a_dropped_modification_ends(calls: bool) -> None:
    with opened("inline") as context:
        pd = handles.ProtectionDomain(context)
        cq = handles.CompletionQueue(context, 4)
        qp = handles.QueuePair(pd, cq, cq)
        change = qp.begin_modify(QpState.INIT, pkey_index=0, port_num=1, qp_access_flags=0)
        if calls:
            change.run()
        cycle = [change]
        cycle.append(cycle)  # type: ignore[arg-type]  # only the garbage collector frees it
        del change, cycle
        collect_garbage()
        assert qp.state is (QpState.INIT if calls else QpState.RESET)
        assert qp.query().qp_state is qp.state
        for handle in (qp, cq, pd):
            handle.destroy()
