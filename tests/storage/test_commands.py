"""Server, clients and load generator as processes: output, error messages, and recovery after SIGKILL."""

import asyncio
import contextlib
import json
import os
import pty
import random
import signal
import socket
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_server.client import connect

import aioverbs
from tests.conftest import LOOP_FACTORIES
from tests.pace import fewer, patience
from tests.storage.loading import check_data, load, shares_of_two
from tests.storage.model import BLOCK
from tests.storage.processes import Process, command, run, run_in_process, served
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

KILLS = 54  # `nox -s power_cuts` has all of them


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """Directory of sockets for the module-scoped server and its clients."""
    with tempfile.TemporaryDirectory(prefix="aioverbs-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def directory_of_sockets(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the directory of this module instead of one for each test."""
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(sockets))


@pytest.fixture(scope="module")
def server(sockets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Server shared by tests; each test uses volumes of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIOVERBS_SOFT_DIRECTORY", str(sockets))
        with served(tmp_path_factory.mktemp("served") / "root") as server:
            yield server


def test_volumes_by_commands(device_name: str, tmp_path: Path) -> None:
    root, data, copy = tmp_path / "root", tmp_path / "data", tmp_path / "copy"
    data.write_bytes(os.urandom(3_000_000))
    with served(root, "--metrics-port", 0, device=device_name) as server:
        server.done("client", "create", "disk", "4MiB")
        put = run("client", "put", data, "disk", "--verify", device=device_name, **server.env)
        assert (put.returncode, put.stderr) == (0, "wrote 3,000,000 bytes to disk\n"), "there is no progress bar"
        server.done("client", "snapshot", "disk", "then")
        server.done("client", "clone", "then", "again")
        server.done("client", "resize", "again", "1M")
        assert server.done("client", "list") == "again 1048576\ndisk 4194304\nthen 4194304 read-only\n"
        server.done("client", "delete", "disk")
        server.done("client", "get", "then", copy, "--verify")
        assert copy.read_bytes() == data.read_bytes() + bytes((4 << 20) - 3_000_000)
        url = server.output_lines[0].split()[-1]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def metrics() -> str:
            with opener.open(url, timeout=20) as answer:
                text: str = answer.read().decode()
                return text

        # the last command exits without waiting for its session to end
        wait_until(lambda: "storage_sessions 0.0" in metrics())
        assert 'storage_requests_total{kind="flush",outcome="done"} 1.0' in metrics()
        assert "storage_sync_seconds_count" in metrics()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "data", "root"]
    with served(root, device=device_name) as server:
        assert [each["name"] for each in json.loads(server.done("client", "list", "--json"))] == ["again", "then"]
        server.done("client", "get", "again", copy, "--by-messages")
        assert copy.read_bytes() == data.read_bytes()[: 1 << 20]


def test_transfers_show_a_progress_bar_on_terminals(server: Process, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(8 << 20))
    server.done("client", "create", "long", "8M")
    shown, terminal = pty.openpty()
    with open(shown, "rb", buffering=0) as screen:
        env = {**os.environ, **server.env, "TERM": "xterm", "AIOVERBS_DEVICE": "soft0"}
        with subprocess.Popen(command("client", "put", data, "long"), env=env, stderr=terminal):
            os.close(terminal)
            seen = b""
            with contextlib.suppress(OSError):  # EIO: the process has ended
                while more := screen.read(4096):
                    seen += more
    assert b"put data" in seen
    assert b"8.4/8.4 MB" in seen
    assert b"wrote 8,388,608 bytes to long" in seen


