"""Contexts of the software device, in each mode of execution."""

from collections.abc import Iterator

import pytest

from aioverbs._core.software import software
from tests.core.contexts import MODES, opened


@pytest.fixture(params=MODES)
def context(request: pytest.FixtureRequest) -> Iterator[software.Context]:
    """A context, in every mode; its children are destroyed with it."""
    with opened(request.param) as context:
        yield context


@pytest.fixture
def inline() -> Iterator[software.Context]:
    """A context for tests that do not depend on the execution."""
    with opened("inline") as context:
        yield context


@pytest.fixture(params=["plain", "thread domain"])
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of domain to make queues on: see `tests.core.pairs.make_domain`."""
    assert isinstance(request.param, str)
    return request.param
