"""Thread domains, parent domains and resource domains: native, and degraded with the same behaviour."""

import asyncio
import contextvars
import errno
import logging
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest

from aioverbs import (
    AffinityError,
    BrokenResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    DefaultAllocator,
    ResourceDomain,
    ResourceState,
    VerbsError,
)
from aioverbs._core.handles import handles
from aioverbs._lifecycle.affinity import Affinity, ThreadModel, run_on_owner
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.device import Device, open_device
from tests.capabilities import Capability, capabilities, needs
from tests.core.allocators import Recording
from tests.garbage import collect_garbage
from tests.waiting import until

DEGRADES = [errno.EOPNOTSUPP, errno.ENOSPC, errno.ENOMEM]
names = pytest.mark.parametrize("number", DEGRADES, ids=errno.errorcode.get)


# ---- Thread domains


@needs(Capability.THREAD_DOMAINS)
async def test_a_thread_domain_belongs_to_the_running_loop(device: Device) -> None:
    async with device.thread_domain() as td:
        assert td.native
        assert td.owner is not None
        assert td.owner.loop is asyncio.get_running_loop()
        assert td.handle is not None
        assert td.handle.affinity is td.owner
        with pytest.raises(AffinityError, match="ibv_dealloc_td"):
            await asyncio.to_thread(td.handle.destroy)


@needs(Capability.FAULT_PLAN)
@names
async def test_a_thread_domain_degrades_with_one_warning(
    device: Device, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    device.faults.fail("alloc_td", number, times=0)
    async with device.thread_domain() as td, device.thread_domain() as another:
        assert not td.native
        assert td.handle is None
        assert not another.native
        assert td.owner is not None, "still owned by one loop and its thread"
        async with device.protection_domain() as pd, pd.parent_domain(td) as domain:
            assert domain.native
            assert domain.owner is td.owner
            assert domain.handle.affinity is td.owner
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert errno.errorcode[number].replace("ENOTSUP", "EOPNOTSUPP") in record.getMessage()
    with pytest.raises(VerbsError, match="ibv_alloc_td"):
        await device.thread_domain(require_native=True).open()
    assert device.statistics().native_thread_domains == 0


@needs(Capability.FAULT_PLAN)
async def test_other_errors_are_raised(device: Device) -> None:
    device.faults.fail("alloc_td", errno.EIO)
    with pytest.raises(VerbsError, match="EIO"):
        await device.thread_domain().open()
    assert device.statistics().native_thread_domains == 0


async def test_closing_a_thread_domain_returns_its_budget(caplog: pytest.LogCaptureFixture) -> None:
    async with open_device("soft0", max_native_thread_domains=2) as device:
        for _ in range(3):
            async with device.thread_domain() as a, device.thread_domain() as b, device.thread_domain() as c:
                assert [td.native for td in (a, b, c)] == [True, True, False]
                with pytest.raises(VerbsError, match=r"ENOSPC.*max_native_thread_domains"):
                    await device.thread_domain(require_native=True).open()
        assert device.statistics().native_thread_domains == 0
    assert "max_native_thread_domains" in caplog.text


# ---- Parent domains


@needs(Capability.PARENT_DOMAINS)
async def test_a_parent_domain_stands_for_its_protection_domain(device: Device) -> None:
    async with device.protection_domain() as pd, pd.parent_domain(context="mine") as domain:
        assert domain.native
        assert not domain.native_allocators
        assert domain.base is pd.base is pd
        assert domain.context == "mine"
        assert domain.owner is None
        region = handles.MemoryRegion(domain.handle, bytearray(64))
        queue = handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        qp = handles.QueuePair(domain.handle, queue, queue)
        for handle in (qp, queue, region):
            handle.destroy()


async def test_parents_of_wrong_types_are_refused(device: Device) -> None:
    """Wrong parents are refused by the constructor, with an error that names both."""
    async with device.protection_domain() as pd, pd.completion_queue(4) as cq:
        parent: Any
        for parent in ("x", "", 0, object()):
            pattern = f" is made from other resources, such as a domain, not from {re.escape(repr(parent))}$"
            with pytest.raises(TypeError, match=f"^ResourceDomain{pattern}"):
                device.resource_domain(parent)
            with pytest.raises(TypeError, match=f"^QueuePair{pattern}"):
                pd.queue_pair(parent)
            with pytest.raises(TypeError, match=f"^QueuePair{pattern}"):
                pd.queue_pair(cq, parent)
            with pytest.raises(TypeError, match=f"^QueuePair{pattern}"):
                pd.queue_pair(cq, srq=parent)


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL], ids=errno.errorcode.get)
async def test_a_parent_domain_degrades(device: Device, number: int, caplog: pytest.LogCaptureFixture) -> None:
    device.faults.fail("alloc_parent_domain", number, times=0)
    allocator = Recording()
    async with device.protection_domain() as pd, device.thread_domain() as td:
        async with pd.parent_domain(td, allocator) as domain, pd.parent_domain() as another:
            assert not domain.native
            assert not domain.native_allocators
            assert domain.handle is pd.handle is another.handle
            assert domain.owner is td.owner
        with pytest.raises(VerbsError, match="ibv_alloc_parent_domain"):
            await pd.parent_domain(require_native=True).open()
    (record,) = caplog.records
    assert "parent domains are not native" in record.getMessage()


