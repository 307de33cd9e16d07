"""Where the devices of these processes find each other."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(folder))


@pytest.fixture(params=["1", "0"], ids=["direct", "socket"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether large data goes from memory to memory."""
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", request.param)
    return bool(int(request.param))
