"""Worker processes: calls and results, cancellation, deaths and replacement."""

import asyncio
import errno
import os
import pickle
import resource
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from aioverbs import (
    AffinityError,
    BrokenResourceError,
    ClosedResourceError,
    ForkedProcessError,
    WorkerDiedError,
    WorkerPool,
)
from aioverbs._lifecycle.cross_loop import CrossLoopFuture
from aioverbs._pool.placement import rendezvous
from aioverbs._pool.pool import send_socket_call, socket_call_factory_for
from aioverbs._pool.process_protocol import receive_socket, send_socket
from aioverbs._pool.supervisor import PendingCall
from tests.core.children import in_child
from tests.pace import patience
from tests.pool import handlers, work
from tests.pool.processes import alive, other_loop, processes
from tests.pool.test_calls import cancelled_before
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest.fixture
def pool(process_pool: WorkerPool) -> WorkerPool:
    return process_pool


@pytest.mark.every_way
async def test_each_worker_is_a_process_with_a_loop_and_a_domain(pool: WorkerPool) -> None:
    statistics = pool.statistics()
    ids = processes(pool)
    assert len({*ids, os.getpid()}) == 3
    assert [(each.ready, each.native) for each in statistics.workers] == [(True, True)] * 2
    for worker, process_id in enumerate(ids):
        for function in (work.describe_worker, work.describe_worker_later):
            assert await pool.run(function, worker=worker) == (process_id, worker, other_loop(), True)
    assert await pool.map(work.write, [b"hello", b"x" * 4096]) == [b"hello", b"x" * 4096]
    assert [each[1] for each in [await pool.run(work.describe_worker) for _ in range(4)]] in ([0, 1] * 2, [1, 0] * 2)
    assert (await pool.run(work.describe_worker, key="a"))[1] == rendezvous("a", range(2))
    large = bytes(5_000_000)
    assert await pool.run(bytes, large, worker=1) == large


async def test_memory_registered_once_serves_all_workers(pool: WorkerPool) -> None:
    """Workers that replace others as well."""
    assert all(each.shares_pd for each in pool.statistics().workers)
    async with pool.pd.register(4096, work.ACCESS, pool.pd.shared_memory) as region:
        for at, worker in ((0, 0), (8, 1)):
            await pool.run(work.write_to_remote, region.remote()[at : at + 8], b"worker %d" % worker, worker=worker)
        with pytest.raises(WorkerDiedError):
            await pool.run(work.kill_own_process, worker=0)
        await pool.run(work.write_to_remote, region.remote()[16:24], b"the next", worker=0)
        assert bytes(region.buffer[:24]) == b"worker 0worker 1the next"


async def test_pickling_of_calls_results_and_exceptions(pool: WorkerPool) -> None:
    deaths = pool.statistics().deaths
    work.VARIABLE.set("here")
    assert await pool.run(work.variable) == "none"
    with pytest.raises(work.PicklableError, match="there") as caught:
        await pool.run(work.fail, "own")
    assert "in the worker process:\nTraceback" in caught.value.__notes__[0]
    assert 'raise PicklableError("there")' in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"UnpicklableError: 1 and 2 \(the original exception cannot be pickled"):
        await pool.run(work.fail, "stubborn")
    with pytest.raises((pickle.PicklingError, AttributeError)) as caught_there:
        await pool.run(work.fail, "lambda")
    assert "results of worker processes are pickled" in caught_there.value.__notes__[0]
    with pytest.raises(TypeError, match="two") as caught_result:
        await pool.run(work.fail, "returned")
    assert caught_result.value.__notes__ == ["the result of a worker process cannot be unpickled"]
    with pytest.raises((pickle.PicklingError, AttributeError)) as caught_here:
        await pool.run(lambda: None)
    assert "worker processes take pickled calls" in caught_here.value.__notes__[0]
    assert ([each.calls for each in pool.statistics().workers], pool.statistics().deaths) == ([0, 0], deaths)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("textless", r"TextlessError: \(no text: its __str__ failed\) \(the original exception cannot be pickled"),
        ("disguised", r"DisguisedError: one \(the original exception cannot be pickled: it is unpickled as 'one'"),
        ("picky", "the note cannot be added"),
        ("picky, pickling", "the note cannot be added"),
    ],
)
async def test_calls_end_whatever_exception_a_function_raises(pool: WorkerPool, kind: str, text: str) -> None:
    deaths = pool.statistics().deaths
    call = pool.start_soon(work.fail, kind)
    async with asyncio.timeout(patience(20)):
        with pytest.raises(RuntimeError, match=text) as caught:
            await call.wait()
    assert "in the worker process:\nTraceback" in caught.value.__notes__[0]
    assert pool.statistics().deaths == deaths


