"""Probes of the capabilities that tests need."""

from tests.capabilities import Capability, capabilities


def test_the_software_device_has_every_capability() -> None:
    """Otherwise a test could be skipped on all devices."""
    assert capabilities("soft0") == set(Capability)


def test_probing_twice_gives_the_same_capabilities(device_name: str) -> None:
    """RDMA devices have no capability that only a device inside this process can have."""
    found = capabilities(device_name)
    capabilities.cache_clear()
    assert capabilities(device_name) == found
    in_process = {Capability.FAULT_PLAN, Capability.OBJECT_COUNTS, Capability.STAND_INS}
    assert found & in_process == (in_process if device_name == "soft0" else set())
