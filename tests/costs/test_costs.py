"""Costs of operations equal the table COSTS: the docstring of this package says how to read and to change it."""

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.costs.counting import COUNTS_BYTES
from tests.pace import patience

# A process that is stopped in a system call restarts the call, which counts twice.
pytestmark = [pytest.mark.toolchain, pytest.mark.stops_processes, pytest.mark.timeout(patience(120))]

HERE = Path(__file__).parent
LOOPS = ("asyncio", "uvloop")
# Calls by which an allocator gets its memory are not counted: allocations are. The clock is read without the kernel if
# there is a vDSO. Python 3.11 calls getpid whenever it looks up the running loop.
NOT_COUNTED = {"brk", "mmap", "munmap", "mremap", "madvise", "clock_gettime", "gettimeofday", "getpid"}
# glibc uses either, depending on architecture and caller.
ALIASES = {"epoll_pwait": "epoll_wait", "ppoll": "poll"}
UNABLE = 126  # exit status of system_calls.c
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
# Counting itself allocates a few objects more or less.
ALLOCATIONS_WITHIN = 4

Calls = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Cost:
    """Total cost of a scene, on asyncio and on uvloop.

    :param doorbells: number of calls of verbs that post.
    :param loop: system calls of the event loop's thread. Those of epoll_wait are turns of the loop, and on a device
        with
        peers also checks for frames.
    :param others: some of the calls of other kinds of threads: see `tests.costs.counting.Counted`.
    :param native: number of allocations in C and Cython.
    :param allocations: total number of allocations, by CPython 3.11, in the order of the loops.
    :param within: tolerance of system calls; that of allocations is five times as much.
    """

    doorbells: int
    loop: Calls
    allocations: tuple[int, int]
    others: Mapping[str, Calls] = field(default_factory=dict)
    native: int = 0
    within: int = 0


# With two devices, the most recently active stream is read seven times of eight, and all descriptors the eighth time:
# the number of these in the counted part is random. So is whether the peer's thread, which checks once a millisecond,
# finds that the loop has not read. One more for each operation would be 128.
CHECK_TOLERANCE = 8

# Each thread of a device allocates a record when it first looks up an object (soft/base/epoch.c), on a busy machine in
# the counted part. One more for each operation would be at least 8.
DEVICE_THREADS = 2

# Both ends are asleep, and each wakes up on a frame from the other one, with a message or an answer. The loop that
# reads a frame takes its event at once, without a call that tells it.
MESSAGE_BY_SOCKET = {"epoll_wait": (305, 304), "recvfrom": (590, 590), "sendmsg": (256, 256)}

# The same: each wakes the other one by a doorbell, which it reads. The threads of the devices are held while they
# sleep; where they see that the loop polls, an answer has no doorbell of its own (tests/native/test_ring_answers.c).
# tests/native/test_ring_calls.c counts the calls to a peer that polls, which are none.
MESSAGE_BY_RINGS = {
    "epoll_wait": (137, 137),
    "read": (0, 64),
    "recvfrom": (255, 255),
    "sendto": (256, 256),
    "write": (0, 64),
}

