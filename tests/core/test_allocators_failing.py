"""Allocators that fail, return invalid values or raise: the verb reports the error, and nothing is left behind."""

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import VerbsError
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from tests.conftest import ROOT
from tests.core.allocators import QP, Recording
from tests.core.contexts import children
from tests.raw_verbs import poll

Answer = Callable[[Recording, int, int, int], object]


def raising(error: BaseException) -> Answer:
    def answer(*_: object) -> object:
        raise error

    return answer


def misaligned(self: Recording, size: int, alignment: int, resource_type: int) -> int:
    piece = self.piece(size, alignment, resource_type)
    piece.address += alignment // 2
    return piece.address


def dirty(position: Callable[[int], int]) -> Answer:
    def answer(self: Recording, size: int, alignment: int, resource_type: int) -> int:
        piece = self.piece(size, alignment, resource_type)
        assert piece.view is not None
        base = piece.address - int(memoryview_address(piece.view))
        piece.memory[base + position(size)] = 1
        return piece.address

    return answer


def memoryview_address(view: Any) -> int:
    import ctypes

    return ctypes.addressof(view)


class AllocatorError(Exception):
    pass


# Name: answer, errno of the verb, type and text of its cause.
BAD_ANSWERS: dict[str, tuple[Answer, int, type[BaseException] | None, str]] = {
    "None": (lambda *_: None, errno.ENOMEM, None, ""),
    "raises": (raising(AllocatorError("no more")), errno.ENOMEM, AllocatorError, "no more"),
    "text": (lambda *_: "0x1000", errno.EINVAL, TypeError, "must return an address, USE_DEFAULT or None, not '0x1000'"),
    "True": (lambda *_: True, errno.EINVAL, TypeError, "not True"),
    "a float": (lambda *_: 4096.0, errno.EINVAL, TypeError, "not 4096.0"),
    "0": (lambda *_: 0, errno.EINVAL, TypeError, "not 0"),
    "negative": (lambda *_: -4096, errno.EINVAL, TypeError, "not -4096"),
    "too big": (lambda *_: 1 << 64, errno.EINVAL, TypeError, "not 18446744073709551616"),
    "misaligned": (misaligned, errno.EINVAL, ValueError, "which is not aligned to"),
    "dirty at the start": (dirty(lambda size: 0), errno.EINVAL, ValueError, "which is not zeroed"),
    "dirty at the end": (dirty(lambda size: size - 1), errno.EINVAL, ValueError, "which is not zeroed"),
}


def allocating_calls(context: software.Context, domain: parent_domain.ParentDomain) -> dict[str, Callable[[], object]]:
    """Return a call of each verb that allocates, by its name; the queues that they need are created here."""
    cq = handles.CompletionQueue(context, 64, parent_domain=domain)
    srq = handles.SharedReceiveQueue(domain, 64)
    return {
        "ibv_create_cq_ex": lambda: handles.CompletionQueue(context, 64, parent_domain=domain),
        "ibv_create_qp": lambda: handles.QueuePair(domain, cq, cq),
        "ibv_create_srq": lambda: handles.SharedReceiveQueue(domain, 64),
        "ibv_resize_cq": lambda: cq.resize(1000),
        "ibv_modify_srq": lambda: srq.modify(max_wr=1000),
    }


@pytest.mark.parametrize(("bad", "number", "cause", "text"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_an_invalid_answer_fails_the_verb(
    context: software.Context, bad: Answer, number: int, cause: type[BaseException] | None, text: str
) -> None:
    """Fail at the memory of the queue or at its doorbell record: memory that the verb got before is freed."""
    allocator = Recording()
    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, allocator)
    for good in range(2):

        def answer(self: Recording, *request: int, first: int = len(allocator.pieces) + good) -> object:
            return bad(self, *request) if len(self.pieces) >= first else self.piece(*request).address

        allocator.answer = answer
        with pytest.raises(VerbsError) as caught:
            handles.CompletionQueue(context, 100, parent_domain=domain)
        assert (caught.value.verb, caught.value.errno) == ("ibv_create_cq_ex", number)
        assert type(caught.value.__cause__) is (cause or type(None))
        assert text in str(caught.value.__cause__)
        assert domain.held == len(allocator.live) == len(children(context)) - 2 == 0
    allocator.answer = None  # a valid answer
    handles.CompletionQueue(context, 100, parent_domain=domain)


VERBS = ["ibv_create_cq_ex", "ibv_create_qp", "ibv_create_srq", "ibv_resize_cq", "ibv_modify_srq"]


def test_the_same_address_twice(context: software.Context) -> None:
    """Memory in use stays in use if it is offered a second time."""
    allocator = Recording()
    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, allocator)
    cq = handles.CompletionQueue(context, 100, parent_domain=domain)
    allocator.answer = lambda self, *_: self.pieces[0].address
    with pytest.raises(VerbsError) as caught:
        handles.CompletionQueue(context, 100, parent_domain=domain)
    assert "which is in use" in str(caught.value.__cause__)
    assert len(allocator.live) == domain.held == 2
    assert poll(cq) == []


