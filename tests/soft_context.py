"""The handle of a software device, by which tests look into it."""

from aioverbs._core.software import software
from aioverbs._verbs.device import Device

__all__ = ["soft_context"]


def soft_context(device: Device) -> software.Context:
    """Return a device's context, which is a software device's."""
    assert isinstance(device.handle, software.Context)
    return device.handle
