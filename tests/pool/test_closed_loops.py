"""Process pools whose loop is closed or does not run: their calls end, and another loop closes the pool."""

import asyncio
import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from aioverbs import (
    BrokenResourceError,
    CallFuture,
    Device,
    ResourceState,
    WorkerDiedError,
    WorkerPool,
    open_device,
)
from tests.connections.serving import served
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.pool import handlers
from tests.pool.processes import alive, processes
from tests.pool.work import variable
from tests.waiting import until, wait_until

pytestmark = pytest.mark.timeout(60)


async def open_pool() -> tuple[Device, WorkerPool]:
    device = await open_device("soft0").open()
    pool = await WorkerPool(device, 1, processes=True).open()
    await pool.run(variable)
    return device, pool


def test_a_thread_pool_whose_closing_was_interrupted_by_the_end_of_its_loop_can_be_closed() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def end_slowly() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.to_thread(go_on.wait, patience(20))

    async def leave() -> tuple[Device, WorkerPool, asyncio.Task[None]]:
        device = await open_device("soft0").open()
        pool = await WorkerPool(device, 1).open()
        pool.start_soon(end_slowly)
        await until(begun.is_set)
        closing = asyncio.create_task(pool.stop(0))
        await until(lambda: pool.state is ResourceState.CLOSING)
        return device, pool, closing

    async def close() -> None:
        async with asyncio.timeout(patience(20)):
            await pool.aclose()
            assert not [thread.name for thread in threading.enumerate() if "WorkerPool" in thread.name]
            await device.aclose()

    try:
        device, pool, closing = asyncio.run(leave())
        assert closing.cancelled()
        assert pool.state is not ResourceState.CLOSED
    finally:
        go_on.set()
    asyncio.run(close())