COSTS = {
    # 64 awaits complete at once, then the loop takes a turn.
    "write": Cost(128, {"epoll_wait": (1, 1)}, (17, 5)),
    # 16 in each. The C memory of a batch is allocated once; the await completes at once.
    "write in batches": Cost(8, {}, (89, 88), native=8),
    # HIGH_BANDWIDTH: 16 are posted in one turn of the loop, with one doorbell at its end.
    "write together": Cost(8, {"epoll_wait": (16, 16)}, (289, 153)),
    # The device is woken, and wakes the loop: one turn to arm the queue, one asleep, and on asyncio one for the task.
    "write by the thread": Cost(
        128,
        {"epoll_wait": (384, 256), "futex": (128, 128), "read": (128, 128)},
        (4122, 666),
        {"device": {"futex": (128, 128), "write": (128, 128)}},
    ),
    "write in batches by the thread": Cost(
        8,
        {"epoll_wait": (24, 16), "futex": (8, 8), "read": (8, 8)},
        (346, 129),
        {"device": {"futex": (8, 8), "write": (8, 8)}},
        native=8,
    ),
    # The peer's thread reads a frame and sends the answer: one sendmsg on either side.
    "write to another device": Cost(
        128,
        {
            "epoll_wait": (560, 432),
            "recvfrom": (464, 464),
            "sendmsg": (128, 128),
        },
        (4506, 666),
        {"fabric": {"recvfrom": (128, 128), "sendmsg": (128, 128)}},
        within=CHECK_TOLERANCE,
    ),
    # A message is a send, and a receive that is posted again. Credits return with the echo. The receive wakes the peer.
    "message": Cost(256, {"epoll_wait": (256, 128), "read": (129, 129), "write": (129, 129)}, (4698, 1498)),
    # 16 of them share a frame, and with it a send, a completion and a turn of the loop. Each becomes bytes, and each
    # call is a coroutine.
    "messages together": Cost(18, {"epoll_wait": (9, 8), "read": (4, 8), "write": (5, 8)}, (676, 555)),
    "message by Unix socket": Cost(256, MESSAGE_BY_SOCKET, (3556, 1498), within=CHECK_TOLERANCE),
    "message by rings": Cost(256, MESSAGE_BY_RINGS, (3556, 1498), within=CHECK_TOLERANCE),
    "message by TCP": Cost(256, MESSAGE_BY_SOCKET, (3556, 1498), within=CHECK_TOLERANCE),
    "message of 32 KiB by rings": Cost(256, MESSAGE_BY_RINGS, (3556, 1498), within=CHECK_TOLERANCE),
    # Each is read from the peer's memory, after a check that the peer still lives.
    "message of 32 KiB, direct": Cost(
        256,
        {**MESSAGE_BY_SOCKET, "poll": (128, 128), "process_vm_readv": (128, 128)},
        (3556, 1498),
        within=CHECK_TOLERANCE,
    ),
    # Awaits that complete at once, with a turn of the loop after a number of them.
    "lease": Cost(0, {"epoll_wait": (8, 8)}, (2197, 2133)),
    # Each loop wakes the other one, once; the caller has a second turn for its task.
    "call of a worker": Cost(
        0,
        {"epoll_wait": (256, 256), "read": (0, 128), "recvfrom": (256, 0), "sendto": (128, 0), "write": (0, 128)},
        (10395, 3355),
        {
            "worker": {
                "epoll_wait": (128, 128),
                "read": (0, 128),
                "recvfrom": (256, 0),
                "sendto": (128, 0),
                "write": (0, 128),
            }
        },
    ),
}


def compile_programs(folder: Path) -> tuple[Path, Path]:
    """Compile the tracer and the preloaded library."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g"]
    program, library = folder / "system_calls", folder / "allocations.so"
    subprocess.run([*compiler, *flags, HERE / "system_calls.c", "-o", program], check=True)
    subprocess.run([*compiler, *flags, "-shared", "-fPIC", HERE / "allocations.c", "-o", library], check=True)
    return program, library


def syscall_names() -> dict[int, str]:
    """Return the names of this architecture's system calls by number, according to the compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-E", "-dM", "-include", "sys/syscall.h", "-x", "c", os.devnull]
    defined = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {int(number): name for name, number in re.findall(r"^#define __NR_(\w+) (\d+)$", defined, re.MULTILINE)}


