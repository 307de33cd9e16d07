"""The documented API: public names, their members, and the signatures of these."""

import dataclasses
import enum
import importlib
import inspect
import operator
import pkgutil
import re
from functools import cache
from pathlib import Path

from stubs import Signature, Stub, read

import aioverbs
from aioverbs._exports import DEFINED_IN

__all__ = [
    "attribute_type",
    "defined_in",
    "described",
    "fields",
    "find",
    "is_compiled",
    "is_enumeration",
    "is_made_by_others",
    "is_ours",
    "members",
    "parameters",
    "public",
    "resolve",
    "shown",
    "signature",
]

_CORE = "aioverbs._core."
_REFERENCE = Path(__file__).parent / "reference"
_DIRECTIVE = re.compile(r"^\.\. auto\w+:: (\S+)$", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_][\w.]*")


@cache
def find(name: str) -> object:
    """Return the object of a name in `aioverbs.__all__`, or of a name with its module.

    :raises AttributeError: the name does not exist.
    """
    first, _, rest = name.removeprefix("aioverbs.").partition(".")
    if first not in aioverbs.__all__:
        found: object = pkgutil.resolve_name(name)
        return found
    # Not by importing its path: some modules have the name of a function.
    value = getattr(aioverbs, first)
    return operator.attrgetter(rest)(value) if rest else value


@cache
def shown() -> tuple[str, ...]:
    """Return the full names in the directives of the reference's pages, such as ``"aioverbs.Device"``."""
    pages = sorted(_REFERENCE.glob("*.rst"))
    return tuple(name for page in pages for name in _DIRECTIVE.findall(page.read_text()))


@cache
def public() -> dict[object, str]:
    """Return the full name of each class and function that has a page."""
    found = {name: find(name) for name in (*(f"aioverbs.{name}" for name in aioverbs.__all__), *shown())}
    return {value: name for name, value in found.items() if isinstance(value, type) or inspect.isroutine(value)}


def defined_in(value: object) -> str:
    """Return the name of the defining module; ``__module__`` of an exported object names the package instead."""
    module = str(getattr(value, "__module__", None))
    return DEFINED_IN.get(getattr(value, "__name__", ""), module) if module == "aioverbs" else module


def is_compiled(value: object) -> bool:
    """Return whether a value is a class of the compiled core."""
    return isinstance(value, type) and defined_in(value).startswith(_CORE)


_MADE_ELSEWHERE = re.compile(
    r"\b(made|created|returned)\s+by\b|\bto\s+(create|lease)\s+one\b|\breturns\s+(one|it)\b", re.IGNORECASE
)


def is_made_by_others(kind: type) -> bool:
    """Return whether users do not construct a class: its docstring says so, or an argument has an internal type."""
    if _MADE_ELSEWHERE.search(kind.__doc__ or ""):
        return True
    try:
        arguments = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return False
    words = (word for each in arguments for word in _WORD.findall(inspect.formatannotation(each.annotation)))
    used = (resolve(word, defined_in(kind)) for word in words)
    return any(isinstance(each, type) and is_ours(each) and each not in public() for each in used)


def is_ours(value: object) -> bool:
    """Return whether a value is defined in the package."""
    return defined_in(value).partition(".")[0] == "aioverbs"


def resolve(name: str, module: str) -> object | None:
    """Return the object of a name within a module, or of a full name; None if there is none."""
    for path in (f"{module}.{name}", name):
        try:
            found: object = find(path) if path.startswith("aioverbs.") else pkgutil.resolve_name(path)
        except (AttributeError, ImportError, ValueError):
            continue
        return found
    return None


def is_enumeration(value: object) -> bool:
    """Return whether a value is an enumeration, whose members are documented without docstrings."""
    return isinstance(value, type) and issubclass(value, enum.Enum)


