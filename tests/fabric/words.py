"""Memory in which each 8 bytes are their own."""

import functools
from array import array

__all__ = ["words"]


@functools.lru_cache(maxsize=64)
def words(first: int, length: int) -> bytes:
    """Return consecutive numbers of 8 bytes each; a MiB takes long to make where memory is checked by a sanitizer.

    :param first: the first number.
    :param length: in bytes; what does not fill a number is left out.
    """
    return array("Q", range(first, first + length // 8)).tobytes()
