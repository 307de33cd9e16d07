"""Runs each Python-free C program of this folder."""

import subprocess
from pathlib import Path

import pytest

from tests.native.build import build, programs

pytestmark = [pytest.mark.toolchain, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    try:
        return {program.name: program for program in build("plain", tmp_path_factory.mktemp("native"))}
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{error.cmd[-1]} cannot be built: the compiler says why", pytrace=False)


@pytest.mark.parametrize("name", [source.stem for source in programs("plain")])
def test_program(built: dict[str, Path], name: str) -> None:
    done = subprocess.run([built[name]], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{name} ended with {done.returncode}\n{done.stdout}{done.stderr}"
