"""The page for contributors: the packages, files, functions, sessions and messages that it names exist."""

import re
import tomllib
from pathlib import Path

from tests.checks.core_layers import LAYERS
from tests.conftest import ROOT
from tests.packaging.test_readme import sessions

PACKAGE = ROOT / "aioverbs"
CORE = PACKAGE / "_core"
WHOLE = (PACKAGE / "_docs" / "contributing.md").read_text()
BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
TEXT = BLOCK.sub("", WHOLE)
FILE = re.compile(r"[\w./-]+(?:/|\.(?:[ch]|md|pyi?|p[xy][dix]|toml|txt))")
NAME = re.compile(r"[A-Za-z_]\w*")


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(WHOLE) if found == kind]


def code(text: str) -> list[str]:
    """Return the texts in backquotes."""
    return re.findall(r"`([^`]+)`", text)


def first_column(head: str) -> list[str]:
    """Return the names in the first column of the table with a heading."""
    table = re.search(rf"^\| {head} \|.*\n\|---.*\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert table is not None
    return [name for row in table[1].splitlines() for name in code(row.split("|")[1])]


def levels_of(container: str) -> dict[str, int]:
    """Return the level of each existing module and folder in the layers of pyproject.toml; 0 is the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each.get("containers") == [container]]
    folder = ROOT / container.replace(".", "/")
    levels = {name.strip(" ()"): level for level, layer in enumerate(layers) for name in re.split(r"[|:]", layer)}
    return {
        name: level for name, level in levels.items() if (folder / name).is_dir() or any(folder.glob(f"{name}.py*"))
    }


def places(name: str) -> list[Path]:
    """Return the files or folders of a name that is relative to the repository, the package or the core."""
    return [base / name for base in (ROOT, PACKAGE, CORE) if (base / name).exists()]


def test_the_map_lists_every_package_in_order_of_layers() -> None:
    named, levels = first_column("package"), levels_of("aioverbs")
    assert sorted(named) == sorted(levels)
    assert named == sorted(named, key=lambda name: levels[name])


def test_the_map_lists_every_folder_of_the_core_in_order_of_layers() -> None:
    named = [name.removeprefix("_core/") for name in first_column("folder")]
    sources = [path for path in CORE.rglob("*") if path.suffix in (".c", ".h", ".pyx", ".pxi", ".pxd")]
    assert sorted(named) == sorted({path.parent.relative_to(CORE).as_posix() for path in sources} - {"."})
    assert [name for name in named if name in LAYERS] == list(reversed(LAYERS))
    levels = levels_of("aioverbs._core")
    assert named == sorted(named, key=lambda name: levels[name.split("/")[0]])


def test_named_files_exist() -> None:
    words = [word for span in (*code(TEXT), *blocks("sh")) for word in span.split()]
    named = {word for word in words if FILE.fullmatch(word)}
    assert len(named) > 60
    assert {name for name in named if not places(name)} == set()


def test_functions_are_in_the_files_named_beside_them() -> None:
    checked = 0
    missing = []
    for item in re.split(r"\n(?=\||- )|\n\n+", TEXT):  # rows, items of lists, and paragraphs
        files = [path for span in code(item) if FILE.fullmatch(span) for path in places(span) if path.is_file()]
        text = "\n".join(path.read_text() for path in files)
        names = [span for span in code(item) if NAME.fullmatch(span)] if files else []
        checked += len(names)
        missing += [(name, item[:60]) for name in names if not re.search(rf"\b{name}\b", text)]
    assert checked > 100
    assert missing == []


def test_every_session_is_in_the_table() -> None:
    assert sorted(first_column("session")) == sorted(sessions())
    lines = "\n".join([*code(TEXT), *blocks("sh")])
    named = {name for line in re.findall(r"nox -s ([\w ]+)", lines) for name in line.split()}
    assert named <= set(sessions())


def test_messages_of_the_lock_order_match_the_source() -> None:
    source = (CORE / "soft" / "base" / "lock_order.c").read_text()
    formats = [re.escape(each).replace("%s", "(.+)") for each in re.findall(r'"(soft0: .*)\\n"', source)]
    locks = re.findall(r'\[SOFT_RANK_\w+\] = "(.*)"', source)
    order, held = "".join(blocks("text")).splitlines()
    (waited,) = filter(None, (re.fullmatch(each, order) for each in formats))
    assert set(waited.groups()) <= set(locks)
    (without,) = filter(None, (re.fullmatch(each, held) for each in formats))
    function, lock, text = without.groups()
    assert lock in locks
    core = "".join(path.read_text() for path in CORE.glob("soft/*/*.c"))
    body = re.search(rf"\b{function}\([^;]*?\)\n{{\n(.*?)^}}", core, re.DOTALL | re.MULTILINE)
    assert body is not None
    assert f"assert_held({text});" in body[1]
