"""PURE: what is wrong with a machine's RDMA devices, and what mends it."""

import enum
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from aioverbs.cli.machine import Device, Library, Machine, Port, Trial

__all__ = ["Diagnosis", "Finding", "Severity", "diagnose"]

_ENOUGH_LOCKED = 64 << 20  # bytes; what a few queues and buffers take
_PACKAGES = "sudo apt-get install {}"
_PRIVATE = re.compile(r"IBVERBS_PRIVATE|undefined symbol|version `")


class Severity(enum.Enum):
    """Whether something cannot be used because of it."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    :param code: a name for it that stays.
    :param subject: the device that it is about, ``"soft0"`` for the software device, or ``"system"``.
    :param message: what is so, and why that matters.
    :param commands: what mends it, to be typed.
    :param hint: what else there is to say of mending it.
    """

    code: str
    severity: Severity
    subject: str
    message: str
    commands: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    :param usable: the RDMA devices that nothing stands against.
    :param unusable: the others.
    """

    findings: tuple[Finding, ...]
    usable: tuple[str, ...]
    unusable: tuple[str, ...]


def _error(code: str, subject: str, message: str, *commands: str, hint: str | None = None) -> Finding:
    return Finding(code, Severity.ERROR, subject, message, commands, hint)


def _warning(code: str, subject: str, message: str, *commands: str, hint: str | None = None) -> Finding:
    return Finding(code, Severity.WARNING, subject, message, commands, hint)


def diagnose(machine: Machine) -> Diagnosis:
    """Find what is wrong, what is to be mended first first."""
    system = [*_software(machine), *_hardware(machine), *_limits(machine), *_connecting(machine), *_build(machine)]
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


def _software(machine: Machine) -> Iterator[Finding]:
    if machine.probe.crash is not None:
        told = "".join(f"; it said: {line}" for line in machine.probe.warnings[-1:])
        yield _error(
            "libraries-crash",
            "system",
            f"a process that tried libibverbs and pyverbs {machine.probe.crash}{told}",
            _PACKAGES.format("--reinstall libibverbs1 ibverbs-providers python3-pyverbs"),
        )
        return
    libibverbs, pyverbs = machine.probe.libibverbs, machine.probe.pyverbs
    if libibverbs.problem is not None:
        yield _error(
            "libibverbs-missing",
            "system",
            f"libibverbs cannot be loaded, by which every RDMA device is driven: {libibverbs.problem}",
            _PACKAGES.format("libibverbs1 ibverbs-providers python3-pyverbs"),
        )
    elif pyverbs.problem is not None:
        yield _pyverbs(machine, pyverbs, pyverbs.problem)


def _pyverbs(machine: Machine, pyverbs: Library, problem: str) -> Finding:
    if _PRIVATE.search(problem):
        version = machine.probe.libibverbs.version or "another version"
        return _error(
            "pyverbs-version",
            "system",
            f"pyverbs was built for another libibverbs than the one that is here, {version}: {problem}",
            "pip uninstall pyverbs",
            _PACKAGES.format("--reinstall libibverbs1 ibverbs-providers python3-pyverbs"),
            hint="a build of pyverbs fits exactly one libibverbs: have both from the distribution",
        )
    if "No module named" not in problem:
        return _error(
            "pyverbs-broken",
            "system",
            f"pyverbs is there and cannot be loaded: {problem}",
            _PACKAGES.format("--reinstall python3-pyverbs"),
        )
    if not machine.pyverbs_builds:
        return _error(
            "pyverbs-missing",
            "system",
            "pyverbs is not installed, by which RDMA devices are found",
            _PACKAGES.format("python3-pyverbs ibverbs-providers"),
        )
    builds = ", ".join(machine.pyverbs_builds)
    if machine.soabi in machine.pyverbs_builds:
        return _error(
            "pyverbs-hidden",
            "system",
            "the distribution's pyverbs is installed, and this Python's environment does not see it",
            f"ln -s /usr/lib/python3/dist-packages/pyverbs {machine.platlib}/pyverbs",
        )
    return _error(
        "pyverbs-python",
        "system",
        f"the distribution's pyverbs is for {builds}, and this Python is {machine.soabi}",
        "/usr/bin/python3 -m venv --system-site-packages .venv",
        hint="install aioverbs there, or build pyverbs for this Python from the sources of the libibverbs that is here",
    )


# ---- Kernel


def _hardware(machine: Machine) -> Iterator[Finding]:
    names = {device.name for device in machine.devices}
    if names:
        return
    unloaded = [module for module in machine.hardware if module not in machine.modules]
    if unloaded:
        yield _error(
            "no-module",
            "system",
            f"there is RDMA hardware, and the kernel has no module loaded that drives it: {', '.join(unloaded)}",
            *(f"sudo modprobe {module}" for module in unloaded),
            *(["sudo modprobe ib_uverbs"] if "ib_uverbs" not in machine.modules else []),
        )
    elif machine.container:
        yield _error(
            "no-device",
            "system",
            "this is a container, and it was given no RDMA device",
            "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 …",
            hint="the machine that it runs on must have one",
        )
    elif "rdma_rxe" in machine.modules or machine.loadable is None or "rdma_rxe" in machine.loadable:
        interface = next(iter(machine.interfaces), "eth0")
        yield _error(
            "no-device",
            "system",
            "there is no RDMA hardware, and no link of soft-RoCE, which is RDMA over any network interface",
            "sudo modprobe rdma_rxe",
            f"sudo rdma link add rxe0 type rxe netdev {interface}",
        )
    else:
        yield _error(
            "no-device",
            "system",
            f"there is no RDMA hardware, and this kernel ({machine.kernel}) has no module rdma_rxe for soft-RoCE",
            hint="a distribution's ordinary kernel has it, that of containers and of cloud images often not",
        )


def _limits(machine: Machine) -> Iterator[Finding]:
    refused = [name for name, trial in machine.probe.trials.items() if _beyond_limit(machine, trial)]
    if machine.memlock is None:
        return
    commands = (
        "ulimit -l unlimited",
        "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf",
    )
    hint = "the first is for this shell, where its hard limit allows that; the second for those who log in from now on"
    limit = f"only {machine.memlock >> 10} KiB may be locked in memory by a process of this user"
    if refused:
        message = f"{limit}, and what {', '.join(refused)} was to register is more"
        yield _error("memlock", "system", message, *commands, hint=hint)
    elif machine.devices and machine.memlock < _ENOUGH_LOCKED:
        message = f"{limit}: registering {'more fails with ENOMEM' if machine.memlock else 'any fails with EPERM'}"
        yield _warning("memlock", "system", message, *commands, hint=hint)


def _beyond_limit(machine: Machine, trial: Trial) -> bool:
    """Return whether a device could not be used since too little memory may be locked."""
    numbers = (errno.ENOMEM, errno.EPERM) if machine.memlock == 0 else (errno.ENOMEM,)
    return machine.memlock is not None and trial.number in numbers


def _build(machine: Machine) -> Iterator[Finding]:
    if not machine.probe.optimized:
        yield _warning(
            "not-optimized",
            "system",
            "aioverbs was compiled without optimization, as happens where CFLAGS is set while it is installed: "
            "it is several times slower",
            "env -u CFLAGS pip install --force-reinstall --no-deps --no-binary aioverbs aioverbs",
            hint="or have -O3 among your CFLAGS",
        )


def _connecting(machine: Machine) -> Iterator[Finding]:
    if not machine.devices or machine.probe.crash is not None:
        return
    if machine.probe.librdmacm.problem is not None:
        yield _warning(
            "librdmacm-missing",
            "system",
            f"librdmacm cannot be loaded, which connects by IP address: {machine.probe.librdmacm.problem}",
            _PACKAGES.format("librdmacm1"),
        )
    if machine.rdma_cm in (errno.ENOENT, errno.ENXIO, errno.ENODEV):
        yield _warning(
            "rdma-cm-missing",
            "system",
            "there is no /dev/infiniband/rdma_cm, by which librdmacm connects",
            "sudo modprobe rdma_ucm",
        )
    elif machine.rdma_cm:
        yield _warning(
            "rdma-cm-permission",
            "system",
            f"/dev/infiniband/rdma_cm cannot be opened ({os.strerror(machine.rdma_cm)}), by which librdmacm connects",
            "sudo chmod 666 /dev/infiniband/rdma_cm",
        )


def _software_device(machine: Machine) -> Iterator[Finding]:
    if machine.soft_problem is None:
        return
    name = machine.soft_problem.partition(":")[0]
    other_directory = "export AIOVERBS_SOFT_DIRECTORY=/tmp/aioverbs-$(id -u)"
    yield _error(
        "soft-settings",
        "soft0",
        f"the software device cannot be opened: {machine.soft_problem}",
        f"unset {name}" if name.startswith("AIOVERBS_SOFT_") else other_directory,
        hint="or give it another value, as that says",
    )


# ---- One device


def _device(machine: Machine, device: Device) -> Iterator[Finding]:
    yield from _node(machine, device)
    yield from _use(machine, device)
    active = [port for port in device.ports if port.state == "ACTIVE"]
    if not active:
        yield from (_port(device, port) for port in device.ports)
    for port in active:
        if port.link_layer == "Ethernet" and not any(_routable(gid.address) for gid in port.gids):
            yield _gid(device, port)


def _node(machine: Machine, device: Device) -> Iterator[Finding]:
    if device.node is None:
        yield _error(
            "no-uverbs",
            device.name,
            "the kernel does not offer it to programs: the module ib_uverbs is not loaded",
            "sudo modprobe ib_uverbs",
        )
    elif device.refused == errno.ENOENT:
        command = f"docker run --device={device.node} …" if machine.container else "sudo udevadm trigger"
        yield _error("no-node", device.name, f"there is no {device.node}", command)
    elif device.refused in (errno.EACCES, errno.EPERM):
        # What the file's mode allows, a container may still forbid.
        given = device.refused == errno.EPERM and machine.container
        command = f"docker run --device={device.node} …" if given else f"sudo chmod 666 {device.node}"
        rule = 'KERNEL=="uverbs*", MODE="0666"'
        yield _error(
            "permission",
            device.name,
            f"this user may not open {device.node} ({os.strerror(device.refused)})",
            command,
            hint=None if given else f"a udev rule keeps it so: {rule} in /etc/udev/rules.d/90-rdma.rules",
        )
    elif device.refused:
        yield _error("node", device.name, f"{device.node} cannot be opened: {os.strerror(device.refused)}")


def _use(machine: Machine, device: Device) -> Iterator[Finding]:
    probe = machine.probe
    if device.node is None or device.refused or probe.crash is not None or probe.libibverbs.problem is not None:
        return
    if device.name not in probe.listed:
        told = "".join(f"; libibverbs says: {line}" for line in probe.warnings)
        yield _error(
            "no-provider",
            device.name,
            "libibverbs has no provider for it, which is a library as libmlx5-rdmav34.so, of the same version"
            f" (here are those for {', '.join(machine.providers) or 'nothing'}){told}",
            _PACKAGES.format("--reinstall ibverbs-providers libibverbs1"),
        )
        return
    trial = probe.trials.get(device.name)
    if trial is None or trial.problem is None or _beyond_limit(machine, trial):
        return
    code = "pyverbs-layout" if "unknown object layout" in trial.problem else "use"
    yield _error(code, device.name, f"it was opened, and could not be used: {trial.problem}")


def _port(device: Device, port: Port) -> Finding:
    state = f"port {port.number} is {port.state or 'in no state'} ({port.physical or 'of a link that is not known'})"
    if port.link_layer == "InfiniBand" and port.physical == "LinkUp":
        return _error(
            "port",
            device.name,
            f"{state}: it waits for a subnet manager",
            "sudo apt-get install opensm",
            hint="one runs in each InfiniBand subnet, on a switch or on one of the machines",
        )
    if port.physical == "Disabled" and port.netdev is not None:
        command = f"sudo ip link set {port.netdev} up"
        return _error("port", device.name, f"{state}: {port.netdev} is down", command)
    hint = "look at its cable, and at what is at the other end"
    return _error("port", device.name, f"{state}: {port.netdev or 'it'} has no link", hint=hint)


def _gid(device: Device, port: Port) -> Finding:
    interface = port.netdev or "DEVICE"
    command = f"sudo ip address add 192.0.2.1/24 dev {interface}"
    hint = "with an address of your network; each one gives the port a GID"
    if not port.gids:
        return _error(
            "no-gid", device.name, f"port {port.number} has no GID, by which peers reach it", command, hint=hint
        )
    # The kernel asks IPv6 where a peer of RoCE v2 is; of RoCE v1 it reads that in the GID.
    if not port.ipv6 and any(gid.kind == "RoCE v2" for gid in port.gids):
        return _error(
            "no-ip-gid",
            device.name,
            f"port {port.number} has GIDs of no IP address, only of its link: peers are found from these by IPv6, which"
            f" is off on {interface}",
            command,
            hint=hint,
        )
    return _warning(
        "no-ip-gid",
        device.name,
        f"port {port.number} has GIDs of no IP address, only of its link: no router forwards what is sent to these",
        command,
        hint=hint,
    )


def _routable(gid: str) -> bool:
    return not gid.startswith("fe80")
