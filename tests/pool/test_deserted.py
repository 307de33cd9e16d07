"""Pools of processes whose loop is closed: another one closes them."""

import asyncio
import contextlib
import gc
import warnings

import pytest

from aioverbs import BrokenResourceError, Device, WorkerPool, open_device
from tests.pace import patience
from tests.pool.work import variable

pytestmark = [pytest.mark.once, pytest.mark.timeout(60)]


async def make() -> tuple[Device, WorkerPool]:
    device = await open_device("soft0").open()
    pool = await WorkerPool(device, 2, processes=True).open()
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
