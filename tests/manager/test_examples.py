"""The examples run, and say what they are to say."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SAYS = {
    "buffer_pool": [
        "received: b'message 7'",
        "16 messages, 4 buffers, none leased",
        "registered 1 time, found 2 times",
    ],
    "custom_allocator": ["one of our own:", "bytes at 0x", "asked: True", "recorded:"],
    "domains_by_hand": ["wrote 512 bytes, thread domain native", "arrived: True"],
    "first_transfer": ["everything was given back: 0 handles open"],
    "first_write": [
        "soft0: no locks",
        "written: b'hello'",
        "stopped: ibv_post_send on <QueuePair",
        "ResourceDomain, open",
    ],
    "shared_pd": ["registered by the other: b'hello'", "with another key: ibv_share_pd failed: EACCES"],
    "xrc_domain": ["opened by two contexts", "O_EXCL: ibv_open_xrcd failed: EINVAL", "gone with the last one"],
}


def test_every_example_is_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / f"{name}.py"],
        env={**os.environ, "AIOVERBS_DEVICE": "soft0"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for text in SAYS[name]:
        assert text in done.stdout
