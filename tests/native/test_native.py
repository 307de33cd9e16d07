"""Runs each Python-free C program of this folder."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from tests.native.build import build, environments, programs

pytestmark = [pytest.mark.toolchain, pytest.mark.timeout(900)]  # the first one builds them all


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the folder of the programs, which the workers of pytest-xdist share; the first one builds them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "native"
    folder.mkdir(exist_ok=True)
    done = folder / "done"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            try:
                build("plain", folder)
            except subprocess.CalledProcessError as error:
                pytest.fail(f"{error.cmd[-1]} cannot be built: the compiler says why", pytrace=False)
            done.touch()
    return folder


@pytest.mark.slow
def test_many_kills(built: Path) -> None:
    """Either side of a pair of rings is killed 500 times."""
    env = {**os.environ, "AIOVERBS_KILLS": "500"}
    done = subprocess.run([built / "test_fabric_processes"], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("name", "environment"),
    [(source.stem, environment) for source in programs("plain") for environment in environments(source.stem)],
    ids=lambda each: each if isinstance(each, str) else "-".join(each.values()) or "default",
)
def test_program(built: Path, name: str, environment: dict[str, str]) -> None:
    env = {**os.environ, **environment}
    done = subprocess.run([built / name], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, f"{name} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    # For want of something of the kernel's: under an emulator that may be, see `nox -s aarch64`.
    assert "skipped what needs" not in done.stdout
