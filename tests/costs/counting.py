"""Counters of the process that `tests.costs.scenes` runs in: of its system calls, and of what it allocates."""

import asyncio
import contextlib
import ctypes
import gc
import mmap
import os
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COUNTS_BYTES", "Counted", "Counting"]

# As in system_calls.c.
_THREADS = 64
_WORDS = 2 + 512  # of a thread: its number, whether it is held, its system calls
_NAMES = {"aioverbs-soft": "device", "aioverbs-fabric": "fabric"}
_TURNS = 8  # of the loop, in which what is left of a warm-up is done, and what may be done in a turn is as at first
COUNTS_BYTES = 8 * _THREADS * _WORDS


@dataclass(frozen=True)
class Counted:
    """What happened meanwhile.

    :param calls: system calls by their numbers, for each kind of thread: "loop" is that of the event loop, "device"
        executes requests, "fabric" serves peers, and others are "worker".
    :param allocations: by all threads.
    :param native: of these, those in the C and Cython of aioverbs.
    :param doorbells: calls of verbs that post.
    """

    calls: dict[str, dict[int, int]]
    allocations: int
    native: int
    doorbells: int


class Counting:
    """The counters.

    :param words: memory that they are in, of COUNTS_BYTES, as a descriptor.
    """

    def __init__(self, words: int) -> None:
        self._words = memoryview(mmap.mmap(words, COUNTS_BYTES)).cast("Q")
        self._library = library = ctypes.PyDLL(None)  # which keeps the GIL
        for name in ("allocations_all", "allocations_native"):
            getattr(library, name).restype = ctypes.c_uint64
        assert library.allocations_find_parts() >= 4, "it counts nothing of what is compiled"
        gc.collect()
        gc.disable()  # what it finds is not a matter of what is measured

    def _threads(self) -> dict[int, str]:
        """The names of the threads, by the places of their counts."""
        names = {}
        for place in range(_THREADS):
            number = self._words[place * _WORDS]
            with contextlib.suppress(FileNotFoundError):  # it has ended
                name = Path(f"/proc/self/task/{number}/comm").read_text().strip()
                names[place] = "loop" if number == os.getpid() else _NAMES.get(name, "worker")
        return names

    async def count(
        self,
        warm_up: Callable[[], Awaitable[None]],
        measured: Callable[[], Awaitable[None]],
        doorbells: Callable[[], int],
        hold: Collection[int] = (),
    ) -> Counted:
        """Count what an operation does while the threads of this process run in turns.

        :param warm_up: what is done before, twice: freely, so that devices find each other, and in turns.
        :param measured: what is counted.
        :param doorbells: how many there were so far.
        :param hold: numbers of threads that stand still meanwhile.
        """
        library, words = self._library, self._words
        await warm_up()
        threads = self._threads()
        for place in threads:
            words[place * _WORDS + 1] = words[place * _WORDS] in hold
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        try:
            await warm_up()
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            rung, before = doorbells(), words.tolist()
            allocations, native = library.allocations_all(), library.allocations_native()
            await measured()
            allocations, native = library.allocations_all() - allocations, library.allocations_native() - native
            after = words.tolist()
            rung = doorbells() - rung
        finally:
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        calls: dict[str, Counter[int]] = {name: Counter() for name in threads.values()}
        for place, name in threads.items():
            first = place * _WORDS + 2
            for number in range(_WORDS - 2):
                calls[name][number] += after[first + number] - before[first + number]
        return Counted({name: dict(+counter) for name, counter in calls.items()}, allocations, native, rung)
