"""Monitoring of this process's resources: contents of samples, closing, forks."""

import asyncio
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from aioverbs import AccessFlags, Device, WorkerPool, monitor, open_device
from aioverbs._monitoring import monitor as monitor_module, server, snapshot
from tests.core.children import in_child
from tests.descriptors import descriptors
from tests.garbage import collect_garbage
from tests.manager.monitor_viewers import Viewer, file_names, folder, monitor_threads, nodes, open_viewer, until
from tests.manager.test_write import ends
from tests.pace import patience

__all__ = ["folder"]

NODE = ["id", "kind", "label", "state", "owner", "created", "native", "statistics", "children"]


# ---- Samples


def completed(sample: dict[str, Any], device: Device) -> int:
    """Return how many send requests of the device's queue pairs had completed at the time of a sample."""
    return sum(
        node["statistics"]["sends"]["completed"]
        for each in sample["devices"]
        if each["id"] == device._lifecycle.serial
        for node in nodes(each)
        if node["kind"] == "QueuePair"
    )


async def test_a_cancelled_close_still_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, join = threading.Event(), server.MonitorServer.join

    def join_slowly(stopped: server.MonitorServer) -> None:
        go_on.wait(patience(10))
        join(stopped)

    monkeypatch.setattr(server.MonitorServer, "join", join_slowly)
    watched = await monitor().open()
    closing = asyncio.create_task(watched.aclose())
    for _ in range(3):
        await asyncio.sleep(0.01)
        closing.cancel()
    await asyncio.sleep(0.01)
    assert not closing.done()
    go_on.set()
    await asyncio.wait([closing])
    assert closing.cancelled()
    assert not monitor_threads()


async def test_samples_have_the_tree_with_counts(device: Device) -> None:
    async with monitor() as watched, ends(device) as pair:
        with open_viewer(watched) as viewer:
            greeting = await viewer.read_sample()
            assert (greeting["aioverbs-monitor"], greeting["pid"]) == (server.VERSION, os.getpid())
            assert "python" in greeting["program"] or "pytest" in greeting["program"]
            viewer.send_request(b'{"interval_s": 0.05}\n')
            first = second = await viewer.read_sample()
            assert list(first) == ["time_ns", "truncated", "devices"]
            await pair.write(b"hello")
            async with asyncio.timeout(patience(10)):
                while not completed(second, device):  # earlier samples may be queued
                    second = await viewer.read_sample()
        (tree,) = [each for each in second["devices"] if each["id"] == device._lifecycle.serial]
        assert tree["label"] == device.name
        found = list(nodes(tree))
        assert all(list(node) == NODE for node in found)
        assert {node["kind"] for node in found} >= {"Device", "CompletionQueue", "QueuePair", "MemoryRegion"}
        before = {node["id"]: node for each in first["devices"] for node in nodes(each)}
        (written,) = [
            node
            for node in found
            if node["kind"] == "QueuePair"
            and node["statistics"]["sends"]["bytes"] > before[node["id"]]["statistics"]["sends"]["bytes"]
        ]
        assert written["statistics"]["sends"]["completed"] == 1
        assert second["time_ns"] > first["time_ns"]
        assert not second["truncated"]
    assert not monitor_threads()


async def test_samples_have_every_kind_of_resource(device: Device) -> None:
    async with (
        device.protection_domain() as pd,
        device.thread_domain() as td,
        pd.parent_domain(td),
        device.resource_domain(pd) as domain,
        domain.completion_queue(64) as cq,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(cq, srq=srq),
        domain.register(64, AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND),
        domain.memory_window(),
        domain.buffer_pool(64, 2),
        WorkerPool(device, 2) as pool,
    ):
        sample = await asyncio.to_thread(snapshot.sample)
        decoded = json.loads(snapshot.encode(sample))
        assert decoded == sample
        tree = next(each for each in decoded["devices"] if each["id"] == device._lifecycle.serial)
        found = list(nodes(tree))
        kinds = {node["kind"] for node in found}
        assert kinds >= {"ProtectionDomain", "ThreadDomain", "ParentDomain", "ResourceDomain", "SharedReceiveQueue"}
        assert kinds >= {"MemoryWindow", "BufferPool", "WorkerPool"}
        assert all(node["statistics"] is not None for node in found)
        assert {node["kind"] for node in found if node["native"] is not None} == {
            "ThreadDomain", "ParentDomain", "ResourceDomain",
        }  # fmt: skip
        workers = next(node for node in found if node["kind"] == "WorkerPool")["statistics"]["workers"]
        assert [worker["number"] for worker in workers] == [0, 1]
        assert len({node["id"] for node in found}) == len(found)
        assert pool.size == 2


