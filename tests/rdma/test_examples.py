"""The examples on an RDMA device; those with connections use rdma_cm."""

import re
import sys

import pytest

from tests.capabilities import Capability, capabilities
from tests.conftest import ROOT
from tests.manager.test_examples import ARGUMENTS, EXPECTED_OUTPUT, REQUIRED_MODULES
from tests.rdma.cm import address_of, established, nothing_left
from tests.rdma.seam import rdma_devices
from tests.running import run

pytestmark = [pytest.mark.rdma, pytest.mark.rdma_all, pytest.mark.timeout(620)]

NOT_NATIVE = "not native from here on"  # logged for devices without native thread domains
CONNECTS = {"arrays", "asgi", "key_value"}  # examples that call `aioverbs.connect`; they take an address
REFUSED = {
    "custom_allocator": (Capability.PARENT_DOMAINS, "{} does not call allocators"),
    "shared_pd": (
        Capability.SHARED_DOMAINS,
        "ibv_import_device failed: EOPNOTSUPP .* provider of {} does not support it",
    ),
    "xrc_domain": (Capability.XRC_DOMAINS, "ibv_open_xrcd failed: EOPNOTSUPP"),
}


def lines(name: str, device: str) -> list[str]:
    """Return the expected output where it differs from soft0's."""
    native = Capability.THREAD_DOMAINS in capabilities(device)
    match name:
        case "first_write":
            return [
                f"{device}: {'no locks' if native else 'with the locks of the provider'}",
                *EXPECTED_OUTPUT[name][1:],
            ]
        case "domains_by_hand":
            return [f"thread domain {'native' if native else 'not native'}", "arrived: True"]
        case "two_processes":
            return EXPECTED_OUTPUT[name][:-1]  # the rest is about fabrics of software devices
    return EXPECTED_OUTPUT[name]


@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_example(name: str) -> None:
    if name in REQUIRED_MODULES:
        pytest.importorskip(REQUIRED_MODULES[name])
    device = rdma_devices()[0]
    arguments = [address_of(device)] if name in CONNECTS else ARGUMENTS.get(name, [])
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py"), *arguments]
    before = established()
    with nothing_left():
        done = run(command, 600)
    complaints = "".join(line for line in done.stderr.splitlines(keepends=True) if NOT_NATIVE not in line)
    needed, refusal = REFUSED.get(name, (None, ""))
    if needed is not None and needed not in capabilities(device):
        assert done.returncode == 1
        assert re.fullmatch(f"{refusal.format(device)}.*; AIOVERBS_DEVICE=soft0 .*\n", complaints)
    else:
        assert (done.returncode, complaints) == (0, "")
        for text in lines(name, device):
            assert text in done.stdout
    assert (established() > before) == (name in CONNECTS)
