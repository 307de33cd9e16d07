"""What of the public names there is to be told of: their members, with the signatures that they have."""

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
    """What a name of `aioverbs.__all__` or with its module stands for.

    :raises AttributeError: there is no such thing.
    """
    first, _, rest = name.removeprefix("aioverbs.").partition(".")
    if first not in aioverbs.__all__:
        found: object = pkgutil.resolve_name(name)
        return found
    # Not by its path: there are modules that have names of functions.
    value = getattr(aioverbs, first)
    return operator.attrgetter(rest)(value) if rest else value


@cache
def shown() -> tuple[str, ...]:
    """Full names in the directives of the reference's pages, ``"aioverbs.Device"``."""
    pages = sorted(_REFERENCE.glob("*.rst"))
    return tuple(name for page in pages for name in _DIRECTIVE.findall(page.read_text()))


@cache
def public() -> dict[object, str]:
    """Every class and function that there is a page for, and its full name there."""
    found = {name: find(name) for name in (*(f"aioverbs.{name}" for name in aioverbs.__all__), *shown())}
    return {value: name for name, value in found.items() if isinstance(value, type) or inspect.isroutine(value)}


def defined_in(value: object) -> str:
    """The module that defines something, which what is exported does not say."""
    module = str(getattr(value, "__module__", None))
    return DEFINED_IN.get(getattr(value, "__name__", ""), module) if module == "aioverbs" else module


def is_compiled(value: object) -> bool:
    """Whether it is a class of the compiled core."""
    return isinstance(value, type) and defined_in(value).startswith(_CORE)


def is_made_by_others(kind: type) -> bool:
    """Whether a class is made by something else than its users: it says so, or takes what they never see."""
    if "made by" in (kind.__doc__ or "").lower():
        return True
    try:
        arguments = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return False
    words = (word for each in arguments for word in _WORD.findall(inspect.formatannotation(each.annotation)))
    used = (resolve(word, defined_in(kind)) for word in words)
    return any(isinstance(each, type) and is_ours(each) and each not in public() for each in used)


def is_ours(value: object) -> bool:
    """Whether something is defined in the package."""
    return defined_in(value).partition(".")[0] == "aioverbs"


def resolve(name: str, module: str) -> object | None:
    """What a name means in a module, or with the module that it names; None: nothing."""
    for path in (f"{module}.{name}", name):
        try:
            found: object = find(path) if path.startswith("aioverbs.") else pkgutil.resolve_name(path)
        except (AttributeError, ImportError, ValueError):
            continue
        return found
    return None


def is_enumeration(value: object) -> bool:
    """Whether its members are told of without docstrings of their own."""
    return isinstance(value, type) and issubclass(value, enum.Enum)


@cache
def members(kind: type) -> tuple[str, ...]:
    """What a class has, by itself or by bases that are not public, and has a docstring; of an enumeration, its members.

    Not what takes or gives parts of the compiled core: that is for the modules of the package.
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
    """The full name of what a class has, by itself or by others that there are pages for."""
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
    """A member of a class, wherever its class has it from."""
    for base in owner.__mro__:
        if is_compiled(base):
            stub = _stub(defined_in(base))
            known = f"{base.__name__}.{name}"
            if known in stub.signatures or known in stub.properties:
                return stub.signatures.get(known), stub.properties.get(known)
    return None, None


def signature(name: str) -> Signature | None:
    """That of something compiled, by its public name, with its class; None: Python itself knows it."""
    owner, member = described(name)
    if owner is None:
        return None
    if member is not None:
        return None if member in _python_names(owner) else _in_stubs(owner, member)[0]
    return _stub(defined_in(owner)).signatures.get(owner.__name__) if is_compiled(owner) else None


def attribute_type(name: str) -> str | None:
    """The type of something compiled that is an attribute."""
    owner, member = described(name)
    return _in_stubs(owner, member)[1] if owner is not None and member is not None else None


def _python_names(owner: type) -> set[str]:
    """What its classes in Python have, which stand before the compiled ones."""
    return {name for base in owner.__mro__ if not is_compiled(base) for name in vars(base)}


def described(name: str) -> tuple[type | None, str | None]:
    """The class that a full name is of, and what of it: ``aioverbs.QueuePair.read``."""
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
    """What a class is made with."""
    if dataclasses.is_dataclass(kind):
        return frozenset(each.name for each in dataclasses.fields(kind))
    return parameters(kind)


def parameters(value: object) -> frozenset[str]:
    """The names of what something is called with; none where it is not, or is compiled."""
    try:
        return frozenset(inspect.signature(value).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return frozenset()