@pytest.mark.parametrize("error", [AllocatorError("planted"), KeyboardInterrupt()])
def test_an_exception_in_free_is_unraisable(
    context: software.Context, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The verb succeeds all the same: the exception goes to sys.unraisablehook."""

    class RaisingFree(Recording):
        def free(self, address: int, resource_type: int, *of: object) -> None:
            super().free(address, resource_type, *of)
            raise error

    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    allocator = RaisingFree()
    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, allocator)
    cq = handles.CompletionQueue(context, 100, parent_domain=domain)
    qp = handles.QueuePair(domain, cq, cq)
    qp.destroy()
    cq.destroy()
    assert [(unraisable.exc_value, unraisable.object) for unraisable in reported] == [(error, domain)] * 4
    assert all(unraisable.exc_type is type(error) and unraisable.exc_traceback for unraisable in reported)
    assert domain.held == len(allocator.live) == 0
    assert [piece.freed for piece in allocator.pieces] == [1] * 4


def test_an_allocator_without_methods(context: software.Context) -> None:
    nothing: Any = object()
    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, nothing)
    with pytest.raises(VerbsError, match="ibv_create_cq_ex failed: ENOMEM") as caught:
        handles.CompletionQueue(context, 100, parent_domain=domain)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_each_thread_has_its_own_cause(context: software.Context) -> None:
    """Two threads fail at the same time, each with its own cause."""
    barrier = threading.Barrier(2, timeout=20)

    def answer(*_: object) -> object:
        barrier.wait()
        raise AllocatorError(threading.current_thread().name)

    domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, Recording(answer))
    causes: dict[str, str] = {}

    def fail() -> None:
        with pytest.raises(VerbsError) as caught:
            handles.CompletionQueue(context, 100, parent_domain=domain)
        causes[threading.current_thread().name] = str(caught.value.__cause__)

    threads = [threading.Thread(target=fail, name=name) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert causes == {"one": "one", "other": "other"}


def test_a_handled_failure_leaves_no_cause(context: software.Context) -> None:
    """An allocator that handles a failure of its own leaves no cause behind for the next one."""
    inner = parent_domain.ParentDomain(
        handles.ProtectionDomain(context), None, Recording(raising(AllocatorError("inner")))
    )

    def recovering(self: Recording, size: int, alignment: int, resource_type: int) -> object:
        with pytest.raises(VerbsError) as caught:
            handles.CompletionQueue(context, 4, parent_domain=inner)
        assert str(caught.value.__cause__) == "inner"
        return self.piece(size, alignment, resource_type).address if resource_type != QP else None

    outer = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, Recording(recovering))
    cq = handles.CompletionQueue(context, 4, parent_domain=outer)
    with pytest.raises(VerbsError, match="ibv_create_qp failed: ENOMEM") as caught:
        handles.QueuePair(outer, cq, cq)
    assert caught.value.__cause__ is None


FAILING_FREE = """
import ctypes, mmap
from aioverbs._core.handles import handles, parent_domain
from aioverbs._providers import software

class RaisingFree:
    def __init__(self):
        self.pages = []
    def allocate(self, size, alignment, *of):
        self.pages.append(mmap.mmap(-1, max(size, 4096)))
        return ctypes.addressof(ctypes.c_char.from_buffer(self.pages[-1]))
    def free(self, address, *of):
        raise RuntimeError("planted error")

context = software.open_context()
domain = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, RaisingFree())
handles.CompletionQueue(context, 1, parent_domain=domain).destroy()
"""


def test_python_itself_reports_a_free_that_raises() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FAILING_FREE], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert "Exception ignored in: <ParentDomain" in done.stderr
    assert done.stderr.count("RuntimeError: planted error") == 2
