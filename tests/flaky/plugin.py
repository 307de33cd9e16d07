"""A pytest plugin that runs the tests of one round in their order, and appends each result to a file.

`run.py` names the round's file in AIOVERBS_TEST_ROUND; `tests/conftest.py` loads the plugin if that is set. With
pytest-xdist each worker orders the tests, and the controller writes the results.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.flaky.results import Result, append_result

__all__ = ["Round", "exempt"]

REPORT_CHARACTERS = 6000


@dataclass(frozen=True)
class Round:
    """The task that `run.py` gives to pytest.

    Attributes:
        tests: node IDs, in the order to run them in.
        seconds: after these no further test begins; they count from the first one in a process.
        results: the file that results are appended to.
        exempt: a folder; processes whose ID is a file's name there are not stopped, nor are their children.
        stop_s: how long a process is stopped.
    """

    tests: list[str]
    seconds: float
    results: str
    exempt: str
    stop_s: float


@contextmanager
def exempt(round_: Round) -> Iterator[None]:
    """Keep this process and its children from being stopped."""
    mark = Path(round_.exempt, str(os.getpid()))
    mark.touch()
    try:
        time.sleep(2 * round_.stop_s)  # a stop that has begun is over by then
        yield
    finally:
        mark.unlink()


@dataclass(eq=False)  # pluggy keeps plugins in sets
class _Plugin:
    round: Round
    writes: bool
    _seconds: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, str] = field(default_factory=dict)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the round's tests, in the round's order."""
        position = {test: index for index, test in enumerate(self.round.tests)}
        chosen = [item for item in items if item.nodeid in position]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in position])
        items[:] = sorted(chosen, key=lambda item: position[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Keep a test that stops processes by itself from being disturbed in that."""
        if item.get_closest_marker("stops_processes") is None:
            return (yield)
        with exempt(self.round):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Append the result of a test when its tear-down is over, or its worker has crashed."""
        if not self.writes:
            return
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + getattr(report, "duration", 0.0)
        if report.failed:
            self._failures[test] = self._failures.get(test, "") + report.longreprtext[-REPORT_CHARACTERS:]
        if report.when not in ("setup", "call"):
            failure = self._failures.pop(test, None)
            seconds = round(self._seconds.pop(test), 3)
            append_result(Path(self.round.results), Result(test, failure is None, seconds, failure or ""))


class _TimeLimit:
    """Passes over all tests once the round's time is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None  # set by the first test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Skip the test without a report once the time is over, by returning True."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._seconds
        return True if now >= self._until else None


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins that this process needs in the round."""
    round_ = Round(**json.loads(Path(os.environ["AIOVERBS_TEST_ROUND"]).read_text()))
    config.pluginmanager.register(_TimeLimit(round_.seconds))
    config.pluginmanager.register(_Plugin(round_, writes=not hasattr(config, "workerinput")))
