"""Mutants: faults that can be planted in a source file, and the choice of mutants to try."""

import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff

__all__ = ["Fault", "Mutant", "Replacement", "choose", "mutants_of", "only", "place_key"]

# Kinds that few lines have, but that do much harm: they are chosen early.
RARE = {"freed too early", "handler removed", "lock removed", "missing free", "missing wake-up", "wrong errno"}
FAVOUR = 0.4


@dataclass(frozen=True, slots=True)
class Replacement:
    """Bytes `start` to `end` (exclusive) of a source file, to be replaced by `text`."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as a language's module finds it.

    Attributes:
        operator: the kind of fault.
        function: the function or method that it is in; empty at the level of the file.
        replacements: in the order of the file; not overlapping.
    """

    operator: str
    function: str
    replacements: tuple[Replacement, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault in a file.

    Attributes:
        id: the same as long as the function's name and the lines that are replaced stay as they are.
        path: of the file, from the project's root.
        line: of the first replacement, from 1.
        key: of the place, as `place_key` makes it.
        fault: what is changed.
    """

    id: str
    path: str
    line: int
    key: str
    fault: Fault

    def apply(self, source: bytes) -> bytes:
        """Return the source with the fault in it."""
        for each in reversed(self.fault.replacements):
            source = source[: each.start] + each.text + source[each.end :]
        return source

    def diff(self, source: bytes) -> str:
        """Return what it changes, as a unified diff of the lines alone."""
        before, after = source.decode().splitlines(), self.apply(source).decode().splitlines()
        lines = list(unified_diff(before, after, lineterm="", n=0))
        return "\n".join(line for line in lines[2:] if not line.startswith("@@"))


def place_key(function: str, text: str) -> str:
    """Return the key of a line, which survives edits elsewhere: the function, without classes, and the line's text."""
    return f"{function.rpartition('.')[2]}: {text.strip()}"


def mutants_of(path: str, source: bytes, faults: Iterable[Fault]) -> Iterator[Mutant]:
    """Yield the mutants of a file in the order of the file."""
    lines = source.decode().splitlines()
    seen: Counter[str] = Counter()
    for fault in faults:
        first = fault.replacements[0]
        line = source.count(b"\n", 0, first.start) + 1
        changes = [(source[each.start : each.end].decode(), each.text.decode()) for each in fault.replacements]
        name = repr((path, fault.operator, fault.function, lines[line - 1].strip(), changes))
        seen[name] += 1
        digest = hashlib.sha256(f"{name}{seen[name]}".encode()).hexdigest()[:16]
        yield Mutant(digest, path, line, place_key(fault.function, lines[line - 1]), fault)


def choose(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Choose mutants: from each file in proportion to its number of mutants, and in a file each operator in turn.

    The choice depends only on the seed and the mutants' IDs: a greater count adds to the choice of a smaller one,
    except for rounding.

    :returns: sorted by file and line.
    """
    files: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))

    def rank(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.id}".encode()).hexdigest()

    def turn_of(path: str, operator: str) -> float:
        return random.Random(f"{seed} {path} {operator}").random() * (FAVOUR if operator in RARE else 1)

    for mutant in sorted(mutants, key=rank):
        files[mutant.path][mutant.fault.operator].append(mutant)
    # Each file's mutants are at even distances between 0 and 1, so below any limit each file has its share.
    placed: list[tuple[float, str, Mutant]] = []
    for path, operators in files.items():
        by_operator = [operators[operator] for operator in sorted(operators, key=lambda each: turn_of(path, each))]
        longest = max(map(len, by_operator))
        in_turn = [each[turn] for turn in range(longest) for each in by_operator if turn < len(each)]
        first = random.Random(f"{seed} {path}").random()
        placed += [((turn + first) / len(in_turn), mutant.id, mutant) for turn, mutant in enumerate(in_turn)]
    chosen = [mutant for _, _, mutant in sorted(placed, key=lambda each: each[:2])[:count]]
    order = {mutant.id: position for position, mutant in enumerate(mutants)}
    return sorted(chosen, key=lambda mutant: order[mutant.id])


def only(paths: Sequence[str], prefixes: Sequence[str]) -> list[str]:
    """Return the paths that are one of these files or in one of these folders; all if there are none."""
    pattern = re.compile("|".join(f"{re.escape(each.rstrip('/'))}(/|$)" for each in prefixes))
    return [path for path in paths if pattern.match(path)]
