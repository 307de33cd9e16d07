"""PURE: find problems with a machine's RDMA devices, and the commands that fix the problems."""

import enum
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from aioverbs.cli.machine import Device, Machine, Port, Trial

__all__ = ["Diagnosis", "Finding", "Severity", "diagnose"]

_ENOUGH_MEMLOCK = 64 << 20  # bytes; enough for a few queues and buffers
# Packages by library and package manager. Those of libibverbs include its providers.
_PACKAGES = {
    "libibverbs": {"apt-get": "libibverbs1 ibverbs-providers", "dnf": "libibverbs"},
    "librdmacm": {"apt-get": "librdmacm1", "dnf": "librdmacm"},
    "opensm": {"apt-get": "opensm", "dnf": "opensm"},
}
_INSTALL = {"apt-get": "sudo apt-get install", "dnf": "sudo dnf install"}
_REINSTALL = {"apt-get": "sudo apt-get install --reinstall", "dnf": "sudo dnf reinstall"}
_FAMILIES = {"apt-get": "Debian, Ubuntu", "dnf": "Fedora, RHEL"}
_TOO_OLD = "is older than rdma-core 44"
_NEWER = "use a newer release of the distribution, or remove an old copy that hides the distribution's own"


class Severity(enum.Enum):
    """Severity of a finding: an ERROR makes its subject unusable, a WARNING does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """A problem with a device or the whole system. Created by `diagnose`.

    :param code: stable name of the kind of problem.
    :param severity: whether the problem makes the subject unusable.
    :param subject: name of the affected device, ``"soft0"`` for the software device, or ``"system"``.
    :param message: description of the problem and its effect.
    :param commands: shell commands that fix the problem.
    :param hint: further advice; None if there is none.
    """

    code: str
    severity: Severity
    subject: str
    message: str
    commands: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and which RDMA devices are usable. Created by `diagnose`.

    :param findings: the problems, in the order in which to fix them.
    :param usable: names of the RDMA devices without an error; empty if there is an error about ``"system"``.
    :param unusable: names of the other RDMA devices.
    """

    findings: tuple[Finding, ...]
    usable: tuple[str, ...]
    unusable: tuple[str, ...]


def _error(code: str, subject: str, message: str, *commands: str, hint: str | None = None) -> Finding:
    """Return a `Finding` of severity ERROR: a problem that makes ``subject`` unusable.

    :param commands: shell commands that fix the problem.
    :param hint: further advice; None if there is none.
    """
    return Finding(code, Severity.ERROR, subject, message, commands, hint)


def _warning(code: str, subject: str, message: str, *commands: str, hint: str | None = None) -> Finding:
    """Return a `Finding` of severity WARNING about ``subject``, which is usable in spite of it.

    :param commands: shell commands that fix the problem.
    :param hint: further advice; None if there is none.
    """
    return Finding(code, Severity.WARNING, subject, message, commands, hint)


def diagnose(machine: Machine) -> Diagnosis:
    """Find problems with the machine's RDMA devices, its software device and its libraries.

    :param machine: data about the machine, from `inspect_machine`.
    :returns: a `Diagnosis`: the findings in the order in which to fix them, and the names of the usable and unusable
        RDMA devices. If there is an error about ``"system"``, all RDMA devices are unusable.
    """
    system = [
        *_software(machine),
        *_hardware(machine),
        *_limits(machine),
        *_connection_manager(machine),
        *_optimization(machine),
    ]
    broken = any(finding.severity is Severity.ERROR for finding in system)
    findings = [*system, *_software_device(machine)]
    usable: list[str] = []
    unusable: list[str] = []
    for device in machine.devices:
        found = list(_device(machine, device))
        findings += found
        bad = broken or any(finding.severity is Severity.ERROR for finding in found)
        (unusable if bad else usable).append(device.name)
    return Diagnosis(tuple(findings), tuple(usable), tuple(unusable))


# ---- Libraries


def _install(machine: Machine, library: str, commands: dict[str, str] = _INSTALL) -> tuple[str, ...]:
    """Return the shell command that installs the packages of ``library``, in a tuple. If the machine's package manager
    is unknown, the tuple has one command for each package manager, with the names of its distributions as a comment.

    :param commands: beginning of the command, by package manager.
    """
    packages = _PACKAGES[library]
    if machine.package_manager is not None:
        return (f"{commands[machine.package_manager]} {packages[machine.package_manager]}",)
    return tuple(f"{commands[each]} {packages[each]}  # {_FAMILIES[each]}" for each in packages)