def devices_seen() -> set[int]:
    sample: Any = snapshot.sample()
    return {each["id"] for each in sample["devices"]}


async def test_closed_resources_are_not_shown(device_name: str) -> None:
    async with open_device(device_name) as device:
        number = device._lifecycle.serial
        assert number in devices_seen()
    assert number not in devices_seen()
    assert number not in snapshot._devices


async def test_a_sample_is_limited_in_size(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    async with device.protection_domain() as pd, pd.register(64), pd.register(64), pd.register(64):
        monkeypatch.setattr(snapshot, "MAX_RESOURCES", 3)
        sample: Any = snapshot.sample()
    assert sample["truncated"]
    assert sum(len(list(nodes(each))) for each in sample["devices"]) == 3


async def test_samples_come_at_intervals() -> None:
    async with monitor() as watched:
        with open_viewer(watched) as viewer:
            await viewer.read_line()
            begin = time.monotonic()
            viewer.send_request(b'{"interval_s": 0.1}\n')
            times = [(await viewer.read_sample())["time_ns"] for _ in range(4)]
    assert time.monotonic() - begin >= 0.29
    assert times == sorted(set(times))


async def test_a_slow_sample_leaves_time_for_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    rests: list[float] = []

    def slow() -> dict[str, object]:
        rests.extend(time.monotonic() - end for end in ends[-1:])
        time.sleep(0.1)
        ends.append(time.monotonic())
        return {"time_ns": 1, "devices": []}

    monkeypatch.setattr(server, "sample", slow)
    async with monitor() as watched:
        with open_viewer(watched) as viewer:
            await viewer.read_line()
            viewer.send_request(b'{"interval_s": 0.05}\n')
            for _ in range(3):
                await viewer.read_sample()
    assert min(rests) >= 0.05


async def test_a_viewer_that_does_not_read_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "sample", lambda: {"text": "x" * (2 << 20), "devices": []})
    async with monitor() as watched:
        with open_viewer(watched) as lazy, open_viewer(watched) as viewer:
            for each in (lazy, viewer):
                await each.read_line()
                each.send_request(b'{"interval_s": 0.05}\n')
            for _ in range(3):  # the socket buffer of `lazy` is full
                assert len(await viewer.read_line()) > 2 << 20
            assert len((await lazy.read_sample())["text"]) == 2 << 20, "whole lines, even if read late"
            assert len((await lazy.read_sample())["text"]) == 2 << 20


# ---- Closing


async def test_closing_the_monitor_leaves_nothing(folder: Path) -> None:
    collect_garbage()
    before = descriptors()
    for _ in range(3):
        async with monitor() as watched:
            viewer = Viewer(watched.path)
            await viewer.read_line()
        assert await viewer.is_disconnected()
        viewer.close()
    assert descriptors() == before
    assert not monitor_threads()
    assert file_names(folder) == []


async def test_several_monitors_share_one_socket() -> None:
    first, second = monitor(), monitor()
    async with first:
        async with second:
            assert first.path == second.path
            assert len(monitor_threads()) == 1
        assert first.path.exists()
        with pytest.raises(RuntimeError, match="the monitor is not open"):
            second.path  # noqa: B018
        with pytest.raises(RuntimeError, match="the monitor is already open"):
            await first.open()
    await first.aclose()
    assert not monitor_threads()
    async with first:
        assert first.path.exists()


