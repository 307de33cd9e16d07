"""PURE: what is measured of whom, in which order, and what comes out of it."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "OPERATIONS",
    "SIZES",
    "WINDOW",
    "Cell",
    "Figure",
    "Operation",
    "Samples",
    "cells",
    "figures",
    "fitting_count",
    "median",
    "next_count",
    "percentile",
    "places",
    "size_of",
    "turn_s",
    "turns",
]

Operation = Literal["write", "read", "send"]
OPERATIONS: tuple[Operation, ...] = ("write", "read", "send")

SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20)  # bytes
WINDOW = 16  # operations under way, of those of which that many have room
ROUNDS = 7
MEMORY = 2 << 20  # bytes: the most that is under way at once

_WARMING = 1.5  # turns that finding the counts takes, and what ends the turn before
_MEASURED = 0.75  # of the whole time; the rest is for starting, telling the other process, and comparing bytes
_LEAST_TURN_S = 0.001
_GROWTH = 8  # times as many operations as before, at most: caches and clocks were cold
_MOST = 200_000  # operations of a turn: each one's time is kept


@dataclass(frozen=True)
class Cell:
    """What all contenders do in the same rounds.

    :param size: bytes of each operation.
    :param window: operations that are under way at once.
    """

    operation: Operation
    size: int
    window: int


@dataclass
class Samples:
    """What one contender took for a cell, in nanoseconds.

    :param rounds: for an operation, of each round: the median where they went one by one, else the average.
    :param single: of each operation, where they went one by one.
    """

    rounds: list[float] = field(default_factory=list)
    single: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """What came out for one contender and cell.

    :param median_ns: what an operation took in the median round.
    :param p99_ns: what 99 of 100 operations did not exceed; None where they did not go one by one.
    :param bytes_per_s: by that.
    :param ratio: how many times as fast as the contender that all are compared with: the median of the ratios within
        one round each; None where that one has no figure.
    """

    contender: str
    operation: Operation
    size: int
    window: int
    rounds: int
    median_ns: float
    p99_ns: float | None
    bytes_per_s: float
    ratio: float | None


def places(size: int) -> int:
    """How many operations of a size have memory of their own."""
    return max(1, min(WINDOW, MEMORY // size))


def cells(operations: Iterable[Operation], sizes: Sequence[int] = SIZES) -> list[Cell]:
    """What is measured: each size one by one, and with a window, where there is room for more than one."""
    both = (
        (Cell(operation, size, 1), Cell(operation, size, places(size))) for operation in operations for size in sizes
    )
    return [cell for pair in both for cell in dict.fromkeys(pair)]


def turn_s(seconds: float, count: int, contenders: int, rounds: int = ROUNDS) -> float:
    """How long a contender's turn is, so that all together take so many seconds.

    :param count: of cells.
    """
    return max(_LEAST_TURN_S, seconds * _MEASURED / (max(1, count * contenders) * (rounds + _WARMING)))


def turns(names: Sequence[str], rounds: int = ROUNDS) -> Iterator[tuple[int, str]]:
    """Who measures when: in each round each one once, and each round another one first.

    What disturbs a machine for a while disturbs all of them, and nobody always comes after the same one.
    """
    for number in range(rounds):
        first = number % max(1, len(names))
        yield from ((number, name) for name in (*names[first:], *names[:first]))


def next_count(count: int, took_ns: float, wanted_s: float) -> int | None:
    """How many operations to try next, after so many took so long; None: they took about a turn.

    :param wanted_s: how long a turn is to be, in seconds.
    """
    if took_ns >= wanted_s * 1e9 / 2 or count >= _MOST:
        return None
    return min(max(count + 1, fitting_count(took_ns / count, wanted_s)), count * _GROWTH, _MOST)


def fitting_count(operation_ns: float, wanted_s: float) -> int:
    """How many operations make a turn, where one takes so long."""
    return max(1, min(_MOST, round(wanted_s * 1e9 / max(operation_ns, 1.0))))


def size_of(size: int) -> str:
    """A size in a unit that fits it."""
    for unit, letters in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {letters}"
    return f"{size} B"


def median(values: Iterable[float]) -> float:
    """The median, of one value at least."""
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that so many percent of them do not exceed.

    :raises ValueError: there are no values, or it is not from 0 to 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"a percentile is of one value at least, and from 0 to 100, not {percent} of {len(values)}")
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def figures(cell: Cell, samples: Mapping[str, Samples], base: str) -> list[Figure]:
    """The figures of a cell: of those contenders that have samples.

    :param base: the contender that all are compared with.
    """
    others = samples[base].rounds if base in samples else []
    found = []
    for name, its in samples.items():
        if not its.rounds:
            continue
        ratios = [other / own for own, other in zip(its.rounds, others, strict=False)]
        median_ns = median(its.rounds)
        found.append(
            Figure(
                name,
                cell.operation,
                cell.size,
                cell.window,
                len(its.rounds),
                median_ns,
                percentile(its.single, 99) if its.single else None,
                cell.size * 1e9 / median_ns,
                median(ratios) if ratios else None,
            )
        )
    return found
