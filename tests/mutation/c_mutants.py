"""Faults in C, by tree-sitter's grammar of C."""

import errno
import re
from collections.abc import Iterator

import tree_sitter_c
from tree_sitter import Language, Node, Parser

from tests.mutation.mutants import Fault, Replacement

__all__ = ["c_faults", "functions_of_lines"]

_PARSER = Parser(Language(tree_sitter_c.language()))

_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_BOUND = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_LOGIC = {"&&": "||", "||": "&&"}
# Function names, by the kind of fault if a call of the function is missing.
_LOCKS = (("_take", "_give"), ("lock", "unlock"), ("_rdlock", "_unlock"), ("_wrlock", "_unlock"), ("_enter", "_leave"))
_STORES = re.compile("^atomic_")
_WAKES = re.compile(r"wake|signal|broadcast|notify|kick|ring|tell|eventfd_write")
_FREES = re.compile(r"free|release|_put$|^put_|close|munmap|drop|destroy|_end$|unpin|unref")
_COUNTED = ("memcpy", "memmove", "memcmp", "memset", "malloc", "calloc", "read", "write", "recv", "send")
_NOT_MUTATED = ("preproc_if", "preproc_elif", "preproc_directive", "sizeof_expression", "static_assert_declaration")
_ENDS = ("return_statement", "goto_statement", "continue_statement", "break_statement")


def _text(node: Node | None) -> str:
    return node.text.decode() if node is not None and node.text is not None else ""


def _expression(node: Node) -> Node | None:
    """Return the expression of an expression statement; None for other and empty statements."""
    return node.named_children[0] if node.type == "expression_statement" and node.named_children else None


def _called(node: Node) -> str:
    """Return the name of the function if a statement only calls a function; else an empty string."""
    inner = _expression(node)
    return _text(inner.child_by_field_name("function")) if inner is not None and inner.type == "call_expression" else ""


def _replace(node: Node, text: str) -> Replacement:
    return Replacement(node.start_byte, node.end_byte, text.encode())


def _name_of(function: Node) -> str:
    declarator = function.child_by_field_name("declarator")
    while declarator is not None and declarator.type != "identifier":
        declarator = declarator.child_by_field_name("declarator")
    return _text(declarator)


def _walk(node: Node) -> Iterator[Node]:
    """Yield the nodes of a function in source order, without those that tests cannot check."""
    yield node
    if _text(node.child_by_field_name("function")) in ("assert", "assert_held", "static_assert", "_Static_assert"):
        return
    for child in node.children:
        if child.type not in _NOT_MUTATED:
            yield from _walk(child)


def _functions(tree: Node) -> Iterator[Node]:
    for node in tree.children:
        if node.type == "function_definition":
            yield node
        elif node.type not in ("declaration", "preproc_def", "preproc_function_def", "type_definition"):
            yield from _functions(node)


def _unlocked(function: Node, statement: Node) -> Iterator[Replacement]:
    """Yield the removal of a lock and of what unlocks it in the function, if the statement is the first to take it."""
    name = _called(statement)
    call = _expression(statement)
    arguments = _text(call.child_by_field_name("arguments")) if call is not None else ""
    for take, give in _LOCKS:
        if not name.endswith(take):
            continue
        calls = [each for each in _walk(function) if _called(each) in (name, name.removesuffix(take) + give)]
        same = [each for each in calls if arguments in _text(each)]
        if len({_called(each) for each in same}) == 2 and same[0] == statement:
            yield from (_replace(each, ";") for each in same)
            return


def _freed(node: Node) -> set[str]:
    """Return the expressions that a freeing statement names, and the targets that its block assigned them to before.

    If the statement frees a field, other fields of the same object do not count.
    """
    call = _expression(node)
    arguments = call.child_by_field_name("arguments") if call is not None else None
    freed = {_text(each).lstrip("&") for each in arguments.named_children} if arguments is not None else set()
    names = set(freed)
    for before in node.parent.named_children if node.parent is not None else ():
        if before == node:
            break
        inner = _expression(before)
        if inner is not None and inner.type == "assignment_expression" and _names(inner, freed):
            names.add(re.split(r"\W", _text(inner.child_by_field_name("left")).lstrip("*&("))[0])
    return names


def _names(node: Node, names: set[str]) -> bool:
    """Return whether a node's text contains one of these expressions."""
    return any(re.search(rf"(?<![\w.>]){re.escape(each)}(?!\w)", _text(node)) for each in names if each)


