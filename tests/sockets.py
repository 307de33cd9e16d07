"""Fixtures for tests with software devices of several processes, for the folders and files that import them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["direct", "directory_of_sockets", "short_path"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a folder for sockets, whose paths have at most 107 bytes; `tmp_path` is too long under pytest-xdist."""
    with tempfile.TemporaryDirectory(prefix="aioverbs-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def directory_of_sockets(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own socket directory, so that its devices do not find those of other tests."""
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(short_path))


@pytest.fixture(params=["1", "0"], ids=["direct", "socket"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether large data is copied directly from memory to memory."""
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", request.param)
    return bool(int(request.param))
