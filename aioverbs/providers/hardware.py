"""RDMA devices of this machine: pyverbs lists and opens them, every other verb goes through the core's own table."""

import contextlib
import errno
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from aioverbs._core import engine, pyverbs_bridge
from aioverbs.errors import DeviceNotFoundError, LibraryNotFoundError, VerbsError

if TYPE_CHECKING:
    from pyverbs.device import Context as PyverbsContext
    from pyverbs.mr import MR
    from pyverbs.pd import PD

__all__ = ["adopt_context", "adopt_memory_region", "adopt_protection_domain", "names", "open_context"]


def _pyverbs_device() -> ModuleType:
    """``pyverbs.device``, imported when a device is first asked for: nothing else needs it."""
    engine.load_libibverbs()
    try:
        import pyverbs.device
    except ImportError as error:
        raise LibraryNotFoundError("pyverbs", str(error)) from error
    return pyverbs.device


@contextlib.contextmanager
def _as_verbs_error(verb: str) -> Iterator[None]:
    """What pyverbs raises is no OSError, and means one."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        number = getattr(error, "error_code", -1)
        raise VerbsError(verb, number if number > 0 else errno.EIO) from error


def names() -> list[str]:
    """The RDMA devices of this machine.

    :raises LibraryNotFoundError: pyverbs or the libibverbs that it was built for is not installed.
    :raises VerbsError: they cannot be listed.
    """
    device = _pyverbs_device()
    with _as_verbs_error("ibv_get_device_list"):
        found = device.get_device_list()
    return [device.name.decode() for device in found]


def open_context(name: str) -> engine.Context:
    """Open an RDMA device.

    :raises DeviceNotFoundError: there is no such device.
    :raises LibraryNotFoundError: pyverbs or libibverbs is not installed.
    :raises VerbsError: it cannot be opened, as with EACCES.
    """
    available = names()
    if name not in available:
        raise DeviceNotFoundError(name, available)
    with _as_verbs_error("ibv_open_device"):
        context = _pyverbs_device().Context(name=name)
    return engine.Context.adopt(pyverbs_bridge.context_capsule(context), context)


class _Lent:
    """A pyverbs context that its user closes: here it is only kept."""

    def __init__(self, context: object) -> None:
        self.context = context

    def close(self) -> None:
        """Nothing."""


def adopt_context(context: "PyverbsContext") -> engine.Context:
    """Use an open `pyverbs.device.Context`, which its user keeps and closes afterwards.

    :raises TypeError: it is something else.
    :raises ValueError: it is closed.
    :raises LibraryNotFoundError: pyverbs or libibverbs is not installed.
    """
    _pyverbs_device()
    return engine.Context.adopt(pyverbs_bridge.context_capsule(context), _Lent(context))


def adopt_protection_domain(context: engine.Context, pd: "PD") -> engine.ProtectionDomain:
    """Use an open `pyverbs.pd.PD` of an adopted context, which its user keeps and closes afterwards.

    :raises TypeError: it is something else.
    :raises ValueError: it is closed, or of another context.
    """
    return engine.ProtectionDomain.adopt(context, pyverbs_bridge.pd_capsule(pd), pd)


def adopt_memory_region(pd: engine.ProtectionDomain, mr: "MR") -> engine.MemoryRegion:
    """Use an open `pyverbs.mr.MR` of an adopted protection domain, which its user keeps and closes afterwards.

    :raises TypeError: it is something else.
    :raises ValueError: it is closed, or of another protection domain.
    """
    return engine.MemoryRegion.adopt(pd, pyverbs_bridge.mr_capsule(mr), mr)
