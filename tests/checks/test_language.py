from pathlib import Path

import pytest

from tests.checks.language import objections

CAR = '''
"""Cars."""

__all__ = ["Car", "park"]


class Vehicle:
    """Base class of vehicles."""

    def move(self, metres: int) -> None:
        """Move.

        :param metres: the distance.
        """


class Car(Vehicle):
    """A car.

    :param seats: number of seats.
    """

    def __init__(self, seats: int, _engine: object = None) -> None: ...

    def load(self, *goods: str) -> None:
        """Load goods.

        :param goods: their names.
        """

    def _start(self, key: str) -> None:
        """Start the engine."""


def park(car: Car) -> None:
    """Park a car.

    :param car: the car.
    """
'''
PUMP = '''"""Pumps."""

cdef class Pump(Tool):
    """A pump."""

    def start(self, int depth=1, object name not None, **options):
        """Start the pump.

        :param depth: in metres.
        :param name: its name.
        :param options: further settings.
        """

    cdef int _run(self, int count):
        return count


cdef class Tool:
    """A tool."""

    def lift(self, list loads):
        """Lift loads.

        :param loads: the loads.
        """
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a tree without violations: the package exports a class, a function and a Cython class."""
    for folder in ("aioverbs/_garage", "examples", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "noxfile.py").write_text('"""Sessions."""\n')
    (tmp_path / "aioverbs" / "__init__.pyi").write_text(
        "from aioverbs._garage.car import Car as Car, park as park\nfrom aioverbs._garage.pump import Pump as Pump\n"
    )
    (tmp_path / "aioverbs" / "_garage" / "car.py").write_text(CAR)
    (tmp_path / "aioverbs" / "_garage" / "pump.pyx").write_text(PUMP)
    return tmp_path


def change(tree: Path, file: str, old: str, new: str) -> None:
    path = tree / "aioverbs" / "_garage" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_tree_without_violations(tree: Path) -> None:
    assert list(objections(tree)) == []


@pytest.mark.parametrize(
    ("place", "text", "line"),
    [
        ("aioverbs/tool.py", '"""What a tool is."""\n', 1),
        ("examples/tool.py", 'class Tool:\n    """Of tools."""\n', 2),
        ("tests/tool.py", 'async def run() -> None:\n    """\n    It runs.\n    """\n', 2),
        ("aioverbs/tool.pyi", 'def run() -> None:\n    """Whatever runs."""\n', 2),
        ("aioverbs/tool.pyx", '"""Those of tools."""\n', 1),
        ("aioverbs/tool.pyx", 'cdef class Tool:\n    """That is a tool."""\n', 2),
        ("aioverbs/tool.pyx", 'def run(\n    self, int count\n):\n    """Which runs."""\n', 4),
        ("aioverbs/tool.c", "int x;\n\n/* Where tools are. */\nint y;\n", 3),
        ("aioverbs/tool.h", "/** Whose tool it is. */\n", 1),
    ],
)
def test_banned_first_words_are_found(tree: Path, place: str, text: str, line: int) -> None:
    (tree / place).write_text(text)
    ((rule, objection),) = objections(tree)
    assert rule == "first word"
    assert objection.startswith(f"{place}:{line}: begins with ")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("aioverbs/tool.py", '"""Tools.\n\nWhat they do.\n"""\nx = """What is no docstring."""\n'),
        ("aioverbs/tool.pyx", '"""Tools."""\n\nx = """What is no docstring."""\n'),
        ("aioverbs/tool.c", "int x; /* What follows code. */\n/* Itself. */\n"),
    ],
)
def test_other_positions_and_words_are_allowed(tree: Path, place: str, text: str) -> None:
    (tree / place).write_text(text)
    assert list(objections(tree)) == []


@pytest.mark.parametrize(
    ("file", "removed", "objection"),
    [
        ("car.py", "        :param metres: the distance.\n", "car.py:10: move lacks :param metres:"),
        ("car.py", "        :param goods: their names.\n", "car.py:25: load lacks :param goods:"),
        ("car.py", "    :param car: the car.\n", "car.py:35: park lacks :param car:"),
        ("pump.pyx", "        :param depth: in metres.\n", "pump.pyx:6: start lacks :param depth:"),
        ("pump.pyx", "        :param name: its name.\n", "pump.pyx:6: start lacks :param name:"),
        ("pump.pyx", "        :param options: further settings.\n", "pump.pyx:6: start lacks :param options:"),
        ("pump.pyx", "        :param loads: the loads.\n", "pump.pyx:21: lift lacks :param loads:"),
    ],
)
def test_missing_parameters_are_found(tree: Path, file: str, removed: str, objection: str) -> None:
    line = removed.replace(removed.strip(), "").replace("\n", "")
    change(tree, file, removed, f"{line}Nothing.\n")
    assert list(objections(tree)) == [("param", f"aioverbs/_garage/{objection}")]


def test_a_class_documents_the_arguments_of_its_constructor(tree: Path) -> None:
    change(tree, "car.py", "self, seats: int,", "self, seats: int, doors: int,")
    assert list(objections(tree)) == [("param", "aioverbs/_garage/car.py:23: __init__ lacks :param doors:")]
    change(tree, "car.py", "    :param seats: number of seats.\n", "    Created by `park`.\n")
    assert list(objections(tree)) == []


def test_private_classes_need_no_parameters(tree: Path) -> None:
    (tree / "aioverbs" / "__init__.pyi").write_text("")
    change(tree, "car.py", "    :param car: the car.\n", "")
    change(tree, "pump.pyx", "        :param depth: in metres.\n", "")
    assert list(objections(tree)) == []


@pytest.mark.parametrize("place", ["aioverbs/errors.py", "aioverbs/testing/__init__.py"])
def test_names_in_all_of_a_public_module_are_public(tree: Path, place: str) -> None:
    (tree / place).parent.mkdir(exist_ok=True)
    (tree / place).write_text('__all__ = ["stop"]\n\n\ndef stop(car: object) -> None:\n    """Stop a car."""\n')
    assert list(objections(tree)) == [("param", f"{place}:4: stop lacks :param car:")]


@pytest.mark.parametrize("place", ["aioverbs/tool.c", "aioverbs/tool.py", "examples/tool.py", "noxfile.py"])
@pytest.mark.parametrize("word", ["cr" + "ew", "hir" + "ing", "far" + "_qp"])  # split, since this file is checked, too
def test_retired_words_are_found(tree: Path, place: str, word: str) -> None:
    (tree / place).write_text(f"x = 1\n{word} = 2\n")
    assert list(objections(tree)) == [("retired word", f"{place}:2: {word!r}")]


def test_a_retired_word_within_another_word_is_allowed(tree: Path) -> None:
    (tree / "aioverbs" / "tool.py").write_text("screw = hired_car = afar_x = 1  # whole, then, shed\n")
    assert list(objections(tree)) == []


@pytest.mark.parametrize("word", ["who", "Somebody", "his"])
def test_pronouns_are_found_in_the_library_only(tree: Path, word: str) -> None:
    for folder in ("aioverbs", "tests"):
        (tree / folder / "tool.py").write_text(f"# {word} calls\n")
    assert list(objections(tree)) == [("retired word in the library", f"aioverbs/tool.py:1: {word!r}")]


@pytest.mark.parametrize("place", ["aioverbs/tool.pyx", "tests/tool.c", "examples/tool.py"])
def test_long_lines_are_found(tree: Path, place: str) -> None:
    comment = "// " if place.endswith(".c") else "# "
    (tree / place).write_text(f"{comment:x<120}\n{comment:x<121}\n")
    assert list(objections(tree)) == [("long line", f"{place}:2: 121 characters")]
