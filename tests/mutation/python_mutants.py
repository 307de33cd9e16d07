"""Faults in Python and Cython, found by parso, which continues after syntax that it does not know, such as cdef."""

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile

import parso
from parso.tree import BaseNode, Leaf, NodeOrLeaf

from tests.mutation.mutants import Fault, Replacement

__all__ = ["functions_of_lines", "python_faults"]

_parse: Callable[[str], NodeOrLeaf] = parso.parse  # parso has no type annotations

_OPERATORS = {
    "comparison flipped": {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
    | {"is": "is not", "in": "not in"},
    "bound flipped": {"<": "<=", "<=": "<", ">": ">=", ">=": ">"},
    "and for or": {"and": "or", "or": "and"},
    "flag flipped": {"True": "False", "False": "True"},
}
_WAKES = re.compile(r"(notify|wake|set|set_result|set_exception|call_soon|signal|ring|kick)(_\w+)?$")
_FREES = re.compile(r"(free|release|a?close|unpin|discard|remove|cancel|clear|pop|unregister|destroy|\w+_end)(_\w+)?$")
_CALL = re.compile(r"(?:await )?(?:[\w.]+\.)?(\w+)\(.*\)", re.DOTALL)
_ASSIGNMENT = re.compile(r"[\w.]+\.\w+ [-+|&]?= .*", re.DOTALL)
_CAST = re.compile(r"<\s*(const )?[\w. ]+[\s*]*\??>")
_DEFINITION = re.compile(r"(?P<indent> *)(?:async def|def|class|cp?def\b.*?)\s*\b(?P<name>\w+)\s*[(:\[]")
_ENDS = re.compile(r"(raise|return|continue|break)\b")
_ERRNO = set(errno.errorcode.values())
_NOT_MUTATED = ("cdef ", "ctypedef ", "assert ", "from ")  # beginnings of lines


class _Source:
    """A file's text, and the byte offsets of its lines."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self.lines = source.decode().split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line.encode()) + 1)

    def offset(self, position: tuple[int, int]) -> int:
        line, column = position
        return self.starts[line - 1] + len(self.lines[line - 1][:column].encode())

    def text(self, first: Leaf, last: Leaf) -> str:
        return self._source[self.offset(first.start_pos) : self.offset(last.end_pos)].decode()

    def replace(self, node: NodeOrLeaf, text: str, end: NodeOrLeaf | None = None) -> Replacement:
        last = end if end is not None else node
        return Replacement(self.offset(node.start_pos), self.offset(last.end_pos), text.encode())


def _leaves(node: NodeOrLeaf) -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, BaseNode):
        for child in node.children:
            yield from _leaves(child)


def _is_annotation(leaf: Leaf) -> bool:
    """Return whether a leaf is part of an annotation, a default, a decorator or an import."""
    node: NodeOrLeaf | None = leaf
    while node is not None:
        if node.type in ("annassign", "tfpdef", "param", "parameters", "decorator", "import_from", "import_name"):
            return True
        parent = node.parent
        if parent is not None and parent.type == "funcdef" and node is not parent.children[-1]:
            return True
        node = parent
    return False


def _statements(leaves: Sequence[Leaf]) -> Iterator[tuple[Leaf, Leaf]]:
    """Yield the first and the last leaf of each logical line. This uses leaves, since Cython syntax has no nodes."""
    first = 0
    for position, leaf in enumerate(leaves):
        if leaf.type in ("newline", "endmarker"):
            if first < position:
                yield leaves[first], leaves[position - 1]
            first = position + 1


def _begins_line(source: _Source, node: NodeOrLeaf) -> bool:
    line, column = node.start_pos
    return not source.lines[line - 1][:column].strip()


def _statement(source: _Source, first: Leaf, last: Leaf) -> Iterator[tuple[str, tuple[Replacement, ...]]]:
    code = source.text(first, last)
    if call := _CALL.fullmatch(code):
        name = call[1]
        kind = "missing wake-up" if _WAKES.match(name) else "missing free" if _FREES.match(name) else "missing call"
        if not name.startswith("assert"):
            yield kind, (source.replace(first, "pass", last),)
    elif _ASSIGNMENT.fullmatch(code):
        yield "state not set", (source.replace(first, "pass", last),)


def _head_of(following: Iterable[Leaf]) -> list[Leaf]:
    """Return the leaves between a keyword and the colon that ends the line; none if there is no such colon."""
    head: list[Leaf] = []
    depth = 0
    for leaf in following:
        if leaf.type in ("newline", "endmarker"):
            return []
        if leaf.value == ":" and depth == 0:
            return head
        depth += (leaf.value in ("(", "[", "{")) - (leaf.value in (")", "]", "}"))
        head.append(leaf)
    return []


def _head(source: _Source, leaf: Leaf, following: Iterable[Leaf]) -> Iterator[tuple[str, tuple[Replacement, ...]]]:
    """Yield the faults of a line that begins with a keyword and ends with a colon."""
    leaves = _head_of(following)
    if not leaves:
        return
    first, last = leaves[0], leaves[-1]
    begin, end = source.offset(first.start_pos), source.offset(last.end_pos)
    head = source.text(first, last)
    if leaf.value == "except":
        kinds = list(takewhile(lambda each: each.value != "as", leaves))
        yield "handler removed", (source.replace(first, "tuple()", kinds[-1]),)  # Cython's `except ()` handles all
    elif leaf.value == "with" and re.fullmatch(r"[\w.]*lock[\w.()]*", head):
        yield "lock removed", (source.replace(leaf, "if True", last),)
    elif leaf.value in ("if", "elif", "while"):
        yield "condition negated", (Replacement(begin, end, f"not ({head})".encode()),)
        line, _ = last.end_pos
        inner = source.lines[line].strip() if line < len(source.lines) else ""
        if leaf.value == "if" and _ENDS.match(inner):
            yield "state not checked", (Replacement(begin, end, f"({head}) and False".encode()),)


def _leaf(source: _Source, leaf: Leaf, following: Leaf) -> Iterator[tuple[str, tuple[Replacement, ...]]]:
    text = leaf.value
    parent = leaf.parent.type if leaf.parent is not None else ""
    if text in ("<", ">"):
        line, column = leaf.start_pos
        if any(each.start() <= column < each.end() for each in _CAST.finditer(source.lines[line - 1])):
            return
    if text == "in" and parent in ("for_stmt", "comp_for", "sync_comp_for", "error_node", "comp_op"):
        return
    for kind, table in _OPERATORS.items():
        if text in table and leaf.type in ("operator", "keyword"):
            if text == "is" and following.value == "not":
                yield kind, (source.replace(leaf, "is", following),)
            else:
                yield kind, (source.replace(leaf, table[text]),)
    if leaf.type == "number" and text.isdigit() and parent != "expr_stmt":
        yield "off by one", (source.replace(leaf, str(int(text) + 1)),)
    elif leaf.type == "name" and text in _ERRNO:
        yield "wrong errno", (source.replace(leaf, "EINVAL" if text != "EINVAL" else "ENOMEM"),)


def python_faults(source: bytes) -> Iterator[Fault]:
    """Yield all faults that can be planted in a file of Python or Cython."""
    leaves = list(_leaves(_parse(source.decode())))
    text = _Source(source)
    functions = functions_of_lines(source)
    found: list[tuple[tuple[int, int], str, tuple[Replacement, ...]]] = []
    for first, last in _statements(leaves):
        found += [(first.start_pos, *each) for each in _statement(text, first, last)]
    for position, leaf in enumerate(leaves[:-1]):
        if _is_annotation(leaf) or text.lines[leaf.start_pos[0] - 1].lstrip().startswith(_NOT_MUTATED):
            continue
        if leaf.value in ("if", "elif", "while", "with", "except") and _begins_line(text, leaf):
            faults = _head(text, leaf, islice(leaves, position + 1, None))
        else:
            faults = _leaf(text, leaf, leaves[position + 1])
        found += [(leaf.start_pos, *each) for each in faults]
    for place, operator, replacements in sorted(found, key=lambda each: each[0]):
        yield Fault(operator, functions.get(place[0], ""), replacements)


def functions_of_lines(source: bytes) -> dict[int, str]:
    """Return the qualified name of the function that each line belongs to, by indentation."""
    functions: dict[int, str] = {}
    open_: list[tuple[int, str]] = []
    for number, line in enumerate(source.decode().split("\n"), 1):
        code = line.strip()
        if not code or code.startswith(("#", ")", "]")):
            continue
        indent = len(line) - len(line.lstrip())
        while open_ and indent <= open_[-1][0]:
            open_.pop()
        if (definition := _DEFINITION.match(line)) is not None:
            open_.append((indent, definition["name"]))
        if open_:
            functions[number] = ".".join(name for _, name in open_)
    return functions
