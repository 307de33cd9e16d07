"""Kernels with 64 KiB pages, as on arm64 and POWER: tests of memory, with a preloaded library that simulates them.

`native/test_page_size.c` tests allocators and the software device by themselves. Here Python has the same page size,
and processes share memory.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import patience

pytestmark = [pytest.mark.toolchain, pytest.mark.timeout(patience(240))]

ROOT = Path(__file__).resolve().parents[2]
MEMORY_TESTS = [f"core/test_{name}.py" for name in ("allocators", "native_allocators", "native_allocators_queues")]
MEMORY_TESTS += ["core/test_shared_domains.py", "manager/test_buffers.py", "sharing/test_shared_memory_access.py"]


@pytest.fixture(scope="module")
def wide_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of processes with such pages, and with one event loop."""
    library = tmp_path_factory.mktemp("wide") / "wide_pages.so"
    flags = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-fPIC", "-shared")
    source = ROOT / "tests/native/wide_pages.c"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, *flags, str(source), "-ldl", "-o", str(library)], check=True)
    # AIOVERBS_TEST_ROUND names the tests that the outer process runs, which may be others.
    kept = (name for name in os.environ if not name.startswith("PYTEST_") and name != "AIOVERBS_TEST_ROUND")
    outer = {name: os.environ[name] for name in kept}
    return outer | {"LD_PRELOAD": str(library), "AIOVERBS_TEST_LOOPS": "asyncio"}


def output(environment: dict[str, str], *arguments: str) -> str:
    """Run Python, check that it succeeds, and return its output."""
    command = (sys.executable, "-P", *arguments)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(200))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def test_python_knows_the_page_size(wide_pages: dict[str, str]) -> None:
    assert output(wide_pages, "-c", "import mmap; print(mmap.PAGESIZE)") == "65536\n"


@pytest.mark.parametrize("tests", MEMORY_TESTS)
def test_memory_tests_pass_with_wide_pages(wide_pages: dict[str, str], tests: str) -> None:
    """The preloaded library aborts the process on a call that such a kernel refuses, as for a part of a page."""
    printed = output(wide_pages, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{tests}")
    assert " passed" in printed
