"""`aioverbs bench` on an RDMA device, compared with streams and the software device."""

import json
import subprocess
import sys

import pytest

from tests.pace import patience
from tests.rdma.cm import nothing_left
from tests.rdma.seam import rdma_devices

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(400)]  # takes minutes on an emulated machine


def test_devices_that_are_active_are_measured() -> None:
    command = [sys.executable, "-P", "-m", "aioverbs.cli", "bench", "--json", "--seconds", f"{patience(2):g}"]
    with nothing_left():
        done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    device = rdma_devices()[0]
    assert {"tcp", "unix", "soft0", device} <= set(result["contenders"])
    figures = [each for each in result["figures"] if each["contender"] == device]
    assert {each["operation"] for each in figures} == {"write", "read", "send"}
    assert all(each["median_ns"] > 0 and each["ratio"] is not None for each in figures)