def _statement(function: Node, node: Node) -> Iterator[tuple[str, tuple[Replacement, ...]]]:
    name = _called(node)
    pair = tuple(_unlocked(function, node))
    if pair:
        yield "lock removed", pair
    elif name and not any(name.endswith(each) for both in _LOCKS for each in both) and "assert" not in name:
        kinds = {"state not set": _STORES, "missing wake-up": _WAKES, "missing free": _FREES}
        kind = next((kind for kind, names in kinds.items() if names.search(name)), "missing call")
        yield kind, (_replace(node, ";"),)
        before = node.prev_named_sibling
        related = before is not None and before.type == "expression_statement" and _names(before, _freed(node))
        if kind == "missing free" and before is not None and related and "assert" not in _called(before):
            yield "freed too early", (_replace(before, _text(node)), _replace(node, _text(before)))
    inner = _expression(node)
    if (node.parent is not None and node.parent.type == "for_statement") or inner is None:
        return
    if inner.type == "update_expression" or (
        inner.type == "assignment_expression"
        and (left := inner.child_by_field_name("left")) is not None
        and left.type == "field_expression"
    ):
        yield "state not set", (_replace(node, ";"),)


def _condition(node: Node) -> Iterator[tuple[str, tuple[Replacement, ...]]]:
    condition, body = node.child_by_field_name("condition"), node.child_by_field_name("consequence")
    if condition is None:
        return
    yield "condition negated", (_replace(condition, f"(!{_text(condition)})"),)
    last = body
    if body is not None and body.type == "compound_statement" and body.named_children:
        last = body.named_children[-1]
    if last is not None and last.type in _ENDS and node.child_by_field_name("alternative") is None:
        yield "state not checked", (_replace(condition, f"({_text(condition)} && 0)"),)


def _binary(node: Node) -> Iterator[tuple[str, tuple[Replacement, ...]]]:
    operator = node.child_by_field_name("operator")
    if operator is None:
        return
    for kind, table in (("comparison flipped", _NEGATED), ("bound flipped", _BOUND), ("and for or", _LOGIC)):
        if operator.type in table:
            yield kind, (_replace(operator, table[operator.type]),)


def _call(node: Node) -> Iterator[tuple[str, tuple[Replacement, ...]]]:
    arguments = node.child_by_field_name("arguments")
    if arguments is not None and _text(node.child_by_field_name("function")) in _COUNTED and arguments.named_children:
        length = arguments.named_children[-1]
        yield "off by one", (_replace(length, f"({_text(length)}) - 1"),)


def _leaf(node: Node) -> Iterator[tuple[str, tuple[Replacement, ...]]]:
    text = _text(node)
    parent = node.parent.type if node.parent is not None else ""
    if node.type == "number_literal" and text.isdigit():
        if parent in ("binary_expression", "subscript_expression", "argument_list", "assignment_expression"):
            octal = len(text) > 1 and text.startswith("0")
            yield "off by one", (_replace(node, f"0{int(text, 8) + 1:o}" if octal else str(int(text) + 1)),)
    elif node.type == "identifier" and text in errno.errorcode.values():
        yield "wrong errno", (_replace(node, "EINVAL" if text != "EINVAL" else "ENOMEM"),)
    elif node.type == "identifier" and re.fullmatch("IBV_WC_.*_ERR", text) and parent != "case_statement":
        other = "IBV_WC_GENERAL_ERR" if text != "IBV_WC_GENERAL_ERR" else "IBV_WC_FATAL_ERR"
        yield "wrong status", (_replace(node, other),)
    elif node.type in ("true", "false"):
        yield "flag flipped", (_replace(node, "false" if node.type == "true" else "true"),)


_RULES = {
    "binary_expression": _binary,
    "call_expression": _call,
    "if_statement": _condition,
    "while_statement": _condition,
}


def c_faults(source: bytes) -> Iterator[Fault]:
    """Yield all faults that can be planted in a C file: in its functions, not in macros."""
    for function in _functions(_PARSER.parse(source).root_node):
        name = _name_of(function)
        body = function.child_by_field_name("body")
        for node in _walk(body) if body is not None else ():
            statement = node.type == "expression_statement"
            found = _statement(function, node) if statement else _RULES.get(node.type, _leaf)(node)
            yield from (Fault(operator, name, replacements) for operator, replacements in found)


def functions_of_lines(source: bytes) -> dict[int, str]:
    """Return the name of the function that each line belongs to; lines outside of functions are left out."""
    return {
        line: _name_of(function)
        for function in _functions(_PARSER.parse(source).root_node)
        for line in range(function.start_point[0] + 1, function.end_point[0] + 2)
    }
