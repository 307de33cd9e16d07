"""Functions that run in a child of this process."""

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

_SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")

# With an address sanitizer, held by a thread that allocates without the GIL while another one forks.
allocating: AbstractContextManager[object] = threading.Lock() if _SANITIZED else nullcontext()


def _may_allocate(task: Path) -> bool:
    """Whether a thread may be at its beginning: it has no name of its own yet and is not asleep.

    A watchdog of the test runner has no name either, but sleeps.
    """
    try:
        named = (task / "comm").read_text() == "aioverbs-soft\n"
        state = (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended
    return not named and state != "S"


def wait_for_beginnings() -> None:
    """With an address sanitizer: wait until the device's C threads are past their beginning, where they allocate.

    The allocator of gcc 12's runtime stays locked in a child when another thread is inside at the moment of the
    fork; glibc's does not. Such a thread takes its name last.
    """
    if not _SANITIZED:
        return
    ours = {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) not in ours]
    for _ in range(10_000):
        if not any(map(_may_allocate, tasks)):
            return
        time.sleep(0.001)
    raise AssertionError("a C thread does not begin")


def in_child(function: Callable[[], T], limit_s: int = 0) -> T:
    """Call a function in a child made by fork; what it returns there.

    The child ends at once, without what the interpreter does at its end. What fails there fails here.

    :param limit_s: seconds after which it is killed, where it may wait for what is not there; 0: none.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Forking beside other threads is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        wait_for_beginnings()
        with allocating:
            child = os.fork()
    if not child:
        os.close(reader)
        status = 1
        try:
            try:
                if limit_s:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not as the parent has it
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
