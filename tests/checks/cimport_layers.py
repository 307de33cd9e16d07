"""Check that modules import only from lower layers, for what import-linter does not see.

    python tests/checks/cimport_layers.py [ROOT]

Checked are imports and cimports in Cython sources, the C headers that these include, imports from compiled modules, and
imports of the package itself, which is above all layers. The layers are those of import-linter's contracts in
pyproject.toml, where a folder with C sources only is listed in parentheses.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SUFFIXES = (".py", ".pyx", ".pxd", ".pxi")
_STRING_OR_COMMENT = re.compile(r"""('''|\"\"\")(?:\\.|.)*?\1|(['"])(?:\\.|(?!\2)[^\\\n])*\2|\#[^\n]*""", re.DOTALL)
_STATEMENT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<source>[.\w]+)[ \t]+c?import[ \t]*(?:\((?P<listed>[^)]*)\)|(?P<names>[^\n;]*))"
    r"|c?import[ \t]+(?P<modules>[^\n;]*))",
    re.MULTILINE,
)
_HEADER = re.compile(r"""^[ \t]*cdef[ \t]+extern[ \t]+from[ \t]+["']([^"'<>]+)["']""", re.MULTILINE)


@dataclass(frozen=True)
class Layers:
    """Modules of one container, from top to bottom; modules of the same level are side by side."""

    container: str
    levels: tuple[frozenset[str], ...]
    independent: frozenset[int]
    exhaustive: bool

    def objection(self, importer: str, imported: str) -> str | None:
        """Return the reason why `importer` may not import `imported`, or None."""
        above, below = self._child(importer), self._child(imported)
        if above is None or below is None or above == below:
            return None
        places = [self._level(above), self._level(below)]
        if None in places:
            unknown = above if places[0] is None else below
            return f"{self.container}.{unknown} is not in the stack" if self.exhaustive else None
        if places[0] == places[1]:
            return f"{above} and {below} are side by side" if places[0] in self.independent else None
        return None if places < places[::-1] else f"{below} is above {above}"

    def _child(self, module: str) -> str | None:
        prefix = f"{self.container}."
        return module.removeprefix(prefix).split(".")[0] if module.startswith(prefix) else None

    def _level(self, name: str) -> int | None:
        return next((index for index, level in enumerate(self.levels) if name in level), None)


def layers(pyproject: dict[str, Any]) -> Iterator[Layers]:
    """Yield the layers of import-linter's contracts."""
    for contract in pyproject["tool"]["importlinter"]["contracts"]:
        if contract["type"] != "layers":
            continue
        levels = [re.split(r"[|:]", level) for level in contract["layers"]]
        for container in contract["containers"]:
            yield Layers(
                container,
                tuple(frozenset(name.strip(" ()") for name in level) for level in levels),
                frozenset(index for index, level in enumerate(contract["layers"]) if "|" in level),
                bool(contract.get("exhaustive")),
            )


def imports(text: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of each import and cimport in a source of `package`."""
    blank = _STRING_OR_COMMENT.sub(lambda match: "\n" * match.group().count("\n") or "''", text)
    blank = blank.replace("\\\n", "  ")
    for match in _STATEMENT.finditer(blank):
        line = blank.count("\n", 0, match.start()) + 1
        if match["modules"] is not None:
            for module in match["modules"].split(","):
                yield line, module.split(" as ")[0].strip()
            continue
        source = match["source"]
        dots = len(source) - len(source.lstrip("."))
        if dots:
            parents = package.split(".")
            source = ".".join([*parents[: len(parents) - dots + 1], source[dots:]]).rstrip(".")
        for name in (match["listed"] or match["names"]).split(","):
            if name.strip():
                yield line, f"{source}.{name.split(' as ')[0].strip()}"


def headers(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of each of the package's headers that a Cython source includes."""
    text = path.read_text() if path.suffix != ".py" else ""
    for match in _HEADER.finditer(text):
        header = path.parent.parent / match[1]
        if header.exists():
            yield text.count("\n", 0, match.start(1)) + 1, ".".join(header.relative_to(root).with_suffix("").parts)


def including_source(path: Path) -> Path:
    """Return the source that includes a .pxi file; for any other file, the file itself."""
    if path.suffix != ".pxi":
        return path
    including = re.compile(rf"""^[ \t]*include[ \t]+["']{re.escape(path.name)}["']""", re.MULTILINE)
    beside = sorted(other for other in path.parent.iterdir() if other.suffix in _SUFFIXES and other != path)
    return next((including_source(other) for other in beside if including.search(other.read_text())), path)


def objections(root: Path) -> Iterator[str]:
    """Yield the violations in the tree under `root`."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    top = pyproject["tool"]["importlinter"]["root_package"]
    stack = list(layers(pyproject))
    sources = (path for path in (root / top).rglob("*") if path.suffix in _SUFFIXES)
    # Folders that are no packages, such as that of the documentation, are outside of the layers.
    for path in sorted(path for path in sources if (path.parent / "__init__.py").exists()):
        parts = including_source(path).relative_to(root).with_suffix("").parts
        importer = ".".join(parts).removesuffix(".__init__")
        for line, imported in (*imports(path.read_text(), ".".join(parts[:-1])), *headers(path, root)):
            place = f"{path.relative_to(root)}:{line}: imports {imported}"
            beneath = imported.removeprefix(f"{top}.").split(".")[0]
            exists = (root / top / beneath).is_dir() or any((root / top).glob(f"{beneath}.*"))
            ours = imported == top or imported.startswith(f"{top}.")
            if ours and (imported == top or not exists) and importer != top:
                yield f"{place}: the package itself is above all layers"
            for each in stack:
                objection = each.objection(importer, imported)
                if objection is not None and imported != top:
                    yield f"{place}: {objection}"


def main() -> int:
    found = list(objections(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
    print("\n".join(found) if found else "every Cython and Python source imports only lower layers")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
