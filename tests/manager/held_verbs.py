"""Delayed verbs: in the helper threads of `QueuePair.establish`, and in another thread on an unlocked domain."""

import asyncio
import ctypes
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aioverbs import USE_DEFAULT, Device, ResourceDomain, UseDefault
from aioverbs._verbs import neighbour_lookup

__all__ = ["Helpers", "SlowVerb", "StayingAllocator", "helpers", "thread_inside"]

_MODIFY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


class Helpers:
    """Holds helper threads of `QueuePair.establish` before their verb, or with `after` set, after it."""

    def __init__(self) -> None:
        self.after = False
        self.waiting: list[threading.Event] = []
        self._lock = threading.Lock()

    def hold(self, run: Callable[[], object]) -> None:
        if self.after:
            run()
        go_on = threading.Event()
        with self._lock:
            self.waiting.append(go_on)
        assert go_on.wait(30)
        if not self.after:
            run()

    def release(self) -> None:
        for each in self.waiting:
            each.set()

    def release_first(self) -> None:
        with self._lock:
            self.waiting.pop(0).set()


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helpers]:
    """Have the software device use helper threads, and hold these until the test releases them."""
    held = Helpers()
    run_in_helper_thread = neighbour_lookup.run_in_helper_thread
    monkeypatch.setattr(neighbour_lookup, "may_block", lambda _: True)

    def hold(verb: str, run: Callable[[], object]) -> Coroutine[Any, Any, None]:
        return run_in_helper_thread(verb, functools.partial(held.hold, run))

    monkeypatch.setattr(neighbour_lookup, "run_in_helper_thread", hold)
    yield held
    held.release()


class SlowVerb:
    """Delays the return of ``ibv_modify_qp`` in other threads than this one; the device has done the work by then.

    :param monkeypatch: has verbs of the device run in helper threads.
    """

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(neighbour_lookup, "may_block", lambda _: True)
        slot = ctypes.c_void_p.from_address(device.handle.table_slot("modify_qp"))
        assert slot.value is not None
        real = _MODIFY(slot.value)
        here = threading.get_ident()
        self.inside = 0
        self._go_on = threading.Event()

        def modify(qp: int, attr: int, mask: int) -> int:
            answer: int = real(qp, attr, mask)
            if threading.get_ident() != here:
                self.inside += 1
                self._go_on.wait(30)
            return answer

        self._modify = _MODIFY(modify)  # referenced while the device is open
        slot.value = ctypes.cast(self._modify, ctypes.c_void_p).value

    def release(self) -> None:
        """Let the verb return, and return at once from now on."""
        self._go_on.set()


class StayingAllocator:
    """Allocator that blocks its thread, and so keeps the thread inside a verb of the domain."""

    def __init__(self) -> None:
        self.stays = False
        self.entered, self.go_on = threading.Event(), threading.Event()

    def allocate(self, size: int, alignment: int, resource_type: int, *parent: object) -> UseDefault:
        if self.stays:
            self.stays = False
            self.entered.set()
            assert self.go_on.wait(10)
        return USE_DEFAULT

    def free(self, address: int, resource_type: int, *parent: object) -> None:
        raise AssertionError("nothing was allocated")


@asynccontextmanager
async def thread_inside(domain: ResourceDomain, staying: StayingAllocator) -> AsyncIterator[Callable[[], object]]:
    """Keep another thread inside a verb of `domain` until the yielded function is called."""
    staying.stays = True
    cq = domain.completion_queue(8)
    thread = asyncio.create_task(asyncio.to_thread(asyncio.run, cq.open()))
    await asyncio.to_thread(staying.entered.wait, 10)
    try:
        yield staying.go_on.set
    finally:
        staying.go_on.set()
        await thread
        await cq.aclose()