async def test_a_failing_sample_is_logged_and_monitoring_continues(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[str, object]:
        raise ZeroDivisionError

    monkeypatch.setattr(server, "sample", fail)
    async with monitor() as watched:
        with open_viewer(watched) as viewer:
            await viewer.read_line()
            viewer.send_request(b'{"interval_s": 1.0}\n')
            assert await viewer.is_disconnected()
            await until(lambda: file_names(watched.path.parent) == [])
            await until(lambda: not monitor_threads())
        monkeypatch.setattr(server, "sample", dict)
        async with monitor() as another:
            assert file_names(another.path.parent) == [another.path.name]
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "this process can no longer be monitored" in record.getMessage()


async def test_sockets_of_dead_processes_are_removed(folder: Path) -> None:
    os.mkdir(folder, 0o700)
    dead = in_child(os.getpid)
    with socket.socket(socket.AF_UNIX) as left, socket.socket(socket.AF_UNIX) as alive:
        left.bind(str(folder / f"{dead}-00000000.sock"))
        alive.bind(str(folder / f"{dead}-11111111.sock"))
        alive.listen(1)  # a process of a container can have this number
        async with monitor() as watched:
            assert file_names(folder) == sorted([f"{dead}-11111111.sock", watched.path.name])


def test_monitoring_from_trio() -> None:
    trio = pytest.importorskip("trio")

    async def main() -> bool:
        async with monitor() as watched:
            return watched.path.is_socket()

    assert trio.run(main)


# ---- Forks


async def test_a_child_closes_the_monitor_and_can_open_its_own(folder: Path) -> None:
    async with monitor() as watched:
        viewer = Viewer(watched.path)
        greeting = await viewer.read_sample()
        theirs = {os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors() if int(fd) > 2}

        async def their_own() -> tuple[int, list[str]]:
            async with monitor() as own:
                with open_viewer(own) as other:
                    return (await other.read_sample())["pid"], file_names(folder)

        def in_the_child() -> tuple[int, str, int, int, list[str], tuple[int, list[str]]]:
            message = ""
            asyncio.events._set_running_loop(None)
            mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors() if int(fd) > 2}
            try:
                watched.path  # noqa: B018
            except RuntimeError as error:
                message = str(error)
            asyncio.run(watched.aclose())
            alone = file_names(folder)
            return os.getpid(), message, len(theirs & mine), len(theirs), alone, asyncio.run(their_own())

        child, message, kept, there, alone, (pid, names) = in_child(in_the_child)
        assert (message, pid, greeting["pid"]) == ("the monitor is not open in this process", child, os.getpid())
        assert kept < there, "the child closed the server's descriptors"
        assert alone == [watched.path.name]
        assert len(names) == 2
        assert file_names(folder) == [watched.path.name]
        viewer.send_request(b'{"interval_s": 1.0}\n')
        assert "devices" in await viewer.read_sample()
    assert await viewer.is_disconnected(), "the child holds no end of the socket"
    viewer.close()


async def test_a_fork_waits_for_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end, forked = (threading.Event() for _ in range(3))

    def slow() -> dict[str, object]:
        begun.set()
        end.wait(patience(10))
        return {"time_ns": 1, "devices": []}

    def let_it_end() -> None:
        time.sleep(0.2)
        end.set()
        # An ending thread holds the lock of the sanitizer's allocator, which would stay locked in the child.
        forked.wait(patience(20))

    monkeypatch.setattr(server, "sample", slow)
    monkeypatch.setattr(server, "_FORK_TIMEOUT_S", patience(10))
    async with monitor() as watched:
        with open_viewer(watched) as viewer:
            await viewer.read_line()
            viewer.send_request(b'{"interval_s": 1.0}\n')
            await asyncio.to_thread(begun.wait)
            thread = threading.Thread(target=let_it_end)
            thread.start()
            locked, ended = in_child(lambda: (server._sampling.locked(), end.is_set()))
            forked.set()
            assert (locked, ended) == (False, True)
            assert "devices" in await viewer.read_sample()
            thread.join()


async def test_a_fork_waits_for_a_sample_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FORK_TIMEOUT_S", 0.05)
    with server._sampling:
        assert in_child(lambda: server._sampling.locked()) is False
        assert server._sampling.locked()
    assert not server._sampling.locked()


# ---- Environment variable


async def test_monitoring_by_environment_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor_module, "_environment_was_read", False)
    for text, warning in (("", ""), ("0", ""), ("yes", "write 1 for yes or 0 for no, not 'yes'")):
        monkeypatch.setenv("AIOVERBS_MONITOR", text)
        async with open_device("soft0"):
            assert not monitor_threads()
        assert warning in caplog.text
    async with open_device("soft0"):
        pass
    assert caplog.text.count("write 1 for yes") == 1


async def test_failure_to_start_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor_module, "_environment_was_read", False)
    monkeypatch.setenv("AIOVERBS_MONITOR", "1")
    os.mknod(folder)
    async with open_device("soft0") as device:
        assert device.name == "soft0"
    assert "AIOVERBS_MONITOR: this process cannot be monitored: " in caplog.text
    assert "is not a directory" in caplog.text
