"""RDMA devices that the kernel knows, and their device files, read from sysfs without any library."""

import contextlib
import errno
import os
from pathlib import Path

from aioverbs.errors import VerbsError
from aioverbs.gid_selection import Gid
from aioverbs.types import GidType

__all__ = ["check_node", "device_nodes", "device_numbers", "gid_table", "kernel_devices", "try_open"]

_FOLDER = Path("/sys/class/infiniband")


def kernel_devices() -> list[str]:
    """Return the names of the kernel's RDMA devices, sorted, whether or not this process can use them."""
    return sorted(path.name for path in _FOLDER.iterdir()) if _FOLDER.is_dir() else []


def device_nodes(root: Path = Path("/")) -> dict[str, Path]:
    """Return the path of the device file below /dev of each RDMA device that has one, by the name of the device.

    :param root: root folder of the file system.
    """
    nodes = {}
    for path in (root / "sys/class/infiniband_verbs").glob("*/ibdev"):
        with contextlib.suppress(OSError):  # the device was removed in between
            nodes[path.read_text().strip()] = root / "dev/infiniband" / path.parent.name
    return nodes


def device_numbers(root: Path = Path("/")) -> set[tuple[int, int]]:
    """Return the major and minor numbers of the device files by which programs send commands to RDMA devices.

    :param root: root folder of the file system.
    """
    numbers = set()
    for path in (root / "sys/class/infiniband_verbs").glob("*/dev"):
        with contextlib.suppress(OSError, ValueError):  # the device was removed in between
            major, minor = path.read_text().split(":")
            numbers.add((int(major), int(minor)))
    return numbers


def gid_table(name: str, port: int) -> list[Gid]:
    """Return the GIDs of a port with their indexes and types.

    :param name: name of the device.
    :param port: number of the port.
    :raises VerbsError: the device or the port does not exist.
    """
    folder = _FOLDER / name / "ports" / str(port)
    try:
        roce_v1 = (folder / "link_layer").read_text().strip() == "Ethernet"
        indexes = sorted(int(path.name) for path in (folder / "gids").iterdir())
    except OSError as error:
        raise VerbsError("ibv_query_gid_table", error.errno or errno.EIO) from error
    found = []
    for index in indexes:
        with contextlib.suppress(OSError):  # an empty entry has no type, and of some drivers no GID
            gid = bytes.fromhex((folder / "gids" / str(index)).read_text().replace(":", ""))
            kind = (folder / "gid_attrs/types" / str(index)).read_text().strip()
            known = GidType.ROCE_V2 if kind == "RoCE v2" else GidType.ROCE_V1 if roce_v1 else GidType.IB
            found.append(Gid(index, gid, known))
    return [each for each in found if any(each.gid)]


def try_open(path: Path) -> int:
    """Open and close a device file, and return the error number, such as EACCES; 0 on success."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def check_node(verb: str, node: Path) -> None:
    """Check that a device file can be opened, after a verb that opens it has failed.

    The libraries of rdma-core search for the file elsewhere if it cannot be opened, and report the result of that
    search: ENOENT, even if the process lacks the permission to open the file.

    :param verb: name of the verb, for the error.
    :param node: device file.
    :raises VerbsError: the file exists and cannot be opened, for example with EACCES.
    """
    number = try_open(node)
    if number not in (0, errno.ENOENT):
        raise VerbsError(
            verb, number, f"this process cannot open {node}: check its permissions and run `aioverbs doctor`"
        )
