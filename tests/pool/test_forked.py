"""Pools in the child of a fork, and in the parent of one that ends by an exception."""

import os
import sys
from pathlib import Path

import pytest

from tests.pace import patience
from tests.running import run

pytestmark = pytest.mark.once

# A child that a task forks and that ends by an exception: asyncio cancels the parent's tasks in it, and waits for them.
# The parent is ended at once: asyncio's own end of the child's loop takes what wakes it from other threads.
PROCESSES = """
import asyncio, os, sys
from pathlib import Path
from aioverbs import WorkerPool, open_device

async def main():
    fifo = Path(sys.argv[1])
    async with open_device("soft0") as device, WorkerPool(device, 1, processes=True) as pool:
        before = pool.statistics().workers[0].process_id
        waiting = asyncio.create_task(pool.run(Path.read_text, fifo))
        while not pool.statistics().workers[0].calls:
            await asyncio.sleep(0)
        child = os.fork()
        if not child:
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        fifo.write_text("as ever")      # which waits for the worker
        print(await waiting, await pool.run(os.getpid) == before, pool.statistics().deaths)
    print("closed", flush=True)
    os._exit(0)

asyncio.run(main())
"""


def test_processes_stay_with_the_parent(tmp_path: Path) -> None:
    """The child neither ends nor replaces them, and the parent goes on to hear them."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    done = run([sys.executable, "-P", "-W", "ignore", "-c", PROCESSES, str(fifo)], patience(50))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["3", "as ever True 0", "closed"]
