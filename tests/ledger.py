"""The ledger of handles: a test that leaves one open fails, and what it left is destroyed before the next test."""

import gc
from collections.abc import Generator, Iterable, Iterator

import pytest

from aioverbs import BusyResourceError
from aioverbs._core import engine

__all__ = ["destroy_all", "ledger", "pytest_runtest_makereport"]

_passed = pytest.StashKey[bool]()


def _acknowledge_all(queue: engine.CompletionQueue) -> None:
    """Events that were taken and never acknowledged make a queue refuse to go."""
    while True:
        try:
            queue.ack_events(1)
        except ValueError:
            return


def _acknowledge_async_events() -> None:
    """The same for asynchronous events, which whoever failed may still hold."""
    for event in gc.get_objects():
        if isinstance(event, engine.AsyncEvent) and not event.acknowledged:
            event.ack()


def destroy_all(handles: Iterable[engine.Handle]) -> None:
    """Destroy handles, the last one first: parents are made before their children."""
    for handle in reversed(list(handles)):
        if isinstance(handle, engine.CompletionQueue) and not handle.closed:
            _acknowledge_all(handle)
        try:
            handle.destroy()
        except BusyResourceError:
            _acknowledge_async_events()
            handle.destroy()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture(autouse=True)
def ledger(request: pytest.FixtureRequest) -> Iterator[None]:
    """Comes first and goes last: all that was opened for one test is to be destroyed by then."""
    before = set(engine.open_handles())
    yield
    left = [handle for handle in engine.open_handles() if handle not in before]
    names = ", ".join(map(repr, left))
    destroy_all(left)
    # One that failed has no chance to clean up after itself, and one reason to fail is enough.
    if left and request.node.stash.get(_passed, False):
        pytest.fail(f"left open: {names}", pytrace=False)
