"""Two processes: every operation, every status, and the effects of killing one of them."""

import asyncio
import functools
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    MessageModel,
    QueuePair,
    RemoteRegion,
    WcStatus,
    WorkCompletionError,
)
from aioverbs._core.data_path.data_path import Operation
from tests.fabric.peer import SIZE, pattern
from tests.fabric.two import End, PeerProcess, end, peer_process
from tests.pace import patience

QUICK: dict[str, Any] = {"timeout": 10, "retry_cnt": 2}  # 4 ms, three times
every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


@every_model
async def test_operations_reach_another_process(model: MessageModel, direct: bool) -> None:
    async with peer_process(model) as there, end(model) as here:
        (qp,) = here.qps
        await there.connect(qp)
        local, remote = here.region, there.region
        back = qp.receive(local[:64])
        local.buffer[100:105] = b"hello"
        await qp.send(local[100:105])
        assert bytes((await back).data) == b"hello"
        for size in (1, 8, 4096, 131072, 131073, SIZE):
            local.buffer[:size] = random.Random(size).randbytes(size)
            written = bytes(local.buffer[:size])
            await qp.write(local[:size], remote[:size])
            assert await there.read_memory(0, min(size, 1000)) == written[:1000]
            local.buffer[:size] = bytes(size)
            await qp.read(local[:size], remote[:size])
            assert bytes(local.buffer[:size]) == written
        await qp.write(local[:8], remote[64:72])
        before = int.from_bytes(local.buffer[:8], sys.byteorder)
        assert await qp.fetch_and_add(remote[64:72], 5) == before
        assert await qp.compare_and_swap(remote[64:72], (before + 5) % 2**64, 7) == (before + 5) % 2**64
        assert await there.read_memory(64, 8) == (7).to_bytes(8, sys.byteorder)
        (peer,) = (each for each in here.device.peers() if each.connected_by_us)
        assert (peer.process_id, peer.transport, peer.direct) == (there.process.pid, "unix", direct)
        assert qp.statistics().sends.failed == ()


REFUSED: dict[str, tuple[WcStatus, Callable[[QueuePair, End, PeerProcess], Operation[Any]]]] = {
    "another key": (
        WcStatus.REM_ACCESS_ERR,
        lambda qp, here, there: qp.write(
            here.region[:8], RemoteRegion(there.region.address, 8, there.region.rkey ^ 0x100)
        ),
    ),
    "beyond the end": (
        WcStatus.REM_ACCESS_ERR,
        lambda qp, here, there: qp.read(
            here.region[:8], RemoteRegion(there.region.address + SIZE - 4, 8, there.region.rkey)
        ),
    ),
    "large, beyond the end": (
        WcStatus.REM_ACCESS_ERR,
        lambda qp, here, there: qp.write(here.region, RemoteRegion(there.region.address + 1, SIZE, there.region.rkey)),
    ),
    "too long for its receive": (
        WcStatus.REM_INV_REQ_ERR,
        lambda qp, here, there: qp.send(here.region[:5000]),
    ),
}


@pytest.mark.every_way
async def test_requests_refused_by_the_other_process_fail(direct: bool) -> None:
    async with peer_process() as there, end(queue_pairs=len(REFUSED)) as here:
        for qp, (name, (status, post)) in zip(here.qps, REFUSED.items(), strict=True):
            await there.connect(qp)
            failed, behind = post(qp, here, there), qp.write(here.region[:8], there.region[:8])
            with pytest.raises(WorkCompletionError) as caught:
                await failed
            assert caught.value.status is status, name
            with pytest.raises(WorkCompletionError) as flushed:
                await behind
            assert flushed.value.status is WcStatus.WR_FLUSH_ERR, name
            assert await there.read_memory(0, 64) == pattern(0, 64)
            assert len(here.region.pins) == 0


async def test_messages_wait_for_receives_of_another_process() -> None:
    """Post more messages than the sixteen receives posted there: the rest wait until receives are posted again."""
    async with peer_process() as there, end() as here:
        (qp,) = here.qps
        await there.connect(qp, rnr_retry=7)
        echoes = [qp.receive(here.region[64 * n : 64 * n + 8]) for n in range(60)]
        sent = [qp.send(here.region[4096 + n : 4097 + n]) for n in range(60)]
        for message in sent:
            await message
        for echo in echoes:
            await echo


async def test_a_request_to_a_killed_process_fails() -> None:
    async with peer_process() as there, end() as here:
        (qp,) = here.qps
        await there.connect(qp, **QUICK)
        there.kill()
        await there.process.wait()
        with pytest.raises(WorkCompletionError) as caught:
            await qp.write(here.region[:8], there.region[:8])
        assert caught.value.status is WcStatus.RETRY_EXC_ERR


