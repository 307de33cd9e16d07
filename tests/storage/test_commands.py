"""Servers, clients and load as processes: what they say, what is wrong, and what is there after a SIGKILL."""

import asyncio
import contextlib
import json
import os
import pty
import random
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from storage_server.client import connect

import aioverbs
from tests.conftest import LOOP_FACTORIES
from tests.pace import fewer, patience
from tests.storage.loading import load, look, shares_of_two
from tests.storage.processes import command, here, run, served
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

KILLS, ALL_KILLS = 4, 54  # the first ones in each run


def test_volumes_by_commands(device_name: str, tmp_path: Path) -> None:
    root, data, copy = tmp_path / "root", tmp_path / "data", tmp_path / "copy"
    data.write_bytes(os.urandom(3_000_000))
    with served(root, "--metrics-port", 0, device=device_name) as server:
        server.done("client", "create", "disk", "4MiB")
        put = server.run("client", "put", data, "disk", "--verify")
        assert (put.returncode, put.stderr) == (0, "wrote 3,000,000 bytes to disk\n"), "and no bar"
        server.done("client", "snapshot", "disk", "then")
        server.done("client", "clone", "then", "again")
        server.done("client", "resize", "again", "1M")
        assert server.done("client", "list") == "again 1048576\ndisk 4194304\nthen 4194304 read-only\n"
        server.done("client", "delete", "disk")
        server.done("client", "get", "then", copy, "--verify")
        assert copy.read_bytes() == data.read_bytes() + bytes((4 << 20) - 3_000_000)
        url = server.said[0].split()[-1]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def metrics() -> str:
            with opener.open(url, timeout=20) as answer:
                told: str = answer.read().decode()
                return told

        wait_until(lambda: "storage_sessions 0.0" in metrics())  # the last command does not wait for that
        assert 'storage_requests_total{kind="flush",outcome="done"} 1.0' in metrics()
        assert "storage_sync_seconds_count" in metrics()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "data", "root"]
    with served(root, device=device_name) as server:
        assert [each["name"] for each in json.loads(server.done("client", "list", "--json"))] == ["again", "then"]
        server.done("client", "get", "again", copy, "--by-messages")
        assert copy.read_bytes() == data.read_bytes()[: 1 << 20]


def test_long_transfers_show_on_terminals_how_far_they_are(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(8 << 20))
    with served(tmp_path / "root") as server:
        server.done("client", "create", "disk", "8M")
        shown, terminal = pty.openpty()
        with open(shown, "rb", buffering=0) as screen:
            env = {**os.environ, **server.env, "TERM": "xterm", "AIOVERBS_DEVICE": "soft0"}
            with subprocess.Popen(command("client", "put", data, "disk"), env=env, stderr=terminal):
                os.close(terminal)
                seen = b""
                with contextlib.suppress(OSError):  # EIO: it has ended
                    while more := screen.read(4096):
                        seen += more
    assert b"put data" in seen
    assert b"8.4/8.4 MB" in seen
    assert b"wrote 8,388,608 bytes to disk" in seen


