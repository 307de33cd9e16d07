"""What the host must have before it can boot the virtual machine: Debian or Ubuntu packages.

The guest has no system of its own, it sees the host's root. So what runs inside, such as
libibverbs and its providers, is installed on the host.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

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
APT_LIMIT_S = 600


def ensure_packages() -> None:
    """Install what is missing of `PACKAGES` when this is root, else say how to.

    Raises:
        VmError: something is missing and could not be installed.
    """
    if platform.machine() != "x86_64":
        raise VmError(
            Failure.NOT_PREPARED,
            f"the virtual machine is x86_64 and shares its host's root; this is an {platform.machine()} host",
        )
    if shutil.which("dpkg-query") is None or shutil.which("apt-get") is None:
        raise VmError(
            Failure.NOT_PREPARED,
            "this needs Debian 12 or Ubuntu 24.04: it takes a kernel and rdma-core from apt",
        )
    missing = _missing()
    if not missing:
        return
    install = ("install", "-y", "--no-install-recommends", *missing)
    if os.geteuid() != 0:
        line = f"sudo apt-get update && sudo apt-get {' '.join(install)}"
        raise VmError(Failure.NOT_PREPARED, f"packages are missing; install them with\n    {line}")
    print(f"vm: installing {' '.join(missing)}", file=sys.stderr, flush=True)
    try:
        apt_get(*install)
    except VmError:
        apt_get("update")
        apt_get(*install)


def apt_get(*arguments: str, cwd: Path | None = None) -> None:
    """Run `apt-get`, asking nothing, for a limited time.

    It fails on a machine whose package lists are old or absent; who calls it updates them then
    and tries again, which costs nothing where they are fine.

    Arguments:
        arguments: what follows `apt-get`.
        cwd: the directory to run in; `apt-get download` writes there.

    Raises:
        VmError: it failed, or did not end in time.
    """
    command = " ".join(("apt-get", *arguments))
    try:
        done = subprocess.run(
            ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", *arguments),
            cwd=cwd,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=APT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{command} did not end within {APT_LIMIT_S} s"
        raise VmError(Failure.NOT_PREPARED, message) from error
    if done.returncode != 0:
        raise VmError(Failure.NOT_PREPARED, f"{command} failed:\n{done.stdout}")


def _missing() -> list[str]:
    query = subprocess.run(
        ("dpkg-query", "-W", "-f", "${Package} ${Status}\n", *PACKAGES),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    status = dict(line.split(" ", 1) for line in query.stdout.splitlines())
    return [name for name in PACKAGES if status.get(name) != "install ok installed"]
