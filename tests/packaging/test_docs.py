"""The documentation has every public name and every example; what leads nowhere in it is found."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aioverbs
from tests.conftest import ROOT

sys.path.append(str(ROOT / "aioverbs" / "_docs"))

import docstrings
import stubs
import surface
import themes

EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), ROOT / "examples" / "storage_server"])


def write(folder: Path, root: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(root / "aioverbs" / "_docs" / "pages.py"), str(folder)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "sources"
    done = write(folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_every_public_name_has_its_place() -> None:
    names = [name for theme in themes.THEMES for name in theme.names]
    assert len(names) == len(set(names))
    placed = {name for name in names if not name.startswith("aioverbs.")}
    assert set(aioverbs.__all__) - placed == set(), "give each of them its place in aioverbs/_docs/themes.py"
    assert placed - set(aioverbs.__all__) == set(), "take each of them out of aioverbs/_docs/themes.py"


def test_every_public_name_is_on_a_page(sources: Path) -> None:
    pages = "".join(path.read_text() for path in (sources / "reference").glob("*.rst"))
    shown = re.findall(r"^\.\. auto\w+:: aioverbs\.(\w+)", pages, re.MULTILINE)
    assert set(aioverbs.__all__) <= set(shown)
    for name in themes.FIXTURES:
        assert f".. py:data:: {name}\n" in pages


def test_methods_of_bases_that_are_not_public_are_shown() -> None:
    assert "connect" in surface.members(aioverbs.QueuePair)
    assert "read" not in surface.members(aioverbs.QueuePair), "which its public base has"
    assert surface.member(aioverbs.QueuePair, "read") == "aioverbs._core.data_path.data_path.Sending.read"
    assert surface.member(aioverbs.WcStatus, "SUCCESS") == "aioverbs.WcStatus.SUCCESS"


def test_every_example_has_a_page(sources: Path) -> None:
    index, first = ((sources / page).read_text() for page in ("examples/index.rst", "index.md"))
    for path in EXAMPLES:
        page = (sources / "examples" / f"{path.stem}.rst").read_text()
        for each in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            name = each.relative_to(ROOT / "examples")
            assert f".. literalinclude:: {name}\n" in page
            assert (sources / "examples" / name).read_text() == each.read_text()
        assert f"<{path.stem}>" in index
        assert f"\nexamples/{path.stem}\n" in first


def test_the_readme_and_the_changelog_are_pages(sources: Path) -> None:
    index = (sources / "index.md").read_text()
    readme = (ROOT / "README.md").read_text()
    assert index.startswith(readme.partition("](")[0])
    assert "](examples/pool.py)" in readme
    assert "](examples/pool.rst)" in index
    assert (sources / "CHANGELOG.md").read_text() == (ROOT / "CHANGELOG.md").read_text()
    for page in ("tests/verbs_matrix/verbs", "aioverbs/_docs/protocol", "aioverbs/_docs/contributing"):
        assert (sources / f"{page}.md").is_file(), "the README has a link to it"
        assert f"\n{page}\n" in index
    lock_order = "aioverbs/_core/soft/base/lock_order.h"
    assert (sources / lock_order).read_text() == (ROOT / lock_order).read_text(), "the page for contributors shows it"


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "aioverbs").mkdir(parents=True)
    for name in ("aioverbs/_docs", "examples", "CHANGELOG.md"):
        (root / name).symlink_to(ROOT / name)
    (root / "aioverbs" / "_docs").unlink()
    (root / "aioverbs" / "_docs").mkdir()
    for path in (ROOT / "aioverbs" / "_docs").glob("*.py"):
        (root / "aioverbs" / "_docs" / path.name).write_text(path.read_text())
    (root / "README.md").write_text("[this](examples/pool.py), [that](examples/puddle.py)")
    done = write(tmp_path / "sources", root)
    assert done.returncode == 1
    assert "README.md has a link to examples/puddle.py, which is not there" in done.stderr


@pytest.mark.parametrize(
    ("of", "text", "becomes"),
    [
        ("aioverbs.QueuePair.messages", "see `batch`", "see :py:obj:`batch <aioverbs.QueuePair.batch>`"),
        ("aioverbs.QueuePair.messages", "a `Device`.", "a :py:obj:`Device <aioverbs.Device>`."),
        ("aioverbs.QueuePair.messages", "`receive_depth` of them", "``receive_depth`` of them"),
        ("aioverbs.Requester.write_nowait", "`fence`", "``fence``"),
        ("", "`QueuePair.read`", ":py:obj:`QueuePair.read <aioverbs._core.data_path.data_path.Sending.read>`"),
        ("", "`aioverbs.Backoff()`", ":py:obj:`aioverbs.Backoff() <aioverbs.Backoff>`"),
        ("", "`ConnectionSettings.spin_ns`", ":py:obj:`ConnectionSettings.spin_ns <aioverbs.ConnectionSettings>`"),
        ("", "`anyio.WouldBlock`, `ValueError`", "``anyio.WouldBlock``, ``ValueError``"),
        ("", "`ulimit -l` and ``code`` and :exc:`X`", "``ulimit -l`` and ``code`` and :exc:`X`"),
        ("", "`QueuePair.reed`, `anyio.WoodBlock`, `nothing`", ":py:obj:`QueuePair.reed`, :py:obj:`anyio.WoodBlock`, "),
    ],
)
def test_names_in_backquotes_are_references(of: str, text: str, becomes: str) -> None:
    assert docstrings.to_rst(text, docstrings.references_from(of)).startswith(becomes)


def test_indented_blocks_are_code() -> None:
    text = "Do this:\n\n    x = 1\n\n    y = 2\n\n    :param z: what\n        it is."
    plain = docstrings.to_rst(text.replace("    :param", ":param"), lambda name: name)
    code = ".. code-block:: python\n\n    x = 1\n\n    y = 2\n\n"
    assert plain == f"Do this:\n\n{code}:param z: what\n        it is."
    assert ".. code-block:: text\n" in docstrings.to_rst("As\n\n    rping -s -a 10.77.0.1\n", lambda name: name)


STUB = """
from asyncio import Future
from typing import Never, TypeAlias
_Piece: TypeAlias = RegionSlice | Registered
_Local: TypeAlias = _Piece | Sequence[_Piece]
def span(memory: Buffer) -> tuple[int, int]: ...
class Queue:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def depth(self) -> int: ...
    @staticmethod
    def of(depth: int) -> Queue: ...
    def send(self, local: _Local, /, *, fence: bool = False) -> Future[None]: ...
