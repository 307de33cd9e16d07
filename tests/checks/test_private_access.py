from pathlib import Path

import pytest

from tests.checks.private_access import objections

CAR = """
import os

_wheels = 4

class Car:
    _seats: int

    def __init__(self, other):
        self._engine = object()

    @property
    def _doors(self):
        return self._engine

    if os.name:
        def _horn(self): ...
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Create the packages `_garage`, which defines private names, and `_garden`, and an example."""
    for folder in ("aioverbs/_garage", "aioverbs/_garden", "examples/tour"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("aioverbs", "aioverbs/_garage", "aioverbs/_garden", "examples/tour"):
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "aioverbs" / "_garage" / "car.py").write_text(CAR)
    (tmp_path / "aioverbs" / "_garage" / "lift.pyx").write_text("cdef class Lift:\n    cdef int _height, _load\n")
    return tmp_path


def messages(root: Path) -> list[str]:
    return [each.split(": ", 1)[1] for each in objections(root)]


@pytest.mark.parametrize(
    ("place", "text", "name"),
    [
        ("aioverbs/_garden/tree.py", "def drive(car): return car._engine", "car._engine"),
        ("aioverbs/tools.py", "def drive(self): return self.car._engine.start()", "self.car._engine"),
        ("examples/tour/way.py", "def drive(car): car._seats = 5", "car._seats"),
        ("aioverbs/_garden/tree.py", "def drive(car): del car._doors", "car._doors"),
        ("aioverbs/tools.py", "def drive(car): car._horn()", "car._horn"),
        ("examples/tour/way.py", "def drive(lift): return lift._load", "lift._load"),
        ("aioverbs/_garden/tree.py", "from aioverbs._garage import car\nwheels = car._wheels", "car._wheels"),
    ],
)
def test_private_names_of_another_package_are_found(house: Path, place: str, text: str, name: str) -> None:
    (house / place).write_text(text)
    assert messages(house) == [f"{name} is private to _garage"]


def test_private_imports_are_found(house: Path) -> None:
    tree = house / "aioverbs" / "_garden" / "tree.py"
    tree.write_text("\nfrom aioverbs._garage.car import Car, _wheels\n")
    assert list(objections(house)) == ["aioverbs/_garden/tree.py:2: imports _wheels, which is private to _garage"]


@pytest.mark.parametrize(
    "text", ["from aioverbs._garage.car import Car", "import aioverbs._garage", "from aioverbs import _garage"]
)
def test_private_imports_of_an_example_are_found(house: Path, text: str) -> None:
    (house / "examples" / "way.py").write_text(text)
    (found,) = messages(house)
    assert found.startswith("imports aioverbs._garage")


def test_private_names_in_a_cython_source_are_found(house: Path) -> None:
    (house / "aioverbs" / "_garden" / "pump.pyx").write_text(
        '"""Not car._seats."""\n\ncdef drive(car):\n    self._engine = 1  # nor car._doors\n    car._horn()\n'
    )
    assert list(objections(house)) == ["aioverbs/_garden/pump.pyx:5: _horn is private to _garage"]


@pytest.mark.parametrize(
    "text",
    [
        "def move(self, cls): return self._engine, cls._engine",
        "class Bus:\n    def __init__(self): super()._horn()",
        "class Tree:\n    _seats = 3\ndef look(tree): return tree._seats",
        "import os\nfrom multiprocessing import process\nos._horn(), process._engine",
        "def look(row): return row._replace(size=1), row.__class__, row._nobodys",
    ],
)
def test_names_of_the_own_package_or_of_python_are_allowed(house: Path, text: str) -> None:
    (house / "aioverbs" / "_garden" / "tree.py").write_text(text)
    assert messages(house) == []


def test_private_names_are_allowed_within_their_package(house: Path) -> None:
    (house / "aioverbs" / "_garage" / "key.py").write_text(
        "from aioverbs._garage.car import _wheels\ndef turn(car, lift): return car._engine, lift._load, _wheels"
    )
    assert messages(house) == []
