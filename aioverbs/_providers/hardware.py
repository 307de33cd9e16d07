"""RDMA devices of this machine, and handles of pyverbs objects that a user has created on them."""

import errno
import os
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

__all__ = [
    "adopt_context",
    "adopt_memory_region",
    "adopt_protection_domain",
    "gid_table",
    "listed",
    "names",
    "open_context",
]

_KINDS = frozenset(GidType)
_MOST_ENTRIES = 0xFFFF // 32  # GIDs in one answer of the kernel, whose length has 16 bits


def names() -> list[str]:
    """Return the names of the RDMA devices of this machine: those of `listed`, then the other devices that the kernel
    knows. `open_context` says why one of those cannot be used.

    :returns: a new list; empty if there is no device or the kernel's RDMA modules are not loaded.
    :raises LibraryNotFoundError: libibverbs cannot be loaded, or lacks a verb.
    :raises VerbsError: the verb that lists the devices failed for another reason.
    """
    found = listed()
    return [*found, *(name for name in sysfs.kernel_devices() if name not in found)]


def listed() -> list[str]:
    """Return the names of the RDMA devices for which libibverbs has a provider (``ibv_get_device_list``).

    :returns: a new list; empty if there is no such device or the kernel's RDMA modules are not loaded.
    :raises LibraryNotFoundError: libibverbs cannot be loaded, or lacks a verb.
    :raises VerbsError: the verb failed for another reason, for example with EMFILE because no descriptor is left.
    """
    try:
        return handles.device_names()
    except VerbsError as error:
        if error.errno == errno.ENOSYS:  # of any failure to look for devices
            sysfs.check_list(error.verb)
            return []
        raise


def open_context(name: str) -> handles.Context:
    """Open an RDMA device (``ibv_open_device``).

    :param name: name of the device, such as ``"mlx5_0"``.
    :returns: a new handle of the open context, which the caller destroys.
    :raises DeviceNotFoundError: there is no RDMA device with that name.
    :raises LibraryNotFoundError: libibverbs cannot be loaded, or lacks a verb.
    :raises VerbsError: the device cannot be opened. If its device file exists and cannot be opened, this has the errno
        of that, for example EACCES, EPERM or EMFILE. With ENODEV if the kernel has the device and libibverbs does not
        list it.
    """
    try:
        return handles.Context.open_device(name)
    except DeviceNotFoundError:
        if name in sysfs.kernel_devices():
            raise VerbsError("ibv_open_device", errno.ENODEV, _unlisted(name)) from None
        raise
    except VerbsError as error:
        if error.errno == errno.ENOSYS:  # as for `listed`
            sysfs.check_list(error.verb)
            raise DeviceNotFoundError(name) from error
        if (node := sysfs.device_nodes().get(name)) is not None:
            sysfs.check_node(error.verb, node)
        raise


def _unlisted(name: str) -> str:
    """Return advice about a device that the kernel has and libibverbs does not list.

    libibverbs leaves out a device without a device file, and a device for which it finds no provider.
    """
    node = sysfs.device_nodes().get(name)
    if node is None:
        todo = "load the kernel module ib_uverbs"
    elif not os.path.exists(node):
        todo = f"its device file {node} is missing, which a container must be given"
    else:
        todo = (
            "its provider is missing or of another version: install ibverbs-providers (Debian, Ubuntu) or libibverbs"
            " (Fedora, RHEL)"
        )
    return f"the kernel has {name}, but libibverbs does not list it: {todo}; run `aioverbs doctor`"


def gid_table(context: handles.Context, port: int) -> list[Gid]:
    """Return the GIDs of a port with their indexes and types (``ibv_query_gid_table``). If libibverbs lacks this verb,
    or the tables of all ports together are too long for it, read them from the kernel's files.

    :param context: context of an RDMA device.
    :param port: number of a port that the device has.
    :returns: a new list of `Gid`, without empty entries and entries of a type that `GidType` lacks.
    :raises VerbsError: the verb or the query for the size of a port's table failed, or the kernel's files cannot be
        read.
    :raises ClosedResourceError: the context is closed.
    """
    ports = range(1, context.attributes.phys_port_cnt + 1)
    max_entries = sum(context.query_port(each).gid_tbl_len for each in ports)
    if not max_entries:  # the kernel refuses to read nothing
        return []
    try:
        found = context.query_gid_table(max_entries)
    except VerbsError as error:
        if error.errno != errno.EOPNOTSUPP and not (error.errno == errno.EINVAL and max_entries > _MOST_ENTRIES):
            raise
        return sysfs.gid_table(context.name, port)
    return [Gid(index, gid, GidType(kind)) for number, index, gid, kind in found if number == port and kind in _KINDS]


def adopt_context(context: "PyverbsContext") -> handles.Context:
    """Return a handle of an open `pyverbs.device.Context`.

    The user still owns `context` and closes it later.

    :param context: the pyverbs context.
    :returns: a new handle, which the caller destroys before the user closes `context`.
    :raises TypeError: `context` is not a `pyverbs.device.Context`.
    :raises ValueError: `context` is closed.
    :raises LibraryNotFoundError: libibverbs cannot be loaded, or lacks a verb.
    :raises RuntimeError: the object layout of this version of pyverbs is unknown, or the object contains an
        unexpected pointer.
    """
    from aioverbs._core.handles import pyverbs_bridge

    return handles.Context.adopt(pyverbs_bridge.context_capsule(context), context)


def adopt_protection_domain(context: handles.Context, pd: "PD") -> handles.ProtectionDomain:
    """Return a handle of an open `pyverbs.pd.PD` of an adopted context.

    The user still owns `pd` and closes it later.

    :param context: handle of the adopted context.
    :param pd: the pyverbs protection domain.
    :returns: a new handle, which the caller destroys before the user closes `pd`.
    :raises TypeError: `pd` is not a `pyverbs.pd.PD`, or is a parent domain.
    :raises ValueError: `pd` is closed or does not belong to `context`.
    :raises RuntimeError: the object layout of this version of pyverbs is unknown, or the object contains an
        unexpected pointer.
    :raises ClosedResourceError: `context` is closed.
    """
    from aioverbs._core.handles import pyverbs_bridge

    return handles.ProtectionDomain.adopt(context, pyverbs_bridge.pd_capsule(pd), pd)


def adopt_memory_region(pd: handles.ProtectionDomain, mr: "MR") -> handles.MemoryRegion:
    """Return a handle of an open `pyverbs.mr.MR` of an adopted protection domain.

    The user still owns `mr` and closes it later.

    :param pd: handle of the adopted protection domain.
    :param mr: the pyverbs memory region.
    :returns: a new handle, which the caller destroys before the user closes `mr`.
    :raises TypeError: `mr` is not a `pyverbs.mr.MR`.
    :raises ValueError: `mr` is closed or does not belong to `pd`.
    :raises RuntimeError: the object layout of this version of pyverbs is unknown, or the object contains an
        unexpected pointer.
    :raises ClosedResourceError: `pd` is closed.
    """
    from aioverbs._core.handles import pyverbs_bridge

    return handles.MemoryRegion.adopt(pd, pyverbs_bridge.mr_capsule(mr), mr)