class Slice:
    def __init__(self, offset: int) -> None: ...
"""


def test_signatures_come_from_stubs(tmp_path: Path) -> None:
    (tmp_path / "queue.pyi").write_text(STUB)
    stub = stubs.read(tmp_path / "queue.pyi")
    pieces = "RegionSlice | MemoryRegion"
    assert stub.properties == {"Queue.depth": "int"}
    assert stub.signatures == {
        "span": stubs.Signature("(memory: Buffer)", "tuple[int, int]"),
        "Queue": stubs.Signature("", None),
        "Queue.of": stubs.Signature("(depth: int)", "Queue"),
        "Queue.send": stubs.Signature(
            f"(local: {pieces} | Sequence[{pieces}], /, *, fence: bool=False)", "asyncio.Future[None]"
        ),
        "Slice": stubs.Signature("(offset: int)", None),
    }


def test_what_is_private_is_not_taken_for_what_is_public() -> None:
    known = surface.signature("aioverbs._core.software.software.FaultPlan.break_completion_queue")
    assert known == stubs.Signature("(cq: aioverbs._core.handles.handles.CompletionQueue)", "None")


def test_what_is_made_by_others_is_not_shown_as_if_it_were_called() -> None:
    assert surface.is_made_by_others(aioverbs.Connection)
    assert not surface.is_made_by_others(aioverbs.Backoff)
    assert surface.signature("aioverbs.QueuePair.read") is not None
    assert surface.signature("aioverbs.QueuePair.messages") is None, "Python knows it"
