"""Functions that run in a forked child of this process."""

import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")

# Under AddressSanitizer, a lock held by threads that allocate without the GIL while another thread forks.
allocating: AbstractContextManager[object] = threading.Lock() if SANITIZED else nullcontext()


def _may_allocate(task: Path) -> bool:
    """Return whether a thread may be starting: it does not have its final name yet and is not asleep.

    A watchdog of the test runner does not have that name either, but sleeps.
    """
    try:
        named = (task / "comm").read_text() == "aioverbs-soft\n"
        state = (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False  # the thread has ended
    return not named and state != "S"


def wait_for_thread_starts() -> None:
    """Under AddressSanitizer, wait until the device's C threads have started, since they allocate at their start.

    The allocator of gcc 12's runtime stays locked in a child when another thread is inside at the moment of the fork;
    glibc's does not. Such a thread sets its name last.
    """
    if not SANITIZED:
        return
    ours = {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) not in ours]
    for _ in range(10_000):
        if not any(map(_may_allocate, tasks)):
            return
        time.sleep(0.001)
    raise AssertionError("a C thread does not begin")


def in_child(function: Callable[[], T], limit_s: int = 0) -> T:
    """Call a function in a child made by fork, and return its result.

    The child exits at once, without finalization of the interpreter. An exception in the child fails the test here.

    :param limit_s: seconds after which the child is killed, in case it waits forever; 0: no limit.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # The test forks beside other threads on purpose.
        warnings.simplefilter("ignore", DeprecationWarning)
        wait_for_thread_starts()
        with allocating:
            child = os.fork()
    if not child:
        os.close(reader)
        status = 1
        try:
            try:
                if limit_s:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not the parent's handler
                    signal.alarm(limit_s)
                answer: tuple[bool, object] = True, function()
            except BaseException:
                answer = False, traceback.format_exc()
            with os.fdopen(writer, "wb") as stream:
                pickle.dump(answer, stream)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
    result: tuple[bool, T] = pickle.loads(data)
    worked, value = result
    assert worked, f"in the child: {value}"
    return value
