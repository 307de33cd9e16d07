"""Fixtures for tests with software devices of several processes, for the folders and files that import them."""

from pathlib import Path

import pytest

__all__ = ["direct", "directory_of_sockets"]


@pytest.fixture(autouse=True)
def directory_of_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the test's own: there the devices find each other, and nobody else's."""
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(folder))


@pytest.fixture(params=["1", "0"], ids=["direct", "socket"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether large data goes from memory to memory."""
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", request.param)
    return bool(int(request.param))
