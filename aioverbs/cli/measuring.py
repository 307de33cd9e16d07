"""PURE: which cells are measured, the order of turns, and the figures computed from samples."""

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
    "count_for_turn",
    "figures",
    "format_size",
    "median",
    "next_count",
    "percentile",
    "slot_count",
    "turn_order",
    "turn_seconds",
]

Operation = Literal["write", "read", "send"]
OPERATIONS: tuple[Operation, ...] = ("write", "read", "send")

SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20)  # bytes
WINDOW = 16  # operations in flight at most; fewer if their bytes exceed MEMORY
ROUNDS = 7
MEMORY = 2 << 20  # bytes in flight at most

_CALIBRATION_TURNS = 1.5  # duration of the calibration of a contender, in turns
_MEASURED_FRACTION = 0.75  # part of the time spent in turns; the rest is startup, requests to the peer, checksums
_MIN_TURN_S = 0.001
_MAX_GROWTH = 8  # limit of the growth of a turn's operation count: the first turns run with cold caches
_MAX_COUNT = 200_000  # operations of a turn at most, since the time of each one is stored


@dataclass(frozen=True)
class Cell:
    """Work that all contenders do in the same rounds.

    :param operation: ``"write"``, ``"read"`` or ``"send"``.
    :param size: bytes of each operation.
    :param window: number of operations in flight.
    """

    operation: Operation
    size: int
    window: int


@dataclass
class Samples:
    """Times of one contender in a cell, in nanoseconds.

    :param rounds: time of an operation in each round: the median if the window is 1, else the average.
    :param single: time of each operation; empty unless the window is 1.
    """

    rounds: list[float] = field(default_factory=list)
    single: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """Result of one contender in a cell. Made by `figures`.

    :param contender: the contender's name.
    :param operation: operation of the cell.
    :param size: bytes of each operation.
    :param window: number of operations in flight.
    :param rounds: number of rounds that were measured.
    :param median_ns: time of an operation in the median round, in nanoseconds.
    :param p99_ns: 99th percentile of the times of operations, in nanoseconds; None unless the window is 1.
    :param bytes_per_s: throughput, from `size` and `median_ns`.
    :param ratio: speed relative to the base contender, more than 1 if faster: the median of the ratios of each round;
        None if the base contender was not measured.
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


def slot_count(size: int) -> int:
    """Return how many operations of `size` bytes can be in flight, each with its own memory slot: 1 to `WINDOW`."""
    return max(1, min(WINDOW, MEMORY // size))


def cells(operations: Iterable[Operation], sizes: Sequence[int] = SIZES) -> list[Cell]:
    """Return the cells to measure: for each operation and size, one with a window (operations in flight) of 1, and one
    with the largest possible window if that is more than 1.
    """
    both = (
        (Cell(operation, size, 1), Cell(operation, size, slot_count(size)))
        for operation in operations
        for size in sizes
    )
    return [cell for pair in both for cell in dict.fromkeys(pair)]


def turn_seconds(seconds: float, count: int, contenders: int, rounds: int = ROUNDS) -> float:
    """Return how long a contender's turn may take, in seconds, if the benchmark is to take `seconds`; at least 0.001.

    :param seconds: target duration of the whole benchmark.
    :param count: number of cells.
    :param contenders: number of contenders.
    :param rounds: number of rounds in each cell.
    """
    return max(_MIN_TURN_S, seconds * _MEASURED_FRACTION / (max(1, count * contenders) * (rounds + _CALIBRATION_TURNS)))


def turn_order(names: Sequence[str], rounds: int = ROUNDS) -> Iterator[tuple[int, str]]:
    """Yield, for each turn, a tuple of the round number, from 0, and the contender's name. Each contender has one turn
    per round, and the contender that begins changes from round to round.

    A disturbance of the machine therefore affects all contenders alike, and no contender always follows the same one.
    """
    for number in range(rounds):
        first = number % max(1, len(names))
        yield from ((number, name) for name in (*names[first:], *names[:first]))


def next_count(count: int, elapsed_ns: float, target_s: float) -> int | None:
    """Return the operation count to try next when looking for the number of operations in a turn; None to stop.

    None is returned if `count` operations took at least half a turn, or if `count` has reached the limit of 200,000.
    Otherwise the result is larger than `count`, but at most eight times as large and at most 200,000.

    :param count: the last operation count.
    :param elapsed_ns: duration of `count` operations, in nanoseconds.
    :param target_s: target duration of a turn, in seconds.
    """
    if elapsed_ns >= target_s * 1e9 / 2 or count >= _MAX_COUNT:
        return None
    return min(max(count + 1, count_for_turn(elapsed_ns / count, target_s)), count * _MAX_GROWTH, _MAX_COUNT)


def count_for_turn(operation_ns: float, target_s: float) -> int:
    """Return how many operations fit into a turn, at least 1 and at most 200,000.

    :param operation_ns: duration of an operation, in nanoseconds.
    :param target_s: target duration of the turn, in seconds.
    """
    return max(1, min(_MAX_COUNT, round(target_s * 1e9 / max(operation_ns, 1.0))))


def format_size(size: int) -> str:
    """Return a number of bytes as text in whole units, rounded down: ``"64 B"``, ``"4 KiB"``, ``"1 MiB"``."""
    for unit, letters in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {letters}"
    return f"{size} B"


def median(values: Iterable[float]) -> float:
    """Return the median of the values.

    :raises statistics.StatisticsError: there is no value.
    """
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of the values that at least `percent` percent of the values do not exceed.

    :raises ValueError: `values` is empty, or `percent` is outside 0..100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(
            f"a percentile needs at least one value and a percentage from 0 to 100, got {percent} and {len(values)}"
        )
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def figures(cell: Cell, samples: Mapping[str, Samples], base: str) -> list[Figure]:
    """Compute the figures of a cell.

    :param cell: the cell.
    :param samples: samples by contender.
    :param base: name of the contender with which the others are compared.
    :returns: a figure for each contender that has samples, in the order of `samples`.
    """
    base_rounds = samples[base].rounds if base in samples else []
    found = []
    for name, own in samples.items():
        if not own.rounds:
            continue
        ratios = [base_ns / own_ns for own_ns, base_ns in zip(own.rounds, base_rounds, strict=False)]
        median_ns = median(own.rounds)
        found.append(
            Figure(
                name,
                cell.operation,
                cell.size,
                cell.window,
                len(own.rounds),
                median_ns,
                percentile(own.single, 99) if own.single else None,
                cell.size * 1e9 / median_ns,
                median(ratios) if ratios else None,
            )
        )
    return found
