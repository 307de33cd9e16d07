"""Memory in which every 8 bytes have a unique value."""

import functools
from array import array

__all__ = ["words"]


@functools.lru_cache(maxsize=64)
def words(first: int, length: int) -> bytes:
    """Return consecutive 8-byte numbers. Results are cached: a MiB takes long to make under a sanitizer.

    :param first: the first number.
    :param length: in bytes; a remainder that does not fill a number is left out.
    """
    return array("Q", range(first, first + length // 8)).tobytes()
