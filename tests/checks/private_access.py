"""Check that names that begin with an underscore are used only within their own package.

    python tests/checks/private_access.py [ROOT]

Checked are imports, and attributes of objects other than `self` and `cls`. Types are unknown to the check, so a name
belongs to all packages that define an attribute or function of that name, and any of these may use it. A name that no
package defines belongs to another project (``os._exit``, ``namedtuple._replace``). Each example counts as a package,
and may import no private names at all.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_PYTHONS = {"_", "_asdict", "_fields", "_make", "_replace"}  # `_asdict` and the others: public methods of named tuples
_CYTHON = (".pyx", ".pxd", ".pxi")
_STRING_OR_COMMENT = re.compile(r"""('''|\"\"\")(?:\\.|.)*?\1|(['"])(?:\\.|(?!\2)[^\\\n])*\2|\#[^\n]*""", re.DOTALL)
_CYTHON_ACCESS = re.compile(r"(?<!\bself)(?<!\bcls)(?<=[\w)\]])\.(_[a-z]\w*)")
_CYTHON_DEFINITION = re.compile(
    r"^[ \t]*(?:async[ \t]+|c|cp)?(?:def|class)\b([^(=\n]*)|\bself\.(_\w+)[ \t]*=", re.MULTILINE
)
_PRIVATE = re.compile(r"(?<![\w.])_[a-z]\w*")


@dataclass
class Names:
    """Private names in a source: the defined ones; the used and imported ones with line, name and source text."""

    defined: set[str] = field(default_factory=set)
    used: list[tuple[int, str, str]] = field(default_factory=list)
    imported: list[tuple[int, str, str]] = field(default_factory=list)  # line, module, name


def is_private(name: str) -> bool:
    """Return whether a name begins with an underscore, and is not reserved by Python."""
    return name.startswith("_") and name not in _PYTHONS and not (name.startswith("__") and name.endswith("__"))


def in_python(text: str) -> Names:
    """Return the private names in a Python source."""
    tree, names = ast.parse(text), Names()
    pythons = set(_imported_from_python(tree))
    for scope in ast.walk(tree):
        if isinstance(scope, ast.Module | ast.ClassDef):
            names.defined |= set(filter(is_private, _bound(scope)))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=attribute):
                if isinstance(node.ctx, ast.Store) and is_private(attribute):
                    names.defined.add(attribute)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(value=ast.Name(id=name)) if name in pythons:  # asyncio._get_running_loop
                pass
            case ast.Attribute(attr=attribute) if is_private(attribute):
                names.used.append((node.lineno, attribute, ast.unparse(node)))
            case ast.ImportFrom(module=str(module), names=aliases):
                names.imported += [(node.lineno, module, alias.name) for alias in aliases]
            case ast.Import(names=aliases):
                names.imported += [(node.lineno, alias.name, "") for alias in aliases]
    return names


def _imported_from_python(tree: ast.Module) -> Iterator[str]:
    """Yield the names imported from the standard library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                if (module or alias.name).partition(".")[0] in sys.stdlib_module_names:
                    yield alias.asname or alias.name.partition(".")[0]


def _bound(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the names bound by the statements of a module or a class, also within branches."""
    waiting: list[ast.stmt] = list(scope.body)
    for each in waiting:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name
            continue
        for node in ast.walk(each):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def in_cython(text: str) -> Names:
    """Return the private names in a Cython source, found by regular expressions."""
    blank = _STRING_OR_COMMENT.sub(lambda match: "\n" * match.group().count("\n") or "''", text)
    defined = {name for found in _CYTHON_DEFINITION.findall(blank) for name in _PRIVATE.findall(" ".join(found))}
    used = [(blank.count("\n", 0, match.start()) + 1, match[1], match[1]) for match in _CYTHON_ACCESS.finditer(blank)]
    return Names(defined, used)


def packages(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield each source with its package: a name such as `_verbs`, or an example.

    Sources in folders that are no packages, such as that of the documentation, are not checked.
    """
    for path in sorted((root / "aioverbs").rglob("*")):
        if path.suffix in (".py", *_CYTHON) and (path.parent / "__init__.py").exists():
            yield path.relative_to(root / "aioverbs").parts[0].removesuffix(".py"), path
    for path in sorted((root / "examples").rglob("*.py")):
        yield "/".join(path.relative_to(root).parts[:2]), path


def objections(root: Path) -> Iterator[str]:
    """Yield the violations in the tree under `root`."""
    sources = [
        (package, path, (in_cython if path.suffix in _CYTHON else in_python)(path.read_text()))
        for package, path in packages(root)
    ]
    definers = defaultdict(set)
    for package, _, names in sources:
        for name in names.defined:
            definers[name].add(package)
    for package, path, names in sources:
        place = path.relative_to(root)
        for line, name, written in names.used:
            if definers[name] and package not in definers[name]:
                yield f"{place}:{line}: {written} is private to {', '.join(sorted(definers[name]))}"
        for line, module, name in names.imported:
            first, *rest = module.split(".")
            if first != "aioverbs":
                continue
            if package.startswith("examples/"):
                if any(map(is_private, (*rest, name))):
                    yield f"{place}:{line}: imports {module}{name and f'.{name}'}, which is private"
            elif rest and rest[0] != package and is_private(name):
                yield f"{place}:{line}: imports {name}, which is private to {rest[0]}"


if __name__ == "__main__":
    found = list(objections(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
    print(*found or ["no package uses private names of another one"], sep="\n")
    sys.exit(bool(found))