@needs(Capability.PARENT_DOMAINS)
async def test_memory_comes_from_the_allocator(device: Device) -> None:
    allocator = Recording()
    async with device.resource_domain(allocator=allocator) as domain:
        assert domain.parent.native_allocators
        queue = handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        assert allocator.live
        queue.destroy()
        assert not allocator.live


# ---- Resource domains


@pytest.mark.parametrize(
    ("model", "shared"), [(ThreadModel.SINGLE, False), (ThreadModel.UNSAFE, True), (ThreadModel.SAFE, False)]
)
async def test_parts_of_a_resource_domain(device: Device, model: ThreadModel, shared: bool) -> None:
    async with device.protection_domain() as pd:
        async with device.resource_domain(
            pd if shared else None, thread_model=model, message_model=MessageModel.HIGH_BANDWIDTH
        ) as domain:
            assert (domain.thread_model, domain.message_model) == (model, MessageModel.HIGH_BANDWIDTH)
            assert (domain.base is pd) is shared
            assert domain.parent.base is domain.base
            assert domain.parent.td is domain.td
            assert (domain.td is None) == (model is ThreadModel.SAFE)
            has = {Capability.THREAD_DOMAINS, Capability.PARENT_DOMAINS} <= capabilities(device.name)
            assert domain.native == (has and model is not ThreadModel.SAFE)
            assert domain.handle.affinity is (domain.owner if has else None)
            assert (domain.owner is not None and domain.owner.bound) == (model is ThreadModel.SINGLE)
            parent_domain = domain.handle if domain.native else None
            queue = handles.CompletionQueue(device.handle, 4, parent_domain=parent_domain, affinity=domain.owner)
            if model is ThreadModel.SINGLE:
                with pytest.raises(AffinityError):
                    await asyncio.to_thread(queue.resize, 4)
            else:
                await asyncio.to_thread(queue.resize, 4)
            queue.destroy()
        assert pd.handle.closed is False
    assert not any(count for _, count in device.statistics().objects)


@needs(Capability.PARENT_DOMAINS)
async def test_overlapping_verbs_of_an_unsafe_domain_are_refused(device: Device) -> None:
    entered, leave = threading.Event(), threading.Event()

    class SlowAllocator(Recording):
        def allocate(self, size: int, alignment: int, resource_type: int, *parent: object) -> Any:
            entered.set()
            assert leave.wait(30)
            return super().allocate(size, alignment, resource_type, *parent)

    async with device.resource_domain(thread_model=ThreadModel.UNSAFE, allocator=SlowAllocator()) as domain:
        make = asyncio.to_thread(handles.CompletionQueue, device.handle, 4, parent_domain=domain.handle)
        task = asyncio.create_task(make)
        assert await asyncio.to_thread(entered.wait, 30)
        with pytest.raises(ConcurrentAccessError):
            handles.SharedReceiveQueue(domain.handle, 4)
        leave.set()
        queue = await task
        queue.destroy()


