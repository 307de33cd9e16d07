"""How patient tests are, by one setting: AIOVERBS_TEST_PACE says how many times slower than usual this machine is.

`tests/rdma/vm.py` sets it where the virtual machine is emulated. Times that tests wait at most are multiplied by it,
and counts of what they do many times are divided by it.
"""

import os

__all__ = ["PACE", "fewer", "patience"]

PACE = max(1.0, float(os.environ.get("AIOVERBS_TEST_PACE", "1")))


def patience(seconds: float) -> float:
    """The longest that something may take that takes so long at most on a usual machine."""
    return seconds * PACE


def fewer(count: int, least: int = 1) -> int:
    """How often to do something that is done so often on a usual machine."""
    return max(least, int(count / PACE))