def _software(machine: Machine) -> Iterator[Finding]:
    """Yield one `Finding` of severity ERROR if aioverbs is broken or the probe process crashed, or if libibverbs is too
    old, cannot be loaded or cannot list the devices; otherwise nothing.
    """
    libibverbs = machine.probe.libibverbs
    details = "".join(f"; its last line: {line}" for line in machine.probe.warnings[-1:])
    if machine.probe.broken:
        yield _error(
            "aioverbs-broken",
            "system",
            f"aioverbs itself does not work: the process that tests libibverbs {machine.probe.crash}{details}",
            "pip install --force-reinstall --no-deps aioverbs",
        )
    elif machine.probe.crash is not None:
        yield _error(
            "libraries-crash",
            "system",
            f"the process that tests libibverbs {machine.probe.crash}{details}",
            *_install(machine, "libibverbs", _REINSTALL),
        )
    elif libibverbs.outdated:
        message = f"{libibverbs.path or 'libibverbs'}, which drives all RDMA devices, {_TOO_OLD}: {libibverbs.problem}"
        yield _error("libibverbs-old", "system", message, hint=_NEWER)
    elif libibverbs.problem is not None:
        yield _error(
            "libibverbs-missing",
            "system",
            f"libibverbs, which drives all RDMA devices, cannot be loaded: {libibverbs.problem}",
            *_install(machine, "libibverbs"),
        )
    elif machine.probe.list_problem is not None:
        yield _error(
            "list",
            "system",
            f"libibverbs cannot list the RDMA devices: {machine.probe.list_problem}",
            "strace -f -e trace=openat,socket aioverbs devices",
            hint="the last call before the error tells what the system refuses; in a container, its security profile"
            " may do so",
        )


# ---- Kernel


def _hardware(machine: Machine) -> Iterator[Finding]:
    """Yield one `Finding` of severity ERROR if the kernel has no RDMA device, with commands or advice to get one;
    otherwise nothing.
    """
    names = {device.name for device in machine.devices}
    if names:
        return
    unloaded = [module for module in machine.hardware if module not in machine.modules]
    if unloaded:
        yield _error(
            "no-module",
            "system",
            f"there is RDMA hardware, but its kernel module is not loaded: {', '.join(unloaded)}",
            *(f"sudo modprobe {module}" for module in unloaded),
            *(["sudo modprobe ib_uverbs"] if "ib_uverbs" not in machine.modules else []),
        )
    elif machine.container:
        yield _error(
            "no-device",
            "system",
            "this is a container without an RDMA device",
            "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 …",
            hint="the container's host must have an RDMA device",
        )
    elif "rdma_rxe" in machine.modules or machine.loadable is None or "rdma_rxe" in machine.loadable:
        interface = next(iter(machine.interfaces), "eth0")
        yield _error(
            "no-device",
            "system",
            "there is no RDMA hardware, and no soft-RoCE device (RDMA over any network interface)",
            "sudo modprobe rdma_rxe",
            f"sudo rdma link add rxe0 type rxe netdev {interface}",
        )
    else:
        yield _error(
            "no-device",
            "system",
            f"there is no RDMA hardware, and this kernel ({machine.kernel}) has no module rdma_rxe for soft-RoCE",
            hint="a distribution's standard kernel has the module; kernels of container and cloud images often lack it",
        )


def _limits(machine: Machine) -> Iterator[Finding]:
    """Yield one `Finding` if the limit of locked memory is too low, otherwise nothing.

    Its severity is ERROR if the test of a device failed because of the limit; otherwise it is WARNING, if there is an
    RDMA device and the limit is below 64 MiB.
    """
    over_limit = [name for name, trial in machine.probe.trials.items() if _beyond_limit(machine, trial)]
    if machine.memlock is None:
        return
    commands = (
        "ulimit -l unlimited",
        "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf",
    )
    hint = "the first command is for this shell, if its hard limit allows that; the second for future logins"
    limit = f"a process of this user may lock only {machine.memlock >> 10} KiB of memory"
    if over_limit:
        message = f"{limit}, less than the test of {', '.join(over_limit)} registers"
        yield _error("memlock", "system", message, *commands, hint=hint)
    elif machine.devices and machine.memlock < _ENOUGH_MEMLOCK:
        message = (
            f"{limit}: registering {'more fails with ENOMEM' if machine.memlock else 'any memory fails with EPERM'}"
        )
        yield _warning("memlock", "system", message, *commands, hint=hint)


