"""The descriptors of this process, for tests that see that none is left."""

import gc
import os

__all__ = ["descriptors", "descriptors_at_first"]


def descriptors() -> set[str]:
    """Those that are open, but for the one that looks."""
    return {each for each in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{each}")}


def descriptors_at_first() -> set[str]:
    """The same before something is begun: none of them is of what an earlier test left to the garbage collector."""
    gc.collect()
    return descriptors()
