"""RDMA devices of this machine. pyverbs lists and opens them; the core calls all other verbs through its own table."""

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

# The pyverbs context of each context, for the verbs called through pyverbs. Imported contexts have none.
_pyverbs_contexts: "weakref.WeakKeyDictionary[handles.Context, PyverbsContext]" = weakref.WeakKeyDictionary()


def _pyverbs_device() -> ModuleType:
    """Return the module ``pyverbs.device``, imported when a device is first needed; nothing else needs pyverbs.

    :raises LibraryNotFoundError: pyverbs, or the libibverbs that pyverbs was built for, is not installed.
    """
    handles.load_libibverbs()
    # Its import calls logging.basicConfig, which has no effect if the root logger has a handler.
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
    """Convert a PyverbsError of the block, which is not an OSError, to a VerbsError.

    :param verb: name of the verb, for the error.
    :raises VerbsError: the block raised PyverbsError; with EIO if pyverbs reports no error number.
    """
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        number = getattr(error, "error_code", -1)  # pyverbs' -1 does not mean EPERM; some verbs negate errno
        raise VerbsError(verb, errno.EIO if number == -1 else abs(number)) from error


def names() -> list[str]:
    """Return the names of the RDMA devices of this machine.

    :raises LibraryNotFoundError: pyverbs, or the libibverbs that pyverbs was built for, is not installed.
    :raises VerbsError: ``ibv_get_device_list`` failed.
    """
    device = _pyverbs_device()
    with _as_verbs_error("ibv_get_device_list"):
        found = device.get_device_list()
    return [device.name.decode() for device in found]


def open_context(name: str) -> handles.Context:
    """Open an RDMA device: ``ibv_open_device``.

    :returns: the open context, which the caller destroys.
    :raises DeviceNotFoundError: there is no device of that name.
    :raises LibraryNotFoundError: pyverbs or libibverbs is not installed, or its objects have an unknown layout.
    :raises VerbsError: the device cannot be opened, for example with EACCES.
    """
    available = names()
    if name not in available:
        raise DeviceNotFoundError(name, available)
    context = _open(name)
    try:
        return _adopt(context, context)
    except RuntimeError as error:  # the layout of the pyverbs objects is unknown to the bridge
        context.close()
        raise LibraryNotFoundError("pyverbs", str(error)) from error


def _open(name: str) -> "PyverbsContext":
    """Open an RDMA device by pyverbs; the caller closes the pyverbs context.

    :raises LibraryNotFoundError: pyverbs or libibverbs is not installed.
    :raises VerbsError: the device cannot be opened; with EACCES if its device file cannot.
    """
    try:
        with _as_verbs_error("ibv_open_device"):
            context: PyverbsContext = _pyverbs_device().Context(name=name)
    except VerbsError as error:
        if (node := device_nodes().get(name)) is not None:
            check_node(error.verb, node)
        raise
    return context


def _adopt(context: "PyverbsContext", owner: "PyverbsContext | _UserOwned") -> handles.Context:
    """Return a context over an open pyverbs context.

    :param context: pyverbs context.
    :param owner: object that is kept alive with the context, and whose ``close`` is called when it is destroyed.
    :raises TypeError: `context` is something else.
    :raises ValueError: `context` is closed.
    :raises RuntimeError: this version of pyverbs uses another object layout; nothing was changed.
    """
    adopted = handles.Context.adopt(pyverbs_bridge.context_capsule(context), owner)
    _pyverbs_contexts[adopted] = context
    return adopted


def gid_table(context: handles.Context, port: int) -> list[Gid]:
    """Return the GIDs of a port with their indexes and types: ``ibv_query_gid_table``.

    :raises VerbsError: the verb failed, or the device of an imported context cannot be opened for it.
    :raises LibraryNotFoundError: the context is imported, and pyverbs or libibverbs is not installed.
    """
    ports = range(1, context.attributes.phys_port_cnt + 1)
    max_entries = sum(context.query_port(each).gid_tbl_len for each in ports)
    pyverbs_context = _pyverbs_contexts.get(context)
    with contextlib.ExitStack() as stack:
        if pyverbs_context is None:
            pyverbs_context = _open(context.name)
            stack.callback(pyverbs_context.close)
        with _as_verbs_error("ibv_query_gid_table"):
            found = pyverbs_context.query_gid_table(max_entries)
    return [
        Gid(
            each.gid_index,
            _half_gid_bytes(each.gid_subnet_prefix) + _half_gid_bytes(each.gid_interface_id),
            GidType(each.gid_type),
        )
        for each in found
        if each.port_num == port
    ]


def _half_gid_bytes(half: int) -> bytes:
    """Return the bytes of half a GID, which pyverbs gives as an integer read from memory in native byte order."""
    return half.to_bytes(8, sys.byteorder)


class _UserOwned:
    """Keeps a pyverbs context that the user owns, and does not close it."""

    def __init__(self, context: object) -> None:
        self.context = context

    def close(self) -> None:
        """Do nothing: the user closes the context."""


def adopt_context(context: "PyverbsContext") -> handles.Context:
    """Use an open `pyverbs.device.Context`, which the user continues to own and closes later.

    :returns: a context over it, which the caller destroys first.
    :raises TypeError: `context` is something else.
    :raises ValueError: `context` is closed.
    :raises LibraryNotFoundError: pyverbs or libibverbs is not installed.
    :raises RuntimeError: this version of pyverbs uses another object layout.
    """
    _pyverbs_device()
    return _adopt(context, _UserOwned(context))


def adopt_protection_domain(context: handles.Context, pd: "PD") -> handles.ProtectionDomain:
    """Use an open `pyverbs.pd.PD` of an adopted context, which the user continues to own and closes later.

    :returns: a protection domain over it, which the caller destroys first.
    :raises TypeError: `pd` is something else, or is a parent domain.
    :raises ValueError: `pd` is closed or belongs to another context.
    """
    return handles.ProtectionDomain.adopt(context, pyverbs_bridge.pd_capsule(pd), pd)


def adopt_memory_region(pd: handles.ProtectionDomain, mr: "MR") -> handles.MemoryRegion:
    """Use an open `pyverbs.mr.MR` of an adopted protection domain, which the user continues to own and closes later.

    :returns: a memory region over it, which the caller destroys first.
    :raises TypeError: `mr` is something else.
    :raises ValueError: `mr` is closed or belongs to another protection domain.
    """
    return handles.MemoryRegion.adopt(pd, pyverbs_bridge.mr_capsule(mr), mr)
