"""The project's sessions: `nox -l` lists them. Arguments after `--` go to the tool that a session runs."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["lint", "types", "contracts", "tests"]
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = False  # where CI is set, too

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
COMPILED = [each["name"] for each in PYPROJECT["tool"]["setuptools"]["ext-modules"]]
ADDRESS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g"
# Tests of what any device can do, and of what only RDMA devices have around them: `nox -s rdma -- --all` runs them.
SHARED_TESTS = ["tests/manager", "tests/data_path", "tests/data_path_endings", "tests/sources"]
SHARED_TESTS += [f"tests/connections/test_{name}.py" for name in ("messages", "grants", "closing", "serving")]
SHARED_TESTS += ["tests/storage/test_serving.py", "tests/storage/test_commands.py"]
SHARED_TESTS += [
    f"tests/connections/test_processes.py::test_a_{name}"
    for name in ("killed_peer_is_detected_at_once", "peer_stopped_for_longer_than_keep_alive")
]
RDMA_TESTS = ["tests/rdma", "tests/verbs_matrix"]
# The shared tests that `nox -s rdma` runs: those in which the kernel or the provider gives the answer, be it a status,
# an errno, an attribute, an event, a flush, or pages that it registers. The others test the library's own bookkeeping,
# which is the same on the software device.
ANSWERS_OF_DEVICES = {
    "manager": "capabilities connecting forked gids limits memory waking",
    "data_path": "batches completion_queues failures messages operations refused_in_the_middle shared_receives",
    "data_path_endings": "closing processes storm",
}
CHOSEN_TESTS = [f"tests/{name}/test_{each}.py" for name, files in ANSWERS_OF_DEVICES.items() for each in files.split()]
CHOSEN_TESTS += [
    f"tests/{name}"
    for name in (
        "data_path/test_arguments.py::test_pieces_are_gathered_and_scattered",
        "data_path/test_arguments.py::test_requests_of_no_bytes_are_carried_out",
        "data_path/test_arguments.py::test_small_requests_go_inline",
        "data_path/test_arguments.py::test_a_message_longer_than_the_port_takes_is_refused",
        "connections/test_grants.py::test_read_write_and_atomics",
        "connections/test_grants.py::test_the_device_refuses_access_beyond_the_grant",
        "connections/test_grants.py::test_revoking_under_load",
        "connections/test_processes.py::test_a_killed_peer_is_detected_at_once",
        "connections/test_processes.py::test_a_peer_stopped_for_longer_than_keep_alive",
        "storage/test_serving.py::test_written_data_is_read_back",
    )
]
CHOSEN_SEEDS = "10"  # of 60, of the tests that compare soft-RoCE with the software device
RDMA_LIMIT_S = 2100
SOAK_LIMIT_S = 7200
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
RELEASES = ("trixie", "forky")  # of Debian, whose rdma-core and pyverbs are newer than those that are installed
THREAD = "-fsanitize=thread -fno-omit-frame-pointer -O1 -g"
# Tests sleep and wait for other processes a good part of their time. No more than a few at once: they have time limits.
AT_ONCE = ["--numprocesses=auto", "--maxprocesses=4", "--dist=worksteal"]
UNDER_SANITIZER = "not rdma and not slow and not toolchain"
# The folders whose tests bring C and Cython into states that others do not. Commands, servers, services and packaging
# are Python above them, in processes that take long to start under a sanitizer.
REACHING_C = [
    f"tests/{name}"
    for name in ("core", "data_path", "data_path_endings", "manager", "fabric", "sharing", "connections", "pool")
]


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


# What the tests of the whole suite need.
WHOLE_SUITE = [each for name in ("test", "arrays", "plots", "services", "storage", "mutation") for each in group(name)]


def folder(session: nox.Session, name: str) -> Path:
    """A folder of the session's own for what it builds, kept for the next run."""
    path = session.cache_dir.absolute() / session.name / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def install_project(
    session: nox.Session,
    *requirements: str,
    cflags: str = "",
    ldflags: str = "",
    python: str = "python",
    anew: bool = False,
) -> Path:
    """Compile and install the project and what is required beside it; the folder with the products of the build.

    Nothing is built in the tree. Sessions that compile with the same flags share the folder, one at a time.
    """
    check = session.run(python, "aioverbs/_build/toolchain.py", silent=True, success_codes=[0, 1], external=True)
    if isinstance(check, str) and check.strip():
        session.error(check.strip().removesuffix("."))
    flags = {
        name: f"{os.environ.get(name, '')} {more}".strip()
        for name, more in (("CFLAGS", cflags), ("LDFLAGS", ldflags))
        if more  # a variable that is set takes the place of Python's own flags, -O3 among them
    }
    version = session.run(python, "-VV", silent=True, external=True)
    same = hashlib.sha256(f"{version} {os.environ.get('CC')} {flags}".encode()).hexdigest()[:16]
    products = session.cache_dir.absolute() / "build" / same
    if anew:
        shutil.rmtree(products, ignore_errors=True)
    products.mkdir(parents=True, exist_ok=True)
    config = products / "setup.cfg"
    config.write_text(f"[build]\nbuild_base = {products}\n[egg_info]\negg_base = {products}\n")
    env = {"DIST_EXTRA_CONFIG": str(config), **flags}
    with (products / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        session.run(python, "-m", "pip", "install", "-q", *requirements, ".", env=env, silent=True, external=True)
    return products


def without_all(session: nox.Session) -> tuple[list[str], bool]:
    """The session's arguments without `--all`, and whether it is not among them."""
    return [each for each in session.posargs if each != "--all"], "--all" not in session.posargs


def run_native(session: nox.Session, kind: str, *wrapper: str, env: dict[str, str] | None = None) -> None:
    """Build and run the Python-free C programs of tests/native."""
    out = folder(session, f"native-{kind}")
    session.run("python", "tests/native/run.py", kind, str(out), *(("--", *wrapper) if wrapper else ()), env=env)


@nox.session
def tests(session: nox.Session) -> None:
    """Run pytest on the installed project."""
    install_project(session, *WHOLE_SUITE)
    session.run("pytest", *AT_ONCE, *session.posargs)


# `tests` runs on nox's own Python, and `nox -s tests-3.13` on that one; `nox -t pythons` runs on each. One that is not
# here is skipped, and named.
for _version in PYTHONS:
    nox.session(name=f"tests-{_version}", python=_version, tags=["pythons"], default=False, download_python="never")(
        tests
    )


@nox.session
def clang(session: nox.Session) -> None:
    """Compile the C programs with clang, whose warnings are errors, and run them; `CC=clang nox -s tests` tests all."""
    compiler = os.environ.get("CLANG", "clang")
    if not shutil.which(compiler):
        session.error(f"{compiler} is not here: on Debian and Ubuntu `apt-get install clang`; $CLANG names another")
    session.install(*group("native"))
    run_native(session, "plain", env={"CC": compiler})


@nox.session
def flaky(session: nox.Session) -> None:
    """Find tests that fail by chance: random order, busy processors, stopped processes; `-- --minutes 60 --passes 3`.

    The results of several runs are collected: a run goes on where the one before it ended. `-- --fresh` forgets them.
    """
    install_project(session, *WHOLE_SUITE)
    results = folder(session, "results") / "results.jsonl"
    session.run("python", "-P", "tests/flaky/run.py", "--results", str(results), *session.posargs)


@nox.session
def power_cuts(session: nox.Session) -> None:
    """Cut the power of a storage server's disk, and kill servers, under load 92 times more than `tests` does."""
    install_project(session, *WHOLE_SUITE)
    session.run("pytest", *AT_ONCE, "-m", "slow", "tests/storage", *session.posargs)


@nox.session
def storms(session: nox.Session) -> None:
    """Run the long forms of tests whose short ones `tests` has: storms, kills and pools, again and again."""
    install_project(session, *WHOLE_SUITE)
    session.run("pytest", *AT_ONCE, "-m", "slow and not rdma", "--ignore=tests/storage", *session.posargs)


@nox.session
def mutate(session: nox.Session) -> None:
    """Plant faults, one at a time, and see whether tests find them; `-- --count 20 --minutes 10 --only aioverbs/_pool`.

    The results of several runs are collected: a run goes on where the one before it ended. `-- --report` prints them.
    """
    install_project(session, *WHOLE_SUITE)
    results, work = folder(session, "results") / "results.jsonl", folder(session, "work")
    paths = ("--results", str(results), "--work", str(work))
    session.run("python", "-P", "tests/mutation/run.py", *paths, *session.posargs, success_codes=[0, 1])


@nox.session
def demo(session: nox.Session) -> None:
    """Have a storage server and clients move files on the best device there is; `-- --size 1G`."""
    install_project(session, *group("storage"), *EXTRAS["uvloop"])
    session.run("python", "examples/storage_server", "demo", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format of Python, Cython and C, and that packages use nothing private of others."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("cython-lint", "aioverbs")
    session.run("python", "tests/checks/private_access.py")
    session.run("clang-format", "--dry-run", "-Werror", *map(str, sorted(Path().glob("[at]*/**/*.[ch]"))))


@nox.session
def types(session: nox.Session) -> None:
    """Check all types strictly, and the stubs of the compiled modules against what was compiled."""
    install_project(session, *group("types"))
    session.run("mypy", *session.posargs)
    session.run("python", "-P", "-m", "mypy.stubtest", "--mypy-config-file", "pyproject.toml", *COMPILED)


@nox.session
def contracts(session: nox.Session) -> None:
    """Check that imports, cimports, includes and calls in C only go down the stack."""
    session.install(*group("contracts"))
    for config in ("pyproject.toml", "tests/checks/pure_modules.toml"):
        cache = str(folder(session, f"imports-{Path(config).stem}"))
        session.run("lint-imports", "--config", config, "--cache-dir", cache, *session.posargs)
    session.run("python", "tests/checks/cimport_layers.py")
    session.run("python", "tests/checks/core_layers.py")


def fixed_addresses() -> list[str]:
    """Return what runs a command with addresses that are not randomised, as the thread sanitizer's shadow memory wants.

    Where setarch may not do that, nothing: the command is tried without.
    """
    fixed = ["setarch", platform.machine(), "-R"]
    able = shutil.which(fixed[0]) and subprocess.run([*fixed, "true"], capture_output=True).returncode == 0
    return fixed if able else []


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the C programs, then pytest, under the address and undefined-behaviour sanitizers.

    They watch C and Cython, which are the same on each event loop: pytest runs on one. `-- --all` runs each test on
    both and with each execution, with more of hypothesis's examples.
    """
    arguments, usual = without_all(session)
    install_project(session, *group("test"), cflags=ADDRESS, ldflags=ADDRESS)
    strict = {"UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}
    run_native(session, "asan", env={**strict, "ASAN_OPTIONS": "detect_leaks=1"})
    runtime = runtime_of(session, "libasan.so")
    env = {**strict, "ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": runtime, "PYTHONMALLOC": "malloc"}
    env |= {"AIOVERBS_TEST_LOOPS": "asyncio"} if usual else {"HYPOTHESIS_PROFILE": "thorough"}
    arguments += [] if usual else ["--every-way"]
    tests = () if any(each.startswith("tests") for each in arguments) else REACHING_C
    session.run("pytest", *AT_ONCE, "-m", UNDER_SANITIZER, "-o", "timeout=300", *arguments, *tests, env=env)


@nox.session
def tsan(session: nox.Session) -> None:
    """Run the C programs, then what several loops do in several threads and processes, under the thread sanitizer.

    It watches C and Cython, which are the same on each event loop: pytest runs on one. `-- --all` runs it on both.
    """
    loops = {"AIOVERBS_TEST_LOOPS": "asyncio"} if without_all(session)[1] else {}
    fixed = fixed_addresses()
    options = "halt_on_error=1:second_deadlock_stack=1"
    # The interpreter itself is not compiled for it: its lock, which is a mutex of pthread's, is seen all the same.
    install_project(session, *group("test"), cflags=THREAD, ldflags="-fsanitize=thread")
    # A thread of the case before may be about to end where a program forks, whose child starts threads.
    run_native(session, "tsan", *fixed, env={"TSAN_OPTIONS": f"{options}:die_after_fork=0"})
    # What it has to say goes to files: of processes that tests start, too, and of those that they kill or do not ask.
    reports = folder(session, "reports")
    shutil.rmtree(reports)
    reports.mkdir()
    env = {"LD_PRELOAD": runtime_of(session, "libtsan.so")}
    suppressions = ROOT / "tests" / "thread_sanitizer.txt"
    env["TSAN_OPTIONS"] = f"{options}:suppressions={suppressions}:log_path={reports / 'of'}"
    pytest = ("python", "-P", "-m", "pytest", *AT_ONCE, "-m", UNDER_SANITIZER, "-o", "timeout=300")

    def run(*tests: str, **more: str) -> None:
        try:
            session.run(*fixed, *pytest, *tests, env=env | loops | more, external=True)
        finally:
            if said := [each.read_text(errors="replace") for each in sorted(reports.iterdir())]:
                session.error("\n".join(said))

    tests = ["tests/data_path_endings/test_threads.py", "tests/data_path_endings/test_storm.py"]
    tests += ["tests/manager/test_many_loops.py", "tests/manager/test_waking.py", "tests/manager/test_sharing.py"]
    tests += ["tests/pool/test_calls.py", "tests/pool/test_lifecycle.py", "tests/connections/test_serving.py"]
    run(*tests)
    # Of the fabric: without those that look at memory which a peer may write just then, as RDMA has it.
    fabric = [f"tests/fabric/test_{name}.py" for name in ("frames", "messages", "awaiting", "completion_queues")]
    chosen = "test_frames and (silent or unreliable or one_queue_pair or oldest or seed) or not test_frames"
    run(*fabric, "-k", chosen)
    # Of processes, most of whose time goes to starting them: on one loop always. Most of their workers have the other.
    processes = ["tests/sharing", "tests/pool/test_servers.py", "tests/pool/test_processes.py"]
    processes += ["tests/pool/test_process_lifecycle.py"]
    run(*processes, AIOVERBS_TEST_LOOPS="asyncio", AIOVERBS_TEST_PACE="3")


def runtime_of(session: nox.Session, library: str) -> str:
    """The path of a sanitizer's library, to be loaded before what is compiled for it."""
    compiler = os.environ.get("CC", "cc").split()
    path = str(session.run(*compiler, f"-print-file-name={library}", silent=True, external=True)).strip()
    if not Path(path).is_absolute():
        session.error(f"{compiler[0]} has no {library}: use gcc, with the package {Path(path).stem} of its release")
    return path


def free_threaded_python(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The first argument, AIOVERBS_FREE_THREADED_PYTHON or what PATH has; and the other arguments."""
    if arguments and Path(arguments[0]).name.startswith("python"):
        return arguments[0], arguments[1:]
    on_path = next(filter(None, map(shutil.which, ("python3.14t", "python3.13t"))), None)
    return os.environ.get("AIOVERBS_FREE_THREADED_PYTHON") or on_path, arguments


@nox.session(python=False)
def free_threaded(session: nox.Session) -> None:
    """Run pytest on a free-threaded interpreter with the GIL off."""
    interpreter, arguments = free_threaded_python(session.posargs)
    if interpreter is None:
        session.skip(
            "no python3.14t or python3.13t on PATH: get one with `uv python install 3.14t`, the package "
            "python3.14-nogil of the deadsnakes archive on Ubuntu, or a build of CPython with "
            "`./configure --disable-gil`; then put it on PATH, or say `nox -s free_threaded -- /path/to/python3.14t`"
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
    """Measure what pytest and the C programs reach, in Python, in the allocators and in the software device."""
    shutil.rmtree(folder(session, "."))  # counts of before, and of sources that are gone
    flags = "--coverage -fprofile-update=atomic -O0 -g"
    objects = install_project(session, *group("coverage"), cflags=flags, ldflags="--coverage", anew=True)
    run_native(session, "coverage")
    env = {"COVERAGE_FILE": str(folder(session, "python-coverage") / "data")}
    session.run("coverage", "erase", env=env)
    session.run("coverage", "run", f"{session.bin}/pytest", *session.posargs, env=env)
    session.run("coverage", "combine", "-q", env=env)
    session.run("coverage", "report", env=env)
    native = ["--filter", "aioverbs/_core/(alloc|soft|abi)/.*", "--merge-mode-functions=separate"]
    session.run("gcovr", "--root", ".", *native, str(objects), str(folder(session, "native-coverage")))


@nox.session
def aarch64(session: nox.Session) -> None:
    """Run the C programs for arm64, under Debian's qemu-user; nothing is installed for arm64 but a cross compiler.

    Alignment, the sign of `char`, the layout of structures and inline assembly are those of arm64. Its weak memory
    order is not: where the emulator runs on x86, loads and stores keep the order that x86 has. The kernel and its pages
    are this machine's.
    """
    system = folder(session, "system")
    session.install(*group("native"))
    programs = Path(str(session.run("python", "tests/aarch64/unpack.py", str(system), silent=True)).splitlines()[-1])
    run_native(session, "plain", str(programs / "run"), env={"CC": "aarch64-linux-gnu-gcc"})


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks and print their table."""
    install_project(session, *group("bench"))
    session.run("python", "tests/bench/run.py", *session.posargs)


@nox.session(python=False)
def fuzz(session: nox.Session) -> None:
    """Have libFuzzer talk to parsers and to a device, and hostile peers to queue pairs; `-- --seconds 600`."""
    seconds = int(session.posargs[session.posargs.index("--seconds") + 1]) if "--seconds" in session.posargs else 60
    compiler = os.environ.get("CLANG", "clang")
    trial = folder(session, "trial.dir") / "trial"
    empty = "int LLVMFuzzerTestOneInput(const unsigned char *data, unsigned long size) { return !data && size; }"
    command = [compiler, "-x", "c", "-", "-fsanitize=fuzzer,address,undefined", "-o", str(trial)]
    if not shutil.which(compiler) or subprocess.run(command, input=empty.encode(), capture_output=True).returncode:
        session.error(
            f"{compiler} is no clang with libFuzzer: on Debian and Ubuntu `apt-get install clang libclang-rt-14-dev` "
            "brings it (or -15 and so on, as clang's own version is); $CLANG names another"
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
        found = f"{folder(session, name)}/"  # grows from run to run; what broke it is there, too
        limits = (f"-max_total_time={seconds // 2}", "-timeout=20", "-max_len=4096", "-print_final_stats=1")
        seeds = f"tests/fuzz/corpus/{name}"
        session.run(str(program), *limits, f"-artifact_prefix={found}", found, seeds, external=True)
    for sanitizers in ("address,undefined", "thread"):
        prefix = fixed_addresses() if sanitizers == "thread" else []
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
def docs(session: nox.Session) -> None:
    """Make the documentation out of its pages, docstrings and examples, as HTML; what leads nowhere is an error.

    Versions lie side by side, in a folder of that name each; the sidebar of each page offers all of them.
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
    """Open every page that `nox -s docs` has made in headless Chromium; `-- /path/to/chromium`."""
    html = session.cache_dir.absolute() / "docs" / "versions"
    if not (html / "index.html").is_file():
        session.error("there are no pages yet: `nox -s docs` makes them")
    program = next(iter(session.posargs), "chromium")
    if not shutil.which(program):
        session.error(f"there is no {program}: on Debian `apt-get install chromium` brings it; `-- PATH` names another")
    session.run("python", "tests/packaging/browser.py", str(html), program)


@nox.session
def soak(session: nox.Session) -> None:
    """Move data for five minutes, and cancel, close and forget at random; `-- --seconds 60 --seed 1`."""
    install_project(session, *group("test"))
    session.run("python", "-P", "-X", "faulthandler", "tests/soak/soak.py", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel, and try the wheel in an empty environment outside of the tree."""
    session.install(*group("build"))
    with tempfile.TemporaryDirectory(prefix="aioverbs-build-") as outside:
        config = Path(outside, "setup.cfg")
        config.write_text(f"[egg_info]\negg_base = {outside}\n")
        env = {"DIST_EXTRA_CONFIG": str(config)}
        session.run("python", "-m", "build", "--outdir", f"{outside}/dist", *session.posargs, env=env, silent=True)
        session.run("python", "tests/checks/distributions.py", f"{outside}/dist")
        session.run("python", "-m", "venv", f"{outside}/venv")
        python = f"{outside}/venv/bin/python"
        (wheel,) = Path(outside, "dist").glob("*.whl")
        session.run(python, "-m", "pip", "install", "-q", str(wheel), external=True)
        with session.chdir(outside):
            session.run(python, "-c", "import aioverbs; print(aioverbs.__version__, aioverbs.__file__)", external=True)
            session.run(f"{outside}/venv/bin/aioverbs", "demo", "--size", "8", external=True)


def on_release(
    session: nox.Session, release: str, vm: tuple[str, ...], env: dict[str, str], limit: str, tests: tuple[str, ...]
) -> None:
    """Run tests with the rdma-core, pyverbs and Python of a later Debian release, in the virtual machine."""
    probe = env["AIOVERBS_TEST_PROBE"]
    printed = session.run("python", "tests/rdma/vm_release.py", release, ".cache/rdma-vm", probe, silent=True)
    programs = Path(str(printed).splitlines()[-1])
    root = programs.parents[1]
    environment = folder(session, release)
    session.run(str(programs / "python"), "-m", "venv", "--clear", "--without-pip", str(environment), external=True)
    python = str(environment / "bin" / "python")
    session.run("python", "-m", "pip", "--python", python, "install", "-q", "pip", silent=True)
    session.env["CPATH"] = str(root / "usr" / "include")
    install_project(session, *group("test"), python=python)
    session.run(python, "tests/rdma/pyverbs_path.py", f"{root}/usr/lib/python3/dist-packages/pyverbs", external=True)
    env = {**env, "AIOVERBS_TEST_PROBE": str(programs / Path(probe).name), "AIOVERBS_RDMA_RELEASE": str(root)}
    settings = [part for name, value in env.items() for part in ("--env", f"{name}={value}")]
    command = ("sh", "tests/rdma/vm_release.sh", str(root), python, *tests)
    session.run(*vm, *settings, "--timeout", limit, "--", *command)


def bench_program(session: nox.Session) -> str:
    """Compile the yardsticks of the benchmarks on RDMA devices."""
    program = str(folder(session, "bench") / "rdma_yard")
    flags = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-Iaioverbs/_core")
    sources = ("tests/bench/rdma_yard.c", "aioverbs/_core/abi/verbs_ops.c")
    session.run(*os.environ.get("CC", "cc").split(), *flags, *sources, "-ldl", "-o", program, external=True)
    return program


@nox.session
def rdma(session: nox.Session) -> None:
    """Run `pytest -m rdma` on the RDMA device that is here, else on soft-RoCE in a virtual machine; `-- --shell`.

    In the virtual machine, which is emulated, those run that ask the kernel or the provider; `-- --all` runs all.
    `-- --matrix` runs what is about RDMA devices there with the rdma-core and pyverbs of later Debian releases as well.
    `-- --soak` runs what takes long instead: 10,000 connects and disconnects, and storms. `-- --bench` runs the
    benchmarks on RDMA devices instead, with `-- --bench window` some of them. `-- --power-cuts` cuts the power of the
    virtual machine 50 times under a storage server's load instead, with `-- --power-cuts --rounds 5` less often.
    """
    python = f"{session.bin}/python"
    vm = ("python", "tests/rdma/vm.py", "--cwd", str(ROOT))
    devices = Path("/sys/class/infiniband")
    here = "AIOVERBS_DEVICE" in os.environ or (devices.is_dir() and any(devices.iterdir()))

    bench = "--bench" in session.posargs
    needed = ("rdma-bench",) if bench else ("test", "arrays", "services", "storage")
    install_project(session, *(each for name in needed for each in group(name)))
    if not here:  # also installs what the tests need of the distribution, pyverbs among it
        session.run(*vm, "--prepare")
    session.run("python", "tests/rdma/pyverbs_path.py")
    if "--power-cuts" in session.posargs:
        if here:
            session.error("--power-cuts is for the virtual machine, and there is an RDMA device here")
        rounds = [each for each in session.posargs if each != "--power-cuts"]
        session.run("python", "-P", "tests/rdma/power_cuts.py", *rounds)
        return
    if bench:
        program = bench_program(session)
        arguments = [each for each in session.posargs if each != "--bench"]
        command = (python, "-P", "tests/bench/rdma.py", "--yard", program, *arguments)
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
    given, usual = without_all(session)
    soak, matrix, shell = (each in given for each in ("--soak", "--matrix", "--shell"))
    arguments = [each for each in given if each not in ("--soak", "--matrix", "--shell")]
    named = any(each.startswith("tests") for each in arguments)
    chosen = usual and not (here or named or soak or matrix)
    marked = "rdma and slow" if soak else "rdma and not slow and not rdma_all" if chosen else "rdma and not slow"
    hang = f"faulthandler_timeout={SOAK_LIMIT_S if soak else 700}"  # beyond the limits of single tests
    tests = (python, "-P", "-m", "pytest", "-m", marked, "-p", "no:cacheprovider", "-o", hang, *arguments)
    if chosen:
        env["AIOVERBS_DIFFERENTIAL"] = CHOSEN_SEEDS
    everything = () if named else (*(CHOSEN_TESTS if chosen else SHARED_TESTS), *RDMA_TESTS)
    if here:
        if matrix:
            session.error("--matrix is for the virtual machine; an RDMA device is tested with what is installed")
        session.run(*tests, *everything, env=env)
        return
    tests = (*tests, "-o", "timeout=240")  # where it is emulated, minutes may pass for what takes seconds
    # The guest's copy of the tree is read-only.
    env["HYPOTHESIS_STORAGE_DIRECTORY"] = "/run/tmp/hypothesis"
    settings = [part for name, value in env.items() for part in ("--env", f"{name}={value}")]
    limit = str(SOAK_LIMIT_S if soak else RDMA_LIMIT_S)
    if shell:
        session.run(*vm, *settings, "--shell", *(("--", *arguments) if arguments else ()))
    else:
        session.run(*vm, *settings, "--timeout", limit, "--", *tests, *everything)
    for release in RELEASES if matrix else ():
        on_release(session, release, vm, env, limit, (*tests[1:], *(() if named else RDMA_TESTS)))


if __name__ == "__main__":
    sys.exit("this file is for nox: pip install nox, then nox -l")
