"""Signatures of the compiled modules, read from their stubs, since compiled code has no annotations."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Signature", "Stub", "read"]

# Private names in the stubs, and the public names shown instead. A request of a batch is an `Operation` that is not
# awaited by itself; `Registered` is the compiled core's view of a memory region.
_PUBLIC = {
    "_Allocator": "Allocator",
    "Registered": "MemoryRegion",
    "_Requested": "Operation",
    "_Region": "MemoryRegion",
}

# Modules whose names are shown with the module: short names have no page, or equal a public name of another meaning.
_NAMED_IN_FULL = ("aioverbs._core.handles.handles", "asyncio", "types")


@dataclass(frozen=True)
class Signature:
    """Signature of a function or method.

    :param arguments: the arguments in parentheses, without `self` or `cls`.
    :param returns: the return type; None for ``__init__`` and if there is no annotation.
    """

    arguments: str
    returns: str | None


@dataclass(frozen=True)
class Stub:
    """Contents of a stub, by qualified name.

    :param signatures: signatures of functions and methods; for a class, that of its ``__init__``.
    :param properties: types of properties.
    """

    signatures: dict[str, Signature] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)


def read(path: Path, internal: Mapping[str, str] | None = None) -> Stub:
    """Read a stub.

    :param path: the stub's path.
    :param internal: full names of the stub's internal classes by their short names, which may equal a public name.
    """
    tree = ast.parse(path.read_text(), str(path))
    aliases = {
        node.target.id: node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }
    aliases |= {
        each.asname or each.name: ast.Name(f"{node.module}.{each.name}")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module in _NAMED_IN_FULL
        for each in node.names
    }
    aliases |= {name: ast.Name(full) for name, full in (internal or {}).items() if name not in _PUBLIC}
    stub = Stub()
    for owner, node in _definitions(tree):
        name = f"{owner}.{node.name}" if owner else node.name
        node = _Names(aliases).visit(node)
        decorators = {ast.unparse(each) for each in node.decorator_list}
        returns = ast.unparse(node.returns) if node.returns is not None else None
        if "property" in decorators:
            stub.properties[name] = returns or "object"
            continue
        if owner and "staticmethod" not in decorators:
            (node.args.posonlyargs or node.args.args).pop(0)
        arguments = f"({ast.unparse(node.args)})"
        if node.name == "__init__":
            never = arguments == "(*args: Never, **kwargs: Never)"  # users cannot construct the class
            stub.signatures[owner] = Signature("" if never else arguments, None)
        else:
            stub.signatures[name] = Signature(arguments, returns)
    return stub


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            functions = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from ((node.name, each) for each in functions)


class _Names(ast.NodeTransformer):
    """Replaces aliases and private names by their meaning."""

    def __init__(self, aliases: dict[str, ast.expr]) -> None:
        self._aliases = aliases

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace an alias by its value, and a private name by its public one."""
        if node.id in self._aliases:
            meaning = self.visit(self._aliases[node.id])
            assert isinstance(meaning, ast.expr)
            return meaning
        return ast.Name(_PUBLIC.get(node.id, node.id))
