"""Fork: in the child, the parent's resources raise ForkedProcessError, nothing hangs or warns, new devices work."""

import asyncio
import gc
import mmap
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from aioverbs import ForkedProcessError, Resource, ResourceState
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import Affinity, run_on_owner
from aioverbs._lifecycle.lifecycle import _tree
from aioverbs._providers import peer_log
from aioverbs._verbs.async_events import EventPump
from aioverbs._verbs.device import Device, open_device
from tests.capabilities import Capability, needs
from tests.core.children import in_child
from tests.manager.held_verbs import SlowVerb
from tests.manager.test_write import REMOTE, ends
from tests.pace import patience
from tests.running import run
from tests.waiting import until

LIMIT_S = int(patience(20))


async def write_once(device: Device) -> bytes:
    async with ends(device) as pair:
        await pair.write(b"hello")
        return bytes(pair.target.buffer[:5])


def test_a_copy_of_the_loop_is_not_blocked_by_a_connection_of_the_parent() -> None:
    """The connection is readable in the epoll set that the copy shares with the parent's loop."""
    near, far = socket.socketpair()
    near.setblocking(False)

    def receive() -> str:
        with pytest.raises(BlockingIOError) as caught:
            near.recv(1)
        return type(caught.value).__name__

    with near, far:
        forks.keep_from_children(near)
        far.send(b"x")
        assert in_child(receive, LIMIT_S) == "BlockingIOError"
        assert near.recv(1) == b"x"


@pytest.mark.every_way
async def test_resources_of_the_parent_raise_in_the_child(device: Device) -> None:
    async with (
        device.protection_domain() as pd,
        pd.register(4096, REMOTE) as region,
        device.thread_domain() as td,
        pd.parent_domain(td) as domain,
        pd.completion_queue(64) as cq,
        pd.queue_pair(cq) as qp,
    ):
        everything: list[Resource] = [qp, cq, domain, td, region, pd, device]
        calls: list[Callable[[], object]] = [
            lambda: device.handle,
            device.protection_domain,
            device.statistics,
            lambda: pd.handle,
            lambda: pd.completion_queue(64),
            lambda: region.buffer,
            lambda: region.rkey,
            lambda: qp.query(),
        ]
        unopened = pd.register(64)

        async def use() -> None:
            for call in calls:
                with pytest.raises(ForkedProcessError, match="was opened before the fork"):
                    call()
            for resource in [*everything, unopened]:
                with pytest.raises(ForkedProcessError, match="was opened before the fork"):
                    await resource.open()
            for resource in everything:
                assert resource.closed
                async with asyncio.timeout(patience(5)):
                    await resource.aclose()

        in_child(lambda: asyncio.run(use()))
        in_child(lambda: asyncio.run(device.aclose()))
        assert not any(resource.closed for resource in everything)


def test_each_child_opens_a_new_device() -> None:
    device = open_device("soft0")

    async def use() -> bytes:
        async with device:
            return await write_once(device)

    assert [in_child(lambda: asyncio.run(use())) for _ in range(2)] == [b"hello"] * 2
    assert asyncio.run(use()) == b"hello"


@pytest.mark.parametrize("lock", [_tree, peer_log._lock], ids=["the tree", "the log of refusals"])
def test_locks_held_by_other_threads_are_free_in_the_child(lock: AbstractContextManager[object]) -> None:
    async def use() -> bytes:
        async with open_device("soft0") as device:
            assert device.refusals() == ()
            return await write_once(device)

    def child() -> bytes:
        return asyncio.run(asyncio.wait_for(use(), patience(5)))

    async def hold() -> bytes:
        return await asyncio.to_thread(in_child, child, LIMIT_S)

    with lock:
        assert asyncio.run(hold()) == b"hello"


async def test_resources_collected_in_the_child_do_not_warn(device: Device) -> None:
    async with device.protection_domain():
        td = await device.thread_domain().open()

        def drop() -> list[str]:
            nonlocal td
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                del td
                gc.collect()
            return [str(warning.message) for warning in caught if "was still open" in str(warning.message)]

        assert in_child(drop) == []
        await td.aclose()


