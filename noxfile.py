"""Sessions of the project; `nox -l` lists them. Arguments after `--` go to the tool that a session runs."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).parent))  # nox runs this file from elsewhere

from tests.debian import LATER_RELEASES

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["lint", "types", "contracts", "tests"]
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = False  # nox's default differs if CI is set

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
COMPILED = [each["name"] for each in PYPROJECT["tool"]["setuptools"]["ext-modules"]]
ADDRESS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g"
# Tests that run on any device, and tests that need an RDMA device: `nox -s rdma -- --all` runs both.
SHARED_TESTS = ["tests/manager", "tests/data_path", "tests/data_path_endings", "tests/sources"]
SHARED_TESTS += [f"tests/connections/test_{name}.py" for name in ("messages", "grants", "closing", "serving")]
SHARED_TESTS += ["tests/storage/test_serving.py", "tests/storage/test_commands.py"]
SHARED_TESTS += [
    f"tests/connections/test_processes.py::test_a_{name}"
    for name in ("killed_peer_is_detected_at_once", "peer_stopped_for_longer_than_keep_alive")
]
RDMA_TESTS = ["tests/rdma", "tests/verbs_matrix"]
# The shared tests that `nox -s rdma` runs: their result depends on the kernel or the provider, which return a status,
# an errno or an attribute, report an event, flush a queue, or register pages. The other shared tests cover the
# library's own bookkeeping, which is the same on the software device.
DEVICE_DEPENDENT_FILES = {
    "manager": "capabilities cq_wakeups fork gids limits memory qp_states",
    "data_path": "batches completion_queues failures messages operations partial_posts shared_receives",
    "data_path_endings": "closing processes stress",
}
DEVICE_DEPENDENT_TESTS = [
    f"tests/{name}/test_{each}.py" for name, files in DEVICE_DEPENDENT_FILES.items() for each in files.split()
]
DEVICE_DEPENDENT_TESTS += [
    f"tests/{name}"
    for name in (
        "data_path/test_arguments.py::test_pieces_are_gathered_and_scattered",
        "data_path/test_arguments.py::test_requests_of_zero_bytes_are_executed",
        "data_path/test_arguments.py::test_small_requests_go_inline",
        "data_path/test_arguments.py::test_a_message_longer_than_max_msg_sz_is_refused",
        "connections/test_grants.py::test_read_write_and_atomics",
        "connections/test_grants.py::test_the_device_refuses_access_beyond_the_grant",
        "connections/test_grants.py::test_revoking_under_load",
        "connections/test_processes.py::test_a_killed_peer_is_detected_at_once",
        "connections/test_processes.py::test_a_peer_stopped_for_longer_than_keep_alive",
        "storage/test_serving.py::test_written_data_is_read_back",
    )
]
# What a user does with an RDMA device and a wheel: `nox -s rdma -- --wheel`.
WHEEL_TESTS = [
    "tests/rdma/test_installation.py",
    *(f"tests/rdma/test_doctor.py::test_{name}" for name in ("all_devices_are_usable", "no_libibverbs")),
    *(f"tests/rdma/test_command_line.py::test_{name}" for name in ("devices", "ping[send-rdmacm]")),
    *(f"tests/rdma/test_rping.py::test_{name}[3-64]" for name in ("rdma_core_client", "rdma_core_server")),
    "tests/rdma/test_seam.py::test_the_kernels_files_have_the_same_gid_table",
    "tests/rdma/test_verbs_pointer.py",
]
DIFFERENTIAL_SEEDS = "10"  # of 60; for the tests that compare soft-RoCE with the software device
RDMA_LIMIT_S = 2100
SOAK_LIMIT_S = 7200
PYTHONS = nox.project.python_versions(PYPROJECT)
THREAD = "-fsanitize=thread -fno-omit-frame-pointer -O1 -g"
# Tests spend much of their time asleep or waiting for other processes, so they run in parallel, in one process more
# than there are processors. Only a few at once, since they have time limits.
PARALLEL = [f"--numprocesses={min(len(os.sched_getaffinity(0)) + 1, 4)}", "--dist=worksteal"]
SANITIZER_MARKERS = "not rdma and not slow and not toolchain"
# Folders whose tests exercise C and Cython. The tests of commands, servers, services and packaging cover Python code
# above these, in processes that start slowly under a sanitizer.
NATIVE_CODE_TESTS = [
    f"tests/{name}"
    for name in ("core", "data_path", "data_path_endings", "manager", "fabric", "sharing", "connections", "pool")
]
ARM64_COMPILER = "aarch64-linux-gnu-gcc"
# Tests that run for each wheel and under emulation: those that exercise C and Cython, and memory shared by processes.
CORE_TESTS = [f"tests/{name}" for name in ("core", "data_path", "data_path_endings", "sharing")]
CORE_TESTS += [f"tests/manager/test_{name}.py" for name in ("buffers", "cq_wakeups", "domains", "limits", "memory")]
CORE_TESTS += [f"tests/connections/test_{name}.py" for name in ("grants", "messages", "pure")]
EMULATED = {"AIOVERBS_TEST_EMULATED": "1", "AIOVERBS_TEST_PACE": "4"}

# Tests of the core that take 85 % of its time: they watch time limits, or start processes. `aarch64` runs them under
# emulation, and `wheels` with each Python of x86_64, so that `wheels` leaves them out for each Python of aarch64.
LONG_CORE_TESTS = ["tests/data_path_endings", "tests/sharing"]
LONG_CORE_TESTS += [
    f"tests/core/test_{name}.py" for name in ("exit", "ledger", "older_libibverbs", "page_size", "stateful")
]


def group(name: str) -> tuple[str, ...]:
    """Return the requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


