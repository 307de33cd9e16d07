"""Scaling of time limits and repetitions by AIOVERBS_TEST_PACE, the slowness of this machine (1: usual).

`tests/rdma/vm.py` sets the variable if the virtual machine is emulated. Time limits are multiplied by it, and numbers
of repetitions are divided by it.
"""

import os

__all__ = ["PACE", "fewer", "patience"]

PACE = max(1.0, float(os.environ.get("AIOVERBS_TEST_PACE", "1")))


def patience(seconds: float) -> float:
    """Return a time limit in seconds for this machine, given the limit for a usual machine."""
    return seconds * PACE


def fewer(count: int, least: int = 1) -> int:
    """Return a number of repetitions for this machine, given the number for a usual machine.

    :param least: lower bound of the result.
    """
    return max(least, int(count / PACE))
