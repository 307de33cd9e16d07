"""README.md says what is so."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys

import pytest

from aioverbs.cli.main import COMMANDS
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
START = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox -s "


def sessions() -> list[str]:
    """The functions that noxfile.py decorates as sessions."""
    functions = [
        node for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    return [each.name for each in functions if any("nox.session" in ast.unparse(mark) for mark in each.decorator_list)]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_two_lines_to_start_from() -> None:
    start = re.search(r"^## Start\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    assert start is not None
    assert [block.strip() for block in blocks(start[1], "sh")] == [f"{START}demo", f"{START}tests"]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    fences = re.findall(r"^```(.*)$", README, re.MULTILINE)
    assert fences[1::2] == [""] * (len(fences) // 2), "an end without a beginning"
    assert set(fences[::2]) <= {"python", "py", "sh", "text"}


# A program, and what it prints where the README shows that; else it says hello.
PYTHON = re.findall(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("code", "output"), PYTHON)
def test_the_code_works_as_pasted(code: str, output: str) -> None:
    env = {**os.environ, "AIOVERBS_DEVICE": "soft0"}
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, output or "b'hello'\n", "")


def test_all_code_is_run() -> None:
    assert [code for code, _ in PYTHON] == blocks(README, "python") != []


def test_parts_of_examples_are_what_runs() -> None:
    parts = re.findall(r"\[(examples/\w+\.py)\][^\n]*:\n\n```py\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert [part for _, part in parts] == blocks(README, "py") != []
    for path, part in parts:
        assert part in (ROOT / path).read_text()


def test_commands_are_there() -> None:
    assert set(re.findall(r"(?:`|^)aioverbs ([a-z]+)", README, re.MULTILINE)) <= set(COMMANDS)
    assert set(re.findall(r"nox -s (\w+)", README)) <= set(sessions())
    extras = set(importlib.metadata.metadata("aioverbs").get_all("Provides-Extra") or ())
    assert set(re.findall(r"aioverbs\[(\w+)\]", README)) <= extras


def test_every_session_is_listed() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == sorted(sessions())


def test_ci_runs_the_line_of_the_readme_and_known_sessions() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    listed = re.search(r"^sessions=\((.*?)\)$", script.read_text(), re.MULTILINE)
    assert listed is not None
    assert listed[1].split() == ["lint", "types", "contracts", "clang", "sanitize", "tsan", "build", "docs", "rdma"]
    assert set(listed[1].split()) <= set(sessions())
