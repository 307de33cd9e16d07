"""Number of processors that threads of this process may use at the same time, by their affinity mask and by the limits
of the cgroups."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

__all__ = ["cgroup_limit", "usable_processors"]

_CGROUPS = PurePosixPath("/sys/fs/cgroup")
_RENEWAL_S = 10.0  # how long a limit is used


def usable_processors() -> int:
    """Return how many processors this thread, and those with the same affinity mask, may use at the same time, rounded
    down; 0 if it is less than one.

    The affinity mask of the calling thread (``sched_getaffinity``) and the CPU limits of the process's cgroups count.
    The limits are read again after 10 s.
    """
    return int(min(len(os.sched_getaffinity(0)), _limit_in(int(time.monotonic() / _RENEWAL_S))))


@functools.lru_cache(maxsize=1)
def _limit_in(period: int) -> float:
    """Return the `cgroup_limit` of this process as of the first call in the given period of 10 s.

    :param period: number of the period.
    """
    return cgroup_limit(_read("/proc/self/cgroup") or "", _read)


def _read(path: str) -> str | None:
    """Return the content of a file; None if it cannot be read."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return None


def cgroup_limit(memberships: str, read: Callable[[str], str | None]) -> float:
    """Return how many processors the cgroups of a process may use at the same time; infinity without a limit.

    The limit of a cgroup also binds the cgroups below it. In a container, the path of a cgroup may be that of the host,
    and only the root of the hierarchy can be read.

    :param memberships: content of ``/proc/<pid>/cgroup``, of version 1, 2 or both.
    :param read: callable that returns the content of the file with the given path; None if it cannot be read.
    """
    limit = float("inf")
    for line in memberships.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A hierarchy of version 1 is mounted under the names of its controllers, in any order, with a link for each.
        for folder in _with_parents(_CGROUPS / "cpu" if controllers else _CGROUPS, path):
            if controllers:
                quota, period = read(f"{folder}/cpu.cfs_quota_us"), read(f"{folder}/cpu.cfs_period_us")
                limit = min(limit, _quotient(quota, period))
            else:
                quota, _, period = (read(f"{folder}/cpu.max") or "").partition(" ")
                limit = min(limit, _quotient(quota, period))
    return limit


def _with_parents(root: PurePosixPath, path: str) -> Iterator[PurePosixPath]:
    """Yield the folder of a cgroup and those of the cgroups above it, up to the root of its hierarchy.

    :param root: folder of the hierarchy.
    :param path: path of the cgroup in the hierarchy. If this process cannot see it, only `root` is yielded.
    """
    relative = PurePosixPath(path.lstrip("/"))
    if ".." not in relative.parts:
        for folder in (relative, *relative.parents):
            if folder.parts:
                yield root / folder
    yield root


def _quotient(quota: str | None, period: str | None) -> float:
    """Return the number of processors that a quota per period amounts to; infinity for no limit or unreadable values.

    :param quota: time in microseconds; ``"max"`` or a negative number for no limit, None if unknown.
    :param period: time in microseconds; None if unknown.
    """
    try:
        microseconds, length = int(quota or ""), int(period or "")
    except ValueError:
        return float("inf")
    return microseconds / length if microseconds >= 0 and length > 0 else float("inf")