async def test_resources_collected_in_the_child_unmap_nothing_else(device: Device) -> None:
    """The regions stay mapped in the child; otherwise new mappings at their addresses would be unmapped with them."""
    async with device.protection_domain() as pd:
        regions = [await pd.register(1 << 16).open() for _ in range(8)]
        regions[0].buffer[:5] = b"ours."

        def drop() -> int:
            inherited = [region._memory for region in regions]
            maps = [mmap.mmap(-1, 1 << 16) for _ in range(8)]
            assert isinstance(inherited[0], mmap.mmap)
            assert inherited[0][:5] == bytes(5), "zeros"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                inherited.clear()
                regions.clear()
                gc.collect()
            for each in maps:
                each[:] = b"x" * (1 << 16)
            return len(maps)

        assert in_child(drop) == 8
        assert bytes(regions[0].buffer[:5]) == b"ours."
        for region in regions:
            await region.aclose()


@pytest.mark.every_way
async def test_calls_to_a_loop_of_the_parent_raise() -> None:
    owner = Affinity.of_running_loop()

    async def call() -> None:
        with pytest.raises(ForkedProcessError, match="was opened before the fork"):
            await asyncio.wait_for(run_on_owner(owner, print), patience(5))

    assert not owner.inherited
    assert in_child(lambda: (asyncio.run(call()), owner.inherited)) == (None, True)


@pytest.mark.every_way
@needs(Capability.FAULT_PLAN)
async def test_waiting_for_objects_of_the_parent_raises(device: Device) -> None:
    """Waiting for events and pins that only the parent receives raises an error instead of hanging."""
    async with device.protection_domain() as pd, pd.register(64) as region:
        begun, unbegun = device.events(), device.events()
        waiting = asyncio.create_task(anext(begun))
        await asyncio.sleep(0)
        device.faults.set_port(False)
        await waiting
        region.pins.add()

        async def ask() -> None:
            async with asyncio.timeout(patience(5)):
                for call in (
                    lambda: anext(begun),
                    lambda: anext(unbegun),
                    region.pins.wait,
                    region.pins.close_and_wait,
                ):
                    with pytest.raises(ForkedProcessError, match="was opened before the fork"):
                        await call()

        try:
            with EventPump.of(device.handle)._lock:  # as if a loop were about to deliver an event
                await asyncio.to_thread(in_child, lambda: asyncio.run(ask()), LIMIT_S)
        finally:
            region.pins.discard()
        await begun.aclose()


@needs(Capability.XRC_DOMAINS)
async def test_a_child_closing_a_used_xrc_domain_of_the_parent_does_nothing(device: Device) -> None:
    async with (
        device.protection_domain() as pd,
        device.xrc_domain() as xrc_domain,
        pd.completion_queue(16) as cq,
        pd.shared_receive_queue(4, xrc_domain=xrc_domain, cq=cq),
    ):
        in_child(lambda: asyncio.run(xrc_domain.aclose()))


async def test_a_child_cannot_drop_cached_registrations(device: Device) -> None:
    buffer = bytearray(64)
    async with device.protection_domain() as pd:
        async with pd.cache.region(buffer):
            pass

        async def drop() -> None:
            with pytest.raises(ForkedProcessError, match="ProtectionDomain"):
                await pd.cache.drop(buffer)

        with pd.cache._lock:
            await asyncio.to_thread(in_child, lambda: asyncio.run(drop()), LIMIT_S)
        assert pd.cache.statistics().entries == 1
        await pd.cache.drop(buffer)
        buffer += b"it can be resized"


async def test_a_child_leaves_a_block_of_a_cached_region(device: Device) -> None:
    async with device.protection_domain() as pd:
        block = pd.cache.region(bytearray(64))
        await block.__aenter__()

        async def leave() -> None:
            await block.__aexit__(None, None, None)

        with pd.cache._lock:
            await asyncio.to_thread(in_child, lambda: asyncio.run(leave()), LIMIT_S)
        await block.__aexit__(None, None, None)


