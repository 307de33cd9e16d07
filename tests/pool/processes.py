"""The processes of a pool's workers."""

import asyncio
import os
from pathlib import Path

from aioverbs import WorkerPool

__all__ = ["alive", "descriptors", "other_loop", "processes"]


def processes(pool: WorkerPool) -> list[int]:
    """Return the ids of its workers' processes, of those workers that have one."""
    return [worker.process_id for worker in pool.statistics().workers if worker.process_id is not None]


def alive(process_id: int) -> bool:
    """Tell whether a process has an entry, as a child has that nobody has waited for."""
    return os.path.exists(f"/proc/{process_id}")


def descriptors() -> int:
    """Count the descriptors of this process, without those of /dev/null: uvloop keeps one for all streams."""
    return sum(path.exists() and not path.samefile(os.devnull) for path in Path("/proc/self/fd").iterdir())


def other_loop() -> str:
    """Name the kind of event loop that the running one is not."""
    return "asyncio" if "uvloop" in type(asyncio.get_running_loop()).__module__ else "uvloop"
