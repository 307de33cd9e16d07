"""The examples run and print the expected output."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pace import patience
from tests.running import run

EXPECTED_OUTPUT = {
    "arrays": ["float64 (512, 512): 2,097,152 bytes, their sum is correct", "int32 (64, 1024)"],
    "asgi": ["put 20 objects, got 20 of them unchanged", "from the workers"],
    "buffer_pool": [
        "received: b'message 7'",
        "16 messages, 4 buffers, none leased",
        "registered 1 time, found 2 times",
    ],
    "custom_allocator": ["a custom allocator:", "bytes at 0x", "queues created", "recorded:"],
    "domains_by_hand": ["wrote 512 bytes, thread domain native", "arrived: True"],
    "first_write": [
        "soft0: no locks",
        "written: b'hello'",
        "stopped: ibv_post_send on <QueuePair",
        "ResourceDomain, open",
    ],
    "key_value": ["put 100 values, got 100 of them", "value of a key that was never put: None"],
    "pool": ["hello by worker 0 and world by worker 1", "b'hello' b'world'"],
    "pool_server": ["worker 0 has b'stored' AND MESSAGES", "worker 1 has b'stored' AND MESSAGES"],
    "rc_pingpong": ["answered 50 messages", "50 iters in"],
    "two_processes": ["received b'hello'", "counted [0, 1, 2] and read b'hello' and 3 back", "from memory to memory"],
    "shared_pd": ["registered by the other: b'hello'", "with another key: ibv_share_pd failed: EACCES"],
    "xrc_domain": ["opened by two contexts", "O_EXCL: ibv_open_xrcd failed: EINVAL", "removed with its last reference"],
}
TESTS = "test_key_value"  # a pytest file, which tests a service with `aioverbs.testing`
ARGUMENTS = {"rc_pingpong": ["--both", "-p", "0", "-n", "50"]}


def example(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py"), *arguments]
    return run(command, patience(50), env={**os.environ, "AIOVERBS_DEVICE": "soft0"})


ELSEWHERE = {"rping", "dask_shuffle"}  # tested in tests/rdma and tests/distributed
REQUIRED_MODULES = {"arrays": "numpy", "asgi": "uvicorn"}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXPECTED_OUTPUT) | ELSEWHERE | {TESTS}


@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_example(name: str) -> None:
    if name in REQUIRED_MODULES:
        pytest.importorskip(REQUIRED_MODULES[name])
    done = example(name, *ARGUMENTS.get(name, ()))
    assert (done.returncode, done.stderr) == (0, "")
    for text in EXPECTED_OUTPUT[name]:
        assert text in done.stdout


@pytest.mark.timeout(180)
def test_a_users_tests_of_a_service(tmp_path: Path) -> None:
    """pytest finds the plugin `aioverbs.testing` without configuration."""
    for name in ("key_value", TESTS):
        shutil.copy(ROOT / "examples" / f"{name}.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = run(command, patience(150), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout


def test_ping_pong_between_two_processes() -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "rc_pingpong.py"), "-p", "0", "-n", "50"]
    with subprocess.Popen(command, env={**os.environ, "AIOVERBS_DEVICE": "soft0"}, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        port = waiting.stdout.readline().removeprefix(b"waiting at port ").decode().strip()
        done = example("rc_pingpong", "-p", port, "-n", "50", "localhost")
        assert (done.returncode, done.stderr) == (0, "")
        assert "50 iters in" in done.stdout
        assert waiting.communicate(timeout=30)[0].endswith(b"answered 50 messages\n")
    assert waiting.returncode == 0