# Garbage collection in a fork handler: uvloop registers its handler before aioverbs, or after it.
COLLECTED_IN_BETWEEN = """
import asyncio, gc, os, sys
import uvloop

async def spawn():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    return await process.wait()

async def main():
    first = await spawn() if {before} else 0
    import aioverbs
    async with aioverbs.open_device("soft0") as device, device.protection_domain() as pd:
        allocator = aioverbs.ArenaAllocator()
        async with pd.parent_domain(allocator=allocator) as parent, parent.completion_queue(16) as cq:
            pass
        gc.disable()
        round = [allocator, parent, cq]
        round.append(round)
        del allocator, parent, cq, round
        os.register_at_fork(after_in_child=gc.collect)
        print(first, await spawn())

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("before", [False, True], ids=["after aioverbs", "before aioverbs"])
def test_collection_while_a_loop_forks(before: bool) -> None:
    code = COLLECTED_IN_BETWEEN.format(before=before)
    done = run([sys.executable, "-P", "-c", code], patience(50))
    assert (done.returncode, done.stdout) == (0, "0 0\n")


def test_a_child_does_not_wait_for_a_verb_in_a_thread_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's copies of the tasks that wait for it end when they are cancelled, as at the end of the child."""
    with asyncio.Runner() as runner:

        async def begin() -> tuple[Device, SlowVerb, list[asyncio.Task[None]]]:
            device = await open_device("soft0").open()
            slow = SlowVerb(device, monkeypatch)
            domain = await device.resource_domain().open()
            qp = await domain.queue_pair(await domain.completion_queue(64).open()).open()
            establishing = asyncio.create_task(qp.establish(qp.local_endpoint()))
            await until(lambda: slow.inside)
            closing = asyncio.create_task(qp.aclose())
            await until(lambda: qp.state is ResourceState.CLOSING)
            return device, slow, [establishing, closing]

        async def end() -> list[bool]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            return [task.cancelled() for task in tasks]

        async def close() -> None:
            slow.release()
            await asyncio.wait(tasks)
            assert tasks[1].exception() is None
            with pytest.warns(ResourceWarning, match="still open"):
                await device.aclose()

        device, slow, tasks = runner.run(begin())
        assert in_child(lambda: runner.run(end()), LIMIT_S) == [True, True]
        runner.run(close())


# A task forks a child that ends by an exception: in the child, asyncio cancels and awaits the parent's tasks.
# Meanwhile events for the parent's loop wake the child's copy of the loop.
ENDS_INSIDE_OF_A_LOOP = """
import asyncio, os, sys
import aioverbs

ACCESS = aioverbs.AccessFlags.LOCAL_WRITE | aioverbs.AccessFlags.REMOTE_WRITE

async def clean_up_slowly():
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.1)

def wake(device):
    device.faults.set_port(False)
    device.faults.set_port(True)

async def main():
    async with (
        aioverbs.open_device("soft0") as device,
        device.resource_domain(message_model=aioverbs.MessageModel[sys.argv[1]]) as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, ACCESS) as region,
        domain.queue_pair(cq) as qp,
    ):
        qp.connect(qp.local_endpoint(), ACCESS)
        cleaning = asyncio.create_task(clean_up_slowly())
        events = device.events()
        waiting = asyncio.create_task(anext(events))
        receiving = asyncio.create_task(asyncio.wait_for(qp.receive(region[:8]), 30))
        for _ in range(10):
            await asyncio.sleep(0)      # until the completion queue is armed
        write = qp.write(region[:8], region.remote()[8:16])
        wake(device)
        child = os.fork()
        if not child:
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        if sys.argv[2:]:
            os._exit(0)
        await write
        print((await waiting).event_type.name, (await anext(events)).event_type.name)
        waiting = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        wake(device)
        print((await asyncio.wait_for(waiting, 30)).event_type.name)
        await qp.send(region[:8])
        print((await receiving).byte_len)
        await events.aclose()
        cleaning.cancel()

with asyncio.Runner(loop_factory={factory}) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("model", ["DEFAULT", "FORCE_LOW_LATENCY"])
def test_a_child_that_ends_inside_the_parents_loop_prints_nothing(model: str) -> None:
    """Events still wake the parent's loop afterwards."""
    code = ENDS_INSIDE_OF_A_LOOP.format(factory="None")
    done = run([sys.executable, "-P", "-W", "ignore", "-c", code, model], patience(50))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["3", "PORT_ERR PORT_ACTIVE", "PORT_ERR", "8"]


def test_a_child_that_ends_inside_a_uvloop_prints_nothing() -> None:
    """The parent exits at once: libuv, closing the loop in the child, removes the parent's descriptors from epoll."""
    code = ENDS_INSIDE_OF_A_LOOP.format(factory="__import__('uvloop').new_event_loop")
    done = run([sys.executable, "-P", "-W", "ignore", "-c", code, "DEFAULT", "and end"], patience(50))
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