def count(loop: str, program: Path, library: Path, folder: Path) -> dict[str, dict[str, Any]] | None:
    """Run all scenes on one kind of loop; return None if this process may not trace another one."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIOVERBS_")}
    environment |= {"LD_PRELOAD": str(library), "PYTHONHASHSEED": "0", "AIOVERBS_COSTS_FOLDER": str(folder)}
    if not FREE_THREADED:  # free-threaded Python supports no other allocator
        environment["PYTHONMALLOC"] = "malloc"
    shared_counters = os.memfd_create("counts", 0)
    try:
        os.ftruncate(shared_counters, COUNTS_BYTES)
        os.set_inheritable(shared_counters, True)
        run = "runpy.run_module('tests.costs.scenes', alter_sys=True, run_name='__main__')"
        start = f"import sys, runpy; sys.path.append({str(ROOT)!r}); {run}"
        command = [str(program), str(shared_counters), sys.executable, "-P", "-c", start, loop, str(shared_counters)]
        done = subprocess.run(
            command, env=environment, pass_fds=[shared_counters], capture_output=True, text=True, timeout=patience(60)
        )
    finally:
        os.close(shared_counters)
    if done.returncode == UNABLE:
        return None
    assert not done.returncode, f"status {done.returncode}: {done.stderr}"
    counted: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return counted


def count_all(folder: Path) -> dict[str, Any]:
    """Run all scenes on both kinds of loops."""
    program, library = compile_programs(folder)
    with ThreadPoolExecutor(len(LOOPS)) as pool:
        counted = list(pool.map(lambda loop: count(loop, program, library, folder / loop), LOOPS))
    return dict(zip(LOOPS, counted, strict=True))


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The counts for each loop and scene, shared by all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "costs"
    folder.mkdir(exist_ok=True)
    results = folder / "results.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            # A short path for their sockets.
            with tempfile.TemporaryDirectory(prefix="aioverbs-") as short:
                results.write_text(json.dumps(count_all(Path(short))))
    counts: dict[str, dict[str, dict[str, Any]]] = json.loads(results.read_text())
    if None in counts.values():
        pytest.skip("this process may not trace another one (ptrace), and system calls cannot be counted without that")
    return counts


def calls_by_name(calls: Mapping[str, int], numbers: Mapping[int, str]) -> Counter[str]:
    """Return system calls by name, without those that are not counted."""
    by_name: Counter[str] = Counter()
    for number, times in calls.items():
        name = numbers.get(int(number), number)
        if name not in NOT_COUNTED:
            by_name[ALIASES.get(name, name)] += times
    return by_name


def close_to(counted: Mapping[str, int], expected: Mapping[str, int], within: int) -> bool:
    """Return whether the counts of each name differ by `within` at most."""
    names_of_both = counted.keys() | expected.keys()
    return all(abs(counted.get(name, 0) - expected.get(name, 0)) <= within for name in names_of_both)


@pytest.mark.parametrize("scene", COSTS)
def test_system_calls_and_doorbells(scene: str, counted: dict[str, dict[str, dict[str, Any]]]) -> None:
    cost, numbers = COSTS[scene], syscall_names()
    for at, loop in enumerate(LOOPS):
        scene_counts = counted[loop][scene]
        assert scene_counts["doorbells"] == cost.doorbells
        for kind, calls in {"loop": cost.loop, **cost.others}.items():
            done = calls_by_name(scene_counts["calls"].get(kind, {}), numbers)
            if kind != "loop":
                done = Counter({name: done[name] for name in calls if done[name]})
            expected = {name: each[at] for name, each in calls.items() if each[at]}
            assert close_to(done, expected, cost.within), f"{kind} on {loop}: {dict(done)}, and not {expected}"


@pytest.mark.parametrize("scene", COSTS)
def test_allocations(scene: str, counted: dict[str, dict[str, dict[str, Any]]]) -> None:
    cost = COSTS[scene]
    for at, loop in enumerate(LOOPS):
        scene_counts = counted[loop][scene]
        assert cost.native <= scene_counts["native"] <= cost.native + DEVICE_THREADS, loop
        if sys.implementation.name == "cpython" and sys.version_info[:2] == (
            3,
            11,
        ):  # others differ
            allocations = scene_counts["allocations"] - counted[loop]["nothing"]["allocations"]
            expected = cost.allocations[at]
            assert abs(allocations - expected) <= (ALLOCATIONS_WITHIN + 5 * cost.within), (
                f"{loop}: {allocations}, and not {expected}"
            )
