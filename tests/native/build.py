"""Builds the Python-free C programs: each test_*.c or bench_*.c of this folder, with all of the core that is C.

``$CC`` is the compiler, ``$CFLAGS`` and ``$LDFLAGS`` are added. `run.py` builds and runs them.
"""

import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORE = HERE.parent.parent / "aioverbs" / "_core"

COMMON = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-pthread", f"-I{CORE}", f"-I{HERE}"]
KINDS = {
    "plain": ["-O0"],  # runs as quickly, and is built in half the time
    "asan": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "tsan": ["-O1", "-fsanitize=thread"],
    "coverage": ["-O0", "--coverage", "-fprofile-update=atomic"],
    "bench": ["-O2", "-DNDEBUG"],  # as users have it
}

# A program that counts calls of these, or answers them itself, has them go by way of functions of its own, whichever
# object calls.
LOCKS = [f"pthread_mutex_{name}" for name in ("lock", "trylock", "timedlock")]
LOCKS += ["pthread_rwlock_rdlock", "pthread_rwlock_wrlock"]
LOCKS += [f"pthread_cond_{name}" for name in ("wait", "timedwait", "signal", "broadcast")]
CALLS = ["send", "sendmsg", "recv", "recvmsg", "eventfd_write", "eventfd_read", "epoll_ctl", "epoll_wait", "poll"]
CALLS += ["open", "setsockopt", "madvise"]
WRAPPED = {
    "test_locks": LOCKS,
    "test_page_size": ["sysconf", "mmap", "munmap", "madvise", "msync"],
    "test_ring_answers": ["poll"],
    "test_ring_calls": CALLS,
}

# Programs that are run with rings, and again with sockets only.
BOTH_CARRIERS = [f"test_fabric{name}" for name in ("", "_peers", "_processes", "_waiting")]


def programs(kind: str) -> list[Path]:
    """The sources that have a main of their own."""
    return sorted(HERE.glob("bench_*.c" if kind == "bench" else "test_*.c"))


def environments(program: str) -> tuple[dict[str, str], ...]:
    """Return the environment variables of each run of a program: some run with rings, and with sockets."""
    return ({}, {"AIOVERBS_SOFT_RINGS": "0"}) if program in BOTH_CARRIERS else ({},)


def object_name(source: Path) -> str:
    """Return a name for what a source is compiled to: files of several folders have the same name."""
    return "-".join(source.relative_to(CORE.parent.parent).with_suffix("").parts)


def build(kind: str, out_dir: Path) -> list[Path]:
    """Compile everything again and link one program per test or benchmark; their paths.

    :raises subprocess.CalledProcessError: the compiler refused something; it has said what.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    compile_flags = [*COMMON, *KINDS[kind], *shlex.split(os.environ.get("CFLAGS", ""))]
    link_flags = [*KINDS[kind], "-pthread", *shlex.split(os.environ.get("LDFLAGS", "")), "-ldl"]
    out_dir.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        target = out_dir / f"{object_name(source)}.o"
        subprocess.run([*compiler, *compile_flags, "-c", str(source), "-o", str(target)], check=True)
        return target

    def linked(program: Path) -> Path:
        target = out_dir / program.stem
        objects = [str(out_dir / f"{object_name(program)}.o"), *map(str, shared)]
        wrapped = [f"-Wl,--wrap={name}" for name in WRAPPED.get(program.stem, ())]
        subprocess.run([*compiler, *objects, *wrapped, *link_flags, "-o", str(target)], check=True)
        return target

    core = [CORE / "abi/verbs_ops.c", *sorted(CORE.glob("alloc/*.c")), *sorted(CORE.glob("soft/*/*.c"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        shared = list(pool.map(compiled, [*core, *sorted(HERE.glob("support_*.c"))]))
        list(pool.map(compiled, programs(kind)))
        return list(pool.map(linked, programs(kind)))
