"""The RDMA devices that the kernel knows, which no library need be asked for."""

from pathlib import Path

__all__ = ["kernel_devices"]

_FOLDER = Path("/sys/class/infiniband")


def kernel_devices() -> list[str]:
    """Their names, whether or not a program can use them."""
    return sorted(path.name for path in _FOLDER.iterdir()) if _FOLDER.is_dir() else []
