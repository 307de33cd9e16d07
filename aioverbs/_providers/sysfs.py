"""RDMA devices that the kernel knows, and their device files, read from sysfs without any library."""

import contextlib
import errno
import ipaddress
import os
from pathlib import Path

from aioverbs.errors import VerbsError
from aioverbs.gid_selection import Gid
from aioverbs.types import GidType

__all__ = [
    "check_list", "check_node", "device_nodes", "device_numbers", "gid_table", "kernel_devices", "port_gids",
    "try_open",
]  # fmt: skip

_FOLDER = Path("/sys/class/infiniband")
_VERBS_FOLDER = Path("/sys/class/infiniband_verbs")
_LIST_ADVICE = {
    errno.EACCES: f"this process may not read {_VERBS_FOLDER}: run `aioverbs doctor`",
    errno.ENOENT: f"{_VERBS_FOLDER}/abi_version is missing: load the kernel module ib_uverbs, and in a container do not"
    " hide /sys",
    errno.ENOSYS: "the kernel's interface for verbs does not fit this libibverbs: use a newer one, and run `aioverbs"
    " doctor`",
}


def kernel_devices() -> list[str]:
    """Return a sorted list of the names of all RDMA devices that the kernel knows, including devices that this process
    cannot use; an empty list if the kernel's RDMA modules are not loaded.

    :raises VerbsError: as for `device_nodes`.
    """
    return _entries(_FOLDER)


def _entries(folder: Path) -> list[str]:
    """Return a sorted list of the names in a folder of sysfs; an empty list if the folder does not exist.

    :raises VerbsError: the folder cannot be listed.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise VerbsError("ibv_get_device_list", error.errno or errno.EIO) from error


def check_list(verb: str) -> None:
    """Find out why libibverbs could not look for devices. This is called after a verb that looks for them has failed
    with ENOSYS, which libibverbs reports for every failure to read the kernel's files.

    Nothing is raised if the kernel's RDMA modules are not loaded, so that there is no device.

    :param verb: name of the verb, for the error.
    :raises VerbsError: the modules are loaded; with the errno of reading the kernel's files, for example EMFILE or
        EACCES, or with ENOSYS if they can be read.
    """
    number = errno.ENOSYS
    try:
        os.listdir(_VERBS_FOLDER)
    except FileNotFoundError:
        return
    except OSError as error:
        number = error.errno or errno.EIO
    else:
        try:
            (_VERBS_FOLDER / "abi_version").read_bytes()
        except OSError as error:
            number = error.errno or errno.EIO
    raise VerbsError(verb, number, _LIST_ADVICE.get(number))


def device_nodes(root: Path = Path("/")) -> dict[str, Path]:
    """Return the device files of the RDMA devices: a dict with the name of each device as key and the path of its file
    below `root`, such as /dev/infiniband/uverbs0, as value.

    Devices without a device file are left out. The file may be missing or inaccessible here, as in a container.

    :param root: root directory of the file system, in which sys and dev are looked up.
    :raises VerbsError: the folder of the devices cannot be listed, for example with EMFILE. The error names
        ``ibv_get_device_list``.
    """
    nodes = {}
    folder = root / "sys/class/infiniband_verbs"
    for name in _entries(folder):
        with contextlib.suppress(OSError):  # not a device, or removed in between
            nodes[os.fsdecode((folder / name / "ibdev").read_bytes().strip())] = root / "dev/infiniband" / name
    return nodes


def device_numbers(root: Path = Path("/")) -> set[tuple[int, int]]:
    """Return a set of device numbers, pairs of major and minor number: those of the device files through which programs
    send commands to RDMA devices.

    :param root: root directory of the file system, in which sys is looked up.
    :raises VerbsError: as for `device_nodes`.
    """
    numbers = set()
    folder = root / "sys/class/infiniband_verbs"
    for name in _entries(folder):
        with contextlib.suppress(OSError, ValueError):  # not a device, or removed in between
            major, minor = (folder / name / "dev").read_text().split(":")
            numbers.add((int(major), int(minor)))
    return numbers


def gid_table(name: str, port: int) -> list[Gid]:
    """Return the GIDs of a port with their indexes and types, as ``ibv_query_gid_table`` does.

    :param name: name of the device.
    :param port: number of the port, from 1.
    :returns: a list of `Gid`, sorted by index, without the entries that are empty or cannot be read.
    :raises VerbsError: the kernel's files about the port cannot be read; with ENOENT if there is no such device or
        port. The error names ``ibv_query_gid_table``.
    """
    folder = _FOLDER / name / "ports" / str(port)
    try:
        default = GidType.ROCE_V1 if (folder / "link_layer").read_text().strip() == "Ethernet" else GidType.IB
        gids = port_gids(folder)
    except OSError as error:
        raise VerbsError("ibv_query_gid_table", error.errno or errno.EIO) from error
    return [Gid(index, gid, GidType.ROCE_V2 if kind == "RoCE v2" else default) for index, gid, kind in gids]


def port_gids(folder: Path) -> list[tuple[int, bytes, str]]:
    """Return the GIDs of a port, without the entries of its table that are empty or cannot be read.

    :param folder: folder of the port in sysfs.
    :returns: a list of tuples, sorted by the first element: the index of a GID, its 16 bytes, and its type in the
        kernel's notation, such as ``"RoCE v2"``. The type is empty for ports of older kernels, and for InfiniBand ports
        of kernels that fail with EINVAL.
    :raises OSError: the table cannot be listed, for example because there is no such port.
    """
    found = []
    for index in sorted(int(each) for each in os.listdir(folder / "gids") if each.isdecimal()):
        with contextlib.suppress(OSError, ValueError):  # some drivers have no GID in an empty entry
            gid = ipaddress.IPv6Address((folder / "gids" / str(index)).read_text().strip()).packed
            if any(gid):
                found.append((index, gid, _gid_type(folder / "gid_attrs/types" / str(index))))
    return found


def _gid_type(path: Path) -> str:
    """Return the type of a GID, from the kernel's file about it; an empty string if the kernel does not tell it."""
    try:
        return path.read_text().strip()
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        return ""


def try_open(path: Path) -> int:
    """Try to open the device file `path` for reading and writing, and close it again. Return 0 if it could be opened,
    otherwise the errno, such as EACCES.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def check_node(verb: str, node: Path) -> None:
    """Check that a device file can be opened. This is called after a verb that opens the file has failed, because the
    errno of the verb may be misleading.

    If the file cannot be opened, the libraries of rdma-core search for it elsewhere and report the result of that
    search: ENOENT, even if this process only lacks the permission to open the file. Nothing is raised if the file can
    be opened or does not exist.

    :param verb: name of the verb, for the error.
    :param node: path of the device file.
    :raises VerbsError: the file exists but cannot be opened; with the errno of that, for example EACCES, EPERM
        or EMFILE.
    """
    number = try_open(node)
    if number in (errno.EACCES, errno.EPERM):
        advice = f"this process may not open {node}: check its permissions and run `aioverbs doctor`"
        raise VerbsError(verb, number, advice)
    if number not in (0, errno.ENOENT):
        raise VerbsError(verb, number)
