"""Handlers of Sphinx's events for pages, docstrings, signatures, base classes and unresolved references."""

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from typing import TypeVar, TypeVarTuple

import surface
from docstrings import references_from, to_rst
from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.nodes import find_pending_xref_condition

from aioverbs._exports import DEFINED_IN

__all__ = ["connect"]

# Import the compiled modules before Sphinx does, since Sphinx would load the stubs instead.
for _name in (
    "handles.handles",
    "data_path.data_path",
    "software.software",
    "handles.parent_domain",
    "alloc.allocators",
    "handles.rdma_cm",
):
    importlib.import_module(f"aioverbs._core.{_name}")

# Names imported only for type checkers, and type variables in signatures.
_NOT_THERE = {"Buffer", "PD", "MR", "PyverbsContext", "FrameKind", "Ts", "_T"}
_CHOSEN_LATER = (TypeVar, TypeVarTuple)

_CLASS = re.compile(r"^\.\. auto(?:class|exception):: (\S+)$", re.MULTILINE)


def _page(app: Sphinx, name: str, content: list[str]) -> None:
    """Complete a page of the reference: convert references, and add signature and members to each class."""
    if name.startswith("reference/") and os.fspath(app.env.doc2path(name)).endswith(".rst"):
        text = to_rst(content[0], references_from(""))
        content[0] = _CLASS.sub(lambda match: "\n".join(_options(match[0], match[1])) + "\n", text)


def _options(directive: str, name: str) -> Iterator[str]:
    value = surface.find(name)
    assert isinstance(value, type)
    # Sphinx cannot find the signature of a compiled class.
    known = surface.signature(name) if surface.is_compiled(value) else None
    yield from (directive + (known.arguments if known is not None else ""), "   :show-inheritance:")
    yield "   :member-order: bysource"
    if surface.is_enumeration(value):
        yield "   :undoc-members:"
    if surface.members(value):
        yield f"   :members: {', '.join(surface.members(value))}"


def _docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    text = to_rst("\n".join(lines), references_from(name))
    kind = surface.attribute_type(name) if what == "attribute" else None
    if kind is not None:
        text += f"\n\n:Type: ``{kind}``"
    lines[:] = text.splitlines()


def _signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    if inspect.isclass(obj) and surface.is_enumeration(obj):
        return "", None  # users do not call an enumeration
    if isinstance(obj, type) and (surface.is_compiled(obj) or surface.is_made_by_others(obj)):
        return ("", None) if signature and not surface.is_compiled(obj) else None
    known = surface.signature(name)
    return (known.arguments, known.returns) if known is not None else None


def _bases(app: Sphinx, name: str, obj: type, options: object, bases: list[type]) -> None:
    """Keep the public base classes; the others are implementation details."""
    shown: dict[type, None] = {}
    for base in obj.__mro__[1:-1]:
        wanted = base in surface.public() if surface.is_ours(base) else base.__module__ not in ("typing", "enum", "abc")
        if wanted and not any(issubclass(other, base) for other in shown):
            shown[base] = None
    bases[:] = list(shown) or [object]


def _missing(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Element) -> Element | None:
    """Resolve a reference without a page: the object may have a page by its public name, or be of another project."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    value = surface.resolve(target, node.get("py:module") or "aioverbs")
    name = surface.public().get(value) if isinstance(value, type) or inspect.isroutine(value) else None
    if name is not None:
        return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, contnode)
    others = value is not None and (not surface.is_ours(value) or surface.is_compiled(value))
    if others or target in _NOT_THERE or isinstance(value, _CHOSEN_LATER):
        short = find_pending_xref_condition(node, "resolved")
        name_only = short.children[0] if short is not None else None
        return name_only if isinstance(name_only, Element) else contnode
    return None


def _read_definers() -> None:
    """Add the source analysis of the defining modules to that of `aioverbs`, which re-exports their names.

    Sphinx looks there for the order of members, for comments of attributes, and for overloads.
    """
    whole = ModuleAnalyzer.for_module("aioverbs")
    whole.analyze()
    for module in sorted(set(DEFINED_IN.values())):
        if not module.startswith("aioverbs._core."):
            part = ModuleAnalyzer.for_module(module)
            part.analyze()
            for table in ("annotations", "attr_docs", "overloads", "tagorder", "tags"):
                getattr(whole, table).update(getattr(part, table))


def connect(app: Sphinx) -> None:
    """Connect the handlers to Sphinx's events."""
    _read_definers()
    app.connect("source-read", _page)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-bases", _bases)
    app.connect("missing-reference", _missing)
