"""README.md says what is so."""

import ast
import os
import re

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


def test_every_session_is_listed() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == sorted(sessions())


def test_ci_runs_the_line_of_the_readme_and_known_sessions() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    listed = re.search(r"^sessions=\((.*?)\)$", script.read_text(), re.MULTILINE)
    assert listed is not None
    assert listed[1].split() == ["lint", "types", "contracts", "sanitize", "tsan", "build", "rdma"]
    assert set(listed[1].split()) <= set(sessions())
