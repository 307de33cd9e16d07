"""Packages of Debian or Ubuntu that the host needs to boot the virtual machine.

The guest has no system of its own: it uses the host's root. So programs that run in the guest, such as libibverbs and
its providers, are installed on the host.
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
    """Install missing packages of `PACKAGES` if this is root, else raise an error with the command.

    Raises:

            VmError: this machine has another architecture.
            PackageError: a package is missing and could not be installed.
    """
    if platform.machine() != "x86_64":
        raise VmError(
            Failure.NOT_PREPARED,
            f"the virtual machine is x86_64 and shares its host's root; this is an {platform.machine()} host",
        )
    install_missing(PACKAGES)
