"""`aioverbs doctor` on soft-RoCE, also with something missing."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.seam import rdma_devices

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(240)]

DOCTOR = [sys.executable, "-P", "-m", "aioverbs.cli", "doctor", "--json"]
OURS = "av_doctor"  # an interface, and the soft-RoCE link on it
PATIENCE_S = 10.0

# An unprivileged user with the right to traverse folders, since Python may be installed in a home directory.
ANOTHER_USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
ANOTHER_USER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


@pytest.fixture(autouse=True)
def needs_disposable_machine() -> None:
    """Skip unless these tests may change the machine."""
    if os.geteuid() != 0 or not Path("/sys/module/rdma_rxe").exists():
        pytest.skip("needs soft-RoCE and root, as in the virtual machine")


def run_doctor(*command: str) -> dict[str, Any]:
    """Run the doctor as an unprivileged user; check that its exit status and its output agree."""
    done = subprocess.run([*command, *DOCTOR], capture_output=True, text=True, timeout=220, check=False)
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == result["status"]
    return result


def run_doctor_with_mount(mount: str) -> dict[str, Any]:
    """Run the doctor with a mount that other processes do not see."""
    return run_doctor("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")


def findings(result: dict[str, Any], subject: str) -> dict[str, list[str]]:
    """Return the commands of a subject's findings, by code."""
    return {each["code"]: each["commands"] for each in result["findings"] if each["subject"] == subject}


@functools.cache
def libraries() -> dict[str, str]:
    """Return the paths of libibverbs and librdmacm by name."""
    probe = run_doctor()["machine"]["probe"]
    return {name: probe[name]["path"] for name in ("libibverbs", "librdmacm")}


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def extra_link(*, up: bool) -> Iterator[None]:
    """Create a soft-RoCE link over an interface without an IP address."""
    run("ip", "link", "add", OURS, "type", "dummy")
    try:
        if up:
            run("ip", "link", "set", OURS, "up")
        run("rdma", "link", "add", OURS, "type", "rxe", "netdev", OURS)
        state = Path(f"/sys/class/infiniband/{OURS}/ports/1/state")
        deadline = time.monotonic() + PATIENCE_S
        while up and "ACTIVE" not in state.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield
    finally:
        run("ip", "link", "delete", OURS)  # removes the link, too


def test_all_devices_are_usable() -> None:
    result = run_doctor()
    assert result["status"] == 0
    assert set(rdma_devices()) <= set(result["usable"])
    assert not result["unusable"]
    assert not [each for each in result["findings"] if each["severity"] == "error"]
    libraries = result["machine"]["probe"]
    assert libraries["libibverbs"]["version"] == libraries["librdmacm"]["version"]
    assert libraries["trials"][rdma_devices()[0]] == {"problem": None, "number": 0}


@pytest.mark.rdma_all
def test_a_port_that_is_down() -> None:
    with extra_link(up=False):
        result = run_doctor()
    assert result["unusable"] == [OURS]
    assert findings(result, OURS) == {"port": [f"sudo ip link set {OURS} up"]}
    assert result["status"] == 0  # other devices are usable


@pytest.mark.rdma_all
def test_a_port_without_addresses() -> None:
    if not Path("/proc/sys/net/ipv6/conf").exists():
        pytest.skip("this kernel has no IPv6")
    with extra_link(up=True):
        result = run_doctor()
    assert OURS in result["usable"]
    assert findings(result, OURS) == {"no-ip-gid": [f"sudo ip address add 192.0.2.1/24 dev {OURS}"]}


@pytest.mark.rdma_all
def test_a_port_without_addresses_where_ipv6_is_off() -> None:
    with extra_link(up=True):
        switch = Path("/proc/sys/net/ipv6/conf", OURS, "disable_ipv6")
        if switch.exists():
            switch.write_text("1")
        result = run_doctor()
    assert result["unusable"] == [OURS]
    assert findings(result, OURS) == {"no-ip-gid": [f"sudo ip address add 192.0.2.1/24 dev {OURS}"]}


@pytest.mark.rdma_all
def test_no_memory_may_be_locked() -> None:
    result = run_doctor("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=0:0")
    assert result["status"] == 1
    assert set(rdma_devices()) <= set(result["unusable"])
    assert findings(result, "system")["memlock"][0] == "ulimit -l unlimited"
    assert not any(findings(result, name) for name in rdma_devices())


@pytest.mark.rdma_all
def test_users_without_permission() -> None:
    node = next(Path("/sys/class/infiniband_verbs").glob("uverbs*"))
    path, name = Path("/dev/infiniband", node.name), (node / "ibdev").read_text().strip()
    mode = path.stat().st_mode & 0o777
    path.chmod(0o600)
    try:
        result = run_doctor(*ANOTHER_USER)
    finally:
        path.chmod(mode)
    assert result["unusable"] == [name]
    assert findings(result, name) == {"permission": [f"sudo chmod 666 {path}"]}


@pytest.mark.rdma_all
def test_no_provider() -> None:
    result = run_doctor_with_mount("mount -t tmpfs none /etc/libibverbs.d")
    assert result["status"] == 1
    for name in rdma_devices():
        assert "ibverbs-providers" in findings(result, name)["no-provider"][0]


@pytest.mark.rdma_all
def test_no_libibverbs() -> None:
    result = run_doctor_with_mount(f"mount --bind /dev/null {libraries()['libibverbs']}")
    assert (result["status"], result["usable"]) == (1, [])
    assert "libibverbs1" in findings(result, "system")["libibverbs-missing"][0]
