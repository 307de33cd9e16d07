"""Handle of a software device, for tests that inspect it."""

from aioverbs._core.software import software
from aioverbs._verbs.device import Device

__all__ = ["soft_context"]


def soft_context(device: Device) -> software.Context:
    """Return the context of a software device."""
    assert isinstance(device.handle, software.Context)
    return device.handle
