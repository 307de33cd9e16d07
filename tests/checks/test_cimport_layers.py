from pathlib import Path

import pytest

from tests.checks.cimport_layers import imports, objections

PYPROJECT = """
[tool.importlinter]
root_package = "house"

[[tool.importlinter.contracts]]
type = "layers"
containers = ["house"]
exhaustive = true
layers = ["(roof)", "left | right", "core", "ground"]

[[tool.importlinter.contracts]]
type = "layers"
containers = ["house.core"]
layers = ["(upper)", "lower : beside"]
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    core = tmp_path / "house" / "core"
    core.mkdir(parents=True)
    for name in ("__init__.py", "roof.py", "left.py", "right.py", "ground.py", "cellar.py"):
        (tmp_path / "house" / name).touch()
    for name in ("__init__.py", "upper.pyx", "lower.pyx", "lower.pxd", "beside.pyx"):
        (core / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        "from house.core.lower cimport Thing",
        "from .lower cimport Thing, \\\n    Other",
        "cimport house.core.lower as low",
        "from ..ground import x",
        "from house cimport ground",
        "import os, sys\nfrom libc.stdint cimport uint64_t",
        "# from house import roof",
        '"""\nfrom house import roof\n"""',
        "cdef object upper = 'from house import roof'",
    ],
)
def test_downwards_is_allowed(house: Path, source: str) -> None:
    (house / "house/core/upper.pyx").write_text(source)
    assert list(objections(house)) == []


def test_a_folder_that_is_no_package_may_import_the_package(house: Path) -> None:
    (house / "house/beside").mkdir()
    source = house / "house/beside/pages.py"
    source.write_text("import house")
    assert list(objections(house)) == []
    (house / "house/beside/__init__.py").touch()
    assert [each.rpartition(": ")[2] for each in objections(house)] == ["the package itself is above all layers"]


def test_the_root_package_may_import_all_layers(house: Path) -> None:
    (house / "house/__init__.py").write_text("from house import roof\nfrom .ground import x\nfrom . import core")
    assert list(objections(house)) == []


@pytest.mark.parametrize(
    ("file", "source", "line", "reason"),
    [
        ("core/lower.pyx", "x = 1\nfrom house.core.upper cimport Thing", 2, "upper is above lower"),
        ("core/lower.pxd", "from .upper cimport (\n    Thing,\n)", 1, "upper is above lower"),
        ("core/lower.pyx", "def f():\n    from . import upper", 2, "upper is above lower"),
        ("core/lower.pyx", "cimport os, house.core.upper", 1, "upper is above lower"),
        ("core/lower.pyx", "'''doc\n'''\nfrom house.roof import x", 3, "roof is above core"),
        ("core/lower.pyx", "from .. import roof", 1, "roof is above core"),
        ("core/lower.pyx", "from house import cellar", 1, "house.cellar is not in the stack"),
        ("core/lower.pyx", "import house", 1, "the package itself is above all layers"),
        ("core/lower.pyx", "from house import open_device", 1, "the package itself is above all layers"),
        ("ground.py", "from house.core.lower import Thing", 1, "core is above ground"),
        ("ground.py", "def f():\n    import house", 2, "the package itself is above all layers"),
        ("core/__init__.py", "from ..roof import x", 1, "roof is above core"),
        ("left.pyx", "from .right cimport x", 1, "left and right are side by side"),
    ],
)
def test_upwards_is_found(house: Path, file: str, source: str, line: int, reason: str) -> None:
    (house / "house" / file).write_text(source)
    found = list(objections(house))
    assert any(entry.startswith(f"house/{file}:{line}: ") and entry.endswith(reason) for entry in found), found


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("core/ground/plan.h", None),
        ("core/beside.h", None),
        ("core/attic/plan.h", "lower and attic are side by side"),
    ],
)
def test_a_header_has_the_level_of_its_folder(house: Path, header: str, reason: str | None) -> None:
    text = (house / "pyproject.toml").read_text()
    (house / "pyproject.toml").write_text(text.replace('"lower : beside"', '"lower | (attic)", "beside : ground"'))
    (house / "house" / header).parent.mkdir(exist_ok=True)
    (house / "house" / header).touch()
    (house / "house/core/lower").mkdir()
    (house / "house/core/lower/__init__.py").touch()
    name = header.removeprefix("core/")
    (house / "house/core/lower/lower.pxd").write_text(f'x = 1\ncdef extern from "{name}" nogil:\n    int f()\n')
    place = f"house/core/lower/lower.pxd:2: imports house.{header.removesuffix('.h').replace('/', '.')}"
    assert list(objections(house)) == ([f"{place}: {reason}"] if reason else [])


def test_an_included_file_is_part_of_its_includer(house: Path) -> None:
    (house / "house/core/lower.pyx").write_text('include "lower_part.pxi"')
    part = house / "house/core/lower_part.pxi"
    part.write_text("from house.core.beside cimport x")
    assert list(objections(house)) == []
    part.write_text("from house.core.upper cimport x")
    assert list(objections(house)) == ["house/core/lower_part.pxi:1: imports house.core.upper.x: upper is above lower"]


def test_relative_names_are_resolved() -> None:
    text = "from ..a.b cimport c as d, e\nimport f.g as h\nfrom . cimport i"
    assert list(imports(text, "top.middle.low")) == [
        (1, "top.middle.a.b.c"),
        (1, "top.middle.a.b.e"),
        (2, "f.g"),
        (3, "top.middle.low.i"),
    ]
