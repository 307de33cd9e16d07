"""PURE: policies that choose the worker of a call."""

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
    """Policy that chooses a worker for each call that names neither a worker nor a key.

    A pool calls the policy in the thread of the caller, so several threads may call it at the same time.
    """

    def choose(self, workers: Sequence[int], loads: Sequence[int]) -> int:
        """Choose the worker for a call, and return the number of that worker.

        If the returned number is not in `workers`, the call raises ValueError. If this raises, the call raises the same
        exception. In both cases the function is not called on any worker.

        :param workers: numbers of the workers, in ascending order; at least one.
        :param loads: number of calls that wait or are in flight on each worker, in the same order as `workers`.
        :returns: the number of the chosen worker.
        """


class RoundRobin:
    """Policy that chooses the workers in turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, workers: Sequence[int], loads: Sequence[int]) -> int:
        """Return the number of the worker whose turn it is.

        The turns go through the workers in ascending order, repeatedly.

        :param workers: numbers of the workers, in ascending order; at least one.
        :param loads: number of calls of each worker, which this policy ignores.
        :returns: the number of the chosen worker.
        """
        return workers[next(self._turns) % len(workers)]


class LeastLoaded:
    """Policy that chooses the worker with the fewest calls.

    If several workers have the fewest, it chooses them in turn.
    """

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, workers: Sequence[int], loads: Sequence[int]) -> int:
        """Return the number of the worker with the fewest calls.

        If several workers have the fewest, choose them in turn.

        :param workers: numbers of the workers, in ascending order; at least one.
        :param loads: number of calls that wait or are in flight on each worker, in the same order as `workers`.
        :returns: the number of the chosen worker.
        """
        least = min(loads)
        if loads.count(least) == 1:
            return workers[loads.index(least)]
        idle = [worker for worker, load in zip(workers, loads, strict=True) if load == least]
        return idle[next(self._turns) % len(idle)]


def rendezvous(key: Key, workers: Sequence[int]) -> int:
    """Return the number of the worker that a key belongs to. The result is the same in every process and in every run.

    Each worker has a score for each key, and the highest score wins (rendezvous hashing, Thaler and Ravishankar 1998).
    If a worker is removed, its keys are distributed evenly over the others; if a worker is added, it takes an equal
    share of keys from each of the others; no other key moves. A string and its UTF-8 bytes are the same key.

    :param key: string, bytes or integer of any size.
    :param workers: numbers of the workers; at least one.
    :raises TypeError: `key` is not a string, bytes-like object or integer.
    """
    seed = int.from_bytes(hashlib.blake2b(_key_bytes(key), digest_size=8).digest(), "little")
    return max(workers, key=lambda worker: (_mix64(seed ^ _mix64(worker + 1)), worker))


def _key_bytes(key: Key) -> bytes:
    """Return a key as the bytes to be hashed. An integer never has the same bytes as a string or bytes object.

    :raises TypeError: `key` is not a string, bytes-like object or integer.
    """
    if isinstance(key, str):
        return b"b" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes | bytearray | memoryview):
        return b"b" + bytes(key)
    if isinstance(key, int):
        size = max(_INT_BYTES, key.bit_length() // 8 + 1)
        return b"i" + key.to_bytes(size, "little", signed=True)
    raise TypeError(f"`key` must be a string, bytes or an integer, got {key!r}")


def _mix64(value: int) -> int:
    """Return the 64 bits that splitmix64 mixes from an integer: one changed input bit changes about half of them."""
    value = (value * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


publish(__name__)
