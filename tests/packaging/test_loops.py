"""A test marked `every_way` runs on each event loop of the run: asyncio's and uvloop's, unless told otherwise."""

import asyncio

import pytest

from tests.conftest import LOOP_FACTORIES

SHARED = "test_fixtures_and_test_share_the_loop"


def name_on(loop: str) -> str:
    """The name of that test on a loop: of a single one it says nothing."""
    return f"{SHARED}[{loop}]" if len(LOOP_FACTORIES) > 1 else SHARED


@pytest.fixture
async def fixture_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


@pytest.mark.every_way
async def test_fixtures_and_test_share_the_loop(
    fixture_loop: asyncio.AbstractEventLoop, request: pytest.FixtureRequest
) -> None:
    loop = asyncio.get_running_loop()
    assert fixture_loop is loop
    assert request.node.name == name_on("uvloop" if type(loop).__module__.startswith("uvloop") else "asyncio")


def test_every_loop_has_its_test(request: pytest.FixtureRequest) -> None:
    """Which may run in another process than this one: each has all tests in its list."""
    names = [item.name for item in request.session.items if item.name.startswith(SHARED)]
    assert sorted(names) == sorted(name_on(loop) for loop in LOOP_FACTORIES)
