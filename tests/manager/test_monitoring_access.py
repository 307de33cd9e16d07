"""Access to the monitor: users, permissions of files, and invalid requests."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aioverbs import monitor
from aioverbs._monitoring import directory, monitor as monitor_module, server
from aioverbs._monitoring.directory import MonitorDirectory, default_path
from tests.descriptors import descriptors, descriptors_at_first
from tests.manager.monitor_viewers import folder, open_viewer

__all__ = ["folder"]


def mode_of(path: Path) -> int:
    return path.stat().st_mode


def test_the_folder_is_private(folder: Path) -> None:
    async def main() -> None:
        async with monitor() as watched:
            assert watched.path.parent == folder
            assert mode_of(folder) == stat.S_IFDIR | 0o700
            assert mode_of(watched.path) == stat.S_IFSOCK | 0o600

    before = os.umask(0)
    try:
        asyncio.run(main())
    finally:
        os.umask(before)


async def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with monitor() as watched:
        monkeypatch.setattr(server, "peer_user", lambda connected: os.geteuid() + 1)
        with open_viewer(watched) as viewer:
            assert await viewer.is_disconnected()
        monkeypatch.undo()
    assert f"a process of user {os.geteuid() + 1} tried to monitor" in caplog.text


async def test_viewers_check_the_listening_user(monkeypatch: pytest.MonkeyPatch) -> None:
    async with monitor() as watched:
        monkeypatch.setattr(directory, "peer_user", lambda connected: os.geteuid() + 1)
        with (
            MonitorDirectory(watched.path.parent) as opened,
            pytest.raises(PermissionError, match=f"a process of user {os.geteuid() + 1} listens there"),
        ):
            opened.connect(watched.path.name, 1)
        assert watched.path.exists()


def test_a_folder_readable_by_others_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)

    async def watched() -> None:
        await monitor().open()

    with pytest.raises(PermissionError, match="is open to others: chmod 0700 it"):
        asyncio.run(watched())
    with pytest.raises(PermissionError, match="is open to others"):
        MonitorDirectory()


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(
        PermissionError, match="belongs to another user: name one of your own with AIOVERBS_MONITOR_DIRECTORY"
    ):
        MonitorDirectory()


def test_the_age_of_an_abandoned_link_is_its_own(folder: Path) -> None:
    with MonitorDirectory(make=True) as opened:
        link = folder / f".{os.getpid()}-0123abcd.sock"
        link.symlink_to("nowhere")
        assert (list(opened.names()), link.is_symlink()) == ([], True)
        os.utime(link, (0, 0), follow_symlinks=False)
        assert (list(opened.names()), link.is_symlink()) == ([], False)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_path_that_is_not_a_folder_is_refused(folder: Path, kind: str) -> None:
    if kind == "file":
        folder.touch()
    else:
        folder.symlink_to(folder.parent)
    before = descriptors_at_first()
    with pytest.raises(PermissionError, match="is not a directory"):
        MonitorDirectory(make=True)
    assert descriptors() == before


def test_default_folder() -> None:
    assert default_path({"AIOVERBS_MONITOR_DIRECTORY": "/a", "XDG_RUNTIME_DIR": "/b"}, 7) == Path("/a")
    assert default_path({"XDG_RUNTIME_DIR": "/b"}, 7) == Path("/b/aioverbs-monitor")
    assert default_path({"AIOVERBS_MONITOR_DIRECTORY": ""}, 7) == Path("/tmp/aioverbs-monitor-7")
    with pytest.raises(ValueError, match="AIOVERBS_MONITOR_DIRECTORY: a path that begins with /"):
        default_path({"AIOVERBS_MONITOR_DIRECTORY": "here"}, 7)


async def test_a_path_longer_than_a_socket_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = folder.parent / ("x" * 150)
    monkeypatch.setenv("AIOVERBS_MONITOR_DIRECTORY", str(long))
    async with monitor() as watched:
        with open_viewer(watched) as viewer:
            assert (await viewer.read_sample())["pid"] == os.getpid()


INVALID_REQUESTS = [
    b"\n",
    b"hello\n",
    b"[" * 4000 + b"\n",
    b"\xff\n",
    b"1.0\n",
    b"{}\n",
    b'{"interval_s": null}\n',
    b'{"interval_s": true}\n',
    b'{"interval_s": "1"}\n',
    b'{"interval_s": 0}\n',
    b'{"interval_s": -1}\n',
    b'{"interval_s": NaN}\n',
    b'{"interval_s": 1e9}\n',
    b'{"interval_s": 1.0}\n{"interval_s": 1.0}\n',
    b"x" * 5000,
]


async def test_invalid_requests() -> None:
    async with monitor() as watched:
        for request in INVALID_REQUESTS:
            with open_viewer(watched) as viewer:
                await viewer.read_line()
                viewer.send_request(request)
                assert await viewer.is_disconnected(), request
        with open_viewer(watched) as viewer:  # the monitor still serves
            await viewer.read_line()
            viewer.send_request(b'{"interval_s": 1.0}\n')
            await viewer.read_sample()
            viewer.send_request(b"more")
            assert await viewer.is_disconnected()


async def test_a_silent_viewer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REQUEST_TIMEOUT_S", 0.1)
    async with monitor() as watched:
        with open_viewer(watched) as viewer:
            await viewer.read_line()
            assert await viewer.is_disconnected()


async def test_number_of_viewers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_VIEWERS", 1)
    async with monitor() as watched:
        with open_viewer(watched) as first:
            await first.read_line()
            with open_viewer(watched) as second:
                assert (await second.read_sample())["refused"] == "1 others are already monitoring it"
                assert await second.is_disconnected()
            first.send_request(b'{"interval_s": 1.0}\n')
            await first.read_sample()


async def test_accepting_without_free_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FailsOnce:
        def __init__(self, listening: socket.socket) -> None:
            self.fileno = listening.fileno

        def accept(self) -> None:
            watched_server._listening = listening
            raise OSError(errno.EMFILE, "too many open files")

    pause_s = 0.2
    monkeypatch.setattr(server, "_ACCEPT_PAUSE_S", pause_s)
    async with monitor() as watched:
        watched_server: Any = monitor_module._server
        listening, watched_server._listening = watched_server._listening, FailsOnce(watched_server._listening)
        begin = time.monotonic()
        with open_viewer(watched) as viewer:
            assert (await viewer.read_sample())["pid"] == os.getpid()
        assert time.monotonic() - begin >= pause_s, "accepting pauses after a failure"
    assert caplog.text.count("no monitor is accepted") == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["interval_s", "x"]), inner, max_size=2)
    ),
)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_request_is_answered_or_refused(line: bytes) -> None:
    least, most = server.INTERVALS_S
    with contextlib.suppress(ValueError):
        assert least <= server._interval_of(line) <= most
