"""A test marked `every_way` runs on each event loop of the run: by default asyncio's and uvloop's."""

import asyncio

import pytest

from tests.conftest import LOOP_FACTORIES

SHARED = "test_fixtures_and_test_share_the_loop"


def name_on(loop: str) -> str:
    """Return the test's name on a loop; pytest-asyncio omits the loop if there is only one."""
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


def test_the_test_is_collected_for_every_loop(request: pytest.FixtureRequest) -> None:
    """Check the collected tests, since with pytest-xdist the tests themselves may run in other processes."""
    names = [item.name for item in request.session.items if item.name.startswith(SHARED)]
    assert sorted(names) == sorted(name_on(loop) for loop in LOOP_FACTORIES)