# Requirements of the whole test suite.
SUITE_REQUIREMENTS = [
    each
    for name in ("test", "arrays", "distributed", "plots", "services", "storage", "mutation")
    for each in group(name)
]


def folder(session: nox.Session, name: str) -> Path:
    """Return a folder for the session's build products, kept between runs."""
    path = session.cache_dir.absolute() / session.name / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def install_project(
    session: nox.Session,
    *requirements: str,
    cflags: str = "",
    ldflags: str = "",
    python: str = "python",
    rebuild: bool = False,
    env: Mapping[str, str] = {},
) -> Path:
    """Compile and install the project and further requirements; return the folder with the build products.

    The build writes nothing to the source tree. Sessions that compile with the same flags share the folder; a lock lets
    one session build at a time.

    :param cflags: added to CFLAGS.
    :param ldflags: added to LDFLAGS.
    :param python: the interpreter to install for.
    :param rebuild: delete earlier build products first.
    :param env: further environment variables of the compiler.
    """
    toolchain = (python, "aioverbs/_build/toolchain.py")
    check = session.run(*toolchain, env=env, silent=True, success_codes=[0, 1], external=True)
    if isinstance(check, str) and check.strip():
        session.error(check.strip().removesuffix("."))
    flags = {
        name: f"{os.environ.get(name, '')} {more}".strip()
        for name, more in (("CFLAGS", cflags), ("LDFLAGS", ldflags))
        if more  # setting the variable replaces Python's own flags, such as -O3
    }
    version = session.run(python, "-VV", silent=True, external=True)
    key = hashlib.sha256(f"{version} {os.environ.get('CC')} {flags}".encode()).hexdigest()[:16]
    products = session.cache_dir.absolute() / "build" / key
    if rebuild:
        shutil.rmtree(products, ignore_errors=True)
    products.mkdir(parents=True, exist_ok=True)
    config = products / "setup.cfg"
    config.write_text(f"[build]\nbuild_base = {products}\n[egg_info]\negg_base = {products}\n")
    env = {"DIST_EXTRA_CONFIG": str(config), **flags, **env}
    with (products / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        session.run(python, "-m", "pip", "install", "-q", *requirements, ".[cli]", env=env, silent=True, external=True)
    return products


def split_all_option(session: nox.Session) -> tuple[list[str], bool]:
    """Return the session's arguments without `--all`, and whether `--all` is absent."""
    return [each for each in session.posargs if each != "--all"], "--all" not in session.posargs


def run_native(session: nox.Session, kind: str, *wrapper: str, env: dict[str, str] | None = None) -> None:
    """Build and run the C programs of tests/native, which do not use Python.

    :param kind: kind of build: plain, asan, tsan or coverage.
    :param wrapper: command that runs each program.
    """
    out = folder(session, f"native-{kind}")
    session.run("python", "tests/native/run.py", kind, str(out), *(("--", *wrapper) if wrapper else ()), env=env)


@nox.session
def tests(session: nox.Session) -> None:
    """Run pytest on the installed project."""
    install_project(session, *SUITE_REQUIREMENTS)
    session.run("pytest", *PARALLEL, *session.posargs)


# `tests` runs on nox's own Python, `nox -s tests-3.13` on Python 3.13, and `nox -t pythons` on each version. Versions
# that are not installed are skipped, with a message.
for _version in PYTHONS:
    nox.session(name=f"tests-{_version}", python=_version, tags=["pythons"], default=False, download_python="never")(
        tests
    )


@nox.session
def clang(session: nox.Session) -> None:
    """Compile the C programs with clang, with warnings as errors, and run them.

    To run all tests with clang: `CC=clang nox -s tests`.
    """
    compiler = os.environ.get("CLANG", "clang")
    if not shutil.which(compiler):
        session.error(f"{compiler} is not installed: on Debian and Ubuntu run `apt-get install clang`, or set CLANG")
    session.install(*group("native"))
    run_native(session, "plain", env={"CC": compiler})


@nox.session
def flaky(session: nox.Session) -> None:
    """Find flaky tests: random order, busy processors, stopped processes; `-- --minutes 60 --passes 3`.

    A run continues where the previous run ended, and adds to its results; `-- --fresh` deletes the results first.
    """
    install_project(session, *SUITE_REQUIREMENTS)
    results = folder(session, "results") / "results.jsonl"
    session.run("python", "-P", "tests/flaky/run.py", "--results", str(results), *session.posargs)


@nox.session
def power_cuts(session: nox.Session) -> None:
    """Cut the power of a storage server's disk and kill servers, under load, 92 times more often than `tests`."""
    install_project(session, *SUITE_REQUIREMENTS)
    session.run("pytest", *PARALLEL, "-m", "slow", "tests/storage", *session.posargs)


@nox.session
def storms(session: nox.Session) -> None:
    """Run the long versions of stress tests: storms of operations, killed processes and pools."""
    install_project(session, *SUITE_REQUIREMENTS)
    session.run("pytest", *PARALLEL, "-m", "slow and not rdma", "--ignore=tests/storage", *session.posargs)


@nox.session
def mutate(session: nox.Session) -> None:
    """Mutate the code and check that tests fail; `-- --count 20 --minutes 10 --only aioverbs/_pool`.

    A run continues where the previous run ended, and adds to its results; `-- --report` prints the results.
    """
    install_project(session, *SUITE_REQUIREMENTS)
    results, work = folder(session, "results") / "results.jsonl", folder(session, "work")
    paths = ("--results", str(results), "--work", str(work))
    session.run("python", "-P", "tests/mutation/run.py", *paths, *session.posargs, success_codes=[0, 1])


@nox.session
def demo(session: nox.Session) -> None:
    """Run a storage server and clients on the best available device; `-- --size 1G`."""
    install_project(session, *group("storage"), *EXTRAS["uvloop"])
    session.run("python", "examples/storage_server", "demo", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and language of Python, Cython and C, and that packages use no private names of others."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("cython-lint", "aioverbs")
    session.run("python", "tests/checks/private_access.py")
    session.run("python", "tests/checks/language.py")
    session.run("clang-format", "--dry-run", "-Werror", *map(str, sorted(Path().glob("[at]*/**/*.[ch]"))))


@nox.session
def types(session: nox.Session) -> None:
    """Check all types strictly, and compare the stubs with the compiled modules."""
    install_project(session, *group("types"))
    session.run("mypy", *session.posargs)
    session.run("python", "-P", "-m", "mypy.stubtest", "--mypy-config-file", "pyproject.toml", *COMPILED)


@nox.session
def contracts(session: nox.Session) -> None:
    """Check that imports, cimports, includes and calls in C only go to lower layers."""
    session.install(*group("contracts"))
    for config in ("pyproject.toml", "tests/checks/pure_modules.toml"):
        cache = str(folder(session, f"imports-{Path(config).stem}"))
        session.run("lint-imports", "--config", config, "--cache-dir", cache, *session.posargs)
    session.run("python", "tests/checks/cimport_layers.py")
    session.run("python", "tests/checks/core_layers.py")


def unrandomized_addresses() -> list[str]:
    """Return a command prefix that disables address randomisation, which the thread sanitizer's shadow memory requires.

    Return an empty prefix if setarch is missing or not permitted; the command then runs without it.
    """
    fixed = ["setarch", platform.machine(), "-R"]
    works = shutil.which(fixed[0]) and subprocess.run([*fixed, "true"], capture_output=True).returncode == 0
    return fixed if works else []


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the C programs, then pytest, under the address and undefined-behaviour sanitizers.

    The sanitizers check C and Cython, which are the same on each event loop, so pytest uses one loop. `-- --all` runs
    each test on both loops and with each execution, with more of hypothesis's examples.
    """
    arguments, default_run = split_all_option(session)
    install_project(session, *group("test"), cflags=ADDRESS, ldflags=ADDRESS)
    strict = {"UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}
    run_native(session, "asan", env={**strict, "ASAN_OPTIONS": "detect_leaks=1"})
    runtime = find_runtime(session, "libasan.so")
    env = {**strict, "ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": runtime, "PYTHONMALLOC": "malloc"}
    env |= {"AIOVERBS_TEST_LOOPS": "asyncio"} if default_run else {"HYPOTHESIS_PROFILE": "thorough"}
    arguments += [] if default_run else ["--every-way"]
    tests = () if any(each.startswith("tests") for each in arguments) else NATIVE_CODE_TESTS
    session.run("pytest", *PARALLEL, "-m", SANITIZER_MARKERS, "-o", "timeout=300", *arguments, *tests, env=env)


@nox.session
def tsan(session: nox.Session) -> None:
    """Run the C programs, then tests with several threads and processes, under the thread sanitizer.

    The sanitizer checks C and Cython, which are the same on each event loop, so pytest uses one loop. `-- --all` uses
    both loops.
    """
    loops = {"AIOVERBS_TEST_LOOPS": "asyncio"} if split_all_option(session)[1] else {}
    fixed = unrandomized_addresses()
    options = "halt_on_error=1:second_deadlock_stack=1"
    # The interpreter is not compiled for the sanitizer, which nevertheless sees the GIL: it is a pthread mutex.
    install_project(session, *group("test"), cflags=THREAD, ldflags="-fsanitize=thread")
    # A thread of the previous case may still be ending when a program forks, and the child starts threads.
    run_native(session, "tsan", *fixed, env={"TSAN_OPTIONS": f"{options}:die_after_fork=0"})
    # Reports go to files, since they also come from processes that the tests start, kill, or whose output they ignore.
    reports = folder(session, "reports")
    shutil.rmtree(reports)
    reports.mkdir()
    env = {"LD_PRELOAD": find_runtime(session, "libtsan.so")}
    suppressions = ROOT / "tests" / "thread_sanitizer.txt"
    env["TSAN_OPTIONS"] = f"{options}:suppressions={suppressions}:log_path={reports / 'of'}"
    # The sanitizer goes by addresses, so it does not see that a ring, which each end maps at another one, orders the
    # accesses of the two ends. The C programs have both ends on one mapping.
    env["AIOVERBS_SOFT_RINGS"] = "0"
    pytest = ("python", "-P", "-m", "pytest", *PARALLEL, "-m", SANITIZER_MARKERS, "-o", "timeout=300")

    def run(*tests: str, **more: str) -> None:
        try:
            session.run(*fixed, *pytest, *tests, env=env | loops | more, external=True)
        finally:
            if found := [each.read_text(errors="replace") for each in sorted(reports.iterdir())]:
                session.error("\n".join(found))

    tests = ["tests/data_path_endings/test_threads.py", "tests/data_path_endings/test_stress.py"]
    tests += ["tests/manager/test_many_loops.py", "tests/manager/test_cq_wakeups.py", "tests/manager/test_sharing.py"]
    tests += ["tests/pool/test_calls.py", "tests/pool/test_lifecycle.py", "tests/connections/test_serving.py"]
    run(*tests)
    # Tests of the fabric, without those that read memory while a peer may write it: RDMA allows that race.
    fabric = [f"tests/fabric/test_{name}.py" for name in ("frames", "messages", "awaiting", "completion_queues")]
    chosen = "test_frames and (silent or unreliable or one_queue_pair or oldest or seed) or not test_frames"
    without_rings = "not rings and not direct"  # these set AIOVERBS_SOFT_RINGS themselves
    run(*fabric, "-k", f"({chosen}) and {without_rings}")
    # Tests with worker processes, which mostly wait for processes to start: always on one loop. Most of the workers use
    # the other loop.
    processes = ["tests/sharing", "tests/pool/test_servers.py", "tests/pool/test_processes.py"]
    processes += ["tests/pool/test_process_lifecycle.py"]
    run(*processes, "-k", without_rings, AIOVERBS_TEST_LOOPS="asyncio", AIOVERBS_TEST_PACE="3")


def find_runtime(session: nox.Session, library: str) -> str:
    """Return the path of a sanitizer's runtime library, for LD_PRELOAD."""
    compiler = os.environ.get("CC", "cc").split()
    path = str(session.run(*compiler, f"-print-file-name={library}", silent=True, external=True)).strip()
    if not Path(path).is_absolute():
        session.error(
            f"{compiler[0]} has no {library}: use gcc, and install the package {Path(path).stem} of its version"
        )
    return path


def free_threaded_python(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the interpreter and the other arguments.

    The interpreter is the first argument, else AIOVERBS_FREE_THREADED_PYTHON, else the one on PATH, else None.
    """
    if arguments and Path(arguments[0]).name.startswith("python"):
        return arguments[0], arguments[1:]
    on_path = next(filter(None, map(shutil.which, ("python3.14t", "python3.13t"))), None)
    return os.environ.get("AIOVERBS_FREE_THREADED_PYTHON") or on_path, arguments


@nox.session(python=False)
def free_threaded(session: nox.Session) -> None:
    """Run pytest on a free-threaded interpreter, with the GIL disabled."""
    interpreter, arguments = free_threaded_python(session.posargs)
    if interpreter is None:
        session.skip(
            "no python3.14t or python3.13t on PATH: install one with `uv python install 3.14t`, the package "
            "python3.14-nogil of the deadsnakes archive on Ubuntu, or a build of CPython with "
            "`./configure --disable-gil`; then put it on PATH, or run `nox -s free_threaded -- /path/to/python3.14t`"
        )
    environment = folder(session, "venv")
    session.run(interpreter, "-m", "venv", "--clear", str(environment), external=True)
    python = str(environment / "bin" / "python")
    off = "import sys; sys.exit('the GIL is on' if getattr(sys, '_is_gil_enabled', lambda: True)() else 0)"
    session.run(python, "-c", off, external=True)
    install_project(session, *group("test"), python=python)
    session.run(python, "-P", "-W", "error", "-c", f"import {', '.join(COMPILED)}; {off}", external=True)
    session.run(python, "-P", "-m", "pytest", *arguments, env={"PYTHON_GIL": "0"}, external=True)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure the coverage of Python, the allocators and the software device by pytest and the C programs."""
    shutil.rmtree(folder(session, "."))  # removes counts of earlier runs, and of deleted sources
    flags = "--coverage -fprofile-update=atomic -O0 -g"
    objects = install_project(session, *group("coverage"), cflags=flags, ldflags="--coverage", rebuild=True)
    run_native(session, "coverage")
    env = {"COVERAGE_FILE": str(folder(session, "python-coverage") / "data")}
    session.run("coverage", "erase", env=env)
    session.run("coverage", "run", f"{session.bin}/pytest", *session.posargs, env=env)
    session.run("coverage", "combine", "-q", env=env)
    session.run("coverage", "report", env=env)
    native = ["--filter", "aioverbs/_core/(alloc|soft|abi)/.*", "--merge-mode-functions=separate"]
    session.run("gcovr", "--root", ".", *native, str(objects), str(folder(session, "native-coverage")))


def install_for_arm64(session: nox.Session, programs: Path) -> str:
    """Compile the project for arm64, install it with the requirements of its tests, and return the Python that has it.

    This machine's Python and Cython compile the project with the build settings of the Python for arm64, because Cython
    would take minutes under emulation. Only pip runs there.

    :param programs: the folder that `tests/aarch64/unpack.py` prints.
    """
    environment = folder(session, "environment")
    python = str(environment / "bin" / "python")
    session.run(str(programs / "python"), "-m", "venv", "--without-pip", str(environment), external=True)
    needed = (*PYPROJECT["project"]["dependencies"], *group("test"))
    session.run("python", "-m", "pip", "--python", python, "install", "-q", *needed, silent=True)
    name = "_sysconfigdata__aarch64-linux-gnu"
    (settings,) = programs.parent.glob(f"lib/python3.*/{name}.py")
    alone = folder(session, "settings")  # apart from the standard library, which this machine's Python must not import
    shutil.copy(settings, alone)
    include = programs.parent / "include"
    env = {
        "CC": f"{ARM64_COMPILER} -I{include / settings.parent.name} -I{include}",
        "PYTHONPATH": str(alone),
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "_PYTHON_SYSCONFIGDATA_NAME": name,
    }
    (site,) = environment.glob("lib/python3.*/site-packages")
    build = ("build", "--build-base", str(folder(session, "products")), "--build-lib", str(site))
    setup = ("-c", "import setuptools; setuptools.setup()", "-q", "egg_info", "--egg-base", str(site), *build)
    session.run("python", *setup, env=env, silent=True)
    return python


def core_of_pytest(python: str) -> tuple[str, ...]:
    """Return the command that runs pytest on `CORE_TESTS`, which follow it, with an interpreter that may be slow."""
    pytest = (python, "-P", "-m", "pytest", *PARALLEL, "-p", "no:cacheprovider", "-m", SANITIZER_MARKERS)
    return (*pytest, "-o", "timeout=300")


@nox.session
def aarch64(session: nox.Session) -> None:
    """Run the C programs and a core of pytest for arm64 under Debian's qemu-user; `-- tests/core` runs only that.

    This machine gets a cross compiler. The C library, Python and its headers for arm64 are unpacked into a folder.

    Alignment, the sign of `char`, the layout of structures in C, Cython and ctypes, and inline assembly are those of
    arm64. Its weak memory order is not tested: an emulator on x86 keeps the order of loads and stores of x86. The
    kernel and its page size are this machine's: `tests/core/test_page_size.py` simulates pages of 64 KiB. Tests that
    fail because of the emulator are skipped with the reason in `tests/aarch64/emulator.py`. Commands, servers, services
    and pools of processes are left out: Python above that core, in processes that start slowly under emulation.
    """
    system = folder(session, "system")
    session.install(*group("native"), *PYPROJECT["build-system"]["requires"])
    programs = Path(str(session.run("python", "tests/aarch64/unpack.py", str(system), silent=True)).splitlines()[-1])
    if not session.posargs:
        run_native(session, "plain", str(programs / "run"), env={"CC": ARM64_COMPILER, "CFLAGS": "-DWAIT_S=40"})
    python = install_for_arm64(session, programs)
    tests = () if any(each.startswith("tests") for each in session.posargs) else CORE_TESTS
    session.run(*core_of_pytest(python), *session.posargs, *tests, env=EMULATED, external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks and print their results as a table."""
    install_project(session, *group("bench"))
    session.run("python", "tests/bench/run.py", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz parsers and the software device with libFuzzer, queue pairs with hostile peers; `-- --seconds 600`."""
    seconds = int(session.posargs[session.posargs.index("--seconds") + 1]) if "--seconds" in session.posargs else 60
    compiler = os.environ.get("CLANG", "clang")
    trial = folder(session, "trial.dir") / "trial"
    empty = "int LLVMFuzzerTestOneInput(const unsigned char *data, unsigned long size) { return !data && size; }"
    command = [compiler, "-x", "c", "-", "-fsanitize=fuzzer,address,undefined", "-o", str(trial)]
    if not shutil.which(compiler) or subprocess.run(command, input=empty.encode(), capture_output=True).returncode:
        session.error(
            f"{compiler} is no clang with libFuzzer: on Debian and Ubuntu run "
            "`apt-get install clang libclang-rt-14-dev`, with clang's version in place of 14, or set CLANG"
        )
    flags = ("-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-Iaioverbs/_core")
    checks = ("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all")
    core = ["aioverbs/_core/abi/verbs_ops.c", *sorted(map(str, Path("aioverbs/_core/soft").rglob("*.c")))]
    support = sorted(map(str, (*Path("aioverbs/_core/alloc").glob("*.c"), *Path("tests/native").glob("support_*.c"))))
    pure = [f"aioverbs/_core/soft/{name}.c" for name in ("base/hmac", "fabric/frame", "fabric/handshake_wire")]
    for name, sources in (("frame", pure), ("stream", core)):
        program = folder(session, "programs") / name
        source = f"tests/fuzz/fuzz_{name}.c"
        session.run(compiler, *flags, *checks, source, *sources, "-ldl", "-o", str(program), external=True)
        found = f"{folder(session, name)}/"  # the corpus, which grows from run to run, and the inputs that failed
        limits = (f"-max_total_time={seconds // 2}", "-timeout=20", "-max_len=4096", "-print_final_stats=1")
        seeds = f"tests/fuzz/corpus/{name}"
        session.run(str(program), *limits, f"-artifact_prefix={found}", found, seeds, external=True)
    for sanitizers in ("address,undefined", "thread"):
        prefix = unrandomized_addresses() if sanitizers == "thread" else []
        program = folder(session, "programs") / f"peers-{sanitizers.replace(',', '-')}"
        watched = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-Itests/native")
        sources = ["tests/fuzz/fuzz_peers.c", *core, *support]
        session.run(compiler, *flags, *watched, *sources, "-ldl", "-o", str(program), external=True)
        for execution in ("inline", "thread"):
            session.run(*prefix, str(program), execution, str(seconds // 4), external=True)
    session.install(*group("fuzz"))
    found = f"{folder(session, 'handshake')}/"
    script = "tests/fuzz/fuzz_handshake.py"
    session.run("python", script, f"-max_total_time={seconds // 2}", f"-artifact_prefix={found}", "-timeout=20", found)


@nox.session
def distributed(session: nox.Session) -> None:
    """Run the tests of Dask's `distributed` with our comm backend and with tcp: `-- CHECKOUT [MODULE ...]`.

    `-- --bench` measures comms of both instead, and streams of asyncio and Tornado, side by side; `-- --clusters` the
    work of clusters; `-- --memory` that of a scheduler with many connections.

    A run takes at most two hours, or as many minutes as `--minutes` says, continues where the previous run ended, and
    adds to its results; `--fresh` deletes the results first.

    A wheel of `distributed` has no tests. CHECKOUT is a working copy of its repository, of the version in
    pyproject.toml or one near it. Each MODULE is the name of a file with tests, such as `test_core`; all that depend on
    the backend are run without. First, the checks for any backend that its tests contain are made of ours. The session
    prints a table of the tests that differ. It fails if a check fails or none was made, if tcp passes no test of a
    module, and if tcp passes a test that the backend does not, and `tests/distributed/differences.toml` has no reason
    for that.
    """
    benches = {
        "--bench": "tests/bench/dask_comm.py",
        "--clusters": "tests/bench/dask_cluster.py",
        "--memory": "tests/bench/dask_memory.py",
    }
    chosen = [each for each in session.posargs if each in benches]
    if not session.posargs:
        session.error("name a checkout: git clone https://github.com/dask/distributed, then -- CHECKOUT")
    install_project(session, *SUITE_REQUIREMENTS, *group("suite"))
    if chosen:
        arguments = [each for each in session.posargs if each not in benches]
        session.run("python", "-P", benches[chosen[0]], *arguments)
        return
    results = folder(session, "results")
    session.run("python", "-P", "tests/distributed/suite.py", "--results", str(results), *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the HTML documentation from pages, docstrings and examples; a broken reference is an error.

    Each version has its own folder, and the sidebar of each page links to all versions.
    """
    install_project(session, *group("docs"))
    html = folder(session, "versions")
    printed = session.run("python", "-P", "-c", "import aioverbs; print(aioverbs.__version__)", silent=True)
    version = str(printed).strip()
    strict = ("--fail-on-warning", "--keep-going", "--nitpicky", "--fresh-env", "--quiet")
    doctrees = ("--doctree-dir", str(folder(session, "doctrees")))
    session.run("sphinx-build", *strict, *doctrees, *session.posargs, "aioverbs/_docs", str(html / version))
    session.run("python", "aioverbs/_docs/versions.py", str(html))
    session.log(f"{html}/index.html")


@nox.session
def docs_browser(session: nox.Session) -> None:
    """Open every page built by `nox -s docs` in headless Chromium; `-- /path/to/chromium`."""
    html = session.cache_dir.absolute() / "docs" / "versions"
    if not (html / "index.html").is_file():
        session.error("there are no pages yet: run `nox -s docs` first")
    program = next(iter(session.posargs), "chromium")
    if not shutil.which(program):
        session.error(f"{program} is not installed: on Debian run `apt-get install chromium`, or pass `-- PATH`")
    session.run("python", "tests/packaging/browser.py", str(html), program)


@nox.session
def soak(session: nox.Session) -> None:
    """Move data for five minutes, and cancel, close and drop resources at random; `-- --seconds 60 --seed 1`."""
    install_project(session, *group("test"))
    session.run("python", "-P", "-X", "faulthandler", "tests/soak/soak.py", *session.posargs)


def try_wheel(session: nox.Session, wheel: Path, python: str) -> None:
    """Install a wheel without extras and use it; then install its command and run that.

    :param python: the interpreter of an empty environment.
    """
    pip = ("python", "-m", "pip", "--python", python, "install", "-q")
    session.run(*pip, str(wheel), silent=True)
    session.run(python, "-P", "tests/wheels/try_wheel.py", external=True)
    session.run(*pip, f"{wheel}[cli]", silent=True)
    session.run(python, "-P", "-m", "aioverbs.cli", "demo", "--size", "8", external=True)


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist without git, wheels from it with gcc and with clang, and try each in an empty environment."""
    session.install(*group("build"))
    with tempfile.TemporaryDirectory(prefix="aioverbs-build-") as outside:
        tree, dist = Path(outside, "tree"), Path(outside, "dist")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".nox", ".venv", ".cache", ".*_cache"))
        session.run("python", "-m", "build", "--sdist", "--outdir", str(dist), str(tree), silent=True)
        (sdist,) = dist.iterdir()
        for compiler in ("gcc", "clang"):
            if not shutil.which(compiler):
                session.error(f"{compiler} is not installed: on Debian and Ubuntu run `apt-get install {compiler}`")
            made = Path(outside, compiler)
            command = ("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(made), str(sdist))
            session.run(*command, env={"CC": compiler}, silent=True)
            (wheel,) = made.iterdir()
            session.run("python", "tests/checks/distributions.py", str(sdist), str(wheel))
            session.run("python", "-m", "venv", "--without-pip", f"{made}/venv")
            try_wheel(session, wheel, f"{made}/venv/bin/python")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the manylinux wheels of a release, and try each; `-- 3.13-aarch64` only that one.

    They are for each CPython of this machine or of a Debian release; others are named and left out. zig, from PyPI,
    compiles them for the C library of manylinux_2_28. Each is installed in an empty environment and used, and runs a
    core of pytest: for x86_64 natively, for aarch64 under Debian's qemu-user and without the longest tests. All are
    tried, also after one has failed.
    """
    made = build_wheels(session, *session.posargs)
    failed = []
    for name, (wheel, program) in made.items():
        session.log(f"trying {name}")
        emulated = name.endswith("aarch64")
        try:
            environment = folder(session, "environments") / name
            session.run(str(program), "-m", "venv", "--clear", "--without-pip", str(environment), external=True)
            python = str(environment / "bin" / "python")
            try_wheel(session, wheel, python)
            session.run("python", "-m", "pip", "--python", python, "install", "-q", *group("test"), silent=True)
            left_out = [f"--ignore={each}" for each in LONG_CORE_TESTS] if emulated else []
            environ = EMULATED if emulated else {}
            session.run(*core_of_pytest(python), *left_out, *CORE_TESTS, env=environ, external=True)
        except CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def build_wheels(session: nox.Session, *names: str) -> dict[str, tuple[Path, Path]]:
    """Build manylinux wheels and check their contents.

    :param names: names of the wheels, such as ``"3.13-x86_64"``; without names, all are built.
    :returns: by name, the path of the wheel and that of an interpreter of its version and architecture.
    """
    session.install(*group("wheels"), *PYPROJECT["build-system"]["requires"])
    cache = session.cache_dir.absolute() / "wheels"
    dist = folder(session, "dist")
    shutil.rmtree(dist)
    dist.mkdir()
    command = ("python", "tests/wheels/build.py", str(cache / "pythons"), str(dist), *names)
    made = [json.loads(line) for line in str(session.run(*command, silent=True, stderr=None)).splitlines()]
    session.run("python", "tests/checks/distributions.py", *(each["wheel"] for each in made))
    session.log(f"{dist}")
    return {each["name"]: (Path(each["wheel"]), Path(each["program"])) for each in made}


def create_environment(session: nox.Session, name: str, program: Path) -> str:
    """Create an empty environment, and return the path of its interpreter, which has the name of `program`.

    :param name: name of the environment's folder.
    :param program: the interpreter that the environment is for.
    """
    environment = folder(session, name)
    session.run(str(program), "-m", "venv", "--clear", "--without-pip", str(environment), external=True)
    return str(environment / "bin" / program.name)


def unpack_release(session: nox.Session, release: str, *programs: str) -> list[Path]:
    """Unpack a later Debian release, and return the programs that run this session's Python with the release's C
    library, and the release's own Python, which its pyverbs is built for.

    The latter is `python`. Where both are of the same version, only it is returned.

    :param programs: paths of programs of this system to add to the folder of the release's programs.
    """
    code = "import os, sys; print(os.path.realpath(sys._base_executable))"
    same = str(session.run("python", "-c", code, silent=True)).strip()
    script = ("python", "tests/rdma/vm_release.py", release, ".cache/rdma-vm", *programs, same)
    own = Path(str(session.run(*script, silent=True)).splitlines()[-1], "python")
    if own.readlink().name == Path(same).name:
        session.log(f"{release} has this session's version of Python: only its own is tried")
        return [own]
    return [own.with_name(Path(same).name), own]


def run_on_release(
    session: nox.Session, release: str, vm: tuple[str, ...], env: dict[str, str], limit: str, tests: tuple[str, ...]
) -> None:
    """Run tests in the virtual machine with rdma-core of a later Debian release: in this session's Python, then in the
    release's own."""
    probe = env["AIOVERBS_TEST_PROBE"]
    for program in unpack_release(session, release, probe):
        root = program.parents[2]
        more = {"AIOVERBS_TEST_PROBE": str(program.with_name(Path(probe).name)), "AIOVERBS_RDMA_RELEASE": str(root)}
        settings = [part for name, value in (env | more).items() for part in ("--env", f"{name}={value}")]
        python = create_environment(session, f"{release}-{program.name}", program)
        session.run("python", "-m", "pip", "--python", python, "install", "-q", "pip", silent=True)
        include = {"CPATH": str(root / "usr" / "include")} if program.name == "python" else {}
        install_project(session, *group("test"), python=python, env=include)
        command = ("sh", "tests/rdma/vm_release.sh", str(root), python, *tests)
        session.run(*vm, *settings, "--timeout", limit, "--", *command)


def run_from_wheels(session: nox.Session, vm: tuple[str, ...], arguments: list[str]) -> None:
    """Install the manylinux wheels in empty environments, and use them in the virtual machine: with this system's
    rdma-core in each Python that is installed here, and with that of later Debian releases in theirs.

    :param arguments: arguments of pytest in place of `WHEEL_TESTS`.
    """
    wheels = build_wheels(session, *(f"{version}-x86_64" for version in PYTHONS))
    unpacked = session.cache_dir.absolute()  # a Python from here has the libraries of its release, without libibverbs
    programs = [installed for _, installed in wheels.values() if not installed.is_relative_to(unpacked)]
    programs += [unpack_release(session, release)[-1] for release in LATER_RELEASES]
    env = {"AIOVERBS_TEST_DEVICES": "rdma", "AIOVERBS_TEST_WHEEL": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    settings = [part for name, value in env.items() for part in ("--env", f"{name}={value}")]
    pytest = ("-P", "-m", "pytest", "-m", "rdma and not slow", "-p", "no:cacheprovider", "-o", "timeout=240")
    failed = []
    for number, program in enumerate(programs):
        python = create_environment(session, f"wheel-{number}", program)
        code = "import sys; print(f'3.{sys.version_info.minor}-x86_64')"
        wheel, _ = wheels[str(session.run(python, "-c", code, silent=True, external=True)).strip()]
        pip = ("python", "-m", "pip", "--python", python, "install", "-q")
        session.run(*pip, f"{wheel}[cli]", *group("test"), silent=True)
        root = program.parents[2]
        within = ("sh", "tests/rdma/vm_release.sh", str(root)) if program.parent.name == "run" else ()
        command = (*within, python, *pytest, *(arguments or WHEEL_TESTS))
        try:
            session.run(*vm, *settings, "--timeout", str(RDMA_LIMIT_S), "--", *command)
        except CommandFailed:
            failed.append(str(program))
    if failed:
        session.error(f"failed with {', '.join(failed)}")


def bench_program(session: nox.Session) -> str:
    """Compile the baselines of the benchmarks on RDMA devices; return the program's path."""
    program = str(folder(session, "bench") / "rdma_baseline")
    flags = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-Iaioverbs/_core")
    sources = ("tests/bench/rdma_baseline.c", "aioverbs/_core/abi/verbs_ops.c")
    session.run(*os.environ.get("CC", "cc").split(), *flags, *sources, "-ldl", "-o", program, external=True)
    return program


@nox.session
def rdma(session: nox.Session) -> None:
    """Run `pytest -m rdma` on this machine's RDMA device, else on soft-RoCE in a virtual machine; `-- --shell`.

    The virtual machine is emulated and slow, so only the tests whose result depends on the kernel or the provider run
    there; `-- --all` runs all. `-- --matrix` also runs the tests of RDMA devices there with rdma-core of later Debian
    releases, in this Python and in theirs: with that of Debian 12 these are 44.0, 56.1 and 65.0. Debian's archive has
    no packages of the releases between them, neither in unstable nor in backports.

    These run something else instead: `-- --soak` the long tests (10,000 connects and disconnects, and storms of
    operations); `-- --bench` the benchmarks on RDMA devices, `-- --bench window` some of them; `-- --power-cuts` 50
    power cuts of the virtual machine under a storage server's load, `-- --power-cuts --rounds 5` fewer; `-- --wheel`
    uses the manylinux wheels in the virtual machine, in each Python that there is, also with later Debian releases.
    """
    python = f"{session.bin}/python"
    vm = ("python", "tests/rdma/vm.py", "--cwd", str(ROOT))
    devices = Path("/sys/class/infiniband")
    here = "AIOVERBS_DEVICE" in os.environ or (devices.is_dir() and any(devices.iterdir()))

    if "--wheel" in session.posargs:
        if here:
            session.error("--wheel needs the virtual machine, which is not used on a machine with an RDMA device")
        session.run(*vm, "--prepare")
        run_from_wheels(session, vm, [each for each in session.posargs if each != "--wheel"])
        return
    bench = "--bench" in session.posargs
    needed = ("rdma-bench",) if bench else ("test", "arrays", "dask", "services", "storage")
    install_project(session, *(each for name in needed for each in group(name)))
    if not here:  # also installs the distribution's packages for the tests
        session.run(*vm, "--prepare")
    if "--power-cuts" in session.posargs:
        if here:
            session.error("--power-cuts needs the virtual machine, which is not used on a machine with an RDMA device")
        rounds = [each for each in session.posargs if each != "--power-cuts"]
        session.run("python", "-P", "tests/rdma/power_cuts.py", *rounds)
        return
    if bench:
        program = bench_program(session)
        arguments = [each for each in session.posargs if each != "--bench"]
        command = (python, "-P", "tests/bench/rdma.py", "--baseline", program, *arguments)
        session.run(*(() if here else (*vm, "--timeout", str(RDMA_LIMIT_S), "--")), *command)
        return
    shim = folder(session, "shim") / "shim.so"
    flags = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-fPIC", "-shared", "-pthread", "-Iaioverbs/_core")
    sources = sorted(map(str, Path("tests/rdma").glob("shim*.c")))
    session.run(*os.environ.get("CC", "cc").split(), *flags, *sources, "-o", str(shim), external=True)
    probe = session.run("python", "tests/verbs_matrix/build.py", str(folder(session, "probe")), silent=True)

    env = {name: value for name, value in os.environ.items() if name.startswith(("AIOVERBS_TEST_", "PYTEST_ADDOPTS"))}
    env |= {
        "AIOVERBS_TEST_SHIM": str(shim),
        "AIOVERBS_TEST_PROBE": str(probe).strip(),
        "AIOVERBS_TEST_DEVICES": "rdma",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    posargs, default_run = split_all_option(session)
    soak, matrix, shell = (each in posargs for each in ("--soak", "--matrix", "--shell"))
    arguments = [each for each in posargs if each not in ("--soak", "--matrix", "--shell")]
    named = any(each.startswith("tests") for each in arguments)
    chosen = default_run and not (here or named or soak or matrix)
    marked = "rdma and slow" if soak else "rdma and not slow and not rdma_all" if chosen else "rdma and not slow"
    hang = f"faulthandler_timeout={SOAK_LIMIT_S if soak else 700}"  # above the limits of single tests
    tests = (python, "-P", "-m", "pytest", "-m", marked, "-p", "no:cacheprovider", "-o", hang, *arguments)
    if chosen:
        env["AIOVERBS_DIFFERENTIAL"] = DIFFERENTIAL_SEEDS
    everything = () if named else (*(DEVICE_DEPENDENT_TESTS if chosen else SHARED_TESTS), *RDMA_TESTS)
    if here:
        if matrix:
            session.error("--matrix needs the virtual machine, which is not used on a machine with an RDMA device")
        session.run(*tests, *everything, env=env)
        return
    tests = (*tests, "-o", "timeout=240")  # an emulated machine may take minutes instead of seconds
    # The guest's copy of the tree is read-only.
    env["HYPOTHESIS_STORAGE_DIRECTORY"] = "/run/tmp/hypothesis"
    settings = [part for name, value in env.items() for part in ("--env", f"{name}={value}")]
    limit = str(SOAK_LIMIT_S if soak else RDMA_LIMIT_S)
    if shell:
        session.run(*vm, *settings, "--shell", *(("--", *arguments) if arguments else ()))
    else:
        session.run(*vm, *settings, "--timeout", limit, "--", *tests, *everything)
    for release in LATER_RELEASES if matrix else ():
        run_on_release(session, release, vm, env, limit, (*tests[1:], *(() if named else RDMA_TESTS)))


if __name__ == "__main__":
    sys.exit("run this file with nox: pip install nox, then nox -l")
