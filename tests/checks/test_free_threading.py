"""Extensions support free-threaded Python: importing one that does not would enable the GIL for the process."""

import tomllib
from pathlib import Path

from tests.conftest import ROOT


def directives(source: Path) -> set[str]:
    """Return the Cython directives at the start of a file."""
    found: set[str] = set()
    for line in source.read_text().splitlines():
        if not line.startswith("# cython:"):
            break
        found.update(each.strip() for each in line.removeprefix("# cython:").split(","))
    return found


def test_every_extension_is_free_threading_compatible() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sources = [each for module in project["tool"]["setuptools"]["ext-modules"] for each in module["sources"]]
    without = [
        source
        for source in sources
        if source.endswith(".pyx") and "freethreading_compatible=True" not in directives(ROOT / source)
    ]
    assert without == []
