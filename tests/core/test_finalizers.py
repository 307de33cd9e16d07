"""Python may run anything wherever an object is made: a finalizer in the middle of a poll finds every object usable."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from aioverbs import BusyResourceError, SendFlags, SendOpcode
from aioverbs._core.handles import handles
from tests.conftest import ROOT
from tests.core.contexts import opened
from tests.core.pairs import End, make_pair

COMPLETIONS = 60


@pytest.fixture(params=["basic", "extended"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    """A pair of which one end has many completions to poll."""
    with opened("inline") as context:
        near, far = make_pair(context, extended=request.param == "extended")
        for wr_id in range(COMPLETIONS):
            near.qp.post_send(SendOpcode.RDMA_WRITE, wr_id=wr_id, flags=SendFlags.SIGNALED)
        yield near, far


class Garbage:
    """Something that only the garbage collector ends, and that does something then."""

    def __init__(self, last_will: Callable[[], None]) -> None:
        self.itself = self
        self.last_will = last_will

    def __del__(self) -> None:
        self.last_will()


def poll_with_garbage(cq: handles.CompletionQueue, last_will: Callable[[], None]) -> list[int]:
    """Poll so that the garbage collector runs while completions are made."""
    heard: list[None] = []

    def will() -> None:
        heard.append(None)
        last_will()

    gc.collect()
    gc.disable()
    before = gc.get_threshold()
    Garbage(will)
    try:
        gc.set_threshold(25)
        gc.enable()
        polled = cq.poll(COMPLETIONS)
    finally:
        gc.set_threshold(*before)
        gc.enable()
    assert heard, "the finalizer did not run inside of poll"
    return [completion.wr_id for completion in polled]


def test_polling_and_posting(pair: tuple[End, End]) -> None:
    near, _ = pair
    inner: list[int] = []

    def last_will() -> None:
        inner.extend(completion.wr_id for completion in near.cq.poll(COMPLETIONS))
        near.qp.post_send(SendOpcode.RDMA_WRITE, wr_id=COMPLETIONS, flags=SendFlags.SIGNALED)

    outer = poll_with_garbage(near.cq, last_will)
    last = [completion.wr_id for completion in near.cq.poll(COMPLETIONS)]
    assert sorted(outer + inner + last) == list(range(COMPLETIONS + 1))


def test_destroying(pair: tuple[End, End]) -> None:
    near, _ = pair

    def last_will() -> None:
        near.qp.destroy()
        with pytest.raises(BusyResourceError):
            near.cq.destroy()  # this very poll uses it

    assert poll_with_garbage(near.cq, last_will) == list(range(COMPLETIONS))
    assert near.qp.closed


def test_another_thread_s_turn(pair: tuple[End, End]) -> None:
    near, _ = pair
    done = threading.Event()

    def other() -> None:
        near.cq.poll(1)
        done.set()

    def last_will() -> None:
        threading.Thread(target=other, daemon=True).start()
        assert done.wait(20)

    poll_with_garbage(near.cq, last_will)


FAILING_FREE = """
import ctypes, mmap
from aioverbs._core.handles import handles, parent_domain
from aioverbs._providers import software

class Unwilling:
    def __init__(self):
        self.pages = []
    def allocate(self, size, alignment, *of):
        self.pages.append(mmap.mmap(-1, max(size, 4096)))
        return ctypes.addressof(ctypes.c_char.from_buffer(self.pages[-1]))
    def free(self, address, *of):
        raise RuntimeError("kept for ever")

context = software.open_context()
domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, Unwilling())
handles.CompletionQueue(context, 1, parent_domain=domain).destroy()
"""


def test_python_itself_reports_a_free_that_raises() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FAILING_FREE], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert "Exception ignored in: <ParentDomain" in done.stderr
    assert done.stderr.count("RuntimeError: kept for ever") == 2
