"""The documentation contains every public name and every example, and its builder resolves names and signatures."""

import re
import sys
from pathlib import Path

import pytest

import aioverbs

pytest.importorskip("distributed")  # one page shows its backend

from tests.conftest import ROOT

sys.path.append(str(ROOT / "aioverbs" / "_docs"))

import docstrings
import stubs
import surface
import versions

DOCS = ROOT / "aioverbs" / "_docs"
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def test_every_public_name_is_on_one_page() -> None:
    names = surface.shown()
    assert len(names) == len(set(names))
    placed = {name.removeprefix("aioverbs.") for name in names} & set(aioverbs.__all__)
    assert placed == set(aioverbs.__all__), "add the missing names to aioverbs/_docs/reference"
    for name in names:
        surface.find(name)


def test_fixtures_of_the_plugin_are_on_its_page() -> None:
    page = (DOCS / "reference" / "testing.rst").read_text()
    assert re.findall(r"^\.\. py:data:: (\w+)$", page, re.MULTILINE) == ["aioverbs_device", "aioverbs_ledger"]


def test_every_example_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in (DOCS / "examples").glob("*.md"))
    included = re.findall(r"^```\{literalinclude\} \.\./\.\./\.\./(\S+)$", pages, re.MULTILINE)
    assert sorted(included) == [path.relative_to(ROOT).as_posix() for path in EXAMPLES]


def test_versions_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "0.10.0.dev0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("")
    assert versions.write(tmp_path) == ["0.10.0", "0.10.0.dev0", "0.9.0"]
    assert '["0.10.0", "0.10.0.dev0", "0.9.0"]' in (tmp_path / "versions.js").read_text()
    assert 'url=0.10.0/index.html"' in (tmp_path / "index.html").read_text()


def test_methods_of_private_bases_are_shown() -> None:
    assert "connect" in surface.members(aioverbs.QueuePair)
    assert "read" not in surface.members(aioverbs.QueuePair), "shown on the page of its public base"
    assert surface.member(aioverbs.QueuePair, "read") == "aioverbs._core.data_path.data_path.SendVerbs.read"
    assert surface.member(aioverbs.WcStatus, "SUCCESS") == "aioverbs.WcStatus.SUCCESS"


@pytest.mark.parametrize(
    ("of", "text", "becomes"),
    [
        ("aioverbs.QueuePair.messages", "see `batch`", "see :py:obj:`batch <aioverbs.QueuePair.batch>`"),
        ("aioverbs.QueuePair.messages", "a `Device`.", "a :py:obj:`Device <aioverbs.Device>`."),
        ("aioverbs.QueuePair.messages", "`receive_depth` of them", "``receive_depth`` of them"),
        ("aioverbs._core.data_path.data_path.QueuePairVerbs.write_nowait", "`fence`", "``fence``"),
        ("", "`QueuePair.read`", ":py:obj:`QueuePair.read <aioverbs._core.data_path.data_path.SendVerbs.read>`"),
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


def test_an_internal_class_is_not_shown_as_the_public_one_of_that_name() -> None:
    known = surface.signature("aioverbs._core.software.software.FaultPlan.break_completion_queue")
    assert known == stubs.Signature("(cq: aioverbs._core.handles.handles.CompletionQueue)", "None")


def test_classes_that_users_do_not_construct_have_no_signature() -> None:
    assert surface.is_made_by_others(aioverbs.Connection)
    assert not surface.is_made_by_others(aioverbs.Backoff)
    assert surface.signature("aioverbs.QueuePair.read") is not None
    assert surface.signature("aioverbs.QueuePair.messages") is None, "Python's own signature is used"
