"""RDMA devices of this machine: pyverbs lists and opens them, every other verb goes through the core's own table."""

from types import ModuleType

from aioverbs._core import engine
from aioverbs.errors import DeviceNotFoundError, LibraryNotFoundError

__all__ = ["names", "open_context"]


def _pyverbs_device() -> ModuleType:
    """``pyverbs.device``, imported when a device is first asked for: nothing else needs it."""
    engine.load_libibverbs()
    try:
        import pyverbs.device
    except ImportError as error:
        raise LibraryNotFoundError("pyverbs", str(error)) from error
    return pyverbs.device


def names() -> list[str]:
    """The RDMA devices of this machine.

    :raises LibraryNotFoundError: pyverbs or the libibverbs that it was built for is not installed.
    """
    found = _pyverbs_device().get_device_list()
    return [device.name.decode() for device in found]


def open_context(name: str) -> engine.Context:
    """Open an RDMA device.

    :raises DeviceNotFoundError: there is no such device.
    :raises LibraryNotFoundError: pyverbs or libibverbs is not installed.
    """
    available = names()
    if name not in available:
        raise DeviceNotFoundError(name, available)
    from aioverbs._core import pyverbs_bridge

    context = _pyverbs_device().Context(name=name)
    return engine.Context.adopt(pyverbs_bridge.context_capsule(context), context)
