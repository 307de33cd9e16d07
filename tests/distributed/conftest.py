"""Fixtures for tests of the comm backend."""

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec

import pytest

import aioverbs
from tests.pace import patience

collect_ignore_glob = [] if find_spec("distributed") else ["test_*.py"]


@pytest.fixture(autouse=True)
async def _device(_ledger: None) -> AsyncIterator[None]:
    """Close the device of the process after each test, and with it the domains of all loops, which stay open else.

    Handlers of comms whose peer has closed are left time to notice that.
    """
    yield
    pending = asyncio.all_tasks() - {asyncio.current_task()}
    if pending:
        _, pending = await asyncio.wait(pending, timeout=patience(5))
    await aioverbs.shared_device().aclose()
    assert not pending
