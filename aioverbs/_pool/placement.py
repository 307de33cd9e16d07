"""PURE: which of a pool's workers a call goes to."""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Protocol

from aioverbs._exports import publish

__all__ = ["Key", "LeastLoaded", "PlacementPolicy", "RoundRobin", "rendezvous"]

Key = str | bytes | int

_MASK = (1 << 64) - 1
_INT_BYTES = 16


class PlacementPolicy(Protocol):
    """How a pool places calls that name neither a worker nor a key.

    A pool asks it wherever it is called: in any thread, and in several at once.
    """

    def choose(self, workers: Sequence[int], loads: Sequence[int]) -> int:
        """The worker that a call goes to, one of `workers`; another one is a ValueError for whoever calls.

        :param workers: the numbers of those that there are, one at least, in ascending order.
        :param loads: how many calls each of them has, under way or waiting.
        """


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, workers: Sequence[int], loads: Sequence[int]) -> int:
        """The next one's number."""
        return workers[next(self._turns) % len(workers)]


class LeastLoaded:
    """The one with the fewest calls; among several such, one after the other."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, workers: Sequence[int], loads: Sequence[int]) -> int:
        """The number of one that has the fewest calls."""
        least = min(loads)
        if loads.count(least) == 1:
            return workers[loads.index(least)]
        idle = [worker for worker, load in zip(workers, loads, strict=True) if load == least]
        return idle[next(self._turns) % len(idle)]


def rendezvous(key: Key, workers: Sequence[int]) -> int:
    """The worker that a key belongs to, the same in every process and in every run, wherever it is asked.

    Each worker has a score for each key, and the highest one wins (rendezvous hashing, Thaler and Ravishankar 1998):
    one that goes leaves its own keys to the others in equal parts, one that comes takes its share of each, and no other
    key moves. A text and its bytes in UTF-8 are one key.

    :param workers: the numbers of those that there are, one at least.
    :raises TypeError: the key is no text, bytes or integer.
    """
    seed = int.from_bytes(hashlib.blake2b(_key_bytes(key), digest_size=8).digest(), "little")
    return max(workers, key=lambda worker: (_mix64(seed ^ _mix64(worker + 1)), worker))


def _key_bytes(key: Key) -> bytes:
    if isinstance(key, str):
        return b"b" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes | bytearray | memoryview):
        return b"b" + bytes(key)
    if isinstance(key, int):
        size = max(_INT_BYTES, key.bit_length() // 8 + 1)
        return b"i" + key.to_bytes(size, "little", signed=True)
    raise TypeError(f"a key is a text, bytes or an integer, so that it is the same everywhere, not {key!r}")


def _mix64(value: int) -> int:
    """The finalizer of splitmix64: each bit of the value changes half of the others."""
    value = (value * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


publish(__name__)
