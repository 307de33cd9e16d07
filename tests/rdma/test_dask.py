"""Dask's `distributed` on an RDMA device: all messages of a cluster are sent over the configured device."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pace import patience
from tests.rdma.cm import address_of, established, nothing_left
from tests.rdma.seam import rdma_devices
from tests.running import run

# `distributed` is imported in another process only: its objects would slow down garbage collection in all later tests.
pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(620),
    pytest.mark.skipif(find_spec("distributed") is None, reason="needs `distributed`"),
]

PROGRAM = Path(__file__).with_name("dask_cluster.py")
MAX_PAYLOAD = 4096  # of a packet of RoCE, in bytes


def sent_packets(device: str) -> int | None:
    """Return how many packets a soft-RoCE device has sent; None for other devices, which may not count a loopback."""
    counter = Path("/sys/class/infiniband", device, "ports/1/hw_counters/sent_pkts")
    return int(counter.read_text()) if counter.exists() else None


@pytest.mark.parametrize(
    ("workers", "number", "by_rdma_cm"),
    [
        pytest.param("processes", 0, True, id="processes"),
        pytest.param("threads", -1, False, id="threads", marks=pytest.mark.rdma_all),
    ],
)
def test_a_cluster_rechunks_an_array_over_the_configured_device(workers: str, number: int, by_rdma_cm: bool) -> None:
    """Workers listen at the device's address, which rdma_cm reaches, or at the loopback address, which TCP reaches.

    In the virtual machine, this takes a minute with processes, and half a minute with threads. To run both:
    ``nox -s rdma -- tests/rdma/test_dask.py``.
    """
    device = rdma_devices()[number]
    limit = f"{patience(30):g}s"
    settings = {
        "DASK_DISTRIBUTED__COMM__AIOVERBS__DEVICE": device,
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": limit,
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": limit,
    }
    host = [address_of(device)] if by_rdma_cm else []
    established_before, sent_before = established(), sent_packets(device)
    with nothing_left():
        done = run([sys.executable, "-P", str(PROGRAM), workers, *host], 600, env={**os.environ, **settings})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["correct"]
    assert report["moved"] > 0
    assert list(report["devices"].values()) == [[device]] * 3
    assert (established() > established_before) == by_rdma_cm
    if sent_before is not None:
        sent = sent_packets(device)
        assert sent is not None
        assert (sent - sent_before) * MAX_PAYLOAD > report["size"] + report["moved"]
