"""Optional packages: the library works without them, and the command names the extra that it needs."""

import importlib.metadata
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import aioverbs
from aioverbs.cli.status import Status

SITE = Path(str(aioverbs.__file__)).parents[1]
LIBRARY = [
    each.name
    for each in pkgutil.walk_packages(aioverbs.__path__, "aioverbs.", onerror=lambda name: None)
    if not each.name.startswith(("aioverbs.cli.", "aioverbs.distributed"))
]
SCRIPT = """
from importlib.metadata import entry_points
(script,) = entry_points(group="console_scripts", name="aioverbs")
script.load()()
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_without(tmp_path: Path) -> Run:
    """Return a function that runs Python with all installed packages but those named in a set."""

    def run(hidden: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
        for each in SITE.iterdir():
            if each.name not in hidden:
                (tmp_path / each.name).symlink_to(each)
        command = [sys.executable, "-S", "-P", "-W", "error", *arguments]  # -S: no other site-packages
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, env=env, capture_output=True, text=True, cwd="/", check=False)

    return run


def test_only_anyio_is_required() -> None:
    required = [each for each in importlib.metadata.requires("aioverbs") or () if "extra ==" not in each]
    assert [re.sub("[^a-z].*", "", each) for each in required] == ["anyio"]


def test_the_library_needs_no_extra(run_without: Run) -> None:
    """All modules but those of the command and of Dask's backend import without the packages of any extra."""
    assert {"aioverbs.testing", "aioverbs._server.server", "aioverbs._core.data_path.data_path"} <= set(LIBRARY)
    code = f"import {', '.join(LIBRARY)}"
    done = run_without({"click", "rich", "uvloop", "matplotlib", "numpy", "distributed"}, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("hidden", "named"), [({"click"}, "click"), ({"rich"}, "rich"), ({"click", "rich"}, "click and rich")]
)
@pytest.mark.parametrize("start", [("-m", "aioverbs.cli"), ("-c", SCRIPT)], ids=["module", "script"])
def test_the_command_names_its_extra(run_without: Run, start: tuple[str, ...], hidden: set[str], named: str) -> None:
    done = run_without(hidden, *start, "--version")
    line = f"aioverbs: the command needs {named}: pip install 'aioverbs[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (Status.FAILED, "", line)


def test_the_command_runs_with_its_extra(run_without: Run) -> None:
    done = run_without(set(), "-c", SCRIPT, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"aioverbs, version {aioverbs.__version__}\n"
