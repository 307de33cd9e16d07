"""Fixtures for tests with software devices of several processes, for the folders and files that import them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["direct", "directory_of_sockets", "short_path"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets: their names have 107 bytes, and pytest's own folders are deep where it runs in parallel."""
    with tempfile.TemporaryDirectory(prefix="aioverbs-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def directory_of_sockets(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the test's own: there the devices find each other, and nobody else's."""
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(short_path))


@pytest.fixture(params=["1", "0"], ids=["direct", "socket"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether large data goes from memory to memory."""
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", request.param)
    return bool(int(request.param))
