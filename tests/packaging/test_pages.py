"""The code on pages of the documentation runs, and its output matches the page."""

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.packaging.blocks import RUN, blocks, run

DOCS = ROOT / "aioverbs" / "_docs"
PAGES = sorted(path for name in ("tutorial", "howto", "explanation") for path in (DOCS / name).glob("*.md"))
KINDS = {"python", "py", "sh", "text", "console", "toml", "ini", "yaml", "c", "{svgbob}", "{toctree}"}


def named(path: Path) -> str:
    return path.relative_to(DOCS).with_suffix("").as_posix()


@pytest.mark.parametrize(
    "path", [path for path in PAGES if any(each.kind in RUN for each in blocks(path.read_text()))], ids=named
)
def test_the_code_works_as_pasted(path: Path, tmp_path: Path) -> None:
    run(path.read_text(), tmp_path)


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_blocks_have_known_languages(path: Path) -> None:
    assert {each.kind for each in blocks(path.read_text())} <= KINDS


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_partial_blocks_are_parts_of_programs(path: Path) -> None:
    found = blocks(path.read_text())
    programs = [each.text for each in found if each.kind == "python"]
    programs += [each.read_text() for each in (ROOT / "examples").glob("*.py")]
    for each in found:
        if each.kind == "py":
            ast.parse(each.text)
            assert any(each.text in program for program in programs), each.text


def test_a_wrong_page_fails(tmp_path: Path) -> None:
    page = "```python\nprint('one')\n```\n\n```text\ntwo\n```\n"
    with pytest.raises(AssertionError, match="printed\none"):
        run(page, tmp_path)
    run(page.replace("two", "o..."), tmp_path)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run("```sh\npython -c 1/0\n```\n", tmp_path)


def test_every_page_is_listed_in_its_index() -> None:
    listed = {name: (DOCS / name / "index.md").read_text() for name in ("howto", "explanation")}
    for path in PAGES:
        kind = path.parent.name
        if path.stem != "index" and kind in listed:
            assert re.search(rf"^(\.\./)?{path.stem}$", listed[kind], re.MULTILINE), f"{path} is in no list"
