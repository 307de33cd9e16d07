"""Check the language of sources: first words of docstrings, `:param` of public functions, retired words, long lines.

    python tests/checks/language.py [ROOT] [--count]

- A docstring, and in C a comment that stands before a definition, begins with a verb in the imperative or a noun, never
  with a word of `banned_first_words`.
- The docstring of each public function has `:param NAME:` for each of its arguments. Public are the names that
  `aioverbs/__init__.pyi` exports, the `__all__` of the public modules, and what the base classes of these define.
- A word of `retired_words` stands nowhere. `retired_in_library` stands nowhere in `aioverbs/`.
- A line has at most 120 characters, comments and Cython included.

`language.toml` beside this file has the words.
"""

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

_WIDTH = 120
_SOURCES = (".py", ".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h")
_PUBLIC_MODULES = ("allocators", "testing", "rdma_cm", "errors", "types", "attributes", "addresses")
_CYTHON_CLASS = re.compile(r"^cdef class (\w+)(?:\((\w+)\))?:", re.MULTILINE)
_CYTHON_DEF = re.compile(r"^([ \t]*)(?:async )?def (\w+)\(((?:[^()]|\([^()]*\))*)\)[^\n]*:[ \t]*\n", re.MULTILINE)
_CYTHON_DOCSTRING = re.compile(r"(?:def|class)\b(?:[^\n]|,\n|\(\n)*:[ \t]*\n[ \t]*(\"\"\"(?:.|\n)*?\"\"\")")
_C_COMMENT = re.compile(r"^/\*+\s*(\w+)", re.MULTILINE)


@dataclass
class Words:
    """The lists of `language.toml`."""

    banned_first_words: set[str]
    retired_words: re.Pattern[str]
    retired_in_library: re.Pattern[str]

    @staticmethod
    def read() -> "Words":
        """Read the lists."""
        lists = tomllib.loads(Path(__file__).with_name("language.toml").read_text())

        def pattern(name: str) -> re.Pattern[str]:
            return re.compile(rf"(?<!\w)(?:{'|'.join(lists[name])})(?!\w)")

        return Words(set(lists["banned_first_words"]), pattern("retired_words"), pattern("retired_in_library"))


@dataclass
class Function:
    """A function or class: what is documented, and the arguments."""

    line: int
    name: str
    arguments: list[str]
    docstring: str


@dataclass
class Class:
    """A class of the library."""

    path: Path
    bases: list[str]
    methods: list[Function] = field(default_factory=list)


@dataclass
class Library:
    """Classes and public functions of `aioverbs/`, by their names."""

    classes: dict[str, list[Class]] = field(default_factory=dict)
    functions: dict[str, list[tuple[Path, Function]]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)

    def public(self) -> Iterator[tuple[Path, Function]]:
        """Yield the exported functions, and the methods of exported classes and of their bases."""
        names, seen = sorted(self.exported), set()
        while names:
            name = names.pop()
            if name in seen:
                continue
            seen.add(name)
            yield from self.functions.get(name, ())
            for each in self.classes.get(name, ()):
                names += each.bases
                yield from ((each.path, method) for method in each.methods)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    of = node.args
    rest = [each for each in (of.vararg, of.kwarg) if each is not None]
    names = [each.arg for each in (*of.posonlyargs, *of.args, *of.kwonlyargs, *rest)]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


def _add_python(library: Library, path: Path, text: str) -> None:
    def functions(body: list[ast.stmt], shared: str) -> Iterator[Function]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
                decorators = {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}
                if not decorators & {"overload", "setter", "fixture"}:
                    docstring = (ast.get_docstring(node) or "") + (shared if node.name == "__init__" else "")
                    yield Function(node.lineno, node.name, _arguments(node), docstring)

    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
            found = Class(path, bases, list(functions(node.body, ast.get_docstring(node) or "")))
            library.classes.setdefault(node.name, []).append(found)
    for function in functions(tree.body, ""):
        library.functions.setdefault(function.name, []).append((path, function))
    if path.stem in _PUBLIC_MODULES or (path.stem == "__init__" and path.parent.name in _PUBLIC_MODULES):
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                library.exported |= set(ast.literal_eval(node.value))


