"""Memory of this process, for tests and benchmarks of what is kept."""

import os
import sys
from pathlib import Path

_PRESENT = 63  # bit of an entry of /proc/self/pagemap

__all__ = ["mapped_copies", "resident_bytes", "resident_pages", "resident_rings"]


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, with shared pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def mapped_copies() -> int:
    """Return how many mappings of files for copies of long messages this process has."""
    return sum("memfd:aioverbs-messages" in line for line in Path("/proc/self/maps").read_text().splitlines())


def resident_pages(address: int, length: int) -> int:
    """Return how many of the pages that some bytes of this process are in are resident."""
    size = os.sysconf("SC_PAGESIZE")
    first, last = address // size, -(-(address + length) // size)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        entries = pages.read(8 * (last - first))
    return sum(int.from_bytes(entries[at : at + 8], sys.byteorder) >> _PRESENT for at in range(0, len(entries), 8))


def resident_rings() -> int:
    """Return the resident bytes of the rings that this process shares with others."""
    found, is_ring = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            is_ring = "memfd:aioverbs-rings" in line
        elif name == "Rss:" and is_ring:
            found += int(values[0]) * 1024
    return found
