"""An open device, or the name of one; processes find each other in a folder of the test's own."""

from pathlib import Path

import pytest

from tests.devices import device, device_name

__all__ = ["device", "device_name"]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(folder))
