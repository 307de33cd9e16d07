"""RDMA devices of this machine, and objects of pyverbs on them, which a user may have."""

import errno
from typing import TYPE_CHECKING

from aioverbs._core.handles import handles
from aioverbs._providers import sysfs
from aioverbs.errors import DeviceNotFoundError, VerbsError
from aioverbs.gid_selection import Gid
from aioverbs.types import GidType

if TYPE_CHECKING:
    from pyverbs.device import Context as PyverbsContext
    from pyverbs.mr import MR
    from pyverbs.pd import PD

__all__ = ["adopt_context", "adopt_memory_region", "adopt_protection_domain", "gid_table", "names", "open_context"]


def names() -> list[str]:
    """Return the names of the RDMA devices for which libibverbs has a provider: ``ibv_get_device_list``.

    :returns: the names; an empty list also if the kernel's RDMA modules are not loaded.
    :raises LibraryNotFoundError: libibverbs is not installed.
    :raises VerbsError: the verb failed.
    """
    try:
        return handles.device_names()
    except VerbsError as error:
        if error.errno == errno.ENOSYS:  # the kernel's modules are not loaded
            return []
        raise


def open_context(name: str) -> handles.Context:
    """Open an RDMA device: ``ibv_open_device``.

    :returns: the open context, which the caller destroys.
    :raises DeviceNotFoundError: there is no device of that name.
    :raises LibraryNotFoundError: libibverbs is not installed.
    :raises VerbsError: the device cannot be opened; with EACCES if its device file cannot.
    """
    try:
        return handles.Context.open_device(name)
    except VerbsError as error:
        if error.errno == errno.ENOSYS:  # as for `names`
            raise DeviceNotFoundError(name) from error
        if (node := sysfs.device_nodes().get(name)) is not None:
            sysfs.check_node(error.verb, node)
        raise


def gid_table(context: handles.Context, port: int) -> list[Gid]:
    """Return the GIDs of a port with their indexes and types: ``ibv_query_gid_table``.

    The kernel's files have the table as well, for versions of libibverbs that lack the verb.

    :raises VerbsError: the verb failed.
    """
    ports = range(1, context.attributes.phys_port_cnt + 1)
    max_entries = sum(context.query_port(each).gid_tbl_len for each in ports)
    try:
        found = context.query_gid_table(max_entries)
    except VerbsError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return sysfs.gid_table(context.name, port)
    return [Gid(index, gid, GidType(kind)) for number, index, gid, kind in found if number == port]


def adopt_context(context: "PyverbsContext") -> handles.Context:
    """Use an open `pyverbs.device.Context`, which the user continues to own and closes later.

    :returns: a context over it, which the caller destroys first.
    :raises TypeError: `context` is something else.
    :raises ValueError: `context` is closed.
    :raises LibraryNotFoundError: libibverbs is not installed.
    :raises RuntimeError: this version of pyverbs uses another object layout.
    """
    from aioverbs._core.handles import pyverbs_bridge

    return handles.Context.adopt(pyverbs_bridge.context_capsule(context), context)


def adopt_protection_domain(context: handles.Context, pd: "PD") -> handles.ProtectionDomain:
    """Use an open `pyverbs.pd.PD` of an adopted context, which the user continues to own and closes later.

    :returns: a protection domain over it, which the caller destroys first.
    :raises TypeError: `pd` is something else, or is a parent domain.
    :raises ValueError: `pd` is closed or belongs to another context.
    :raises RuntimeError: this version of pyverbs uses another object layout.
    """
    from aioverbs._core.handles import pyverbs_bridge

    return handles.ProtectionDomain.adopt(context, pyverbs_bridge.pd_capsule(pd), pd)


def adopt_memory_region(pd: handles.ProtectionDomain, mr: "MR") -> handles.MemoryRegion:
    """Use an open `pyverbs.mr.MR` of an adopted protection domain, which the user continues to own and closes later.

    :returns: a memory region over it, which the caller destroys first.
    :raises TypeError: `mr` is something else.
    :raises ValueError: `mr` is closed or belongs to another protection domain.
    :raises RuntimeError: this version of pyverbs uses another object layout.
    """
    from aioverbs._core.handles import pyverbs_bridge

    return handles.MemoryRegion.adopt(pd, pyverbs_bridge.mr_capsule(mr), mr)
