"""Counters of the process that `tests.costs.scenes` runs in: system calls and allocations."""

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

__all__ = ["COUNTS_BYTES", "Counting", "Counts"]

# The same as in system_calls.c.
_THREADS = 64
_WORDS = 2 + 512  # of a thread: its number, whether it is held, its system calls
_NAMES = {"aioverbs-soft": "device", "aioverbs-fabric": "fabric"}
_TURNS = 8  # turns of the loop that finish the warm-up, and reset the loop's budget of awaits
COUNTS_BYTES = 8 * _THREADS * _WORDS


@dataclass(frozen=True)
class Counts:
    """Counts of one scene.

    :param calls: system calls by number, for each kind of thread: "loop" is that of the event loop, "device" executes
        requests, "fabric" serves peers, and others are "worker".
    :param allocations: number of allocations in all threads.
    :param native: number of these in the C and Cython code of aioverbs.
    :param doorbells: number of calls of verbs that post.
    """

    calls: dict[str, dict[int, int]]
    allocations: int
    native: int
    doorbells: int


class Counting:
    """Access to the counters.

    :param words: descriptor of the shared memory of COUNTS_BYTES that has the counters.
    """

    def __init__(self, shared_counters: int) -> None:
        self._words = memoryview(mmap.mmap(shared_counters, COUNTS_BYTES)).cast("Q")
        self._library = library = ctypes.PyDLL(None)  # PyDLL keeps the GIL during calls
        for name in ("allocations_all", "allocations_native"):
            getattr(library, name).restype = ctypes.c_uint64
        assert library.allocations_find_parts() >= 4, "the compiled parts were not found"
        gc.collect()
        gc.disable()  # its allocations are not to be measured

    def _threads(self) -> dict[int, str]:
        """Return the names of the threads, by the index of their counters."""
        names = {}
        for place in range(_THREADS):
            number = self._words[place * _WORDS]
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                name = Path(f"/proc/self/task/{number}/comm").read_text().strip()
                names[place] = "loop" if number == os.getpid() else _NAMES.get(name, "worker")
        return names

    async def count(
        self,
        warm_up: Callable[[], Awaitable[None]],
        measured: Callable[[], Awaitable[None]],
        doorbells: Callable[[], int],
        hold: Collection[int] = (),
    ) -> Counts:
        """Count the cost of an operation while the threads of this process run in turns.

        :param warm_up: awaited twice before: with free threads, so that devices find each other, and then in turns.
        :param measured: the counted operation.
        :param doorbells: returns the number of doorbells so far.
        :param hold: numbers of threads that do not run meanwhile.
        """
        library, shared_counters = self._library, self._words
        await warm_up()
        threads = self._threads()
        for place in threads:
            shared_counters[place * _WORDS + 1] = shared_counters[place * _WORDS] in hold
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        try:
            await warm_up()
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            rung, before = doorbells(), shared_counters.tolist()
            allocations, native = library.allocations_all(), library.allocations_native()
            await measured()
            allocations, native = library.allocations_all() - allocations, library.allocations_native() - native
            after = shared_counters.tolist()
            rung = doorbells() - rung
        finally:
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        calls: dict[str, Counter[int]] = {name: Counter() for name in threads.values()}
        for place, name in threads.items():
            first = place * _WORDS + 2
            for number in range(_WORDS - 2):
                calls[name][number] += after[first + number] - before[first + number]
        return Counts({name: dict(+counter) for name, counter in calls.items()}, allocations, native, rung)
