"""RDMA devices that the kernel knows, and their device files, read from sysfs without any library."""

import contextlib
import errno
import os
from pathlib import Path

from aioverbs.errors import VerbsError

__all__ = ["check_node", "device_nodes", "device_numbers", "kernel_devices", "try_open"]

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
