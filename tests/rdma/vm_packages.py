"""What the host must have before it can boot the virtual machine: Debian or Ubuntu packages.

The guest has no system of its own, it sees the host's root. So what runs inside, such as
libibverbs and its providers, is installed on the host.
"""

import platform

from tests.debian import install_missing
from tests.rdma.vm_errors import Failure, VmError

PACKAGES = (
    "busybox-static",
    "cpio",
    "e2fsprogs",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "kmod",
    "libibverbs1",
    "librdmacm1",
    "python3-pyverbs",
    "qemu-system-x86",
    "rdma-core",
    "rdmacm-utils",
    "zstd",
)


def ensure_packages() -> None:
    """Install what is missing of `PACKAGES` when this is root, else say how to.

    Raises:
        VmError: this machine is of another architecture.
        PackageError: something is missing and could not be installed.
    """
    if platform.machine() != "x86_64":
        raise VmError(
            Failure.NOT_PREPARED,
            f"the virtual machine is x86_64 and shares its host's root; this is an {platform.machine()} host",
        )
    install_missing(PACKAGES)