async def test_a_process_whose_loop_is_busy_is_served_by_its_thread() -> None:
    """The peer's loop, which serves requests when woken up, is blocked: the device's thread serves them instead."""
    async with peer_process() as there, end() as here:
        (qp,) = here.qps
        await there.connect(qp)
        back = qp.receive(here.region[:8])
        await qp.send(here.region[8:16])
        await back
        assert await there.command("sleep") == "asleep"
        for _ in range(20):
            await qp.write(here.region[:8], there.region[:8])
        assert await there.command("awake") == "awake"


def stop_process(pid: int) -> None:
    """Stop a child, and wait until it is stopped: its running thread goes on for a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


@pytest.mark.stops_processes
async def test_a_request_to_a_stopped_process_fails_and_is_not_executed_later() -> None:
    """The peer is silent for longer than all retransmissions take; afterwards it does not execute the request."""
    async with peer_process() as there, end(queue_pairs=2) as here:
        first, second = here.qps
        await there.connect(second)
        await second.write(here.region[:8], there.region[:8])  # both devices have started, and are linked
        await there.connect(first, timeout=14, retry_cnt=2)  # 67 ms, three times
        stop_process(there.process.pid)
        try:
            with pytest.raises(WorkCompletionError) as caught:
                await first.read(here.region, there.region)
            assert caught.value.status is WcStatus.RETRY_EXC_ERR
        finally:
            there.process.send_signal(signal.SIGCONT)
        here.region.buffer[:] = bytes(SIZE)
        await second.write(here.region[:8], there.region[:8])
        assert bytes(here.region.buffer[8:]) == bytes(SIZE - 8), "the failed read was executed later"


async def run_traffic(here: End, there: PeerProcess, qp: QueuePair, seed: int) -> Exception | None:
    """Post random requests until one fails, and return the failure."""
    chance = random.Random(seed)
    local, remote = here.region, there.region
    half = SIZE // 2
    while True:
        size = chance.choice([1, 8, 4096, 100_000, 1 << 20])
        kinds: list[Callable[[], Operation[Any]]] = [
            functools.partial(qp.write, local[:size], remote[half : half + size]),
            functools.partial(qp.read, local[half : half + size], remote[:size]),
            functools.partial(qp.fetch_and_add, remote[half : half + 8], 1),
        ]
        operations = [chance.choice(kinds)() for _ in range(chance.randrange(1, 20))]
        results = await asyncio.gather(*operations, return_exceptions=True)
        for result in results:
            if isinstance(result, WorkCompletionError | BrokenResourceError):
                return result
            assert not isinstance(result, BaseException), result


async def check_kill(seed: int, model: MessageModel) -> None:
    """Kill the other process at a random moment: all waiters end, and other connections are unaffected."""
    chance = random.Random(seed)
    async with peer_process(model) as victim, peer_process(model) as survivor, end(model, queue_pairs=4) as here:
        for qp in here.qps[:3]:
            await victim.connect(qp, **QUICK)
        await survivor.connect(here.qps[3])
        tasks = [asyncio.create_task(run_traffic(here, victim, qp, chance.getrandbits(32))) for qp in here.qps[:3]]
        await asyncio.sleep(chance.random() * 0.05)
        victim.kill()
        failures = await asyncio.wait_for(asyncio.gather(*tasks), patience(20))
        assert all(isinstance(each, WorkCompletionError | BrokenResourceError) for each in failures), failures
        statuses = {each.status for each in failures if isinstance(each, WorkCompletionError)}
        assert statuses <= {WcStatus.RETRY_EXC_ERR, WcStatus.WR_FLUSH_ERR}
        here.region.buffer[:SIZE] = bytes(SIZE)
        await here.qps[3].read(here.region, survivor.region)
        assert bytes(here.region.buffer) == pattern(0, SIZE)
        assert len(here.region.pins) == 0


@pytest.mark.parametrize(("seed", "model"), list(enumerate(MessageModel)))
async def test_killing_the_peer_ends_all_waiters(seed: int, model: MessageModel, direct: bool) -> None:
    await check_kill(seed, model)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.every_way
async def test_killing_the_peer_five_hundred_times_ends_all_waiters(direct: bool) -> None:
    for seed in range(100, 600):
        await check_kill(seed, random.Random(seed).choice(list(MessageModel)))


@pytest.mark.every_way
async def test_memory_deregistered_during_a_large_read_is_not_written_to(direct: bool) -> None:
    """Deregister by the handle during reads: the peer no longer writes to the memory, and the read fails."""
    memory = bytearray(b"\xaa" * SIZE)
    async with peer_process() as there, end() as here:
        (qp,) = here.qps
        await there.connect(qp)
        async with here.domain.register(memory, AccessFlags.LOCAL_WRITE) as region:
            stop_process(there.process.pid)
            reads = [qp.read(region, there.region) for _ in range(8)]
            region.handle.destroy()
            there.process.send_signal(signal.SIGCONT)
            results = await asyncio.gather(*reads, return_exceptions=True)
        statuses = [each.status for each in results if isinstance(each, WorkCompletionError)]
        assert statuses == [WcStatus.LOC_PROT_ERR, *7 * [WcStatus.WR_FLUSH_ERR]]
        assert memory == b"\xaa" * SIZE