@pytest.mark.parametrize("most", [None, 0], ids=["native", "not native"])
async def test_domains_of_two_devices_do_not_mix(most: int | None) -> None:
    """A thread domain that is not native has no verbs object, which would be refused."""
    async with (
        open_device("soft0", max_native_thread_domains=most) as device,
        open_device("soft0") as other,
        device.thread_domain() as td,
        other.protection_domain() as pd,
    ):
        assert td.native == (most is None)
        with pytest.raises(ValueError, match=r"<ThreadDomain .* belongs to a different device than <ProtectionDomain"):
            pd.parent_domain(td)
        for model in ThreadModel:
            with pytest.raises(ValueError, match=r"<Device soft0 .* a different device than <ProtectionDomain"):
                device.resource_domain(pd, thread_model=model)
        async with other.resource_domain(pd), device.thread_domain():
            pass


async def test_a_loop_domain_is_shared_while_in_use(device: Device) -> None:
    async with device.loop_domain() as first:
        async with device.loop_domain() as second:
            assert second is first
        closed = [first.closed]
        async with device.resource_domain() as other:
            assert other.td is not first.td
    assert [*closed, first.closed] == [False, True]
    async with device.loop_domain() as third:
        assert third is not first

    async def elsewhere() -> None:
        async with device.loop_domain() as domain:
            assert domain.owner is not None
            assert domain.owner.loop is asyncio.get_running_loop()

    await asyncio.to_thread(asyncio.run, elsewhere())


async def test_blocks_share_a_loop_domain_only_if_their_settings_are_the_same(device: Device) -> None:
    one, other = DefaultAllocator(), DefaultAllocator()
    async with (
        device.loop_domain() as plain,
        device.loop_domain(message_model=MessageModel.LOW_LATENCY) as fast,
        device.loop_domain(allocator=one) as allocated,
        device.loop_domain(allocator=other) as allocated_elsewhere,
        device.loop_domain(message_model=MessageModel.LOW_LATENCY, allocator=one) as both,
    ):
        domains = [plain, fast, allocated, allocated_elsewhere, both]
        assert len(set(domains)) == 5
        assert [domain.message_model for domain in domains] == [
            MessageModel.DEFAULT,
            MessageModel.LOW_LATENCY,
            MessageModel.DEFAULT,
            MessageModel.DEFAULT,
            MessageModel.LOW_LATENCY,
        ]
        assert [domain.allocator for domain in domains] == [None, None, one, other, one]
        async with device.loop_domain(message_model=MessageModel.LOW_LATENCY, allocator=one) as again:
            assert again is both
        assert not both.closed
    assert [domain.closed for domain in domains] == [True] * 5


