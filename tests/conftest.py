"""What every test has: both event loops, hypothesis profiles, and the repository's folder for helpers of the tests."""

import asyncio
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

pytest_plugins = ["aioverbs.testing"]

from tests.pace import fewer  # noqa: E402  (found by what stands above)

hypothesis.settings.register_profile("dev", deadline=None, derandomize=True, max_examples=fewer(50, least=10))
hypothesis.settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=fewer(200, least=20), print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(autouse=True)
def _ledger(aioverbs_ledger: None) -> None:
    """Of every test: it comes first and goes last."""


LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def _loop_factories() -> Mapping[str, LoopFactory]:
    """The event loops that every async test runs on; AIOVERBS_TEST_LOOPS names fewer."""
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
    """Each async test is run once per loop."""
    return LOOP_FACTORIES