async def test_a_call_ends_if_unpickling_its_result_raises_an_exception_without_notes(pool: WorkerPool) -> None:
    async with asyncio.timeout(patience(20)):
        with pytest.raises(work.PickyError):
            await pool.start_soon(work.fail, "picky, unpickling").wait()


async def test_a_call_ends_if_its_result_cannot_be_sent(pool: WorkerPool) -> None:
    call = pool.start_soon(work.return_without_memory)
    async with asyncio.timeout(patience(20)):
        with pytest.raises(MemoryError, match="no memory for the frame"):
            await call.wait()


def send_to_worker(pool: WorkerPool, sock: socket.socket) -> tuple[PendingCall, CrossLoopFuture[str]]:
    """Send a call with a socket to the same worker as all others."""
    future: CrossLoopFuture[str] = CrossLoopFuture(asyncio.get_running_loop())
    payload = socket_call_factory_for(pool, work.close_socket)(sock, print)
    return send_socket_call(pool, payload, future, "the same worker"), future


async def test_a_closed_socket_does_not_keep_others_from_being_sent(pool: WorkerPool) -> None:
    near, far = socket.socketpair()
    with far:
        closed = socket.socket()
        closed.close()
        _, failing = send_to_worker(pool, closed)
        call, sent = send_to_worker(pool, near)
        async with asyncio.timeout(patience(20)):
            assert await sent.wait(call.withdraw) == "closed"
            with pytest.raises(ClosedResourceError, match="closed before it was sent"):
                await failing.wait(call.withdraw)


