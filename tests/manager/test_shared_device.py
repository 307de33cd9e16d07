"""The shared device: one for all loops and threads of a process, its own in a forked child, closed at the end."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytest_asyncio

from aioverbs import (
    ClosedResourceError,
    Device,
    DeviceNotFoundError,
    EventType,
    ResourceState,
    WorkerPool,
    shared_device,
)
from aioverbs._core.handles import handles
from aioverbs._lifecycle.resource import open_now
from tests.core.children import in_child
from tests.garbage import collect_garbage
from tests.listening import own_address
from tests.pace import patience
from tests.waiting import until

LIMIT_S = int(patience(20))


@pytest_asyncio.fixture(autouse=True)
async def closed_afterwards(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Close the device at the end of the test, so that the next one does not get it."""
    monkeypatch.setenv("AIOVERBS_DEVICE", "soft0")
    monkeypatch.delenv("AIOVERBS_SOFT_ADDRESS", raising=False)
    yield
    for device in {shared_device(), shared_device("soft0")}:
        await device.aclose()
    assert handles.open_handles() == []


async def use_here() -> Device:
    """Make a queue on the shared device, on the running loop."""
    device = shared_device()
    async with device.loop_domain() as domain, domain.completion_queue(8):
        return device


async def test_all_loops_and_threads_get_the_same_open_device() -> None:
    together = threading.Barrier(8)

    def use() -> Device:
        together.wait()
        return asyncio.run(use_here())

    with ThreadPoolExecutor(8) as threads:
        devices = await asyncio.gather(*(asyncio.get_running_loop().run_in_executor(threads, use) for _ in range(8)))
    here = await use_here()
    assert set(devices) == {here}
    assert (here.name, here.state) == ("soft0", ResourceState.OPEN)
    assert [each.name for each in handles.open_handles() if isinstance(each, handles.Context)] == ["soft0"]


def test_no_event_loop_is_needed() -> None:
    assert shared_device() is shared_device("soft0")


async def test_names_of_one_device_return_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shared_device()
    assert shared_device("soft0") is plain
    monkeypatch.setenv("AIOVERBS_SOFT_ADDRESS", f"{own_address()}:7471")
    named = shared_device("soft0")
    assert named is not plain
    assert named.name == f"soft0@{own_address()}:7471"
    assert shared_device(named.name) is named
    assert shared_device() is plain, "the first call has chosen"
    await named.aclose()


async def test_an_unknown_name_opens_nothing() -> None:
    with pytest.raises(DeviceNotFoundError, match="no_such_0"):
        shared_device("no_such_0")
    assert handles.open_handles() == []


async def test_a_closed_device_is_replaced() -> None:
    first = shared_device()
    await first.aclose()
    second = shared_device()
    assert second is not first
    assert second.state is ResourceState.OPEN


@pytest.mark.parametrize("name", [None, "soft0"])
async def test_a_lost_device_is_replaced(name: str | None) -> None:
    lost = shared_device(name)
    lost.faults.lose_device()
    device = shared_device(name)
    assert device is not lost
    assert shared_device(name) is device
    async with device.loop_domain() as domain, domain.completion_queue(8):
        pass
    assert (await anext(lost.events())).event_type is EventType.DEVICE_FATAL, "the listener comes later"
    await lost.aclose()


async def test_a_lost_device_is_closed_when_nothing_refers_to_it(recwarn: pytest.WarningsRecorder) -> None:
    shared_device().faults.lose_device()
    device = shared_device()
    collect_garbage()
    await until(lambda: len(handles.open_handles()) == 1)
    assert handles.open_handles() == [device.handle]
    assert not recwarn


async def test_a_call_in_a_signal_handler_during_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from aioverbs._verbs import shared_device as module

    inner = []

    def interrupted(device: Device) -> None:
        monkeypatch.setattr(module, "open_now", open_now)
        open_now(device)
        inner.append(shared_device())

    monkeypatch.setattr(module, "open_now", interrupted)
    outer = shared_device()
    assert inner == [outer]
    assert shared_device() is outer
    await until(lambda: len(handles.open_handles()) == 1)


async def test_a_block_says_that_the_device_is_open() -> None:
    with pytest.raises(ClosedResourceError, match=r"<Device soft0 .* use it as it is, without `async with`"):
        async with shared_device():
            pass
    assert shared_device().state is ResourceState.OPEN


async def test_a_dropped_reference_closes_nothing(recwarn: pytest.WarningsRecorder) -> None:
    shared_device()
    assert len(handles.open_handles()) == 1
    assert not recwarn


def test_a_forked_child_gets_its_own_device() -> None:
    device = shared_device()

    def use() -> tuple[bool, bool, str]:
        own = shared_device()
        asyncio.run(use_here())
        return own is device, device.closed, own.name

    assert in_child(use, LIMIT_S) == (False, True, "soft0")
    assert in_child(lambda: in_child(use, LIMIT_S), LIMIT_S) == (False, True, "soft0")
    assert shared_device() is device
    assert device.state is ResourceState.OPEN


def test_a_fork_during_the_first_call_in_another_thread() -> None:
    """The lock of the parent's thread is not held in the child."""
    from aioverbs._verbs import shared_device as module

    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with module._lock:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_child(lambda: shared_device().name, LIMIT_S) == "soft0"
    finally:
        go.set()
        thread.join()


def name_in_worker() -> tuple[int, str]:
    return id(shared_device()), shared_device().name


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
async def test_workers_of_a_pool_use_it(processes: bool) -> None:
    device = shared_device()
    async with WorkerPool(device, 1, processes=processes) as pool:
        number, name = await pool.run(name_in_worker)
    assert name == "soft0"
    assert (number == id(device)) != processes


AT_EXIT = """
import asyncio, atexit, sys, threading

def report():
    from aioverbs._core.handles.handles import open_handles
    print("open at the end:", [type(each).__name__ for each in open_handles()])

atexit.register(report)
import aioverbs

async def use():
    domain = await aioverbs.shared_device("soft0").resource_domain().open()
    kept.append(await domain.completion_queue(8).open())
    return domain

kept = []
{}
"""
ENDS = {
    "nothing else open": ('aioverbs.shared_device("soft0")', "[]"),
    "resources of a closed loop": ("kept.append(asyncio.run(use()))", "[]"),
    "resources of a thread": ("t = threading.Thread(target=asyncio.run, args=[use()]); t.start(); t.join()", "[]"),
    "an exception": ('aioverbs.shared_device("soft0"); raise SystemExit(0)', "[]"),
    "a daemon thread's running loop": (
        """
ready = threading.Event()
async def forever():
    kept.append(await use()); ready.set(); await asyncio.sleep(1000)
threading.Thread(target=asyncio.run, args=[forever()], daemon=True).start()
ready.wait()""",
        "[",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_the_process_closes_it(end: str) -> None:
    code, left = ENDS[end]
    command = [sys.executable, "-P", "-c", AT_EXIT.format(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"open at the end: {left}")


def test_a_device_that_cannot_be_closed_at_the_end_keeps_no_other_open() -> None:
    code = """
async def fail():
    raise OSError("no")

_, second, _ = map(aioverbs.shared_device, ("soft0", "soft0@127.0.0.1:0", "soft0@127.0.0.2:0"))
second.aclose = fail
"""
    command = [sys.executable, "-P", "-c", AT_EXIT.format(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd="/")
    assert done.stdout == "open at the end: ['Context']\n"
    assert "OSError: no" in done.stderr
