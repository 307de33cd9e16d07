"""Network failures during traffic: every waiter ends, with the right status, and nothing is left.

Statuses are those of soft-RoCE: RETRY_EXC_ERR for an unreachable peer, LOC_QP_OP_ERR if the own interface has no route
any more. A deleted device stays until its users close it.
"""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    Device,
    EventType,
    MemoryRegion,
    QueuePair,
    Received,
    WcStatus,
    WorkCompletionError,
    open_device,
)
from tests.rdma import links
from tests.waiting import until

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(180)]

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
SIZE = 1 << 16
LENGTH = 20_000  # bytes of a write: several packets
WINDOW = 16
OURS = "av_faults"  # an interface, and the soft-RoCE link on it
PATIENCE_S = 30.0


@dataclass
class End:
    """A device with a queue pair and memory."""

    device: Device
    region: MemoryRegion
    qp: QueuePair


@contextlib.asynccontextmanager
async def an_end(name: str) -> AsyncIterator[End]:
    async with (
        open_device(name) as device,
        device.resource_domain() as domain,
        domain.register(SIZE, ACCESS) as region,
        domain.completion_queue(256) as cq,
        domain.queue_pair(cq) as qp,
    ):
        yield End(device, region, qp)


def connect(near: End, far: End, timeout: int = 14) -> None:
    near.qp.connect(far.qp.local_endpoint(), ACCESS, timeout=timeout)
    far.qp.connect(near.qp.local_endpoint(), ACCESS, timeout=timeout)


