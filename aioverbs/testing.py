"""A pytest plugin for those who test what they built on aioverbs; pytest finds it where aioverbs is installed.

`aioverbs_device` is a software device, and has each test run twice: requests are executed in the call that posts them,
and by a thread beside the loop, as a NIC does, so that awaits really sleep. `aioverbs_ledger` fails a test that leaves
something open. What is to go wrong is planned by `Device.faults`.

    async def test_my_service(aioverbs_device: aioverbs.Device) -> None:
        async with aioverbs_device as device, MyService(device) as service:
            device.faults.fail_request(WcStatus.RETRY_EXC_ERR, first=3)
            ...
"""

import gc
import importlib
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aioverbs._core.handles import handles
    from aioverbs._verbs.device import Device

__all__ = ["aioverbs_device", "aioverbs_ledger", "destroy_all"]

_passed = pytest.StashKey[bool]()


def _acknowledge_all(queue: "handles.CompletionQueue") -> None:
    """Events that were taken and never acknowledged make a queue refuse to go."""
    while True:
        try:
            queue.ack_events(1)
        except ValueError:
            return


def _acknowledge_async_events() -> None:
    """The same for asynchronous events, which whoever failed may still hold."""
    from aioverbs._core.handles import handles

    for event in gc.get_objects():
        if isinstance(event, handles.AsyncEvent) and not event.acknowledged:
            event.ack()


def destroy_all(opened: "Iterable[handles.Handle]") -> None:
    """Destroy what `aioverbs_ledger` finds, the last one first: parents are made before their children."""
    from aioverbs._core.handles import handles
    from aioverbs.errors import BusyResourceError

    for handle in reversed(list(opened)):
        if isinstance(handle, handles.CompletionQueue) and not handle.closed:
            _acknowledge_all(handle)
        try:
            handle.destroy()
        except BusyResourceError:
            _acknowledge_async_events()
            handle.destroy()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep whether the test passed, for who tears down."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture
def aioverbs_ledger(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is opened from here on is to be closed when the test is over: else the test fails, and says what is open.

    It is destroyed then, so that the next test begins with nothing. One that failed by itself is not failed again.
    """
    # Not imported before a test asks for it: pytest loads this module everywhere.
    core = importlib.import_module("aioverbs._core.handles.handles")
    before = set(core.open_handles())
    yield
    left = [handle for handle in core.open_handles() if handle not in before]
    names = ", ".join(map(repr, left))
    destroy_all(left)
    if left and request.node.stash.get(_passed, False):
        pytest.fail(f"left open: {names}", pytrace=False)


@pytest.fixture(params=["inline", "thread"])
def aioverbs_device(request: pytest.FixtureRequest, aioverbs_ledger: None) -> "Device":
    """A software device, not opened yet: ``async with aioverbs_device as device``. The test runs once for each way of
    execution: in the posting call (``inline``) and beside the loop (``thread``)."""
    from aioverbs._verbs.device import open_device

    return open_device("soft0", execution=request.param)
