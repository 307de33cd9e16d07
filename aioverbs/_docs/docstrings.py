"""Conversion of this project's docstrings to reStructuredText.

In these docstrings, a name in single backquotes is a reference, and an indented block is code. The rest is
reStructuredText already.
"""

import ast
import builtins
import pkgutil
import re
from collections.abc import Callable, Iterator

import surface

__all__ = ["Reference", "references_from", "to_rst"]

_NAME = re.compile(r"(?<![`\w:])`([^`\n]+)`(?![`\w])")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.\w+)*(\(\))?")
_OUTSIDE = ("anyio", "asyncio", "collections", "concurrent", "distributed", "multiprocessing", "numpy", "pytest", "ssl")
_PYVERBS = "pyverbs."  # pyverbs is not installed when the documentation is built

_FIXTURES = ("aioverbs_device", "aioverbs_ledger")
_FIXED = {"USE_DEFAULT": "USE_DEFAULT", "testing": "testing"}
_FIXED |= {f"{module}{name}": f"testing.{name}" for name in _FIXTURES for module in ("", "testing.")}

# Function that returns the reStructuredText for a name in backquotes.
Reference = Callable[[str], str]


def to_rst(text: str, reference: Reference) -> str:
    """Convert a docstring to reStructuredText.

    :param text: the docstring, without its common indentation.
    :param reference: converts a name in backquotes.
    """
    return "\n".join(_lines(text.splitlines(), reference))


def _lines(lines: list[str], reference: Reference) -> Iterator[str]:
    at = 0
    while at < len(lines):
        if lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            block = []
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                block.append(lines[at])
                at += 1
            while not block[-1].strip():
                block.pop()
            yield from (f".. code-block:: {_language(block)}", "", *block, "")
            continue
        yield _NAME.sub(lambda found: reference(found[1]), lines[at])
        at += 1


def _language(block: list[str]) -> str:
    code = "\n".join(line[4:] for line in block)
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"


def references_from(name: str) -> Reference:
    """Return the function that converts names in the docstring of an object.

    A name with a page becomes a link; arguments, and names of other projects, become literals. Any other name becomes
    an unresolvable reference, which Sphinx reports.

    :param name: the object's full name, such as ``"aioverbs.QueuePair.read"``; ``""`` for text of no object.
    """
    owner, _ = surface.described(name)
    local = surface.fields(owner) if owner is not None else frozenset()
    try:
        own = surface.find(name)
    except (AttributeError, ImportError, ValueError):
        own = None
    known = surface.signature(name)
    local |= surface.parameters(own) | frozenset(re.findall(r"(\w+):", known.arguments) if known is not None else ())

    def reference(text: str) -> str:
        path = text.removesuffix("()").removeprefix("aioverbs.")
        if not _IDENTIFIER.fullmatch(text):
            return f"``{text}``"
        if owner is not None and "." not in path and (target := surface.member(owner, path)) is not None:
            return f":py:obj:`{text} <{target}>`"
        if path in local:
            return f"``{text}``"
        target = _target(path)
        if target is not None:
            return f":py:obj:`{text} <{target}>`"
        return f"``{text}``" if _is_outside(path) else f":py:obj:`{text}`"

    return reference


def _target(path: str) -> str | None:
    """Return the full name of a public object with a page; None if there is none."""
    if path in _FIXED:
        return f"aioverbs.{_FIXED[path]}"
    first, _, rest = path.partition(".")
    named = {name.rpartition(".")[2]: value for value, name in surface.public().items()}
    named |= {name.removeprefix("aioverbs."): value for value, name in surface.public().items()}
    if path in named:
        return surface.public()[named[path]]
    value = named.get(first)
    if not isinstance(value, type):
        return None
    return surface.member(value, rest) or (surface.public()[value] if rest in surface.fields(value) else None)


def _is_outside(path: str) -> bool:
    """Return whether a name exists in Python or in a known dependency."""
    if path.startswith(_PYVERBS) or hasattr(builtins, path):
        return True
    if path.partition(".")[0] not in _OUTSIDE:
        return False
    try:
        pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return False
    return True