async def test_a_loop_domain_refuses_wrong_settings_at_once(device: Device) -> None:
    with pytest.raises(TypeError, match=r"methods of aioverbs\.Allocator"):
        device.loop_domain(allocator=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a valid MessageModel"):
        device.loop_domain(message_model="fast")  # type: ignore[arg-type]


async def test_the_domain_of_a_closed_loop_is_dropped() -> None:
    device = await open_device("soft0").open()

    def leave() -> "weakref.ref[ResourceDomain]":
        loop = asyncio.new_event_loop()
        domain = loop.run_until_complete(device.loop_domain().__aenter__())
        loop.close()
        return weakref.ref(domain)

    left = await asyncio.to_thread(leave)
    assert left() is not None
    here = device.loop_domain()

    async def enter() -> ResourceDomain:
        domain = await here.__aenter__()
        collect_garbage()
        return domain

    with pytest.warns(ResourceWarning, match=r"ResourceDomain .* it was forgotten"):
        domain = await enter()
    assert left() is None
    assert domain.owner is not None
    assert domain.owner.loop is asyncio.get_running_loop()
    await until(lambda: len(device.resources().children) == 1)
    await here.__aexit__(None, None, None)
    await device.aclose()
    assert handles.open_handles() == []


async def test_the_next_block_closes_the_domains_of_closed_loops() -> None:
    device = await open_device("soft0").open()
    kept = []

    async def enter_only() -> None:
        block = device.loop_domain()
        domain = await block.__aenter__()
        kept.append((block, await domain.completion_queue(8).open()))

    async def enter_and_leave() -> None:
        async with device.loop_domain():
            pass

    def run() -> None:
        loops = [asyncio.new_event_loop() for _ in range(3)]
        for loop in loops:
            loop.run_until_complete(enter_only())
        for loop in loops:
            loop.close()
        assert len(device.resources().children) == 3
        asyncio.run(enter_and_leave())

    with pytest.warns(ResourceWarning, match="CompletionQueue .* was closed before it") as caught:
        await asyncio.to_thread(run)
    assert len(caught) == 3
    assert device.resources().children == ()
    for block, queue in kept:
        assert queue.closed
        await block.__aexit__(None, None, None)
    await device.aclose()


async def test_a_closed_loop_domain_is_replaced(device: Device) -> None:
    async with device.loop_domain() as first:
        await first.aclose()
        async with device.loop_domain() as second:
            assert second is not first
        assert second.closed
        async with device.loop_domain() as third:
            assert third.state is ResourceState.OPEN


async def test_a_loop_domain_block_object_is_entered_once_at_a_time(device: Device) -> None:
    block = device.loop_domain()
    for _ in range(2):
        async with block as domain:
            with pytest.raises(RuntimeError, match="for each block"):
                await block.__aenter__()
            assert domain.state is ResourceState.OPEN
        assert domain.closed
    with pytest.raises(RuntimeError, match="nothing to leave"):
        await block.__aexit__(None, None, None)


async def test_another_loop_cannot_leave_a_loop_domain_block(device: Device) -> None:
    block = device.loop_domain()
    async with block as domain, device.loop_domain():
        with pytest.raises(AffinityError, match="loop_domain"):
            await asyncio.to_thread(asyncio.run, _leave(block))
        assert domain.state is ResourceState.OPEN
    assert domain.closed, "the refusal changed nothing"
    with pytest.raises(AffinityError, match="loop_domain"):
        await asyncio.to_thread(asyncio.run, _leave(block))


async def _leave(block: AbstractAsyncContextManager[object]) -> None:
    await block.__aexit__(None, None, None)


async def test_shutdown_of_asyncgens_does_not_interrupt_leaving_a_loop_domain(device: Device) -> None:
    """`shutdown_asyncgens` runs while leaving the block is suspended."""
    errors: list[object] = []

    async def elsewhere() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        block = device.loop_domain()
        domain = await block.__aenter__()
        drained = asyncio.Event()

        async def drain() -> None:
            await drained.wait()

        domain._lifecycle.drain = drain
        leaving = asyncio.create_task(_leave(block))
        await asyncio.sleep(0)
        await loop.shutdown_asyncgens()
        drained.set()
        await leaving
        assert domain.closed

    await asyncio.to_thread(asyncio.run, elsewhere())
    assert errors == []


@needs(Capability.PARENT_DOMAINS)
async def test_a_closed_domain_is_not_native(device: Device) -> None:
    async with device.resource_domain(allocator=DefaultAllocator()) as domain:
        parent, td = domain.parent, domain.td
        assert td is not None
        assert (domain.native, td.native, parent.native, parent.native_allocators) == (True,) * 4
    assert (domain.native, td.native, parent.native, parent.native_allocators) == (False,) * 4
    with pytest.raises(ClosedResourceError, match="ThreadDomain"):
        _ = td.handle


# ---- Calls on the owner's loop


class OwnerThread:
    """Event loop in a thread of its own, with an affinity."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self.loop: asyncio.AbstractEventLoop
        self.owner: Affinity
        self.thread = threading.Thread(target=asyncio.run, args=[self._main()])

    async def _main(self) -> None:
        self.loop, self.owner = asyncio.get_running_loop(), Affinity.of_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()

    def __enter__(self) -> "OwnerThread":
        self.thread.start()
        assert self._ready.wait(30)
        return self

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)

    def __exit__(self, *_: object) -> None:
        if self.thread.is_alive() and not self.loop.is_closed():
            self.stop()
        self.thread.join()


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE")


async def test_a_call_runs_on_the_owner_and_returns_its_result() -> None:
    VARIABLE.set("carried")

    def plain(a: int, *, b: int) -> tuple[bool, int, str]:
        return elsewhere.owner.owns(), a + b, VARIABLE.get()

    async def coroutine(a: int, *, b: int) -> tuple[bool, int, str]:
        await asyncio.sleep(0)
        return plain(a, b=b)

    functions: list[Callable[..., object]] = [plain, coroutine]
    with OwnerThread() as elsewhere:
        assert not elsewhere.owner.owns()
        for function in functions:
            assert await run_on_owner(elsewhere.owner, function, 1, b=2) == (True, 3, "carried")
        here = Affinity.of_running_loop()
        for function in functions:
            for owner in (here, None, Affinity.unbound()):
                assert await run_on_owner(owner, function, 1, b=2) == (False, 3, "carried")


async def test_an_error_of_the_call_is_raised_by_the_caller() -> None:
    def fail() -> None:
        raise ZeroDivisionError("there")

    with OwnerThread() as elsewhere:
        with pytest.raises(ZeroDivisionError, match="there"):
            await run_on_owner(elsewhere.owner, fail)
        assert await run_on_owner(elsewhere.owner, elsewhere.owner.owns)


@pytest.mark.parametrize("kind", ["native", "native, often", "anyio"])
async def test_cancellation_is_forwarded_and_awaited(kind: str) -> None:
    events: list[str] = []
    started = threading.Event()

    async def stay() -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.05)
            events.append("ended there")

    with OwnerThread() as elsewhere:
        if kind == "anyio":
            async with anyio.create_task_group() as group:
                group.start_soon(run_on_owner, elsewhere.owner, stay)
                await asyncio.to_thread(started.wait, 30)
                group.cancel_scope.cancel()
        else:
            task = asyncio.create_task(run_on_owner(elsewhere.owner, stay))
            await asyncio.to_thread(started.wait, 30)
            for _ in range(5 if "often" in kind else 1):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
        assert events == ["ended there"]


async def test_a_call_fails_when_its_owner_ends() -> None:
    started = threading.Event()

    async def stay() -> None:
        started.set()
        await asyncio.sleep(30)

    with OwnerThread() as elsewhere:
        task = asyncio.create_task(run_on_owner(elsewhere.owner, stay))
        await asyncio.to_thread(started.wait, 30)
        elsewhere.stop()  # asyncio.run cancels the remaining tasks
        with pytest.raises(BrokenResourceError, match="cancelled the call that was sent to it"):
            await task
    with pytest.raises(AffinityError, match=r"has ended|is closed"):
        await run_on_owner(elsewhere.owner, stay)


async def test_a_call_to_a_loop_that_ended_fails() -> None:
    loop = asyncio.new_event_loop()

    async def make() -> Affinity:
        return Affinity.of_running_loop()

    owner = await asyncio.to_thread(loop.run_until_complete, make())
    task = asyncio.create_task(run_on_owner(owner, lambda: None))
    await asyncio.sleep(0.01)
    assert not task.done()
    loop.close()
    with pytest.raises(AffinityError, match="has ended, and the call"):
        await task
