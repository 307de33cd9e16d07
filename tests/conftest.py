"""Configuration of all tests: event loops, hypothesis profiles, the ledger, and the import path of test helpers."""

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Appended, so that `tests` is importable and `aioverbs` remains the installed package.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

pytest_plugins = ["aioverbs.testing", "tests.ways"]
if "AIOVERBS_TEST_ROUND" in os.environ:  # set by tests/flaky/run.py
    pytest_plugins.append("tests.flaky.plugin")
if "AIOVERBS_TEST_EMULATED" in os.environ:  # set by `nox -s aarch64`
    pytest_plugins.append("tests.aarch64.emulator")

from tests.pace import fewer  # noqa: E402  (needs the import path set above)

# The profile `usual` has the same examples in each run; HYPOTHESIS_PROFILE=thorough draws more, and random ones.
hypothesis.settings.register_profile("usual", deadline=None, derandomize=True, max_examples=fewer(50, least=10))
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=fewer(200, least=20), print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


@pytest.fixture(autouse=True)
def _ledger(aioverbs_ledger: None) -> None:
    """Check each test's open objects; set up before and torn down after all other fixtures."""


LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def _loop_factories() -> Mapping[str, LoopFactory]:
    """Return the event loops of async tests, which AIOVERBS_TEST_LOOPS can restrict."""
    factories: dict[str, LoopFactory] = {}
    for name in os.environ.get("AIOVERBS_TEST_LOOPS", "asyncio,uvloop").split(","):
        if name == "uvloop":
            import uvloop

            factories[name] = uvloop.new_event_loop
        else:
            factories[name] = asyncio.SelectorEventLoop
    return factories


LOOP_FACTORIES = _loop_factories()


def pytest_asyncio_loop_factories() -> Mapping[str, LoopFactory]:
    """Return the event loops; `tests.ways` selects which test runs on which."""
    return LOOP_FACTORIES


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, which runs after each test to find leaks.

    The tests are half a million objects that live until the end; a forked child would also scan them when it exits.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the property "summary" that passed tests recorded."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(f"{report.nodeid}: {value}")
