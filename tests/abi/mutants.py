"""Mutants of declarations: each has one typical editing mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from .declarations import NAME, Aggregate, Enumeration, Member

_OTHER_TYPE_OF_THAT_SIZE = {
    "char": "signed char",
    "int": "unsigned int",
    "size_t": "long",
    "uint16_t": "int16_t",
    "uint32_t": "int32_t",
    "uint64_t": "int64_t",
    "uint8_t": "int8_t",
    "unsigned int": "int",
    "__be16": "int16_t",
    "__be32": "int32_t",
    "__be64": "int64_t",
}


@dataclass(frozen=True)
class Mutant:
    what: str
    aggregate: Aggregate
    reported: frozenset[str]  # names of which at least one must be reported
    exactly: bool  # True if no other name may be reported


def aggregate_mutants(aggregate: Aggregate) -> Iterator[Mutant]:
    """Yield mutants of an aggregate: a field retyped with equal size, a field doubled, two neighbours swapped."""
    for path, member in aggregate.paths():
        reported = frozenset([f"{aggregate.name}.{path}"])
        if member.members:
            continue
        other = _other_type(member.type)
        if other is not None:
            changed = replace(member, type=other)
            yield Mutant("retyped", _with(aggregate, member, changed), reported, exactly=True)
        doubled = replace(member, type=member.type.replace(NAME, f"{NAME}[2]"))
        yield Mutant("doubled", _with(aggregate, member, doubled), reported, exactly=False)
    if aggregate.keyword == "struct":
        for index, (first, second) in enumerate(pairwise(aggregate.members)):
            members = (*aggregate.members[:index], second, first, *aggregate.members[index + 2 :])
            swapped = replace(aggregate, members=members)
            # Padding can preserve the offset of one of the two fields, not of both.
            exchanged = (first, second, *first.members, *second.members)
            reported = frozenset(f"{aggregate.name}.{path}" for path, each in aggregate.paths() if each in exchanged)
            yield Mutant("swapped", swapped, reported, exactly=False)


def enumeration_mutants(enumeration: Enumeration, prefix: str) -> Iterator[tuple[str, Enumeration]]:
    """Yield mutants of an enumeration, each with one value increased by one.

    :param prefix: prefix of the unchanged constants.
    """
    for changed, _ in enumeration.values:
        values = tuple(
            (name, f"{prefix}{name} + 1" if name == changed else f"{prefix}{name}") for name, _ in enumeration.values
        )
        yield changed, replace(enumeration, values=values)


def _other_type(text: str) -> str | None:
    """Return another type of the same size; None for a struct."""
    if text.endswith("(void)"):
        return text.removesuffix("(void)") + "(int)"
    if text.endswith(")"):
        return text.removesuffix(")") + ", int)"
    if "*" in text:
        return text.replace("*", "**", 1)
    if text.startswith("enum "):
        return f"float {NAME}"
    name = re.sub(rf" {NAME}.*", "", text)
    other = _OTHER_TYPE_OF_THAT_SIZE.get(name)
    return other and text.replace(name, other, 1)


def _with(aggregate: Aggregate, old: Member, new: Member) -> Aggregate:
    return replace(aggregate, members=_replaced(aggregate.members, old, new))


def _replaced(members: tuple[Member, ...], old: Member, new: Member) -> tuple[Member, ...]:
    return tuple(new if each is old else replace(each, members=_replaced(each.members, old, new)) for each in members)
