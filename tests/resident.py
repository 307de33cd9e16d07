"""Memory of this process, for tests and benchmarks of what is kept."""

import os
from pathlib import Path

__all__ = ["mapped_copies", "resident_bytes"]


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, with shared pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def mapped_copies() -> int:
    """Return how many mappings of files for copies of long messages this process has."""
    return sum("memfd:aioverbs-messages" in line for line in Path("/proc/self/maps").read_text().splitlines())
