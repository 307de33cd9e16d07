"""A process that the kernel ends when the one that started it has ended, however that ended.

    python -m aioverbs.cli.demonstration.tethered PARENT PROGRAM [ARGUMENT …]

runs a program of Python's that way: a file, or a folder with a ``__main__.py``.
"""

import ctypes
import os
import runpy
import signal
import sys

__all__ = ["tether"]

_PR_SET_PDEATHSIG = 1


def tether(parent: int) -> None:
    """Have this process killed at the end of that one, which started it.

    :raises OSError: the kernel does not do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
    if os.getppid() != parent:  # it ended before
        sys.exit(f"process {parent} is gone")


if __name__ == "__main__":
    tether(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
