"""Check the language of sources: first words of docstrings, `:param` of public functions, retired words, long lines.

    python tests/checks/language.py [ROOT] [--count]

- No docstring, and in C no comment at the start of a line, begins with a word of `banned_first_words`.
- The docstring of a public function has `:param NAME:` for each argument. Public are the names that
  `aioverbs/__init__.pyi` exports, the `__all__` of the public modules, and the methods of their base classes.
- No source contains a word of `retired_words`, and no source in `aioverbs/` a word of `retired_in_library`.
- No line has more than 120 characters; this includes comments and Cython.

`language.toml` contains the words.
"""

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

_WIDTH = 120
_SOURCES = (".py", ".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h")
_PUBLIC_MODULES = ("allocators", "testing", "rdma_cm", "errors", "types", "attributes", "addresses")
_CYTHON_CLASS = re.compile(r"^cdef class (\w+)(?:\((\w+)\))?:", re.MULTILINE)
_CYTHON_DEF = re.compile(r"^([ \t]*)(?:async )?def (\w+)\(((?:[^()]|\([^()]*\))*)\)[^\n]*:[ \t]*\n", re.MULTILINE)
_CYTHON_DOCSTRING = re.compile(  # of a module, or after the header of a function or class
    r'(?:\A|(?:def|class)\b(?:\((?:[^()]|\([^()]*\))*\)|[^(\n])*:[ \t]*\n[ \t]*)"""((?:.|\n)*?)"""'
)
_C_COMMENT = re.compile(r"^/\*+\s*(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Words:
    """The lists of `language.toml`."""

    banned_first_words: frozenset[str]
    retired_words: re.Pattern[str]
    retired_in_library: re.Pattern[str]

    @staticmethod
    def read() -> "Words":
        """Read the lists."""
        lists = tomllib.loads(Path(__file__).with_name("language.toml").read_text())

        def pattern(name: str) -> re.Pattern[str]:
            return re.compile(rf"(?<!\w)(?:{'|'.join(lists[name])})(?!\w)")

        banned = frozenset(lists["banned_first_words"])
        return Words(banned, pattern("retired_words"), pattern("retired_in_library"))


@dataclass(frozen=True)
class Function:
    """A function or method of the library, with its arguments and its docstring."""

    path: Path
    line: int
    name: str
    arguments: list[str]
    docstring: str


@dataclass
class Library:
    """Functions and classes of `aioverbs/`, by name.

    :param functions: functions of modules.
    :param methods: public methods of classes.
    :param bases: names of the base classes of classes.
    :param exported: names that are public.
    """

    functions: defaultdict[str, list[Function]] = field(default_factory=lambda: defaultdict(list))
    methods: defaultdict[str, list[Function]] = field(default_factory=lambda: defaultdict(list))
    bases: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    exported: set[str] = field(default_factory=set)

    def public(self) -> Iterator[Function]:
        """Yield the exported functions, and the methods of exported classes and of their bases."""
        pending, visited = sorted(self.exported), set[str]()
        while pending:
            name = pending.pop()
            if name not in visited:
                visited.add(name)
                pending += self.bases[name]
                yield from (*self.functions[name], *self.methods[name])

    def add_python(self, path: Path, text: str) -> None:
        """Add the functions and classes of a Python source, and the `__all__` of a public module."""
        tree = ast.parse(text)
        for function in _python_functions(path, tree.body, ""):
            self.functions[function.name].append(function)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self.bases[node.name] += [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                self.methods[node.name] += _python_functions(path, node.body, ast.get_docstring(node) or "")
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = path.parent.name if path.stem == "__init__" else path.stem
                self.exported |= set(ast.literal_eval(node.value)) if module in _PUBLIC_MODULES else set()

    def add_cython(self, path: Path, text: str) -> None:
        """Add the classes of a Cython source."""
        classes = list(_CYTHON_CLASS.finditer(text))
        for match, following in zip_longest(classes, classes[1:]):
            if match[2]:
                self.bases[match[1]].append(match[2])
            end = following.start() if following else len(text)
            class_docstring = _cython_docstring(text, match.end())
            for method in _CYTHON_DEF.finditer(text, match.end(), end):
                if method[1] and _is_public(method[2]):
                    docstring = _cython_docstring(text, method.end()) + class_docstring * (method[2] == "__init__")
                    line = text.count("\n", 0, method.start(2)) + 1
                    self.methods[match[1]].append(
                        Function(path, line, method[2], _cython_arguments(method[3]), docstring)
                    )


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


def _is_documented(argument: str) -> bool:
    return argument not in ("", "self", "cls") and not argument.startswith("_")


def _python_functions(path: Path, body: list[ast.stmt], class_docstring: str) -> Iterator[Function]:
    """Yield the public functions of a module or class, without overloads, setters and fixtures."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
            decorators = {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}
            if not decorators & {"overload", "setter", "fixture"}:
                arguments = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
                docstring = (ast.get_docstring(node) or "") + class_docstring * (node.name == "__init__")
                yield Function(path, node.lineno, node.name, list(filter(_is_documented, arguments)), docstring)


def _cython_arguments(text: str) -> list[str]:
    """Return the names in a Cython argument list such as ``self, int depth=1, object name not None``."""
    listed = re.sub(r"\([^()]*\)|\bnot None\b", "", text).split(",")
    words = [re.split(r"[=:]", each)[0].split()[-1:] for each in listed]
    return [name for each in words for name in [word.strip("*") for word in each] if _is_documented(name)]


def _cython_docstring(text: str, position: int) -> str:
    match = re.compile(r'\s*"""((?:.|\n)*?)"""').match(text, position)
    return match[1] if match else ""


def _docstrings(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring; in C, of each comment at the start of a line."""
    if path.suffix in (".py", ".pyi"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield node.body[0].lineno, docstring
        return
    pattern = _C_COMMENT if path.suffix in (".c", ".h") else _CYTHON_DOCSTRING
    yield from ((text.count("\n", 0, each.start(1)) + 1, each[1]) for each in pattern.finditer(text))


def sources(root: Path) -> Iterator[Path]:
    """Yield the sources below the root; generated and ignored files are in other folders."""
    for folder in ("aioverbs", "examples", "tests"):
        yield from (each for each in sorted((root / folder).rglob("*")) if each.suffix in _SOURCES)
    yield root / "noxfile.py"


def _text_objections(words: Words, path: Path, place: Path) -> Iterator[tuple[str, str]]:
    """Yield the violations in the text of a source: rule, and place with a description."""
    text = path.read_text()
    for line, docstring in _docstrings(path, text):
        first = re.match(r"[`*]*(\w+)", docstring.lstrip())
        if first and first[1] in words.banned_first_words:
            yield "first word", f"{place}:{line}: begins with {first[1]!r}"
    patterns = {"retired word": words.retired_words}
    if place.parts[0] == "aioverbs":
        patterns["retired word in the library"] = words.retired_in_library
    for number, line_text in enumerate(text.splitlines(), 1):
        if len(line_text) > _WIDTH:
            yield "long line", f"{place}:{number}: {len(line_text)} characters"
        for rule, pattern in patterns.items():
            yield from ((rule, f"{place}:{number}: {found!r}") for found in pattern.findall(line_text))


def objections(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the violations in the tree under `root`: rule, and place with a description."""
    words, library = Words.read(), Library()
    library.exported |= set(re.findall(r"(\w+) as \w+", (root / "aioverbs" / "__init__.pyi").read_text()))
    for path in sources(root):
        place = path.relative_to(root)
        yield from _text_objections(words, path, place)
        if place.parts[0] == "aioverbs" and place.parts[1] not in ("_docs", "_build", "cli"):
            if path.suffix == ".py":
                library.add_python(place, path.read_text())
            elif path.suffix in (".pyx", ".pxi"):
                library.add_cython(place, path.read_text())
    for function in library.public():
        if function.name == "__init__" and ":param" not in function.docstring:
            continue  # users do not construct the class
        for argument in function.arguments:
            if not re.search(rf":param \*{{0,2}}{argument}:", function.docstring):
                yield "param", f"{function.path}:{function.line}: {function.name} lacks :param {argument}:"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the language of sources.")
    parser.add_argument("root", nargs="?", type=Path, default=Path())
    parser.add_argument("--count", action="store_true", help="print how often each rule is broken")
    options = parser.parse_args()
    found = list(dict.fromkeys(objections(options.root)))
    if options.count:
        print(dict(Counter(rule for rule, _ in found)))
    else:
        print(*(f"{objection} ({rule})" for rule, objection in found), sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
