"""Number of processors of a process, from its affinity mask and its cgroups."""

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from aioverbs._verbs import processors
from aioverbs._verbs.processors import cgroup_limit, usable_processors

ROOT = "/sys/fs/cgroup"
V2 = "0::/system.slice/app.service\n"
V1 = "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n3:cpuset:/docker/1\n1:name=systemd:/docker/1\n"


def v1(folder: str, quota: object, period: object = 100000) -> dict[str, str]:
    path = f"{ROOT}/cpu{folder}"  # a link to cpu,cpuacct
    return {f"{path}/cpu.cfs_quota_us": f"{quota}\n", f"{path}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("memberships", "files", "limit"),
    [
        ("", {}, math.inf),
        (V2, {}, math.inf),
        (V2, {f"{ROOT}/system.slice/app.service/cpu.max": "max 100000\n"}, math.inf),
        (V2, {f"{ROOT}/system.slice/app.service/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {f"{ROOT}/system.slice/cpu.max": "40000 20000\n"}, 2),
        (
            V2,
            {
                f"{ROOT}/system.slice/app.service/cpu.max": "400000 100000\n",
                f"{ROOT}/system.slice/cpu.max": "300000 100000\n",
                f"{ROOT}/cpu.max": "500000 100000\n",
            },
            3,
        ),
        ("0::/\n", {f"{ROOT}/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/../other\n", {f"{ROOT}/cpu.max": "50000 100000\n", f"{ROOT}/other/cpu.max": "1 100000\n"}, 0.5),
        (V1, v1("/docker/1", 250000), 2.5),
        (V1, v1("/docker/1", -1), math.inf),
        (V1, v1("", 100000, 50000), 2),  # a container sees its own cgroup as the root
        (V1, v1("/docker/1", 400000) | v1("/docker", 100000), 1),
        (V1, {f"{ROOT}/cpu/docker/1/cpu.cfs_quota_us": "100000\n"}, math.inf),
        ("4:cpuacct,cpu:/docker/1\n", v1("/docker/1", 50000), 0.5),  # not the order of the mount
        ("4:cpu:/docker/1\n", v1("/docker/1", 50000), 0.5),
        ("3:cpuset:/a\n", {f"{ROOT}/cpuset/a/cpu.cfs_{each}_us": "1\n" for each in ("quota", "period")}, math.inf),
        (V1 + V2, v1("/docker/1", 300000) | {f"{ROOT}/system.slice/cpu.max": "200000 100000\n"}, 2),
        (V2, {f"{ROOT}/cpu.max": "100000 0\n"}, math.inf),
        (V2, {f"{ROOT}/cpu.max": "many\n"}, math.inf),
        ("garbage\n::\n", {f"{ROOT}/cpu.max": "100000 100000\n"}, 1),
    ],
)  # fmt: skip
def test_the_lowest_limit_of_a_cgroup_and_those_above_it_counts(
    memberships: str, files: Mapping[str, str], limit: float
) -> None:
    assert cgroup_limit(memberships, files.get) == limit


@pytest.mark.parametrize(("quota", "count"), [("max", 3), ("250000", 2), ("150000", 1), ("50000", 0)])
def test_affinity_mask_and_cgroups_limit_the_processors(
    monkeypatch: pytest.MonkeyPatch, quota: str, count: int
) -> None:
    files = {"/proc/self/cgroup": "0::/\n", f"{ROOT}/cpu.max": f"{quota} 100000\n"}
    monkeypatch.setattr(processors, "_read", files.get)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5})
    processors._limit_in.cache_clear()
    try:
        assert usable_processors() == count
    finally:
        processors._limit_in.cache_clear()


def test_limits_are_read_once_in_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/self/cgroup": "0::/\n", f"{ROOT}/cpu.max": "200000 100000\n"}
    now = 1000.0
    monkeypatch.setattr(processors, "_read", lambda path: files.get(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(processors.time, "monotonic", lambda: now)  # type: ignore[attr-defined]
    processors._limit_in.cache_clear()
    try:
        assert usable_processors() == 2
        files[f"{ROOT}/cpu.max"] = "300000 100000\n"
        assert usable_processors() == 2
        now += 10
        assert usable_processors() == 3
    finally:
        processors._limit_in.cache_clear()


def test_the_affinity_mask_of_the_calling_thread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = os.sched_getaffinity(0)
    if len(mask) < 2:
        pytest.skip("there is one processor")
    monkeypatch.setattr(processors, "_limit_in", lambda _: math.inf)

    def count_pinned() -> int:
        os.sched_setaffinity(0, {min(mask)})
        return usable_processors()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(count_pinned).result() == 1
    assert usable_processors() == len(mask)


def test_this_process_has_a_count() -> None:
    assert 0 <= usable_processors() <= len(os.sched_getaffinity(0))
