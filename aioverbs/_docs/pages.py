"""Writes the sources of the documentation, for Sphinx to read.

    python aioverbs/_docs/pages.py FOLDER

The README, the changelog, a page of the reference for each theme, and one for each example, all from what there is.
"""

import ast
import importlib.util
import inspect
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import surface
from docstrings import references_from, to_rst
from themes import FIXTURES, THEMES, Theme

__all__ = ["write"]

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")
_INCLUDE = re.compile(r"^```\{literalinclude\} (\S+)$", re.MULTILINE)
_CONTENTS = """
```{{toctree}}
:caption: {caption}
:hidden:

{pages}
```
"""


def write(folder: Path) -> None:
    """Write all pages to an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reference = [f"reference/{theme.page}" for theme in THEMES] + ["reference/command"]
    examples = [f"examples/{path.stem}" for path in _all_examples()]
    tables = _markdown(folder, "README.md", "index.md")
    tables += _markdown(folder, "CHANGELOG.md", "CHANGELOG.md")
    contents = (("Reference", reference), ("Examples", ["examples/index", *examples]), ("More", ["CHANGELOG", *tables]))
    with (folder / "index.md").open("a") as index:
        for caption, pages in contents:
            index.write(_CONTENTS.format(caption=caption, pages="\n".join(pages)))
    for theme in THEMES:
        _page(folder / "reference" / f"{theme.page}.rst", _theme(theme))
    _page(folder / "reference" / "command.rst", _command())
    for path in _all_examples():
        _page(folder / "examples" / f"{path.stem}.rst", _example(path))
        for each in _files(path):
            _copy(each, folder / "examples" / each.relative_to(EXAMPLES))
    _page(folder / "examples" / "index.rst", _examples())


def _page(path: Path, lines: Iterator[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _copy(path: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, copy)


def _title(text: str, under: str = "=") -> tuple[str, ...]:
    return text, under * len(text), ""


def _markdown(folder: Path, name: str, page: str) -> list[str]:
    """A document of the repository, with its links leading to pages; the documents that it leads to.

    :raises SystemExit: a link leads nowhere.
    """
    found = []

    def link(match: re.Match[str]) -> str:
        target = match[1].rstrip("/").partition("#")[0]
        path = ROOT / target
        if path == EXAMPLES:
            return "](examples/index.rst)"
        if path in _all_examples():
            return f"](examples/{path.stem}.rst)"
        if not path.is_file():
            sys.exit(f"{name} has a link to {match[1]}, which is not there: correct it, or take it out")
        _copy(path, folder / target)
        if path.suffix == ".md":
            found.append(target.removesuffix(".md"))
            for included in _INCLUDE.findall(path.read_text()):
                _copy(path.parent / included, folder / os.path.normpath(Path(target).parent / included))
        return match[0]

    text = _LINK.sub(link, (ROOT / name).read_text())
    (folder / page).write_text(text)
    return [each for each in found if each not in ("README", "CHANGELOG")]


def _theme(theme: Theme) -> Iterator[str]:
    yield from _title(theme.title)
    if theme.module is not None:
        yield from _plugin(theme.module)
    yield to_rst(theme.text, references_from(""))
    yield ""
    for name in theme.names:
        yield from _name(name)


def _name(name: str) -> Iterator[str]:
    """The directive for a public name."""
    value = surface.find(name)
    full = name if name.startswith("aioverbs.") else f"aioverbs.{name}"
    if inspect.isroutine(value):
        yield from (f".. autofunction:: {full}", "")
    elif not isinstance(value, type):
        yield from (f".. autodata:: {full}", "   :no-value:", "")
    else:
        directive = "autoexception" if issubclass(value, BaseException) else "autoclass"
        # Sphinx takes a signature from nowhere else for what is compiled.
        known = surface.signature(full) if surface.is_compiled(value) else None
        arguments = known.arguments if known is not None else ""
        yield from (f".. {directive}:: {full}{arguments}", "   :show-inheritance:", "   :member-order: bysource")
        if surface.is_enumeration(value):
            yield "   :undoc-members:"
        if surface.members(value):
            yield from (f"   :members: {', '.join(surface.members(value))}",)
        yield ""


def _plugin(module: str) -> Iterator[str]:
    """A plugin of pytest: its docstring, and those of its fixtures, which are no functions to call."""
    spec = importlib.util.find_spec(module)  # not imported: it needs pytest
    assert spec is not None
    tree = ast.parse(Path(str(spec.origin)).read_text())
    fixtures = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    yield from (f".. py:module:: {module}", "")
    yield to_rst(ast.get_docstring(tree) or "", references_from(""))
    yield ""
    for name in FIXTURES:
        node = fixtures[name]
        returned = ast.literal_eval(node.returns) if isinstance(node.returns, ast.Constant) else None
        yield f".. py:data:: {name}"
        if returned is not None:
            yield f"   :type: {returned}"
        text = to_rst(f"A fixture. {ast.get_docstring(node)}", references_from(""))
        yield from ("", *(f"   {line}".rstrip() for line in text.splitlines()), "")
    yield from (".. py:currentmodule:: aioverbs", "")


def _command() -> Iterator[str]:
    yield from _title("The command")
    yield "What ``aioverbs --help`` and the ``--help`` of each command say."
    yield from ("", ".. click:: aioverbs.cli.main:main", "   :prog: aioverbs", "   :nested: full")


def _all_examples() -> list[Path]:
    """Programs of one file, and of a folder with several."""
    return sorted([*EXAMPLES.glob("*.py"), *(each.parent for each in EXAMPLES.glob("*/__init__.py"))])


def _files(example: Path) -> list[Path]:
    return sorted(example.rglob("*.py")) if example.is_dir() else [example]


def _docstring(example: Path) -> str:
    path = example / "__init__.py" if example.is_dir() else example
    text = ast.get_docstring(ast.parse(path.read_text()))
    if text is None:
        sys.exit(f"{path} has no docstring, which is the text of its page: say there what it shows")
    return text


def _example(path: Path) -> Iterator[str]:
    yield from _title(path.name)
    yield to_rst(_docstring(path), references_from(""))
    for each in _files(path):
        if path.is_dir():
            yield from ("", *_title(each.relative_to(path).as_posix(), "-"))
        yield from ("", f".. literalinclude:: {each.relative_to(EXAMPLES)}", "   :language: python", "   :linenos:")


def _examples() -> Iterator[str]:
    yield from _title("Examples")
    yield "All of these are run by the tests."
    yield ""
    for path in _all_examples():
        first = _docstring(path).splitlines()[0]
        yield f":doc:`{path.name} <{path.stem}>`"
        yield f"   {to_rst(first, references_from(''))}"
        yield ""


if __name__ == "__main__":
    write(Path(sys.argv[1]))
