"""Open file descriptors of this process, for tests that check for leaks."""

import os
from collections.abc import Iterable

from tests.garbage import collect_garbage

__all__ = ["descriptors", "descriptors_at_first", "files"]


def descriptors() -> set[str]:
    """Return the open descriptors, without the one that lists them."""
    return {each for each in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{each}")}


def descriptors_at_first() -> set[str]:
    """Return the open descriptors at the start of a test, after collecting the garbage of earlier tests."""
    collect_garbage()
    return descriptors()


def files(numbers: Iterable[str]) -> dict[str, str]:
    """Return what each of these descriptors refers to, for the message of a failed test; without closed ones."""
    links = {each: f"/proc/self/fd/{each}" for each in numbers}
    return {each: os.readlink(link) for each, link in links.items() if os.path.lexists(link)}
