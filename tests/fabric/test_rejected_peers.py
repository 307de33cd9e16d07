"""Peers are accepted by secret and by user; rejected peers are counted, and the reason is reported and logged."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioverbs import WcStatus, WorkCompletionError
from tests.conftest import ROOT
from tests.fabric.exchange import exchange
from tests.fabric.two import End, PeerProcess, end, peer_process
from tests.soft_context import soft_context
from tests.waiting import until

QUICK: dict[str, Any] = {"timeout": 14, "retry_cnt": 2}  # 67 ms, three times
OTHER_USER = 54321  # a user ID; it needs no entry in the user database
OTHER_SECRET = "the peer has another secret: set AIOVERBS_SOFT_SECRET to the same value on both sides"
ONE_SECRET = "one side has no secret: set AIOVERBS_SOFT_SECRET to the same value on both sides"
NOT_ALLOWED = "the peer's user is not allowed: add it to AIOVERBS_SOFT_USERS"


async def check_refused(here: End, there: PeerProcess, caplog: pytest.LogCaptureFixture) -> tuple[list[str], str]:
    """Check that a request fails as if the peer did not exist.

    :returns: the reasons logged and reported on this side, and the answer of the peer to `refusals`.
    """
    (qp,) = here.qps
    before = soft_context(here.device).fabric()
    await there.connect(qp, **QUICK)
    with pytest.raises(WorkCompletionError) as caught:
        await qp.write(here.region[:8], there.region[:8])
    assert caught.value.status is WcStatus.RETRY_EXC_ERR
    assert await there.read_memory(0, 8) == bytes(8)
    # The request may time out before the peer's answer arrives.
    await until(lambda: any(each.connected_by_us and each.problem for each in here.device.peers()))
    (peer,) = (each for each in here.device.peers() if each.connected_by_us and each.problem)
    assert (peer.connected, peer.connections) == (False, 0)
    after = soft_context(here.device).fabric()
    assert (after.connected, after.accepted, after.refused_frames) == (
        *(before.connected, before.accepted, before.refused_frames),
    )
    logged = [record.getMessage() for record in caplog.records if record.name == "aioverbs.fabric"]
    assert len(logged) == after.refused_peers - before.refused_peers
    peer_report = await there.command("refusals")
    peers, frames = peer_report.split()[:2]
    assert int(peers) + len(logged) > 0
    assert int(frames) == 0
    return [*logged, peer.problem], peer_report


async def check_accepted(here: End, there: PeerProcess) -> None:
    (qp,) = here.qps
    await there.connect(qp)
    for seed in range(2):
        await exchange(here, there, qp, seed=seed)
    assert await there.command("refusals") == "0 0"


@pytest.mark.usefixtures("direct")
async def test_a_peer_with_the_same_secret_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOVERBS_SOFT_SECRET", "open sesame")
    async with peer_process() as there, end() as here:
        await check_accepted(here, there)


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        ("open sesame", "open sesam", OTHER_SECRET),
        ("open sesame", "", ONE_SECRET),
        ("", "open sesame", ONE_SECRET),
    ],
    ids=["another", "only here", "only there"],
)
async def test_a_peer_with_another_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ours: str, theirs: str, problem: str
) -> None:
    monkeypatch.setenv("AIOVERBS_SOFT_SECRET", ours)
    async with peer_process(environment={"AIOVERBS_SOFT_SECRET": theirs}) as there, end() as here:
        reported, peer_report = await check_refused(here, there, caplog)
        assert problem in reported[-1]
        assert problem in peer_report or all(problem in line for line in reported)
        for secret in filter(None, (ours, theirs)):
            assert not any(secret in line for line in (*reported, peer_report))


# ---- Users


@functools.cache
def as_other_user() -> tuple[str, ...]:
    """Return a command prefix that runs a command as another user; skip the test where that is impossible."""
    command = ("setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups")
    if os.geteuid() or shutil.which(command[0]) is None:
        pytest.skip("another user's process needs root, and the program setpriv")
    trial_command = [
        *command,
        sys.executable,
        "-P",
        "-c",
        f"import sys; sys.path.append({str(ROOT)!r}); import aioverbs",
    ]
    trial = subprocess.run(trial_command, capture_output=True, text=True, timeout=60, check=False)
    if trial.returncode:
        pytest.skip(f"another user cannot import aioverbs here: {trial.stderr.splitlines()[-1]}")
    return command


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A directory that all users may write to; the directory of the test may be closed to other users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o1777)
        yield Path(path)


@pytest.mark.parametrize("direct", ["0", "1"])
async def test_an_allowed_user_is_accepted(
    monkeypatch: pytest.MonkeyPatch, shared_directory: Path, direct: str
) -> None:
    prefix = as_other_user()
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(shared_directory))
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", direct)
    monkeypatch.setenv("AIOVERBS_SOFT_USERS", str(OTHER_USER))
    async with peer_process(environment={"AIOVERBS_SOFT_USERS": "0"}, prefix=prefix) as there, end() as here:
        await check_accepted(here, there)
        (peer,) = (each for each in here.device.peers() if each.connected_by_us and each.connected)
        assert (peer.user_id, peer.process_id) == (OTHER_USER, there.process.pid)


@pytest.mark.parametrize("by", ["us", "them"])
async def test_a_user_that_is_not_allowed_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shared_directory: Path, by: str
) -> None:
    """One of the sides allows only a third user."""
    prefix = as_other_user()
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(shared_directory))
    monkeypatch.setenv("AIOVERBS_SOFT_USERS", str(OTHER_USER + (by == "us")))
    theirs = "0" if by == "us" else str(OTHER_USER + 1)
    async with peer_process(environment={"AIOVERBS_SOFT_USERS": theirs}, prefix=prefix) as there, end() as here:
        reported, peer_report = await check_refused(here, there, caplog)
        assert any(NOT_ALLOWED in line for line in (reported if by == "us" else (peer_report,)))


async def test_a_private_directory_hides_the_device_from_other_users(
    monkeypatch: pytest.MonkeyPatch, shared_directory: Path
) -> None:
    """Another user does not find a device that allows no other users."""
    prefix = as_other_user()
    path = shared_directory / "ours"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(path))
    (shared_directory / "theirs").mkdir()
    os.chown(shared_directory / "theirs", OTHER_USER, OTHER_USER)
    (shared_directory / "theirs").chmod(0o700)
    environment = {"AIOVERBS_SOFT_DIRECTORY": str(shared_directory / "theirs")}
    async with peer_process(environment=environment, prefix=prefix) as there, end() as here:
        (qp,) = here.qps
        await there.connect(qp, **QUICK)
        with pytest.raises(WorkCompletionError) as caught:
            await qp.write(here.region[:8], there.region[:8])
        assert caught.value.status is WcStatus.RETRY_EXC_ERR
        (peer,) = (each for each in here.device.peers() if each.connected_by_us and each.problem)
        assert peer.problem == "no device with this GID was found"