def _add_cython(library: Library, path: Path, text: str) -> None:
    classes = list(_CYTHON_CLASS.finditer(text))
    for match, following in zip_longest(classes, classes[1:]):
        found = Class(path, [match[2]] if match[2] else [])
        end = following.start() if following else len(text)
        shared = _docstring_at(text, match.end())
        for function in _CYTHON_DEF.finditer(text, match.end(), end):
            if function[1] and _is_public(function[2]):
                listed = re.sub(r"\([^()]*\)|\bnot None\b", "", function[3]).split(",")
                words = [re.split(r"[=:]", each)[0].split()[-1:] for each in listed]
                arguments = [word.strip("*") for each in words for word in each]
                given = [each for each in arguments if each and each not in ("self", "cls") and each[0] != "_"]
                docstring = _docstring_at(text, function.end()) + (shared if function[2] == "__init__" else "")
                line = text.count("\n", 0, function.start(2)) + 1
                found.methods.append(Function(line, function[2], given, docstring))
        library.classes.setdefault(match[1], []).append(found)


def _docstring_at(text: str, position: int) -> str:
    match = re.compile(r'\s*"""((?:.|\n)*?)"""').match(text, position)
    return match[1] if match else ""


def _docstrings(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring; in C of each comment that begins a line."""
    if path.suffix in (".c", ".h"):
        yield from ((text.count("\n", 0, each.start()) + 1, each[1]) for each in _C_COMMENT.finditer(text))
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield node.body[0].lineno, docstring
    elif path.suffix in (".pyx", ".pxi"):
        found = [(each.start(1), each[1].strip('"')) for each in _CYTHON_DOCSTRING.finditer(text)]
        if text.startswith('"""'):
            found.append((0, text[3:]))
        yield from ((text.count("\n", 0, position) + 1, docstring) for position, docstring in found)


def sources(root: Path) -> Iterator[Path]:
    """Yield the sources, from the root: what git ignores lies elsewhere."""
    for folder in ("aioverbs", "examples", "tests"):
        yield from (each for each in sorted((root / folder).rglob("*")) if each.suffix in _SOURCES)
    yield root / "noxfile.py"


def objections(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the rule that is broken, and where and how."""
    words, library = Words.read(), Library()
    exports = root / "aioverbs" / "__init__.pyi"
    library.exported |= set(re.findall(r"(\w+) as \w+", exports.read_text()))
    for path in sources(root):
        text, place = path.read_text(), path.relative_to(root)
        in_library = place.parts[0] == "aioverbs"
        for line, docstring in _docstrings(path, text):
            first = re.match(r"[`*]*(\w+)", docstring.lstrip())
            if first and first[1] in words.banned_first_words:
                yield "first word", f"{place}:{line}: begins with {first[1]!r}"
        for number, line_text in enumerate(text.splitlines(), 1):
            if len(line_text) > _WIDTH:
                yield "long line", f"{place}:{number}: {len(line_text)} characters"
            for found in words.retired_words.findall(line_text):
                yield "retired word", f"{place}:{number}: {found!r}"
            for found in words.retired_in_library.findall(line_text) if in_library else ():
                yield "retired word in the library", f"{place}:{number}: {found!r}"
        if in_library and "_docs" not in place.parts and "_build" not in place.parts and "cli" not in place.parts:
            if path.suffix == ".py":
                _add_python(library, path, text)
            elif path.suffix in (".pyx", ".pxi"):
                _add_cython(library, path, text)
    for path, function in library.public():
        if function.name == "__init__" and ":param" not in function.docstring:
            continue  # made by a method of another class
        for argument in function.arguments:
            if not re.search(rf":param \*{{0,2}}{argument}:", function.docstring):
                yield "param", f"{path.relative_to(root)}:{function.line}: {function.name} lacks :param {argument}:"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the language of sources.")
    parser.add_argument("root", nargs="?", type=Path, default=Path())
    parser.add_argument("--count", action="store_true", help="print how often each rule is broken")
    options = parser.parse_args()
    found = list(dict.fromkeys(objections(options.root)))
    for rule, objection in () if options.count else found:
        print(f"{objection} ({rule})")
    if options.count:
        print(dict(Counter(rule for rule, _ in found)))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