@cache
def members(kind: type) -> tuple[str, ...]:
    """Return the documented members of a class and of its private bases; for an enumeration also its values.

    Members that take or return classes of the compiled core are left out: these are for the package's own modules.
    """
    found = dict.fromkeys(kind.__members__ if issubclass(kind, enum.Enum) else ())
    for base in kind.__mro__:
        if not is_ours(base) or (base is not kind and base in public()):
            continue
        for name, value in vars(base).items():
            text = inspect.getdoc(getattr(value, "__func__", value))
            if not name.startswith("_") and text and _is_member(value) and not _is_internal(value):
                found[name] = None
    return tuple(found)


def member(kind: type, name: str) -> str | None:
    """Return the full name of a member of a class or of a base class with a page; None if there is none."""
    for base in kind.__mro__:
        if base in public() and name in members(base):
            return f"{public()[base]}.{name}"
    return None


def _is_member(value: object) -> bool:
    kinds = (property, staticmethod, classmethod)
    return isinstance(value, kinds) or inspect.isroutine(value) or inspect.isgetsetdescriptor(value)


def _is_internal(value: object) -> bool:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    annotations = getattr(function, "__annotations__", {}).values()
    words = (word for each in annotations for word in _WORD.findall(inspect.formatannotation(each)))
    types = (resolve(word, function.__module__) for word in words)
    return any(is_compiled(each) and each not in public() for each in types)


@cache
def _stub(module: str) -> Stub:
    loaded = importlib.import_module(module)
    compiled = {name: value for name, value in vars(loaded).items() if is_compiled(value) and value not in public()}
    internal = {name: f"{defined_in(value)}.{value.__qualname__}" for name, value in compiled.items()}
    return read(Path(str(loaded.__file__)).with_name(f"{module.rpartition('.')[2]}.pyi"), internal)


def _in_stubs(owner: type, name: str) -> tuple[Signature | None, str | None]:
    """Return the signature and the property type of a member, from the stub of the base class that defines it."""
    for base in owner.__mro__:
        if is_compiled(base):
            stub = _stub(defined_in(base))
            known = f"{base.__name__}.{name}"
            if known in stub.signatures or known in stub.properties:
                return stub.signatures.get(known), stub.properties.get(known)
    return None, None


def signature(name: str) -> Signature | None:
    """Return the signature of a compiled object by its public name; None if Python can find the signature itself."""
    owner, member = described(name)
    if owner is None:
        return None
    if member is not None:
        return None if member in _python_names(owner) else _in_stubs(owner, member)[0]
    return _stub(defined_in(owner)).signatures.get(owner.__name__) if is_compiled(owner) else None


def attribute_type(name: str) -> str | None:
    """Return the type of a compiled property by its public name; None if the name is not such a property."""
    owner, member = described(name)
    return _in_stubs(owner, member)[1] if owner is not None and member is not None else None


def _python_names(owner: type) -> set[str]:
    """Return the names defined by the class's Python bases, which precede the compiled ones."""
    return {name for base in owner.__mro__ if not is_compiled(base) for name in vars(base)}


def described(name: str) -> tuple[type | None, str | None]:
    """Split a full name such as ``aioverbs.QueuePair.read`` into the class and the name of its member.

    :returns: the class and the member's name; None for the member if the name is that of a class, None for both if the
        name is neither.
    """
    path, _, member = name.rpartition(".")
    for found, last in ((name, None), (path, member)):
        try:
            value = find(found)
        except (AttributeError, ImportError, ValueError):
            continue
        if isinstance(value, type):
            return value, last
    return None, None


@cache
def fields(kind: type) -> frozenset[str]:
    """Return the names of a class's fields, or of its arguments if the class is not a dataclass."""
    if dataclasses.is_dataclass(kind):
        return frozenset(each.name for each in dataclasses.fields(kind))
    return parameters(kind)


def parameters(value: object) -> frozenset[str]:
    """Return the names of a callable's arguments; empty if they are unknown or the value is not callable."""
    try:
        return frozenset(inspect.signature(value).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return frozenset()
