"""Who is let in: by the secret, and by the user; others are turned away, counted, and the reason is told and logged."""

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
from tests.fabric.two import End, Other, end, other
from tests.soft_context import soft_context
from tests.waiting import until

QUICK: dict[str, Any] = {"timeout": 14, "retry_cnt": 2}  # 67 ms, three times
SOMEBODY = 54321  # the number of a user; nobody needs to know it
OTHERS_SECRET = "the peer has another secret: set AIOVERBS_SOFT_SECRET to the same value on both sides"
ONE_SECRET = "one side has no secret: set AIOVERBS_SOFT_SECRET to the same value on both sides"
NOT_ALLOWED = "the peer's user is not allowed: add it to AIOVERBS_SOFT_USERS"


async def is_refused(here: End, there: Other, caplog: pytest.LogCaptureFixture) -> tuple[list[str], str]:
    """A request ends with the status of a peer that is not there. Why, as was logged here, and as is told there."""
    (qp,) = here.qps
    before = soft_context(here.device).fabric()
    await there.connect(qp, **QUICK)
    with pytest.raises(WorkCompletionError) as caught:
        await qp.write(here.region[:8], there.region[:8])
    assert caught.value.status is WcStatus.RETRY_EXC_ERR
    assert await there.look(0, 8) == bytes(8)
    # The request's time may be over before they have heard of us.
    await until(lambda: any(each.connected_by_us and each.problem for each in here.device.peers()))
    (peer,) = (each for each in here.device.peers() if each.connected_by_us and each.problem)
    assert (peer.connected, peer.connections) == (False, 0)
    after = soft_context(here.device).fabric()
    assert (after.connected, after.accepted, after.refused_frames) == (
        *(before.connected, before.accepted, before.refused_frames),
    )
    logged = [record.getMessage() for record in caplog.records if record.name == "aioverbs.fabric"]
    assert len(logged) == after.refused_peers - before.refused_peers
    by_them = await there.ask("refusals")
    peers, frames = by_them.split()[:2]
    assert int(peers) + len(logged) > 0
    assert int(frames) == 0
    return [*logged, peer.problem], by_them


async def is_taken(here: End, there: Other) -> None:
    (qp,) = here.qps
    await there.connect(qp)
    for seed in range(2):
        await exchange(here, there, qp, seed=seed)
    assert await there.ask("refusals") == "0 0"


@pytest.mark.usefixtures("direct")
async def test_a_peer_with_the_same_secret_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOVERBS_SOFT_SECRET", "open sesame")
    async with other() as there, end() as here:
        await is_taken(here, there)


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        ("open sesame", "open sesam", OTHERS_SECRET),
        ("open sesame", "", ONE_SECRET),
        ("", "open sesame", ONE_SECRET),
    ],
    ids=["another", "only here", "only there"],
)
async def test_a_peer_with_another_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ours: str, theirs: str, problem: str
) -> None:
    monkeypatch.setenv("AIOVERBS_SOFT_SECRET", ours)
    async with other(environment={"AIOVERBS_SOFT_SECRET": theirs}) as there, end() as here:
        told, by_them = await is_refused(here, there, caplog)
        assert problem in told[-1]
        assert problem in by_them or all(problem in line for line in told)
        for secret in filter(None, (ours, theirs)):
            assert not any(secret in line for line in (*told, by_them))


# ---- Users


@functools.cache
def as_somebody() -> tuple[str, ...]:
    """What runs a command as another user; the test is skipped where that cannot be."""
    command = ("setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups")
    if os.geteuid() or shutil.which(command[0]) is None:
        pytest.skip("another user's process needs root, and the program setpriv")
    trial = [*command, sys.executable, "-P", "-c", f"import sys; sys.path.append({str(ROOT)!r}); import aioverbs"]
    tried = subprocess.run(trial, capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        pytest.skip(f"another user cannot import aioverbs here: {tried.stderr.splitlines()[-1]}")
    return command


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all may write; the one of the test may be closed to others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o1777)
        yield Path(path)


@pytest.mark.parametrize("direct", ["0", "1"])
async def test_another_user_who_may_is_taken(monkeypatch: pytest.MonkeyPatch, shared: Path, direct: str) -> None:
    prefix = as_somebody()
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(shared))
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", direct)
    monkeypatch.setenv("AIOVERBS_SOFT_USERS", str(SOMEBODY))
    async with other(environment={"AIOVERBS_SOFT_USERS": "0"}, prefix=prefix) as there, end() as here:
        await is_taken(here, there)
        (peer,) = (each for each in here.device.peers() if each.connected_by_us and each.connected)
        assert (peer.user_id, peer.process_id) == (SOMEBODY, there.process.pid)


@pytest.mark.parametrize("by", ["us", "them"])
async def test_another_user_who_may_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shared: Path, by: str
) -> None:
    """One of both allows somebody else only."""
    prefix = as_somebody()
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(shared))
    monkeypatch.setenv("AIOVERBS_SOFT_USERS", str(SOMEBODY + (by == "us")))
    theirs = "0" if by == "us" else str(SOMEBODY + 1)
    async with other(environment={"AIOVERBS_SOFT_USERS": theirs}, prefix=prefix) as there, end() as here:
        told, by_them = await is_refused(here, there, caplog)
        assert any(NOT_ALLOWED in line for line in (told if by == "us" else (by_them,)))


async def test_a_private_directory_hides_from_others(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    """Who is another user does not even find a device that has let nobody in."""
    prefix = as_somebody()
    path = shared / "ours"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(path))
    (shared / "theirs").mkdir()
    os.chown(shared / "theirs", SOMEBODY, SOMEBODY)
    (shared / "theirs").chmod(0o700)
    environment = {"AIOVERBS_SOFT_DIRECTORY": str(shared / "theirs")}
    async with other(environment=environment, prefix=prefix) as there, end() as here:
        (qp,) = here.qps
        await there.connect(qp, **QUICK)
        with pytest.raises(WorkCompletionError) as caught:
            await qp.write(here.region[:8], there.region[:8])
        assert caught.value.status is WcStatus.RETRY_EXC_ERR
        (peer,) = (each for each in here.device.peers() if each.connected_by_us and each.problem)
        assert peer.problem == "no device with this GID was found"
