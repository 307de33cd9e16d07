"""Clients of this process's monitor, and helpers to inspect the monitor."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from aioverbs import Monitor
from aioverbs._monitoring.directory import MonitorDirectory
from tests.pace import patience

__all__ = ["Viewer", "file_names", "folder", "monitor_threads", "nodes", "open_viewer", "until"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "monitor"
    monkeypatch.setenv("AIOVERBS_MONITOR_DIRECTORY", str(path))
    return path


class Viewer:
    """Client of a monitor. Waits in a thread, so that the event loop runs meanwhile."""

    def __init__(self, path: Path) -> None:
        with MonitorDirectory(path.parent) as directory:
            connected = directory.connect(path.name, patience(5))
        assert connected is not None
        connected.settimeout(patience(10))
        self.socket = connected
        self.lines = connected.makefile("rb")

    def send_request(self, request: bytes) -> None:
        self.socket.sendall(request)

    async def read_line(self) -> bytes:
        return await asyncio.to_thread(self.lines.readline)

    async def read_sample(self) -> dict[str, Any]:
        sample: dict[str, Any] = json.loads(await self.read_line())
        return sample

    async def is_disconnected(self) -> bool:
        try:
            return await self.read_line() == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


@contextmanager
def open_viewer(monitor: Monitor) -> Iterator[Viewer]:
    with closing(Viewer(monitor.path)) as viewer:
        yield viewer


def monitor_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "aioverbs-monitor"]


def file_names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(patience(500))):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition stayed false")


def nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for child in tree["children"]:
        yield from nodes(child)
