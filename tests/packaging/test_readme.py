"""README.md and the documentation: commands, links and code are correct."""

import ast
import importlib.metadata
import os
import re
from pathlib import Path

import pytest

from aioverbs.cli.main import COMMANDS
from tests.conftest import ROOT
from tests.packaging.blocks import blocks, run

README = (ROOT / "README.md").read_text()
START = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox -s "
PAGES = [ROOT / "README.md", *(ROOT / "aioverbs" / "_docs").glob("*/*.md"), *(ROOT / "aioverbs" / "_docs").glob("*.md")]


def sessions() -> list[str]:
    """Return the names of the sessions in noxfile.py."""
    functions = [
        node for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    return [each.name for each in functions if any("nox.session" in ast.unparse(mark) for mark in each.decorator_list)]


def test_two_lines_to_start_from() -> None:
    start = re.search(r"^## Start\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    assert start is not None
    assert [each.text.strip() for each in blocks(start[1]) if each.kind == "sh"] == [f"{START}demo", f"{START}tests"]


def test_the_code_works_as_pasted(tmp_path: Path) -> None:
    (code,) = [each.text for each in blocks(README) if each.kind == "python"]
    run(f"```python\n{code}```\n```text\nb'hello'\n```\n", tmp_path)
    assert {each.kind for each in blocks(README)} == {"python", "sh"}, "other kinds are not checked"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_linked_files_exist(path: Path) -> None:
    links = re.findall(r"\]\((?!\w+:|#)([^)\s#]+)[^)]*\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_picture_matches_its_script() -> None:
    assert "](aioverbs/_docs/_static/architecture.svg)" in README
    namespace: dict[str, object] = {"__name__": "architecture"}
    exec((ROOT / "aioverbs" / "_docs" / "architecture.py").read_text(), namespace)
    draw = namespace["draw"]
    assert callable(draw)
    assert draw() == (ROOT / "aioverbs" / "_docs" / "_static" / "architecture.svg").read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_exist(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"(?:`|\$ )aioverbs ([a-z]+)", text)) <= set(COMMANDS)
    assert set(re.findall(r"nox -s (\w+)", text)) <= set(sessions())
    extras = set(importlib.metadata.metadata("aioverbs").get_all("Provides-Extra") or ())
    assert set(re.findall(r"aioverbs\[(\w+)\]", text)) <= extras


def test_ci_runs_the_line_of_the_readme_and_known_sessions() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    listed = re.search(r"^sessions=\((.*?)\)$", script.read_text(), re.MULTILINE)
    assert listed is not None
    assert listed[1].split() == ["lint", "types", "contracts", "clang", "sanitize", "tsan", "build", "docs", "rdma"]
    assert set(listed[1].split()) <= set(sessions())
