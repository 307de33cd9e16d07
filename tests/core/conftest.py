"""Contexts of the software device in each way of execution."""

from collections.abc import Iterator

import pytest

from aioverbs._core.software import software
from tests.core.contexts import MODES, opened


@pytest.fixture(params=MODES)
def context(request: pytest.FixtureRequest) -> Iterator[software.Context]:
    """Each behavioural test runs in every mode. What is made of the context goes with it."""
    with opened(request.param) as context:
        yield context


@pytest.fixture
def inline() -> Iterator[software.Context]:
    """For what execution has no part in."""
    with opened("inline") as context:
        yield context


@pytest.fixture(params=["plain", "thread domain"])
def kind(request: pytest.FixtureRequest) -> str:
    """What queues are made on: see `tests.core.pairs.make_domain`."""
    assert isinstance(request.param, str)
    return request.param
