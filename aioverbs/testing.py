"""Pytest plugin for tests of programs that use aioverbs. pytest finds the plugin if aioverbs is installed.

The fixture `aioverbs_device` is a software device. Each test that uses it runs twice: once with requests executed in
the call that posts them, and once with requests executed by a separate thread, as by a NIC, so that awaits really
suspend. The fixture `aioverbs_ledger` fails a test that leaves a resource open. `Device.faults` plans failures.

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
    """Acknowledge all events of a completion queue; the queue cannot be destroyed before that."""
    while True:
        try:
            queue.ack_events(1)
        except ValueError:
            return


def _acknowledge_async_events() -> None:
    """Acknowledge all asynchronous events that still exist, for example because a failed test holds them."""
    from aioverbs._core.handles import handles

    for event in gc.get_objects():
        if isinstance(event, handles.AsyncEvent) and not event.acknowledged:
            event.ack()


def destroy_all(opened: "Iterable[handles.Handle]") -> None:
    """Destroy the handles that a test left open, newest first, because parents are created before their children.

    :param opened: open handles, oldest first, as `aioverbs_ledger` finds them.
    :raises BusyResourceError: an open object that is not in `opened` was created from one of the handles. This handle
        and the older ones stay open.
    :raises VerbsError: a verb failed. The handle concerned and the older ones stay open.
    """
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
    """Store in the test item whether the test passed, which `aioverbs_ledger` reads in its teardown; return the report
    of the wrapped hooks.
    """
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture
def aioverbs_ledger(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves handles open, and name the handles in the failure. The handles are destroyed, so that the
    next test starts clean.

    If the test itself has failed, no second failure is reported.

    :param request: pytest's request object of the fixture.
    """
    # Imported only when a test uses the fixture, because pytest loads this module in every session.
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
    """Unopened software device, which the test opens with ``async with aioverbs_device as device``.

    The test runs once for each value of ``execution``: requests are executed in the call that posts them (``inline``),
    or in a separate thread (``thread``).

    :param request: pytest's request object of the fixture.
    :param aioverbs_ledger: fixture that fails the test if it leaves a resource open.
    """
    from aioverbs._verbs.device import open_device

    return open_device("soft0", execution=request.param)
