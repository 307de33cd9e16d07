"""Pools of processes whose loop is closed, or stands still: their calls end, and another loop closes them."""

import asyncio
import contextlib
import gc
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from aioverbs import BrokenResourceError, CallFuture, Device, WorkerDiedError, WorkerPool, open_device
from tests.pace import patience
from tests.pool.work import variable

pytestmark = pytest.mark.timeout(60)


async def make() -> tuple[Device, WorkerPool]:
    device = await open_device("soft0").open()
    pool = await WorkerPool(device, 1, processes=True).open()
    await pool.run(variable)
    return device, pool


@pytest.mark.parametrize("cancel", [True, False], ids=["run", "closed"])
def test_processes_of_a_closed_loop(cancel: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its end by `asyncio.run` cancels what waits for them; a bare close does not."""

    async def close(device: Device, pool: WorkerPool) -> None:
        async with asyncio.timeout(patience(20)):
            if cancel:
                with pytest.raises(BrokenResourceError, match="the loop that started it has ended"):
                    await pool.run(variable)
            await pool.aclose()
            await device.aclose()

    def make_and_close() -> None:
        if cancel:
            made = asyncio.run(make())
        else:
            with contextlib.closing(asyncio.new_event_loop()) as loop:
                made = loop.run_until_complete(make())
        asyncio.run(close(*made))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of asyncio's transports
        make_and_close()
        gc.collect()
    assert "replaced" not in caplog.text


def test_a_call_is_cancelled_while_the_loop_of_its_processes_stands_still() -> None:
    with contextlib.closing(asyncio.new_event_loop()) as home, contextlib.closing(asyncio.new_event_loop()) as here:
        device, pool = home.run_until_complete(make())
        call = here.create_task(pool.run(variable))
        here.run_until_complete(asyncio.sleep(0))
        call.cancel()
        here.run_until_complete(asyncio.wait([call], timeout=patience(20)))
        assert call.cancelled()
        assert home.run_until_complete(pool.run(variable)) == "none"
        home.run_until_complete(pool.aclose())
        home.run_until_complete(device.aclose())


@pytest.mark.parametrize("closed", [True, False], ids=["its loop is closed", "the thread of that has ended"])
def test_calls_of_processes_end_whose_loop_is_gone(closed: bool) -> None:
    async def close(device: Device, pool: WorkerPool, started: CallFuture[None]) -> None:
        async with asyncio.timeout(patience(20)):
            waiting = asyncio.create_task(started.wait())
            with pytest.raises((WorkerDiedError, BrokenResourceError), match="the loop that started it is gone"):
                await pool.run(variable)
            with pytest.raises(WorkerDiedError, match="the loop that started it is gone"):
                await waiting
            assert not started.cancel()
            await pool.aclose()
            await device.aclose()

    def make_and_close() -> None:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            with ThreadPoolExecutor(1) as thread:
                made = thread.submit(loop.run_until_complete, make()).result()
                started = made[1].start_soon(asyncio.sleep, 3600.0)
                thread.submit(loop.run_until_complete, made[1].run(variable)).result()
            if closed:
                loop.close()
            asyncio.run(close(*made, started))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of asyncio's transports
        make_and_close()
        gc.collect()


def test_a_pool_of_processes_whose_loop_was_closed_under_calls_is_closed() -> None:
    async def close(device: Device, pool: WorkerPool) -> None:
        async with asyncio.timeout(patience(20)):
            await pool.aclose()
            await device.aclose()

    def make_and_close() -> None:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            made = loop.run_until_complete(make())
            started = made[1].start_soon(asyncio.sleep, 3600.0)
        asyncio.run(close(*made))
        assert isinstance(started.exception(), WorkerDiedError)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # as above
        make_and_close()
        gc.collect()
