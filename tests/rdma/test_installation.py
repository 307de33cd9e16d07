"""An installation with libibverbs and its providers, but neither pyverbs nor librdmacm; and one without libibverbs."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.processes import COMMAND
from tests.conftest import ROOT
from tests.rdma.cm import nothing_left
from tests.rdma.seam import rdma_devices
from tests.rdma.test_doctor import findings, libraries, needs_disposable_machine, run_doctor_with_mount
from tests.running import run

pytestmark = [pytest.mark.rdma, pytest.mark.rdma_all, pytest.mark.timeout(920)]

__all__ = ["needs_disposable_machine"]

LIMIT_S = 300  # starting Python takes long on an emulated machine
OPEN = """
import asyncio, sys
from aioverbs import devices, open_device

async def main():
    async with open_device(sys.argv[1]) as device:
        print("opened", device.name, [each.name for each in devices()])

try:
    asyncio.run(main())
except OSError as error:
    print(type(error).__name__, error)
"""


def hide(library: str) -> str:
    """Return a shell command that makes a library unusable."""
    return f"mount --bind /dev/null {libraries()[library]}"


def run_python(*arguments: str, hidden: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run Python, without a library if `hidden` is its name."""
    within = ["unshare", "--mount", "sh", "-c", f'{hide(hidden)} && exec "$@"', "sh"] if hidden is not None else []
    return run([*within, sys.executable, "-P", "-W", "error", *arguments], LIMIT_S)


def example() -> str:
    """Return the README's first example, which also prints the name of the device."""
    code = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert code.count("print(await") == 1
    return code.replace("print(await", "print(device.name, await")


@pytest.mark.skipif("AIOVERBS_TEST_WHEEL" not in os.environ, reason="the project was not installed from a wheel")
def test_the_installation_is_a_wheel_without_pyverbs() -> None:
    version = f"cp3{sys.version_info.minor}"
    tags = importlib.metadata.distribution("aioverbs").read_text("WHEEL") or ""
    assert f"Tag: {version}-{version}-manylinux_2_28_x86_64\n" in tags
    assert importlib.util.find_spec("pyverbs") is None


def test_the_example_of_the_readme() -> None:
    with nothing_left():
        done = run_python("-c", example(), hidden="librdmacm")
    assert (done.returncode, done.stdout) == (0, f"{rdma_devices()[0]} b'hello'\n"), done.stderr
    assert "opening the software device" not in done.stderr


def test_the_command_without_librdmacm() -> None:
    listed = json.loads(run_python(*COMMAND[2:], "devices", "--json", hidden="librdmacm").stdout)
    assert listed["rdma_problem"] is None
    found = {each["name"]: each for each in listed["devices"]}
    assert [found[name]["problem"] for name in rdma_devices()] == [None] * len(rdma_devices())
    result = run_doctor_with_mount(hide("librdmacm"))
    assert result["status"] == 0, result["findings"]
    assert set(rdma_devices()) <= set(result["usable"])
    assert "librdmacm1" in findings(result, "system")["librdmacm-missing"][0]


def test_without_libibverbs() -> None:
    missing = "libibverbs.so.1 cannot be loaded: install libibverbs1 and ibverbs-providers"
    opened = run_python("-c", OPEN, "soft0", hidden="libibverbs")
    known = [*rdma_devices(), "soft0"]  # the kernel's devices are listed with the problem
    assert opened.stdout == f"opened soft0 {known}\n", opened.stderr
    refused = run_python("-c", OPEN, rdma_devices()[0], hidden="libibverbs")
    assert refused.stdout.startswith(f"LibraryNotFoundError {missing}"), refused.stderr
    done = run_python("-c", example(), hidden="libibverbs")
    assert (done.returncode, done.stdout) == (0, "soft0 b'hello'\n"), done.stderr
    assert f"opening the software device soft0: {missing}" in done.stderr


@pytest.mark.parametrize(
    "failure",
    ["RuntimeError('broken')", "ImportError('libibverbs.so.1: version `IBVERBS_1.99\\' not found')"],
    ids=["broken", "another release"],
)
def test_a_pyverbs_that_cannot_be_imported(tmp_path: Path, failure: str) -> None:
    (tmp_path / "pyverbs").mkdir()
    (tmp_path / "pyverbs" / "__init__.py").write_text(f"raise {failure}\n")
    name = rdma_devices()[0]
    planted = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    importing = run_python("-c", f"{planted}import pyverbs")
    assert importing.returncode == 1
    assert failure.partition("(")[0] in importing.stderr
    done = run_python("-c", f"{planted}{OPEN}", name)
    assert done.stdout.startswith(f"opened {name} ["), done.stderr
    assert name in done.stdout.partition("[")[2]