async def test_sending_of_sockets_is_retried_by_one_timer(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[None] = []

    def fail(*_: socket.socket) -> None:
        attempts.append(None)
        raise BlockingIOError(errno.EAGAIN, "the channel is full")

    with monkeypatch.context() as patch:
        patch.setattr("aioverbs._pool.process_worker.send_socket", fail)
        for _ in range(50):
            with socket.socket() as sock:
                call, cancelled = send_to_worker(pool, sock)
                call.withdraw()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled.wait(call.withdraw)
        call, sent = send_to_worker(pool, socket.socket())
        attempts.clear()
        await asyncio.sleep(0.1)
        assert len(attempts) <= 11
    async with asyncio.timeout(patience(20)):
        assert await sent.wait(call.withdraw) == "closed"


async def test_cancelling_the_wait_on_another_loop_cancels_the_call(pool: WorkerPool) -> None:
    call = pool.start_soon(asyncio.sleep, 3600.0)

    async def wait() -> None:
        waiting = asyncio.create_task(call.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await waiting

    with pytest.raises(asyncio.CancelledError):
        await asyncio.to_thread(asyncio.run, wait())
    await until(call.cancelled)


@pytest.mark.every_way
@pytest.mark.parametrize("kind", ["native", "anyio", "started"])
async def test_cancelling_a_call_cancels_the_function_and_waits_for_its_end(
    pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    cancelled = sum(each.cancelled for each in pool.statistics().workers)
    if kind == "anyio":
        async with anyio.create_task_group() as group:
            group.start_soon(pool.run, work.sleep_until_cancelled, str(tmp_path))
            await until(begun.exists)
            group.cancel_scope.cancel()
    elif kind == "native":
        task = asyncio.create_task(pool.run(work.sleep_until_cancelled, str(tmp_path)))
        await until(begun.exists)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        started = pool.start_soon(work.sleep_until_cancelled, str(tmp_path))
        await until(begun.exists)
        assert started.cancel()
        await until(started.cancelled)
    assert ended.exists()
    assert sum(each.cancelled for each in pool.statistics().workers) == cancelled + 1


@pytest.mark.every_way
async def test_cancellation_before_the_start_and_by_the_function_itself(pool: WorkerPool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    blocking = pool.start_soon(handlers.block, folder, worker=0)
    await until((tmp_path / "blocking").exists)
    stay = partial(pool.run, work.sleep_until_cancelled, folder, worker=0)
    assert await cancelled_before(partial(work.mark, folder, "go on"), pool, stay)
    await blocking.wait()
    assert not (tmp_path / "begun").exists()
    with pytest.raises(BrokenResourceError, match="cancelled the call that was sent to it"):
        await pool.run(work.cancel_own_task)


@pytest.mark.every_way
async def test_calls_from_other_loops_and_threads(pool: WorkerPool, tmp_path: Path) -> None:
    def elsewhere() -> tuple[int, int]:
        started = pool.start_soon(work.describe_worker_later, worker=1)
        here = asyncio.run(pool.run(work.describe_worker, worker=0))[1]
        cancelled = pool.start_soon(work.sleep_until_cancelled, str(tmp_path))
        cancelled.cancel()
        return here, started.result(patience(10))[1]

    assert await asyncio.to_thread(elsewhere) == (0, 1)
    for end in (pool.aclose, pool.stop, lambda: pool.stop(0)):
        with pytest.raises(AffinityError, match="aclose on <WorkerPool"):
            await asyncio.to_thread(lambda end: asyncio.run(end()), end)
    assert (await pool.run(work.describe_worker, worker=0))[1] == 0, "the pool still works after it refused"


async def test_a_worker_opens_a_pool_of_its_own(pool: WorkerPool) -> None:
    assert await pool.run(work.open_inner_pool, 1) == [0]


# ---- In the child of a fork


async def test_a_forked_child_cannot_use_worker_processes(pool: WorkerPool) -> None:
    def child() -> str:
        with pytest.raises(ForkedProcessError) as caught:
            asyncio.run(pool.run(work.describe_worker))
        asyncio.run(pool.aclose())
        return type(caught.value).__name__

    assert in_child(child) == "ForkedProcessError"
    assert (await pool.run(work.describe_worker, worker=1))[1] == 1


# ---- Deaths


DEATHS: dict[str, tuple[Callable[..., Any], str]] = {
    "exit": (work.exit_worker, "its process ended with status 3"),
    "exit of a coroutine": (work.exit_worker_later, "its process ended with status 3"),
    "its loop is stopped": (work.stop_the_loop, "its process ended with status 1"),
    "its child lives on": (work.fork_and_die, "its process was killed by SIGKILL"),
}


@pytest.mark.parametrize("cause", DEATHS)
async def test_a_dead_worker_is_reported_and_replaced(
    pool: WorkerPool, cause: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """All calls of the dead worker fail, and calls of another one continue."""
    function, how = DEATHS[cause]
    arguments = [str(tmp_path)] if function is work.fork_and_die else []
    before, deaths = processes(pool), [each.deaths for each in pool.statistics().workers]
    others = [asyncio.create_task(pool.run(asyncio.sleep, 30, worker=1)) for _ in range(3)]
    elsewhere = asyncio.create_task(pool.run(work.wait_for_mark, str(tmp_path), "go on", worker=0))
    assert (await pool.run(work.describe_worker_later, worker=1))[0] == before[1]
    async with asyncio.timeout(patience(8)):  # less than the life of the worker's child
        with pytest.raises(WorkerDiedError, match=f"worker 1 of the pool died: {how}") as caught:
            await pool.run(function, *arguments, worker=1)
    assert caught.value.replaced
    (tmp_path / "child").unlink(missing_ok=True)
    for each in others:
        with pytest.raises(WorkerDiedError):
            await each
    assert not alive(before[1])
    found = await pool.run(work.describe_worker, worker=1)
    assert (found[0] in before, found[1]) == (False, 1)
    work.mark(str(tmp_path), "go on")
    assert await elsewhere == "go on"
    assert processes(pool)[0] == before[0]
    assert [each.deaths for each in pool.statistics().workers] == [deaths[0], deaths[1] + 1]
    assert "a new worker replaces it" in caplog.text


async def test_every_call_ends_when_workers_are_killed_under_load(pool: WorkerPool) -> None:
    """Each call ends by its result or by `WorkerDiedError`. Calls on another worker continue."""
    results: list[str] = []
    asked, over, deaths = 0, False, pool.statistics().deaths

    async def ask() -> None:
        nonlocal asked
        while not over:
            asked += 1
            try:
                await pool.run(work.describe_worker_later)
            except WorkerDiedError:
                results.append("died")
            else:
                results.append("done")

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(ask())
        for _ in range(2):
            done = results.count("done")
            await until(lambda done=done: results.count("done") > done + 20)  # type: ignore[misc]
            victim = processes(pool)[0]
            os.kill(victim, signal.SIGKILL)
            await until(lambda victim=victim: victim not in processes(pool))  # type: ignore[misc]
        over = True
    assert len(results) == asked
    assert pool.statistics().deaths == deaths + 2
    assert (await pool.run(work.describe_worker, worker=0))[1] == 0


async def test_a_socket_that_finds_no_free_descriptor_is_reported_as_lost() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with near, far:
        send_socket(near, near)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(OSError, match="a received socket was lost") as caught:
                receive_socket(far)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE


async def test_a_closed_fd_channel_is_reported_as_closed() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        send_socket(near, near)
        near.close()
        receive_socket(far).close()  # sent before
        with pytest.raises(ConnectionResetError, match="the pool closed the channel"):
            receive_socket(far)
