"""A missing compiler or header is reported in one sentence with the package to install, before the build starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.toolchain

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
CHECK = [str(ROOT / "aioverbs" / "_build" / "toolchain.py")]
SETUP = ["-c", "import setuptools; setuptools.setup()", "build_ext"]


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin")}


@pytest.fixture
def no_header(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a Python whose prefix has a library, but no include folder."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("lib", "lib64"):
        (home / name).symlink_to(Path(sys.base_prefix) / name)
    return {
        "PYTHONHOME": str(home),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if "site-packages" in path),
    }


def run(arguments: list[str], tmp_path: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("CC", "CFLAGS", "LDFLAGS")}
    places = [f"--build-temp={tmp_path}/temp", f"--build-lib={tmp_path}/lib"] if arguments is SETUP else []
    # The Python of a virtual environment ignores PYTHONHOME; its base interpreter does not.
    python = getattr(sys, "_base_executable", sys.executable) if "PYTHONHOME" in environment else sys.executable
    return subprocess.run(
        [python, *arguments, *places],
        env={**clean, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_nothing_is_missing_here(tmp_path: Path) -> None:
    done = run(CHECK, tmp_path, {})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("how", [CHECK, SETUP], ids=["check", "build"])
def test_no_compiler(how: list[str], tmp_path: Path, no_compiler: dict[str, str]) -> None:
    done = run(how, tmp_path, no_compiler)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "C compiler" in last
    assert "install the package gcc" in last
    assert not (tmp_path / "temp").exists()


@pytest.mark.parametrize("how", [CHECK, SETUP], ids=["check", "build"])
def test_no_python_header(how: list[str], tmp_path: Path, no_header: dict[str, str]) -> None:
    done = run(how, tmp_path, no_header)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Python.h" in last
    assert f"install the package python{VERSION}-dev" in last
    assert not (tmp_path / "temp").exists()


def test_no_c_library(tmp_path: Path) -> None:
    done = run(CHECK, tmp_path, {"CC": "cc -nostdinc"})
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "stdlib.h" in done.stderr
    assert f"install the packages libc6-dev and python{VERSION}-dev" in done.stderr


def test_sentences_are_single_lines(tmp_path: Path, no_compiler: dict[str, str]) -> None:
    done = run(CHECK, tmp_path, no_compiler)
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_every_source_and_header_is_built_and_watched(tmp_path: Path) -> None:
    code = """
import json, setuptools
distribution = setuptools.Distribution()
distribution.parse_config_files()
distribution.get_command_obj("build_ext").ensure_finalized()
print(json.dumps({each.name: [each.sources, each.depends] for each in distribution.ext_modules}))
"""
    done = run(["-c", code], tmp_path, {})
    extensions = json.loads(done.stdout)
    core = ROOT / "aioverbs" / "_core"
    translated = {path.with_suffix("").relative_to(ROOT) for path in core.rglob("*.pyx")}
    assert set(extensions) == {".".join(path.parts) for path in translated}
    built = {source for sources, _ in extensions.values() for source in sources}
    sources = {path.relative_to(ROOT) for path in core.rglob("*.c")}
    assert {str(path) for path in sources if path.with_suffix("") not in translated} <= built
    watched = {str(path.relative_to(ROOT)) for suffix in ("h", "pxd", "pxi") for path in core.rglob(f"*.{suffix}")}
    for sources, depends in extensions.values():
        assert watched | set(sources) <= set(depends)
