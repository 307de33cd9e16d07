"""The RDMA devices that the kernel knows, and the files by which programs reach them; no library need be asked."""

import contextlib
import errno
import os
from pathlib import Path

from aioverbs.errors import VerbsError

__all__ = ["check_node", "device_nodes", "device_numbers", "kernel_devices", "try_open"]

_FOLDER = Path("/sys/class/infiniband")


def kernel_devices() -> list[str]:
    """Their names, whether or not a program can use them."""
    return sorted(path.name for path in _FOLDER.iterdir()) if _FOLDER.is_dir() else []


def device_nodes(root: Path = Path("/")) -> dict[str, Path]:
    """The file below /dev of each device, by the device's name, where the kernel offers one.

    :param root: where the machine's files are.
    """
    nodes = {}
    for path in (root / "sys/class/infiniband_verbs").glob("*/ibdev"):
        with contextlib.suppress(OSError):  # it went meanwhile
            nodes[path.read_text().strip()] = root / "dev/infiniband" / path.parent.name
    return nodes


def device_numbers(root: Path = Path("/")) -> set[tuple[int, int]]:
    """Major and minor numbers of the files by which programs send commands to RDMA devices.

    :param root: where the machine's files are.
    """
    numbers = set()
    for path in (root / "sys/class/infiniband_verbs").glob("*/dev"):
        with contextlib.suppress(OSError):  # it went meanwhile
            major, minor = path.read_text().split(":")
            numbers.add((int(major), int(minor)))
    return numbers


def try_open(path: Path) -> int:
    """The error number of opening a device's file, 0 where that works."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def check_node(verb: str, node: Path) -> None:
    """See that a device's file opens, after a verb that opens it failed.

    The libraries of rdma-core look for a file elsewhere when it does not open, and report how that search ended:
    ENOENT, even where the process may not open the file.

    :param verb: the verb's name, for the error.
    :raises VerbsError: the file is there and does not open, as with EACCES.
    """
    number = try_open(node)
    if number not in (0, errno.ENOENT):
        raise VerbsError(
            verb, number, f"{node} does not open for this process: see its permissions and `aioverbs doctor`"
        )
