"""Compare declarations with <infiniband/verbs.h> through the compiler.

One translation unit includes the installed header, repeats our declarations with prefixed names, and asserts each size,
offset, type and value on a line of its own. The failing lines make the report. Nothing is linked or run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .declarations import NAME, Aggregate, Declarations, Enumeration

REFERENCE = "#include <infiniband/verbs.h>"
OURS = "ours_"

_FAILED_ASSERTION = "static assertion failed"


@dataclass(frozen=True)
class Check:
    """Integer constant expression that must be true."""

    name: str  # checked declaration: "struct ibv_pd.handle", "IBV_WC_SUCCESS"
    aspect: str
    condition: str


@dataclass(frozen=True)
class Report:
    checked: int
    different: frozenset[Check]
    absent: frozenset[str]  # declarations that an older installed header lacks

    @property
    def names(self) -> set[str]:
        return {check.name for check in self.different}


def compiler() -> tuple[str, ...]:
    return tuple(shlex.split(os.environ.get("CC", "cc")))


def reference_is_installed(flags: Sequence[str] = ()) -> bool:
    command = [*compiler(), *flags, "-E", "-x", "c", "-"]
    return not subprocess.run(command, input=REFERENCE, capture_output=True, text=True).returncode


def compare(declarations: Declarations) -> Report:
    absent = find_absent(declarations)
    preamble = prefixed_declarations(declarations)
    checks = list(all_checks(declarations, absent))
    different = frozenset(checks[index] for index in failing(preamble, checks))
    return Report(len(checks), different, absent)


def find_absent(declarations: Declarations) -> frozenset[str]:
    """Return the names of our declarations that the installed header lacks."""
    probes: list[tuple[str, str]] = []
    for aggregate in declarations.aggregates:
        probes.append((aggregate.name, f"sizeof({aggregate.name})"))
        for path, _ in aggregate.paths():
            probes.append((f"{aggregate.name}.{path}", f"offsetof({aggregate.name}, {path})"))
    for enumeration in declarations.enumerations:
        if enumeration.tag:
            probes.append((f"enum {enumeration.tag}", f"sizeof(enum {enumeration.tag})"))
        probes.extend((name, f"sizeof({name})") for name, _ in enumeration.values)
    probes.extend((name, f"sizeof({name})") for name, _ in declarations.macros)

    lines = [f"enum {{ probe_{i} = {text} != 0 }};" for i, (_, text) in enumerate(probes)]
    return frozenset(probes[line][0] for line, _ in _errors("", lines))


def failing(preamble: str, checks: Sequence[Check]) -> Iterator[int]:
    lines = [f'_Static_assert({check.condition}, "");' for check in checks]
    for line, message in _errors(preamble, lines):
        if _FAILED_ASSERTION not in message:
            raise AssertionError(f"{checks[line]}: {message}")
        yield line


# -- Our declarations, under other names --------------------------------------------------------------------


def prefixed(text: str, prefix: str = OURS) -> str:
    """Return C text with every tag and constant of the ABI prefixed; names of the C library stay."""
    text = re.sub(r"\b(struct|union|enum) (?!timespec\b)(\w+)", rf"\1 {prefix}\2", text)
    return re.sub(r"\bIBV_", f"{prefix}IBV_", text)


def prefixed_declarations(declarations: Declarations) -> str:
    ours: list[Enumeration | Aggregate] = [*declarations.enumerations, *declarations.aggregates]
    return "\n".join(prefixed(each.declared()) for each in ours)


# -- Checks ---------------------------------------------------------------------------


def all_checks(declarations: Declarations, absent: frozenset[str]) -> Iterator[Check]:
    for aggregate in declarations.aggregates:
        yield from aggregate_checks(aggregate, absent)
    for enumeration in declarations.enumerations:
        yield from enumeration_checks(enumeration, absent)
    for name, value in declarations.macros:
        if name not in absent:
            yield macro_check(name, value)


def aggregate_checks(aggregate: Aggregate, absent: frozenset[str], ours: str | None = None) -> Iterator[Check]:
    """Yield checks of an aggregate against the installed one of the same name.

    :param ours: C type of our declaration.
    """
    theirs = aggregate.name
    ours = ours or prefixed(theirs)
    if theirs in absent:
        return
    yield Check(theirs, "alignment", f"_Alignof({ours}) == _Alignof({theirs})")
    grown = aggregate.grows or grows_at_front(aggregate)
    if not grown:
        yield Check(theirs, "size", f"sizeof({ours}) == sizeof({theirs})")
    elif not any(f"{theirs}.{path}" in absent for path, _ in aggregate.paths()):
        yield Check(theirs, "size", f"sizeof({ours}) <= sizeof({theirs})")
    for path, member in aggregate.paths():
        name = f"{theirs}.{path}"
        if name in absent:
            continue
        places = [f"offsetof({each}, {path})" for each in (ours, theirs)]
        if grows_at_front(aggregate):
            sizes = [f"sizeof({each})" for each in (ours, theirs)]
            places = [f"{size} - {place}" for size, place in zip(sizes, places, strict=True)]
        yield Check(name, "offset", " == ".join(places))
        fields = [f"(({each} *)0)->{path}" for each in (ours, theirs)]
        yield Check(name, "size", " == ".join(f"sizeof({field})" for field in fields))
        if not member.members:
            type_ = member.type.replace(NAME, "")
            condition = f"__builtin_types_compatible_p({type_}, __typeof__({fields[1]}))"
            yield Check(name, "type", condition)


def grows_at_front(aggregate: Aggregate) -> bool:
    return aggregate.tag == "verbs_context"


def enumeration_checks(enumeration: Enumeration, absent: frozenset[str], prefix: str = OURS) -> Iterator[Check]:
    name = f"enum {enumeration.tag}"
    if enumeration.tag and name not in absent:
        yield Check(name, "size", f"sizeof({prefixed(name, prefix)}) == sizeof({name})")
    for value, _ in enumeration.values:
        if value not in absent:
            yield Check(value, "value", f"{prefix}{value} == (long long){value}")


def macro_check(name: str, value: str) -> Check:
    # Cast to uintptr_t, because some macros are pointers.
    return Check(name, "value", f"(uintptr_t){value} == (uintptr_t){name}")


# -- The compiler -------------------------------------------------------------------------------


def _errors(preamble: str, lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Compile the lines after the installed header; yield the line index and text of each error."""
    source = "\n".join([REFERENCE, preamble, '#line 1 "lines"', *lines, ""])
    command = [*compiler(), "-std=gnu11", "-w", "-fsyntax-only", "-fmax-errors=0"]
    command += ["-fno-diagnostics-show-caret", "-fdiagnostics-color=never", "-x", "c", "-"]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, input=source, capture_output=True, text=True, env=environment)
    found = [line for line in done.stderr.splitlines() if " error: " in line]
    if bool(found) != bool(done.returncode):
        raise AssertionError(done.stderr)
    for line in found:
        match = re.match(r"lines:(\d+):\d+: error: (.*)", line)
        if match is None:
            raise AssertionError(f"not about a check: {line}")
        yield int(match[1]) - 1, match[2]
