"""README.md says what is so."""

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
START = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox -s "


def sessions() -> list[str]:
    """The functions that noxfile.py decorates as sessions."""
    functions = [
        node for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    return [each.name for each in functions if any("nox.session" in ast.unparse(mark) for mark in each.decorator_list)]


def test_two_lines_to_start_from() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert [block.strip() for block in blocks] == [f"{START}demo", f"{START}tests"]


PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", PYTHON, ids=["transfer", "connection"])
def test_the_code_works_as_pasted(code: str) -> None:
    env = {**os.environ, "AIOVERBS_DEVICE": "soft0"}
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=50, check=True)
    assert (done.stdout, done.stderr) == ("b'hello'\n", "")


def test_parts_of_examples_are_what_runs() -> None:
    parts = re.findall(r"\[(examples/\w+\.py)\][^\n]*:\n\n```py\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(parts) == README.count("```py\n") == 1
    for path, part in parts:
        assert part in (ROOT / path).read_text()


def test_every_session_is_listed() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == sorted(sessions())


def test_ci_runs_the_line_of_the_readme_and_known_sessions() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    listed = re.search(r"^sessions=\((.*?)\)$", script.read_text(), re.MULTILINE)
    assert listed is not None
    assert listed[1].split() == ["lint", "types", "contracts", "sanitize", "tsan", "build", "rdma"]
    assert set(listed[1].split()) <= set(sessions())