def _beyond_limit(machine: Machine, trial: Trial) -> bool:
    """Return whether the errno of a device's test shows that the test failed because of the limit of locked memory."""
    numbers = (errno.ENOMEM, errno.EPERM) if machine.memlock == 0 else (errno.ENOMEM,)
    return machine.memlock is not None and trial.number in numbers


def _optimization(machine: Machine) -> Iterator[Finding]:
    """Yield one `Finding` of severity WARNING if the compiled core was compiled without optimization; otherwise
    nothing.
    """
    if not machine.probe.optimized:
        yield _warning(
            "not-optimized",
            "system",
            "aioverbs was compiled without optimization and is several times slower; CFLAGS was probably set during "
            "the installation",
            "env -u CFLAGS pip install --force-reinstall --no-deps --no-binary aioverbs aioverbs",
            hint="or add -O3 to CFLAGS",
        )


def _connection_manager(machine: Machine) -> Iterator[Finding]:
    """Yield a `Finding` of severity WARNING if librdmacm is too old or cannot be loaded, and another one if its device
    file cannot be opened. Yield nothing if there is no RDMA device, or if the probe process crashed.
    """
    if not machine.devices or machine.probe.crash is not None:
        return
    librdmacm = machine.probe.librdmacm
    if librdmacm.outdated:
        message = f"{librdmacm.path or 'librdmacm'}, which connects by IP address, {_TOO_OLD}: {librdmacm.problem}"
        yield _warning("librdmacm-old", "system", message, hint=_NEWER)
    elif librdmacm.problem is not None:
        yield _warning(
            "librdmacm-missing",
            "system",
            f"librdmacm, which connects by IP address, cannot be loaded: {librdmacm.problem}",
            *_install(machine, "librdmacm"),
        )
    if machine.rdma_cm in (errno.ENOENT, errno.ENXIO, errno.ENODEV):
        yield _warning(
            "rdma-cm-missing",
            "system",
            "/dev/infiniband/rdma_cm, which librdmacm needs, does not exist",
            "sudo modprobe rdma_ucm",
        )
    elif machine.rdma_cm:
        yield _warning(
            "rdma-cm-permission",
            "system",
            f"/dev/infiniband/rdma_cm, which librdmacm needs, cannot be opened ({os.strerror(machine.rdma_cm)})",
            "sudo chmod 666 /dev/infiniband/rdma_cm",
        )


def _software_device(machine: Machine) -> Iterator[Finding]:
    """Check the environment variables of the software device: yield one `Finding` of severity ERROR if they are
    invalid, otherwise nothing.
    """
    if machine.soft_problem is None:
        return
    name = machine.soft_problem.partition(":")[0]
    other_directory = "export AIOVERBS_SOFT_DIRECTORY=/tmp/aioverbs-$(id -u)"
    yield _error(
        "soft-settings",
        "soft0",
        f"the software device cannot be opened: {machine.soft_problem}",
        f"unset {name}" if name.startswith("AIOVERBS_SOFT_") else other_directory,
        hint="or set the variable to a valid value",
    )


# ---- One device


def _device(machine: Machine, device: Device) -> Iterator[Finding]:
    """Yield a `Finding` for each problem with an RDMA device. Ports that are not active are reported only if the device
    has no active port.
    """
    yield from _device_node(machine, device)
    yield from _usability(machine, device)
    active = [port for port in device.ports if port.state == "ACTIVE"]
    if not active:
        yield from (_port(machine, device, port) for port in device.ports)
    for port in active:
        if port.link_layer == "Ethernet" and not any(_routable(gid.address) for gid in port.gids):
            yield _gid(device, port)


