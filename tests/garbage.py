"""Garbage collection that is complete, for tests of what happens to objects that are dropped."""

import gc
import threading

from tests.waiting import wait_until

__all__ = ["collect_garbage"]


def collect_garbage() -> None:
    """Collect all garbage, and return after the finalizers of all of it.

    `gc.collect()` returns at once while another thread is collecting, which may have begun before something became
    garbage, or be in the middle of the finalizer that a test waits for.
    """
    this_thread = threading.get_ident()
    collected = threading.Event()

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2 and threading.get_ident() == this_thread:
            collected.set()

    def try_to_collect() -> bool:
        gc.collect()
        return collected.is_set()

    gc.callbacks.append(on_collection)
    try:
        wait_until(try_to_collect)
    finally:
        gc.callbacks.remove(on_collection)
