"""Fixtures for tests with software devices of several processes, for the folders and files that import them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["direct", "directory_of_sockets", "set_transfer", "short_path"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a folder for sockets, whose paths have at most 107 bytes; `tmp_path` is too long under pytest-xdist."""
    with tempfile.TemporaryDirectory(prefix="aioverbs-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def directory_of_sockets(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own socket directory, so that its devices do not find those of other tests."""
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(short_path))


@pytest.fixture(params=["direct", "rings", "socket"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether large data is copied directly from memory to memory; if not, it goes through rings or a socket."""
    set_transfer(monkeypatch, request.param)
    return bool(request.param == "direct")


def set_transfer(monkeypatch: pytest.MonkeyPatch, transfer: str) -> None:
    """Have devices that are opened from here on transfer data to other processes of this user in this way.

    :param transfer: ``"direct"``: copied by the peer, with requests through rings; ``"rings"``: all through rings in
        shared memory; ``"socket"``: all through the Unix socket.
    """
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", str(int(transfer == "direct")))
    monkeypatch.setenv("AIOVERBS_SOFT_RINGS", str(int(transfer != "socket")))
