"""Memory of this process, for tests and benchmarks of what is kept."""

import os
from pathlib import Path

__all__ = ["resident_bytes"]


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, with shared pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