def test_access_command_grants_and_removes_rights(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with served(root) as server:
        assert (root / "owner.token").stat().st_mode & 0o777 == 0o600
        assert (root / "catalog.sqlite").stat().st_mode & 0o777 == 0o600
        server.done("client", "create", "disk", "64K")
        token = tmp_path / "token"
        token.write_text(run_in_process("access", root, "add", "ann").output)
        ann = {"STORAGE_TOKEN_FILE": token}
        assert "there is no volume" in server.fails("client", "get", "disk", tmp_path / "x", **ann)
        assert run_in_process("access", root, "allow", "ann", "disk", "read") == (0, "", "")
        assert server.done("client", "list", **ann) == "disk 65536\n"
        assert "may read 'disk'" in server.fails("client", "put", token, "disk", **ann)
        assert "only admins" in server.fails("client", "delete", "disk", **ann)
        assert run_in_process("access", root, "list").output == "ann disk:read\nowner everything\n"
        assert run_in_process("access", root, "remove", "ann") == (0, "", "")
        assert "the token of client 'ann'" in server.fails("client", "list", **ann)
        server.process.send_signal(signal.SIGTERM)
        assert "rejected the client" in server.process.communicate(timeout=patience(20))[1]


def test_errors_are_reported_in_one_line(server: Process, tmp_path: Path) -> None:
    root, large, fails = server.root, tmp_path / "large", server.fails
    large.write_bytes(bytes(65537))
    server.done("client", "create", "small", "64K")
    assert "is not a size" in fails("client", "create", "x", "much")
    assert "whole blocks of 4,096" in fails("client", "create", "x", "5")
    assert "not a valid volume name" in fails("client", "create", "a/b", "4K")
    assert "already" in fails("client", "create", "small", "4K")
    assert "resize it" in fails("client", "put", large, "small")
    assert "no volume 'none'" in fails("client", "get", "none", tmp_path / "x")
    assert "is not HOST:PORT" in fails("client", "--at", "here", "list")
    assert "does not exist" in fails("client", "--token-file", tmp_path / "nowhere", "list")
    assert "NAME.SECRET" in fails("client", "--token-file", large, "list")
    assert "blocks of 4,096 bytes for each client" in fails("load", "small", "--seconds", "1")
    assert "another server uses" in fails("serve", root)
    assert "is not a server's folder" in fails("access", tmp_path, "list")
    assert "there is no client 'bob'" in fails("access", root, "allow", "bob", "small", "read")
    assert "there is no client 'bob'" in fails("access", root, "remove", "bob")
    assert "not a valid client name" in fails("access", root, "add", "a.b/c")
    assert not (tmp_path / "x").exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    assert "is a server running there?" in fails("client", "--at", nobody, "list")


def test_load(device_name: str, tmp_path: Path) -> None:
    # Each client starts a whole window of operations, which complete even after the time is over.
    loading = ("load", "disk", "--clients", 2, "--seconds", patience(0.3), "--window", 16)
    with served(tmp_path / "root", device=device_name) as server:
        server.done("client", "create", "disk", "1M")
        for options in (("--flush-every", 20), ("--by-messages",)):
            found = json.loads(server.done(*loading, *options, "--reads", 50))
            assert found["wrong_blocks"] == 0
            assert found["operations"] > 20
            took = found["latency_us"]
            assert 0 < took["read"]["p50"] <= took["read"]["p99"] <= took["read"]["max"]
            assert took["flush"]["max"] > 0
    with (tmp_path / "root" / "volumes" / "1.volume").open("r+b") as file:
        file.seek(100)
        file.write(b"not what was written there")
    with served(tmp_path / "root", device=device_name) as server:
        done = server.ask(*loading, "--no-fill", "--pattern", "sequential")
        assert done.status == 1
        assert "block 0 is torn" in done.output
        assert "have wrong contents" in done.complaints


@pytest.mark.parametrize(("number", "backing"), [(0, "mapped"), (1, "cached")])
def test_acknowledged_data_survives_a_killed_server(backing: str, number: int, tmp_path: Path) -> None:
    kill_and_check(tmp_path, backing, number)


@pytest.mark.slow
@pytest.mark.parametrize("backing", ["mapped", "cached"])
@pytest.mark.parametrize("number", range(2, fewer(KILLS // 2, least=4)))
def test_acknowledged_data_survives_a_killed_server_many_times(backing: str, number: int, tmp_path: Path) -> None:
    kill_and_check(tmp_path, backing, number)


def kill_and_check(path: Path, backing: str, seed: int) -> None:
    """Kill a loaded server twice, and check each time that all acknowledged data is there."""
    root = path / "root"
    shares = shares_of_two()
    rng = random.Random(seed)
    factories = list(LOOP_FACTORIES.values())

    async def kill() -> None:
        await asyncio.sleep(rng.random() * 0.3)
        process.kill()

    with asyncio.Runner(loop_factory=factories[seed % len(factories)]) as runner:
        for turn in range(2):
            with served(root, "--backing", backing, recovers=True) as process:
                runner.run(load(process, shares, rng, kill, turn=turn, create=not turn))
        with served(root, "--backing", backing, recovers=True) as process:
            runner.run(check_data(process, shares))
    assert any(any(share.acknowledged.values()) for share in shares)


async def test_volumes_of_a_killed_client_are_closed(server: Process) -> None:
    """The volume that the client had open is closed, and other clients can continue."""
    loading = command("load", "busy", "--clients", 1, "--seconds", 60, "--reads", 50, "--flush-every", 5)
    env = {**os.environ, **server.env, "AIOVERBS_DEVICE": "soft0"}
    token = (server.root / "owner.token").read_text()
    async with (
        aioverbs.open_device("soft0") as device,
        device.resource_domain() as domain,
        connect(server.host, server.port, token, domain=domain) as storage,
    ):
        await storage.create("busy", 16 << 20)
        clients = await asyncio.create_subprocess_exec(*loading, env=env, start_new_session=True)
        try:
            async with asyncio.timeout(patience(30)), storage.open("busy") as volume:
                while not any(await volume.read(0, BLOCK)):
                    pass  # nothing is written yet
            os.killpg(clients.pid, signal.SIGKILL)
            async with storage.open("busy", write=True) as volume:
                await volume.write(0, b"mine")
                await volume.flush()
            async with asyncio.timeout(patience(20)):
                await storage.resize("busy", 32 << 20)
            async with storage.open("busy") as volume:
                assert await volume.read(0, 4) == b"mine"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(clients.pid, signal.SIGKILL)
            await clients.wait()
