"""Disturbances of tests: busy processes, and stops of the processes that take part in a test."""

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

__all__ = ["Stopper", "busy_processes"]

_SPIN = """
import os, sys, time
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and os.getppid() == parent: pass
"""


@contextmanager
def busy_processes(count: int, seconds: float) -> Iterator[None]:
    """Keep processors busy. The processes end after `seconds`, or when this process ends."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _SPIN, str(seconds)]))
            stack.callback(process.kill)
        yield


class Stopper:
    """Stops a random descendant of a process for a moment, repeatedly.

    Stops one process at a time, and never the same process twice in a row unless it is the only one.

    :param parent: ID of the process whose descendants are stopped.
    :param stop_s: duration of a stop in seconds.
    :param pause_s: maximum time between two stops in seconds.
    :param exempt: folder of files named by process IDs; these processes and their children are not stopped.
    :param seed: seed for the choice of processes and pauses.
    """

    def __init__(self, parent: int, stop_s: float, pause_s: float, exempt: Path, seed: int) -> None:
        self.stops = 0
        self._parent = psutil.Process(parent)
        self._stop_s, self._pause_s, self._exempt = stop_s, pause_s, exempt
        self._random = random.Random(seed)
        self._last: psutil.Process | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stopper", daemon=True)

    def __enter__(self) -> "Stopper":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def candidates(self) -> list[psutil.Process]:
        """Return the descendants that may be stopped now."""
        exempt = {int(each.name) for each in self._exempt.iterdir()}
        found: list[psutil.Process] = []
        todo = [self._parent]
        while todo:
            try:
                children = [each for each in todo.pop().children() if each.pid not in exempt]
            except psutil.NoSuchProcess:
                continue
            found += children
            todo += children
        return found

    def stop(self, process: psutil.Process) -> None:
        """Stop a process, and let it continue. Leave a process alone that is stopped already or has ended."""
        try:
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE):
                return
            process.suspend()
            try:
                self.stops += 1
                self._ended.wait(self._stop_s)
            finally:
                process.resume()
        except psutil.NoSuchProcess:
            return

    def _run(self) -> None:
        while not self._ended.wait(self._random.uniform(0, self._pause_s)):
            candidates = self.candidates()
            others = [each for each in candidates if each != self._last] or candidates
            if others:
                self._last = self._random.choice(others)
                self.stop(self._last)
