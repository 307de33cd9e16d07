"""Declarations of libibverbs.h as plain data.

pycparser parses the preprocessed header; its syntax tree does not leave this module. A type is the C text of a
declarator with NAME in place of the declared name, `int (*NAME)(struct ibv_td *td)`, so that a member can be declared
again under another name.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "@"

# Minimal system headers for pycparser, which cannot parse the extensions in the real ones.
_SYSTEM_HEADERS = {
    "errno.h": "",
    "linux/types.h": "typedef int __be16, __be32, __be64;",
    "pthread.h": "typedef int pthread_mutex_t, pthread_cond_t;",
    "stddef.h": "typedef int size_t;\n#define NULL 0\n#define offsetof(type, member) 0",
    "stdint.h": "typedef int uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t;",
    "time.h": "",
}


@dataclass(frozen=True)
class Member:
    """Field, or with `members` an inline struct or union, whose name may be empty."""

    name: str | None
    type: str  # for an inline struct or union: the keyword
    members: tuple[Member, ...] = ()

    def declared(self) -> str:
        if not self.members:
            return f"{self.type.replace(NAME, self.name or '')};"
        body = " ".join(member.declared() for member in self.members)
        return f"{self.type} {{ {body} }} {self.name or ''};"


@dataclass(frozen=True)
class Aggregate:
    """Struct or union."""

    keyword: str
    tag: str
    members: tuple[Member, ...]
    grows: bool  # later releases append members

    @property
    def name(self) -> str:
        return f"{self.keyword} {self.tag}"

    def declared(self) -> str:
        return f"{self.name} {{ {' '.join(member.declared() for member in self.members)} }};"

    def paths(self) -> Iterator[tuple[str, Member]]:
        """Yield every named member with its path, including inline structs and unions and their members."""
        return _paths("", self.members)


def _paths(prefix: str, members: tuple[Member, ...]) -> Iterator[tuple[str, Member]]:
    for member in members:
        path = f"{prefix}{member.name}" if member.name else ""
        if path:
            yield path, member
        yield from _paths(f"{path}." if path else prefix, member.members)


@dataclass(frozen=True)
class Enumeration:
    tag: str | None
    values: tuple[tuple[str, str | None], ...]  # name; expression, or None for the previous value plus one

    def declared(self) -> str:
        values = (name if value is None else f"{name} = {value}" for name, value in self.values)
        return f"enum {self.tag or ''} {{ {', '.join(values)} }};"


@dataclass(frozen=True)
class Declarations:
    aggregates: tuple[Aggregate, ...]
    enumerations: tuple[Enumeration, ...]
    macros: tuple[tuple[str, str], ...]  # constants: name, expression


def read(header: str, compiler: tuple[str, ...]) -> Declarations:
    """Parse the text of libibverbs.h."""
    growing = set(re.findall(r"^struct (\w+) \{ */\* grows\b", header, re.MULTILINE))
    aggregates: list[Aggregate] = []
    enumerations: list[Enumeration] = []
    for node in _parse(_preprocess(header, compiler)).ext:
        kind = _kind(getattr(node, "type", None))
        if kind == "Enum":
            enumerators = node.type.values.enumerators
            values = tuple((each.name, each.value and _text(each.value)) for each in enumerators)
            enumerations.append(Enumeration(node.type.name, values))
        elif kind in ("Struct", "Union") and node.type.decls:
            tag = node.type.name
            members = tuple(_member(each) for each in node.type.decls)
            aggregates.append(Aggregate(kind.lower(), tag, members, grows=tag in growing))
    macros = re.findall(r"^#define ((?:IBV|__VERBS)_\w+) (.+)$", header, re.MULTILINE)
    return Declarations(tuple(aggregates), tuple(enumerations), tuple(macros))


def _member(node: Any) -> Member:
    inner = node.type.type if _kind(node.type) == "TypeDecl" else node.type
    if _kind(inner) in ("Struct", "Union") and inner.decls:
        return Member(node.name, _kind(inner).lower(), tuple(_member(each) for each in inner.decls))
    return Member(node.name, re.sub(rf"\b{node.name}\b", NAME, _text(node), count=1))


def _preprocess(header: str, compiler: tuple[str, ...]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in _SYSTEM_HEADERS.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{text}\n")
        command = [*compiler, "-E", "-P", "-x", "c", "-nostdinc", f"-I{folder}", "-"]
        done = subprocess.run(command, input=header, capture_output=True, text=True, check=True)
    return done.stdout


# pycparser has no type information: its nodes are Any, and only used below.
_c_parser = importlib.import_module("pycparser.c_parser")
_c_generator = importlib.import_module("pycparser.c_generator")


def _parse(source: str) -> Any:
    return _c_parser.CParser().parse(source)


def _text(node: Any) -> str:
    return str(_c_generator.CGenerator().visit(node))


def _kind(node: Any) -> str:
    return type(node).__name__
