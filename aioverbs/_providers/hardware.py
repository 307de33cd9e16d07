"""RDMA devices of this machine: pyverbs lists and opens them, every other verb goes through the core's own table."""

import contextlib
import errno
import logging
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from aioverbs._core.handles import handles, pyverbs_bridge
from aioverbs._providers.sysfs import check_node, device_nodes
from aioverbs.errors import DeviceNotFoundError, LibraryNotFoundError, VerbsError
from aioverbs.gid_selection import Gid
from aioverbs.types import GidType

if TYPE_CHECKING:
    from pyverbs.device import Context as PyverbsContext
    from pyverbs.mr import MR
    from pyverbs.pd import PD

__all__ = ["adopt_context", "adopt_memory_region", "adopt_protection_domain", "gid_table", "names", "open_context"]

# What a context was made from, for the verbs that pyverbs is asked for. Imported ones are made from nothing of its.
_pyverbs_contexts: "weakref.WeakKeyDictionary[handles.Context, PyverbsContext]" = weakref.WeakKeyDictionary()


def _pyverbs_device() -> ModuleType:
    """``pyverbs.device``, imported when a device is first asked for: nothing else needs it."""
    handles.load_libibverbs()
    # Its import calls logging.basicConfig, which does nothing where the root logger has a handler.
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        import pyverbs.device
    except ImportError as error:
        raise LibraryNotFoundError("pyverbs", str(error)) from error
    finally:
        root.removeHandler(handler)
    return pyverbs.device


@contextlib.contextmanager
def _as_verbs_error(verb: str) -> Iterator[None]:
    """What pyverbs raises is no OSError, and means one."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        number = getattr(error, "error_code", -1)  # pyverbs' own -1 is not EPERM; some verbs return theirs negative
        raise VerbsError(verb, errno.EIO if number == -1 else abs(number)) from error


def names() -> list[str]:
    """The RDMA devices of this machine.

    :raises LibraryNotFoundError: pyverbs or the libibverbs that it was built for is not installed.
    :raises VerbsError: they cannot be listed.
    """
    device = _pyverbs_device()
    with _as_verbs_error("ibv_get_device_list"):
        found = device.get_device_list()
    return [device.name.decode() for device in found]


def open_context(name: str) -> handles.Context:
    """Open an RDMA device.

    :raises DeviceNotFoundError: there is no such device.
    :raises LibraryNotFoundError: pyverbs or libibverbs is not installed, or not laid out in a way that is known.
    :raises VerbsError: it cannot be opened, as with EACCES.
    """
    available = names()
    if name not in available:
        raise DeviceNotFoundError(name, available)
    context = _open(name)
    try:
        return _adopt(context, context)
    except RuntimeError as error:  # its objects are not what the bridge knows
        context.close()
        raise LibraryNotFoundError("pyverbs", str(error)) from error


def _open(name: str) -> "PyverbsContext":
    try:
        with _as_verbs_error("ibv_open_device"):
            context: PyverbsContext = _pyverbs_device().Context(name=name)
    except VerbsError as error:
        if (node := device_nodes().get(name)) is not None:
            check_node(error.verb, node)
        raise
    return context


def _adopt(context: "PyverbsContext", owner: "PyverbsContext | _Lent") -> handles.Context:
    adopted = handles.Context.adopt(pyverbs_bridge.context_capsule(context), owner)
    _pyverbs_contexts[adopted] = context
    return adopted


def gid_table(context: handles.Context, port: int) -> list[Gid]:
    """The GIDs that a port has: ``ibv_query_gid_table``.

    :raises VerbsError: the device does not tell.
    """
    ports = range(1, context.attributes.phys_port_cnt + 1)
    most = sum(context.query_port(each).gid_tbl_len for each in ports)
    theirs = _pyverbs_contexts.get(context)
    with contextlib.ExitStack() as stack:
        if theirs is None:
            theirs = _open(context.name)
            stack.callback(theirs.close)
        with _as_verbs_error("ibv_query_gid_table"):
            found = theirs.query_gid_table(most)
    return [
        Gid(each.gid_index, _bytes(each.gid_subnet_prefix) + _bytes(each.gid_interface_id), GidType(each.gid_type))
        for each in found
        if each.port_num == port
    ]


def _bytes(half: int) -> bytes:
    """Of a half of a GID, which pyverbs gives as it stands in memory."""
    return half.to_bytes(8, sys.byteorder)


class _Lent:
    """A pyverbs context that its user closes: here it is only kept."""

    def __init__(self, context: object) -> None:
        self.context = context

    def close(self) -> None:
        """Nothing."""


def adopt_context(context: "PyverbsContext") -> handles.Context:
    """Use an open `pyverbs.device.Context`, which its user keeps and closes afterwards.

    :raises TypeError: it is something else.
    :raises ValueError: it is closed.
    :raises LibraryNotFoundError: pyverbs or libibverbs is not installed.
    """
    _pyverbs_device()
    return _adopt(context, _Lent(context))


def adopt_protection_domain(context: handles.Context, pd: "PD") -> handles.ProtectionDomain:
    """Use an open `pyverbs.pd.PD` of an adopted context, which its user keeps and closes afterwards.

    :raises TypeError: it is something else.
    :raises ValueError: it is closed, or of another context.
    """
    return handles.ProtectionDomain.adopt(context, pyverbs_bridge.pd_capsule(pd), pd)


def adopt_memory_region(pd: handles.ProtectionDomain, mr: "MR") -> handles.MemoryRegion:
    """Use an open `pyverbs.mr.MR` of an adopted protection domain, which its user keeps and closes afterwards.

    :raises TypeError: it is something else.
    :raises ValueError: it is closed, or of another protection domain.
    """
    return handles.MemoryRegion.adopt(pd, pyverbs_bridge.mr_capsule(mr), mr)