def _device_node(machine: Machine, device: Device) -> Iterator[Finding]:
    """Yield one `Finding` of severity ERROR if the kernel has no device file for the device, or if the file is missing
    or cannot be opened; otherwise nothing.
    """
    if device.node is None:
        yield _error(
            "no-uverbs",
            device.name,
            "programs cannot open the device: the kernel module ib_uverbs is not loaded",
            "sudo modprobe ib_uverbs",
        )
    elif device.open_errno == errno.ENOENT:
        command = f"docker run --device={device.node} …" if machine.container else "sudo udevadm trigger"
        yield _error("no-node", device.name, f"{device.node} does not exist", command)
    elif device.open_errno in (errno.EACCES, errno.EPERM):
        # A container may forbid an access that the file's mode permits.
        container_forbids = device.open_errno == errno.EPERM and machine.container
        command = f"docker run --device={device.node} …" if container_forbids else f"sudo chmod 666 {device.node}"
        rule = 'KERNEL=="uverbs*", MODE="0666"'
        yield _error(
            "permission",
            device.name,
            f"this user may not open {device.node} ({os.strerror(device.open_errno)})",
            command,
            hint=None
            if container_forbids
            else f"to keep it, add a udev rule: {rule} in /etc/udev/rules.d/90-rdma.rules",
        )
    elif device.open_errno:
        yield _error("node", device.name, f"{device.node} cannot be opened: {os.strerror(device.open_errno)}")


def _usability(machine: Machine, device: Device) -> Iterator[Finding]:
    """Yield one `Finding` of severity ERROR if libibverbs does not list the device, or if the device's test failed.

    Yield nothing otherwise, and if the reason is reported elsewhere: the device file is missing or cannot be opened,
    libibverbs cannot be loaded or cannot list the devices, the probe process crashed, or the limit of locked memory is
    too low.
    """
    probe = machine.probe
    is_known = probe.crash is None and probe.libibverbs.problem is None and probe.list_problem is None
    if device.node is None or device.open_errno or not is_known:
        return
    if device.name not in probe.listed:
        details = "".join(f"; libibverbs says: {line}" for line in probe.warnings)
        yield _error(
            "no-provider",
            device.name,
            "libibverbs has no provider for this device, a library such as libmlx5-rdmav34.so of the same version"
            f" (installed providers: {', '.join(machine.providers) or 'none'}){details}",
            *_install(machine, "libibverbs", _REINSTALL),
        )
        return
    trial = probe.trials.get(device.name)
    if trial is None or trial.problem is None or _beyond_limit(machine, trial):
        return
    yield _error("use", device.name, f"the device file can be opened, but a test of the device failed: {trial.problem}")


def _port(machine: Machine, device: Device, port: Port) -> Finding:
    """Return the `Finding` of severity ERROR for a port that is not active, with commands or advice to activate it."""
    state = f"port {port.number} is {port.state or 'in an unknown state'} ({port.physical or 'unknown link state'})"
    if port.link_layer == "InfiniBand" and port.physical == "LinkUp":
        return _error(
            "port",
            device.name,
            f"{state}: the port is waiting for a subnet manager",
            *_install(machine, "opensm"),
            hint="an InfiniBand subnet needs one subnet manager, on a switch or on one of the machines",
        )
    if port.physical == "Disabled" and port.netdev is not None:
        command = f"sudo ip link set {port.netdev} up"
        return _error("port", device.name, f"{state}: {port.netdev} is down", command)
    hint = "check the cable and the port at its other end"
    return _error("port", device.name, f"{state}: {port.netdev or 'the port'} has no link", hint=hint)


def _gid(device: Device, port: Port) -> Finding:
    """Return the `Finding` for an active Ethernet port that has no routable GID. Its severity is ERROR if the port has
    no GID at all, or if its GIDs need IPv6, which is disabled; otherwise WARNING.
    """
    interface = port.netdev or "DEVICE"
    command = f"sudo ip address add 192.0.2.1/24 dev {interface}"
    hint = "use an address of your network; each address gives the port a GID"
    if not port.gids:
        return _error(
            "no-gid", device.name, f"port {port.number} has no GID, which peers need to reach it", command, hint=hint
        )
    # The kernel resolves a RoCE v2 peer by IPv6. For RoCE v1 it derives the peer's MAC address from the GID.
    if not port.ipv6 and any(gid.kind == "RoCE v2" for gid in port.gids):
        return _error(
            "no-ip-gid",
            device.name,
            f"port {port.number} has only link-local GIDs: reaching a peer from these needs IPv6, which is disabled on"
            f" {interface}",
            command,
            hint=hint,
        )
    return _warning(
        "no-ip-gid",
        device.name,
        f"port {port.number} has only link-local GIDs: routers do not forward packets to these",
        command,
        hint=hint,
    )


def _routable(gid: str) -> bool:
    """Return True if ``gid``, in the kernel's notation, is not link-local; otherwise False."""
    return not gid.startswith("fe80")