def reconnect(near: End, far: End) -> None:
    """Reset and reconnect both ends."""
    for end in (near, far):
        end.qp.to_reset()
    connect(near, far)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that nothing is left: objects of the kernel, and descriptors of devices and of their events."""
    links.need_pair()
    before = links.kernel_objects(), descriptors()
    yield
    assert (links.kernel_objects(), descriptors()) == before


def descriptors() -> list[str]:
    """Return the descriptors of devices and of their events. librdmacm keeps its own until the process ends."""
    targets = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(target for target in targets if "infiniband" in target)


async def run_shell(command: str) -> str:
    """Run a command in a thread, while the loop continues."""
    return await asyncio.to_thread(links.run, command)


async def write(near: End, far: End, number: int) -> WcStatus:
    """Write once; return the status."""
    start = number % 2 * LENGTH
    try:
        await near.qp.write(near.region[start : start + LENGTH], far.region.remote()[start : start + LENGTH])
    except WorkCompletionError as error:
        return error.status
    return WcStatus.SUCCESS


async def write_all(near: End, far: End) -> list[WcStatus]:
    """Write a window of messages; return the statuses."""
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.gather(*(write(near, far, number) for number in range(WINDOW)))


async def check_flushed(waiting: "asyncio.Future[Received]") -> None:
    """Check that a receive was flushed, by ERR or by closing its queue pair."""
    with pytest.raises(WorkCompletionError) as caught:
        await asyncio.wait_for(waiting, PATIENCE_S)
    assert caught.value.status is WcStatus.WR_FLUSH_ERR


async def wait_for_event(device: Device, wanted: EventType) -> None:
    """Wait for an event of the port."""
    async with asyncio.timeout(PATIENCE_S):
        async for found in device.events():
            if found.event_type is wanted:
                assert found.port_num == 1
                return


BROKEN = [WcStatus.RETRY_EXC_ERR] + [WcStatus.WR_FLUSH_ERR] * (WINDOW - 1)


@pytest.mark.parametrize(
    "rules", [("loss", "5%"), ("delay", "3ms", "2ms"), ("delay", "1ms", "loss", "5%")], ids=" ".join
)
async def test_loss_and_delay(rules: tuple[str, ...]) -> None:
    """Messages arrive once, in order and undamaged, despite loss and delay."""
    count = 100
    async with an_end("rxe0") as near, an_end("rxe1") as far:
        connect(near, far)
        with links.netem(*rules):
            received = [far.qp.receive(far.region[number * 64 : number * 64 + 64]) for number in range(WINDOW)]
            for number in range(count):
                place = number % WINDOW * 64
                near.region.buffer[place : place + 64] = number.to_bytes(64, "little")
                sent = near.qp.send(near.region[place : place + 64])
                message = await asyncio.wait_for(received[number % WINDOW], PATIENCE_S)
                assert int.from_bytes(message.data, "little") == number
                received[number % WINDOW] = far.qp.receive(far.region[place : place + 64])
                await asyncio.wait_for(sent, PATIENCE_S)
            near.region.buffer[:LENGTH] = os.urandom(LENGTH)
            assert await write_all(near, far) == [WcStatus.SUCCESS] * WINDOW
            assert far.region.buffer[:LENGTH] == near.region.buffer[:LENGTH]
            assert (links.dropped() > 0) is ("loss" in rules)
        sends = near.qp.statistics().sends
        assert (sends.posted, sends.completed, sends.in_flight, sends.failed) == (count + WINDOW, count + WINDOW, 0, ())


async def test_losing_all_packets_breaks_the_connection() -> None:
    """The connection breaks; the loop, other connections of the device and later ones are unaffected."""
    async with an_end("rxe0") as near, an_end("rxe1") as far, an_end("rxe0") as left, an_end("rxe0") as right:
        connect(near, far)
        connect(left, right)
        waiting = asyncio.ensure_future(far.qp.receive(far.region[:64]))
        with links.netem("loss", "100%"):
            started = time.monotonic()
            broken, fine = await asyncio.gather(write_all(near, far), write_all(left, right))
            assert 0.2 < time.monotonic() - started < 10
            assert broken == BROKEN
            assert fine == [WcStatus.SUCCESS] * WINDOW  # these packets do not leave the device
        with pytest.raises(BrokenResourceError, match="RETRY_EXC_ERR"):
            await near.qp.write(near.region[:8], far.region.remote()[:8])
        assert not waiting.done()  # the far end has not noticed anything
        far.qp.to_error()
        await check_flushed(waiting)
        near.qp.query()
        reconnect(near, far)
        assert await write_all(near, far) == [WcStatus.SUCCESS] * WINDOW


async def test_a_short_link_failure_is_survived() -> None:
    """Messages sent while the link is down are sent again; listeners get events."""
    async with an_end("rxe0") as near, an_end("rxe1") as far:
        connect(near, far, timeout=19)  # a timeout of 2 s, seven times
        stop = asyncio.Event()

        async def traffic() -> int:
            count = 0
            while not stop.is_set():
                assert await write_all(near, far) == [WcStatus.SUCCESS] * WINDOW
                count += 1
            return count

        running = asyncio.create_task(traffic())
        events = [asyncio.create_task(wait_for_event(end.device, EventType.PORT_ERR)) for end in (near, far)]
        try:
            await asyncio.to_thread(links.down)
            await asyncio.gather(*events)
            events = [asyncio.create_task(wait_for_event(end.device, EventType.PORT_ACTIVE)) for end in (near, far)]
        finally:
            await asyncio.to_thread(links.up)
        await asyncio.gather(*events)
        stop.set()
        assert await running >= 1
        assert near.qp.statistics().sends.failed == ()


async def test_the_link_stays_down() -> None:
    async with an_end("rxe0") as near, an_end("rxe1") as far:
        connect(near, far)
        await write_all(near, far)
        waiting = asyncio.ensure_future(far.qp.receive(far.region[:64]))
        try:
            await asyncio.to_thread(links.down)
            broken, unroutable = await asyncio.gather(write_all(near, far), write(far, near, 0))
        finally:
            await asyncio.to_thread(links.up)
        assert broken == BROKEN
        assert unroutable is WcStatus.LOC_QP_OP_ERR
        await check_flushed(waiting)
        near.qp.query()
        reconnect(near, far)
        assert await write_all(near, far) == [WcStatus.SUCCESS] * WINDOW


@contextlib.contextmanager
def extra_link() -> Iterator[None]:
    """Create a soft-RoCE link over an interface of its own, which tests may delete."""
    links.run(f"ip link add {OURS} type dummy && ip address add 10.78.0.1/24 dev {OURS} && ip link set {OURS} up")
    try:
        links.run(f"rdma link add {OURS} type rxe netdev {OURS}")
        gid = Path(f"/sys/class/infiniband/{OURS}/ports/1/gids/1")
        deadline = time.monotonic() + PATIENCE_S
        while "ffff" not in gid.read_text():  # the GID appears slightly later than the link
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield
    finally:
        links.run(f"ip link delete {OURS} || true")
        deadline = time.monotonic() + PATIENCE_S
        while gid.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("command", [f"rdma link delete {OURS}", f"ip link delete {OURS}"])
async def test_the_device_is_deleted(command: str) -> None:
    """Deleting the link waits until the device is closed, and traffic continues. Without the interface it ends."""
    stop = asyncio.Event()

    async def traffic(near: End, far: End) -> tuple[int, WcStatus]:
        """Write until told to stop; return the number of successful writes, and the last status."""
        count, status = 0, WcStatus.SUCCESS
        while not stop.is_set() and status is WcStatus.SUCCESS:
            status = await write(near, far, count)
            count += 1
        return count, status

    with extra_link():
        async with an_end(OURS) as near, an_end(OURS) as far:
            connect(near, far)
            waiting = asyncio.ensure_future(far.qp.receive(far.region[:64]))
            running = asyncio.create_task(traffic(near, far))
            await asyncio.sleep(0.3)
            deleting = await asyncio.create_subprocess_shell(command, stderr=subprocess.DEVNULL)
            await asyncio.sleep(0.5)
            before = near.qp.statistics().sends.completed
            await asyncio.sleep(0.5)
            if command.startswith("rdma"):
                assert deleting.returncode is None
                assert near.qp.statistics().sends.completed > before
                stop.set()  # without its interface, the traffic ends by itself
            count, status = await asyncio.wait_for(running, PATIENCE_S)
            assert count > 1
            assert status is (WcStatus.SUCCESS if command.startswith("rdma") else WcStatus.LOC_QP_OP_ERR)
            assert not waiting.done()
        await check_flushed(waiting)
        assert await asyncio.wait_for(deleting.wait(), PATIENCE_S) == 0
        sysfs_entry = Path("/sys/class/infiniband", OURS)
        if command.startswith("ip"):  # then the kernel deletes the link
            await until(lambda: not sysfs_entry.exists())
        assert not sysfs_entry.exists()  # noqa: ASYNC240  # sysfs is memory: nobody waits for it
