"""Every async test runs on each event loop of the run: asyncio's and uvloop's, unless told otherwise."""

import asyncio

import pytest

from tests.conftest import LOOP_FACTORIES

_seen: set[str] = set()


@pytest.fixture
async def fixture_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def test_fixtures_and_test_share_the_loop(fixture_loop: asyncio.AbstractEventLoop) -> None:
    loop = asyncio.get_running_loop()
    assert fixture_loop is loop
    _seen.add("uvloop" if type(loop).__module__.startswith("uvloop") else "asyncio")


def test_every_loop_was_seen() -> None:
    assert _seen == set(LOOP_FACTORIES)
