"""Extensions are for free-threaded Python: one that is not turns the GIL on for all of the process."""

import tomllib
from pathlib import Path

from tests.conftest import ROOT


def directives(source: Path) -> set[str]:
    """Those of the comments that the file begins with."""
    found: set[str] = set()
    for line in source.read_text().splitlines():
        if not line.startswith("# cython:"):
            break
        found.update(each.strip() for each in line.removeprefix("# cython:").split(","))
    return found


def test_every_extension_says_that_it_needs_no_gil() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sources = [each for module in project["tool"]["setuptools"]["ext-modules"] for each in module["sources"]]
    without = [
        source
        for source in sources
        if source.endswith(".pyx") and "freethreading_compatible=True" not in directives(ROOT / source)
    ]
    assert without == []
