"""Processes of a pool's workers."""

import asyncio
import os
from pathlib import Path

from aioverbs import WorkerPool

__all__ = ["alive", "descriptors", "other_loop", "processes"]


def processes(pool: WorkerPool) -> list[int]:
    """Return the process IDs of the pool's workers, without workers that have none."""
    return [worker.process_id for worker in pool.statistics().workers if worker.process_id is not None]


def alive(process_id: int) -> bool:
    """Return whether a process exists. A child that has exited exists until it is waited for."""
    return os.path.exists(f"/proc/{process_id}")


def descriptors() -> int:
    """Return the number of open descriptors of this process, without /dev/null: uvloop keeps one open."""
    return sum(path.exists() and not path.samefile(os.devnull) for path in Path("/proc/self/fd").iterdir())


def other_loop() -> str:
    """Return the type of event loop that the running loop does not have."""
    return "asyncio" if "uvloop" in type(asyncio.get_running_loop()).__module__ else "uvloop"
