"""Removal of a device below its connections: a device of the virtual machine, created for that."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rdma.cm import free_port

NAME, INTERFACE, ADDRESS = "rxe9", "cm9", "10.79.0.1"
pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(
        "AIOVERBS_RESULTS" not in os.environ, reason="it takes away a device: in the virtual machine only"
    ),
]


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=30)


@pytest.fixture
def device() -> Iterator[str]:
    run(f"ip link add {INTERFACE} type dummy")
    try:
        run(f"ip address add {ADDRESS}/24 dev {INTERFACE}")
        run(f"ip link set {INTERFACE} up")
        run(f"rdma link add {NAME} type rxe netdev {INTERFACE}")
        deadline = time.monotonic() + 10
        gid = Path(f"/sys/class/infiniband/{NAME}/ports/1/gids/1")
        while ":ffff:" not in gid.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield NAME
    finally:
        run(f"ip link delete {INTERFACE}")  # removes the RDMA device, too


def test_all_waiters_end(device: str) -> None:
    root = str(Path(__file__).parents[2])
    # Use the installed package, not the source tree.
    code = f"import runpy, sys; sys.path.append({root!r}); runpy.run_module('tests.rdma.removed', run_name='__main__')"
    command = (sys.executable, "-P", "-c", code, device, ADDRESS, str(free_port()))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in iter(process.stdout.readline, ""):
            lines.append(line)
            if line == "ready\n":
                break
        assert lines[-1:] == ["ready\n"], lines
        # waits for the process to close the device
        with subprocess.Popen(("rdma", "link", "delete", device)) as removing:
            said, _ = process.communicate(timeout=50)
        assert process.returncode == 0, said
        assert said.splitlines()[-2:] == ["removed", "closed"]
        assert removing.returncode == 0
    finally:
        process.kill()
        process.communicate()
