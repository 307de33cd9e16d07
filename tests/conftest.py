"""What every test has: both event loops, hypothesis profiles, and the repository's folder for helpers of the tests."""

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Appended, so that `tests.…` can be imported and `aioverbs` is still the installed one.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

pytest_plugins = ["aioverbs.testing", "tests.ways"]
if "AIOVERBS_TEST_ROUND" in os.environ:  # set by tests/flaky/run.py
    pytest_plugins.append("tests.flaky.plugin")

from tests.pace import fewer  # noqa: E402  (found by what stands above)

# The usual examples are the same ones each time; HYPOTHESIS_PROFILE=thorough draws others, and more of them.
hypothesis.settings.register_profile("usual", deadline=None, derandomize=True, max_examples=fewer(50, least=10))
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=fewer(200, least=20), print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


@pytest.fixture(autouse=True)
def _ledger(aioverbs_ledger: None) -> None:
    """Of every test: it comes first and goes last."""


LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def _loop_factories() -> Mapping[str, LoopFactory]:
    """The event loops that async tests run on; AIOVERBS_TEST_LOOPS names fewer."""
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
    """Each async test can run on each of them: see `tests.ways`."""
    return LOOP_FACTORIES


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at all tests, each time that it is asked for what a test has left.

    They are half a million objects that live until the end; a child of a fork looks at them as well, when it exits.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests that passed recorded as their summary."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(f"{report.nodeid}: {value}")
