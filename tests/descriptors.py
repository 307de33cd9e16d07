"""Open file descriptors of this process, for tests that check for leaks."""

import gc
import os

__all__ = ["descriptors", "descriptors_at_first"]


def descriptors() -> set[str]:
    """Return the open descriptors, without the one that lists them."""
    return {each for each in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{each}")}


def descriptors_at_first() -> set[str]:
    """Return the open descriptors at the start of a test, after collecting the garbage of earlier tests."""
    gc.collect()
    return descriptors()
