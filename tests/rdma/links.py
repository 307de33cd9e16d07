"""The network below soft-RoCE: the virtual machine's pair of interfaces, which tests slow down, break and take down."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

NEAR, FAR = "veth0", "veth1"  # below rxe0 and rxe1

# Taking an interface down removes its routes.
_UP = """ip link set {far} up
ip route replace 10.77.0.1/32 dev veth1 src 10.77.0.2 table 101
ip route replace 10.77.0.2/32 dev veth0 src 10.77.0.1 table 100"""


def need_pair() -> None:
    """Skip the test if there is no pair of interfaces."""
    if os.geteuid() != 0 or not all(Path("/sys/class/net", name).exists() for name in (NEAR, FAR)):
        pytest.skip("needs the virtual machine's pair of network interfaces")


def run(command: str) -> str:
    """Run shell commands, which must succeed."""
    done = subprocess.run(["sh", "-ec", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def down() -> None:
    """Take the far interface down, which takes the near one's carrier away."""
    run(f"ip link set {FAR} down")


def up() -> None:
    """Bring the far interface up again, with its routes."""
    run(_UP.format(far=FAR))


@contextlib.contextmanager
def netem(*rules: str) -> Iterator[None]:
    """Drop or delay packets that leave either interface, as specified, for instance ``"loss 5%"``."""
    for name in (NEAR, FAR):
        run(f"tc qdisc replace dev {name} root netem {' '.join(rules)}")
    try:
        yield
    finally:
        for name in (NEAR, FAR):
            run(f"tc qdisc del dev {name} root")


def dropped() -> int:
    """Return the number of packets that `netem` dropped."""
    queues = (json.loads(run(f"tc -j -s qdisc show dev {name}")) for name in (NEAR, FAR))
    return sum(int(queue["drops"]) for shown in queues for queue in shown if queue["kind"] == "netem")


def kernel_objects() -> dict[str, dict[str, int]]:
    """Return the number of the kernel's objects by device and kind."""
    kept: dict[str, dict[str, int]] = {}
    for device in json.loads(run("rdma -j resource show") or "[]"):
        name = device.pop("ifname")
        kept[name] = {kind: count for kind, count in device.items() if isinstance(count, int) and kind != "ifindex"}
    return kept