def test_who_may_do_what(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert (root / "owner.token").exists() is False
    with served(root) as server:
        assert (root / "owner.token").stat().st_mode & 0o777 == 0o600
        assert (root / "catalog.sqlite").stat().st_mode & 0o777 == 0o600
        server.done("client", "create", "disk", "64K")
        token = tmp_path / "token"
        token.write_text(run("access", root, "add", "ann").stdout)
        ann = {"STORAGE_TOKEN_FILE": token}
        assert "there is no volume" in server.fails_here("client", "get", "disk", tmp_path / "x", **ann)
        assert here("access", root, "allow", "ann", "disk", "read") == (0, "")
        assert server.done("client", "list", **ann) == "disk 65536\n"
        assert "may read 'disk'" in server.fails("client", "put", token, "disk", **ann)
        assert "only admins" in server.fails_here("client", "delete", "disk", **ann)
        assert run("access", root, "list").stdout == "ann disk:read\nowner everything\n"
        assert here("access", root, "remove", "ann") == (0, "")
        assert "the token of client 'ann'" in server.fails_here("client", "list", **ann)
        server.process.send_signal(signal.SIGTERM)
        assert "was refused" in server.process.communicate(timeout=patience(20))[1]


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    root, large = tmp_path / "root", tmp_path / "large"
    large.write_bytes(bytes(65537))
    with served(root) as server:
        fails = server.fails_here
        server.done("client", "create", "disk", "64K")
        assert "is no size" in fails("client", "create", "x", "much")
        assert "whole blocks of 4,096" in fails("client", "create", "x", "5")
        assert "no name of a volume" in fails("client", "create", "a/b", "4K")
        assert "already" in fails("client", "create", "disk", "4K")
        assert "resize it" in fails("client", "put", large, "disk")
        assert "no volume 'none'" in fails("client", "get", "none", tmp_path / "x")
        assert "is no HOST:PORT" in fails("client", "--at", "here", "list")
        assert "does not exist" in fails("client", "--token-file", tmp_path / "nowhere", "list")
        assert "NAME.SECRET" in fails("client", "--token-file", large, "list")
        assert "blocks of 4,096 bytes for each client" in server.fails("load", "disk", "--seconds", "1")
        assert "another server has" in server.fails("serve", root)
        assert "is no folder of a server" in server.fails("access", tmp_path, "list")
        assert "there is no client 'bob'" in fails("access", root, "allow", "bob", "disk", "read")
        assert "there is no client 'bob'" in fails("access", root, "remove", "bob")
        assert "no name of a client" in fails("access", root, "add", "a.b/c")
        assert not (tmp_path / "x").exists()
    assert "is a server running there?" in fails("client", "list")


@pytest.mark.parametrize("options", [["--flush-every", 20], ["--by-messages"]], ids=["one-sided", "messages"])
def test_load(device_name: str, tmp_path: Path, options: list[object]) -> None:
    # Both begin with as many operations as the window has, which they end even where the time is over before.
    loading = ("load", "disk", "--clients", 2, "--seconds", patience(0.3), "--window", 16, *options)
    with served(tmp_path / "root", device=device_name) as server:
        server.done("client", "create", "disk", "1M")
        found = json.loads(server.done(*loading, "--reads", 50))
        assert found["wrong_blocks"] == 0
        assert found["operations"] > 20
        took = found["latency_us"]
        assert 0 < took["read"]["p50"] <= took["read"]["p99"] <= took["read"]["max"]
        assert took["flush"]["max"] > 0
    with (tmp_path / "root" / "volumes" / "1.volume").open("r+b") as file:
        file.seek(100)
        file.write(b"not what was written there")
    with served(tmp_path / "root", device=device_name) as server:
        done = server.run(*loading, "--no-fill", "--pattern", "sequential")
        assert done.returncode == 1
        assert "block 0 is not whole" in done.stdout
        assert "were not what was written" in done.stderr


@pytest.mark.parametrize("backing", ["mapped", "cached"])
@pytest.mark.parametrize("number", range(KILLS // 2))
def test_a_server_that_is_killed(backing: str, number: int, tmp_path: Path) -> None:
    kill_and_look(tmp_path, backing, number)


@pytest.mark.slow
@pytest.mark.parametrize("backing", ["mapped", "cached"])
@pytest.mark.parametrize("number", range(KILLS // 2, fewer(ALL_KILLS // 2, least=KILLS)))
def test_a_server_that_is_killed_many_times(backing: str, number: int, tmp_path: Path) -> None:
    kill_and_look(tmp_path, backing, number)


def kill_and_look(path: Path, backing: str, seed: int) -> None:
    """SIGKILL under load, twice in a row; what was acknowledged is there each time."""
    root = path / "root"
    shares = shares_of_two()
    chance = random.Random(seed)
    factories = list(LOOP_FACTORIES.values())

    async def kill() -> None:
        await asyncio.sleep(chance.random() * 0.3)
        server.kill()

    with asyncio.Runner(loop_factory=factories[seed % len(factories)]) as runner:
        for turn in range(2):
            with served(root, "--backing", backing, recovers=True) as server:
                runner.run(load(server, shares, chance, kill, turn=turn, create=not turn))
        with served(root, "--backing", backing, recovers=True) as server:
            runner.run(look(server, shares))
    assert any(any(share.acknowledged.values()) for share in shares)


async def test_a_client_that_is_killed(tmp_path: Path) -> None:
    """What it had open is closed, and others go on."""
    with served(tmp_path / "root") as server:
        server.done("client", "create", "disk", "16M")
        loading = command("load", "disk", "--clients", 1, "--seconds", 60, "--reads", 50, "--flush-every", 5)
        env = {**os.environ, **server.env, "AIOVERBS_DEVICE": "soft0"}
        clients = await asyncio.create_subprocess_exec(*loading, env=env, start_new_session=True)
        token = (server.root / "owner.token").read_text()
        try:
            async with (
                aioverbs.open_device("soft0") as device,
                device.resource_domain() as domain,
                connect(server.host, server.port, token, domain=domain) as storage,
            ):
                await asyncio.sleep(1.5)
                os.killpg(clients.pid, signal.SIGKILL)
                async with storage.open("disk", write=True) as volume:
                    await volume.write(0, b"mine")
                    await volume.flush()
                async with asyncio.timeout(patience(20)):
                    await storage.resize("disk", 32 << 20)
                async with storage.open("disk") as volume:
                    assert await volume.read(0, 4) == b"mine"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(clients.pid, signal.SIGKILL)
            await clients.wait()