@pytest.mark.parametrize("cancel", [True, False], ids=["run", "closed"])
def test_another_loop_closes_a_process_pool_whose_loop_is_closed(
    cancel: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`asyncio.run` cancels the tasks of the workers when it ends; closing the loop directly does not."""

    async def close(device: Device, pool: WorkerPool) -> None:
        async with asyncio.timeout(patience(20)):
            if cancel:
                with pytest.raises(BrokenResourceError, match="the event loop that opened the pool has ended"):
                    await pool.run(variable)
            await pool.aclose()
            await device.aclose()

    def open_and_close() -> None:
        if cancel:
            made = asyncio.run(open_pool())
        else:
            with contextlib.closing(asyncio.new_event_loop()) as loop:
                made = loop.run_until_complete(open_pool())
        asyncio.run(close(*made))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of asyncio's transports
        open_and_close()
        collect_garbage()
    assert "; a new worker replaces it" not in caplog.text


def test_a_call_is_cancelled_while_the_owning_loop_does_not_run() -> None:
    with contextlib.closing(asyncio.new_event_loop()) as owning, contextlib.closing(asyncio.new_event_loop()) as here:
        device, pool = owning.run_until_complete(open_pool())
        call = here.create_task(pool.run(variable))
        here.run_until_complete(asyncio.sleep(0))
        call.cancel()
        here.run_until_complete(asyncio.wait([call], timeout=patience(20)))
        assert call.cancelled()
        assert owning.run_until_complete(pool.run(variable)) == "none"
        owning.run_until_complete(pool.aclose())
        owning.run_until_complete(device.aclose())


@pytest.mark.parametrize("closed", [True, False], ids=["its loop is closed", "the thread of that has ended"])
def test_calls_fail_when_the_owning_loop_has_ended(closed: bool) -> None:
    async def close(device: Device, pool: WorkerPool, started: CallFuture[None]) -> None:
        async with asyncio.timeout(patience(20)):
            waiting = asyncio.create_task(started.wait())
            with pytest.raises(
                (WorkerDiedError, BrokenResourceError), match="the event loop that opened the pool has ended"
            ):
                await pool.run(variable)
            with pytest.raises(WorkerDiedError, match="the event loop that opened the pool has ended"):
                await waiting
            assert not started.cancel()
            await pool.aclose()
            await device.aclose()

    def open_and_close() -> None:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            with ThreadPoolExecutor(1) as thread:
                made = thread.submit(loop.run_until_complete, open_pool()).result()
                started = made[1].start_soon(asyncio.sleep, 3600.0)
                thread.submit(loop.run_until_complete, made[1].run(variable)).result()
            if closed:
                loop.close()
            asyncio.run(close(*made, started))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of asyncio's transports
        open_and_close()
        collect_garbage()


def test_a_process_pool_whose_loop_was_closed_during_a_call_can_be_closed() -> None:
    async def close(device: Device, pool: WorkerPool) -> None:
        async with asyncio.timeout(patience(20)):
            await pool.aclose()
            await device.aclose()

    def open_and_close() -> None:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            made = loop.run_until_complete(open_pool())
            started = made[1].start_soon(asyncio.sleep, 3600.0)
        asyncio.run(close(*made))
        assert isinstance(started.exception(), WorkerDiedError)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # as above
        open_and_close()
        collect_garbage()


def run_with_pool(use: Callable[[WorkerPool, asyncio.AbstractEventLoop], None]) -> None:
    """Call a function with an open process pool and its loop, and close the pool on a new loop.

    :param use: function that takes the pool and the loop, and closes the loop.
    """

    async def close(device: Device, pool: WorkerPool) -> None:
        async with asyncio.timeout(patience(20)):
            await pool.aclose()
            await device.aclose()

    def open_use_and_close() -> None:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            device, pool = loop.run_until_complete(open_pool())
            use(pool, loop)
        asyncio.run(close(device, pool))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # as above
        # A task that has not begun when its loop is closed, such as the one that shares the protection domain.
        warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
        open_use_and_close()
        collect_garbage()


def test_cancelling_a_wait_for_a_started_call_of_another_loop_cancels_the_call() -> None:
    async def cancel_wait(started: CallFuture[None]) -> None:
        waiting = asyncio.create_task(started.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    def use(pool: WorkerPool, loop: asyncio.AbstractEventLoop) -> None:
        started = start_long_call(pool, loop)
        asyncio.run(cancel_wait(started))
        loop.run_until_complete(until(started.cancelled))

    run_with_pool(use)


def test_a_collected_pool_whose_loop_has_ended_is_not_waited_for() -> None:
    """The collector may run in any thread, while another one holds the lock."""

    async def open_both() -> tuple[Device, WorkerPool]:
        device = await open_device("soft0").open()
        return device, await WorkerPool(device, 1, processes=True).open()

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        device, pool = loop.run_until_complete(open_both())
    (process,), lock, pools = processes(pool), pool._supervisor.lock, [pool]
    del pool
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the pool and of asyncio's transports
        dropping = threading.Thread(target=pools.clear)
        with lock:
            dropping.start()
            dropping.join(patience(10))
            assert not dropping.is_alive()
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # it was killed
        asyncio.run(device.aclose())
        collect_garbage()
    assert not alive(process)


def start_long_call(pool: WorkerPool, loop: asyncio.AbstractEventLoop) -> CallFuture[None]:
    started = pool.start_soon(asyncio.sleep, 3600.0)
    loop.run_until_complete(pool.run(variable))
    return started


def test_a_started_call_is_done_when_the_owning_loop_has_ended() -> None:
    def use(pool: WorkerPool, loop: asyncio.AbstractEventLoop) -> None:
        started = start_long_call(pool, loop)
        assert not started.done()
        loop.close()
        assert started.done()
        assert isinstance(started.exception(0), WorkerDiedError)

    run_with_pool(use)


def test_waiting_for_a_started_call_fails_when_the_owning_loop_has_ended() -> None:
    async def wait(started: CallFuture[None], loop: asyncio.AbstractEventLoop) -> None:
        async with asyncio.timeout(patience(20)):
            tasks = [
                asyncio.create_task(started.wait()),
                asyncio.create_task(asyncio.to_thread(started.result, patience(20))),
                asyncio.create_task(asyncio.to_thread(started.exception, patience(20))),
            ]
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(started.result, 0.01)
            loop.close()
            for task in tasks[:2]:
                with pytest.raises(WorkerDiedError, match="the event loop that opened the pool has ended"):
                    await task
            assert isinstance(await tasks[2], WorkerDiedError)

    run_with_pool(lambda pool, loop: asyncio.run(wait(start_long_call(pool, loop), loop)))


def test_a_call_moved_to_a_replacement_fails_when_the_owning_loop_has_ended() -> None:
    """The first replacement dies before it is ready, and the call moves to the second one."""

    async def kill(pool: WorkerPool) -> None:
        (before,) = processes(pool)
        os.kill(before, signal.SIGKILL)
        await until(lambda: processes(pool) not in ([before], []))

    def use(pool: WorkerPool, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_until_complete(kill(pool))
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(lambda: asyncio.run(asyncio.wait_for(pool.run(variable), patience(20))))
            wait_until(lambda: pool.statistics().workers[0].calls)
            loop.run_until_complete(kill(pool))
            loop.close()
            with pytest.raises(WorkerDiedError, match="the event loop that opened the pool has ended"):
                call.result()

    run_with_pool(use)


def test_a_server_stops_when_the_loop_of_its_process_pool_has_ended() -> None:
    async def serve(pool: WorkerPool, loop: asyncio.AbstractEventLoop) -> None:
        async with asyncio.timeout(patience(20)), served(pool, handlers.echo) as server:
            waiting = asyncio.create_task(server.wait_closed())
            await asyncio.sleep(0)
            loop.close()
            with pytest.raises(BrokenResourceError, match="the event loop that opened the pool has ended"):
                await waiting

    run_with_pool(lambda pool, loop: asyncio.run(serve(pool, loop)))
