"""Data about RDMA on a machine, from its files and from a process that tests the libraries."""

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aioverbs._durations import duration
from aioverbs._providers.software_hosts import resolve_host
from aioverbs._providers.software_names import SoftHost
from aioverbs._providers.software_settings import SoftSettings
from aioverbs._providers.sysfs import device_nodes, port_gids, try_open
from aioverbs.errors import VerbsError

__all__ = ["Device", "Gid", "Library", "Machine", "Port", "Probe", "Trial", "Ways", "inspect_machine"]

_PROBE_S = 60.0
_CAP_IPC_LOCK = 14
_PARENT = "parent"  # attribute of soft-RoCE devices only: their network interface
_UNLOADED = re.compile(
    r"couldn't load driver '(?:.*/)?lib([^'/]+)-rdmav\d+\.so'"
)  # warning of libibverbs on standard error
# Commands that install packages, by the IDs of distributions in /etc/os-release.
_PACKAGE_MANAGERS = {"debian": "apt-get", "ubuntu": "apt-get", "fedora": "dnf", "rhel": "dnf", "centos": "dnf"}

# PCI vendor IDs of RDMA hardware whose kernel module is known.
_MELLANOX, _AMAZON = "0x15b3", "0x1d0f"


@dataclass(frozen=True)
class Gid:
    """A GID of a port.

    :param index: index in the port's GID table.
    :param address: the GID, in the kernel's notation.
    :param kind: GID type in the kernel's notation, such as ``"RoCE v2"``.
    """

    index: int
    address: str
    kind: str


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device, as reported by the kernel.

    :param number: number of the port, from 1.
    :param state: logical state, such as ``"ACTIVE"``; empty if unknown.
    :param physical: physical state, such as ``"LinkUp"``; empty if unknown.
    :param link_layer: ``"Ethernet"`` or ``"InfiniBand"``; empty if unknown.
    :param netdev: name of the port's network interface; None if unknown.
    :param gids: the GIDs of the port, without the empty entries of its GID table.
    :param ipv6: False if IPv6 is disabled on that interface; True if it is enabled or this is unknown.
    """

    number: int
    state: str
    physical: str
    link_layer: str
    netdev: str | None
    gids: tuple[Gid, ...]
    ipv6: bool


@dataclass(frozen=True)
class Device:
    """An RDMA device, as reported by the kernel.

    :param name: name of the device, such as ``"mlx5_0"``.
    :param node: path of the device file; None if the kernel has none for this device.
    :param open_errno: errno of opening that file; 0 if it can be opened, or if `node` is None.
    :param ports: the ports, in the order of their numbers.
    """

    name: str
    node: str | None
    open_errno: int
    ports: tuple[Port, ...]


@dataclass(frozen=True)
class Library:
    """A library, as the probe process found it.

    :param path: path of the loaded file; None if unknown.
    :param version: version of the library; None if unknown.
    :param problem: error message if the library cannot be used; None if it can.
    :param outdated: whether the problem is that the library lacks a function.
    """

    path: str | None = None
    version: str | None = None
    problem: str | None = None
    outdated: bool = False


@dataclass(frozen=True)
class Trial:
    """Result of creating a queue pair and registering memory on a device.

    :param problem: error message; None if there was no error.
    :param number: errno of the error; 0 if there was no error or it has no errno.
    """

    problem: str | None = None
    number: int = 0


@dataclass(frozen=True)
class Ways:
    """Ways by which the software device reaches another process of this user, as a trial found them.

    :param rings: whether requests go through shared memory.
    :param why_not_rings: reason why they do not; empty if they do.
    :param direct: whether data is copied from memory to memory.
    :param why_not_direct: reason why it is not; empty if it is.
    :param problem: error message if the trial failed, and the others are unknown; None if it did not.
    """

    rings: bool = False
    why_not_rings: str = ""
    direct: bool = False
    why_not_direct: str = ""
    problem: str | None = None


@dataclass(frozen=True)
class Probe:
    """Results of a separate process that tests the libraries. Created by `probe`.

    :param libibverbs: the library libibverbs.
    :param librdmacm: the library librdmacm.
    :param listed: names of the devices for which libibverbs has a provider.
    :param list_problem: error message if libibverbs cannot list the devices; None if it can, or cannot be loaded.
    :param trials: results of using these devices, by name.
    :param warnings: lines that the libraries wrote to standard error.
    :param crash: None if the process ended normally; otherwise text that says how it ended. In this case, all other
        results except `warnings` are unknown and have their default values.
    :param broken: whether the process ended with a status other than 0, so that the reason is an exception in aioverbs,
        not a library that crashed.
    :param optimized: whether the compiled core was compiled with optimization.
    :param ways: ways by which the software device reaches another process; None if that was not tried.
    """

    libibverbs: Library = Library()
    librdmacm: Library = Library()
    listed: tuple[str, ...] = ()
    trials: dict[str, Trial] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    crash: str | None = None
    broken: bool = False
    optimized: bool = True
    list_problem: str | None = None
    ways: Ways | None = None


@dataclass(frozen=True)
class Machine:
    """Data about a machine, the input of a diagnosis. Created by `inspect_machine`.

    :param kernel: release of the running kernel.
    :param package_manager: command that installs packages, ``"apt-get"`` or ``"dnf"``; None if the distribution is
        unknown.
    :param container: whether this is a container, with only the devices given to it.
    :param memlock: limit of locked memory in bytes; None if there is no limit or it is unknown.
    :param modules: names of the kernel modules that are loaded.
    :param loadable: names of the kernel modules that can be loaded or are built in; None if unknown.
    :param hardware: names of the kernel modules that drive the RDMA hardware on the PCI bus.
    :param interfaces: names of the network interfaces without the loopback interface.
    :param devices: the kernel's RDMA devices, sorted by name.
    :param rdma_cm: errno of opening /dev/infiniband/rdma_cm; 0 if it can be opened.
    :param providers: names of the providers of libibverbs that are configured and can be loaded, such as ``"mlx5"``.
    :param probe: results of the process that tests the libraries.
    :param soft_problem: error message about the software device's environment variables; None if they are valid.
    """

    kernel: str
    package_manager: str | None
    container: bool
    memlock: int | None
    modules: frozenset[str]
    loadable: frozenset[str] | None
    hardware: tuple[str, ...]
    interfaces: tuple[str, ...]
    devices: tuple[Device, ...]
    rdma_cm: int
    providers: tuple[str, ...]
    probe: Probe
    soft_problem: str | None = None


def probe() -> Probe:
    """Test the libraries in a separate process, because they may crash it.

    :returns: the results. If the process exits with a status other than 0, is killed by a signal or does not end within
        a minute, `Probe.crash` says so, and the results about the libraries and devices are missing. Exceptions that
        `parse_probe` raises propagate unchanged.
    :raises OSError: the process cannot be started.
    """
    command = [sys.executable, "-P", "-m", "aioverbs.cli.probe"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the same import path as here
    environment.pop("AIOVERBS_SOFT_ADDRESS", None)  # two processes of the probe could not both listen there
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_PROBE_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(crash=f"did not end within {duration(_PROBE_S)}")
    warnings = tuple(done.stderr.strip().splitlines())
    if done.returncode:  # that of a signal is negative
        return Probe(warnings=warnings, crash=f"ended with status {done.returncode}", broken=done.returncode > 0)
    return parse_probe(done.stdout, warnings)


def parse_probe(text: str, warnings: tuple[str, ...] = ()) -> Probe:
    """Parse the output of a probe process that ended normally.

    :param text: the process's standard output, a JSON object.
    :param warnings: lines of its standard error.
    :returns: the results; `Probe.crash` is None.
    :raises ValueError: `text` is not JSON.
    :raises KeyError: a result is missing.
    :raises TypeError: a result has the wrong type, or the result for a library, a device or the ways between processes
        has an unknown key.
    """
    found = json.loads(text)
    return Probe(
        libibverbs=Library(**found["libibverbs"]),
        librdmacm=Library(**found["librdmacm"]),
        listed=tuple(found["listed"]),
        trials={name: Trial(**trial) for name, trial in found["trials"].items()},
        warnings=warnings,
        optimized=found["optimized"],
        list_problem=found["list_problem"],
        ways=Ways(**found["ways"]),
    )


def inspect_machine(
    root: Path = Path("/"),
    *,
    try_open: Callable[[Path], int] = try_open,
    probe: Callable[[], Probe] = probe,
    kernel: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Machine:
    """Collect the data about a machine. A file that cannot be read is treated as empty. Exceptions that `try_open` or
    `probe` raises propagate unchanged.

    :param root: root directory of the machine's file system.
    :param try_open: function that tries to open a device file and returns the errno, or 0 if the file can be opened.
    :param probe: function that tests the libraries and returns the results.
    :param kernel: release of the kernel; None for the release of the running kernel.
    :param environment: environment variables in which to look for settings of the software device.
    :returns: the data, the input of a diagnosis.
    :raises OSError: a folder exists but cannot be listed.
    """
    release = platform.release() if kernel is None else kernel
    found = probe()
    unloaded = {match[1] for line in found.warnings for match in _UNLOADED.finditer(line)}
    configured = {path.stem for path in (root / "etc/libibverbs.d").glob("*.driver")}
    return Machine(
        kernel=release,
        package_manager=_package_manager(root),
        container=_is_container(root),
        memlock=_memlock(root),
        modules=frozenset(_names(root / "sys/module")),
        loadable=_loadable(root / "lib/modules" / release),
        hardware=tuple(sorted(set(_hardware(root / "sys/bus/pci/devices")))),
        interfaces=tuple(name for name in _names(root / "sys/class/net") if name != "lo"),
        devices=tuple(_devices(root, try_open)),
        rdma_cm=try_open(root / "dev/infiniband/rdma_cm"),
        providers=tuple(sorted(configured - unloaded)),
        probe=found,
        soft_problem=_soft_problem(environment),
    )


def _soft_problem(environment: Mapping[str, str]) -> str | None:
    """Return the error message about the environment variables of the software device; None if they are valid.

    A host name among them is resolved.
    """
    try:
        settings = SoftSettings.read(environment, os.geteuid())
        if isinstance(settings.address, SoftHost):
            resolve_host(settings.address)
    except ValueError as error:
        return str(error)
    except VerbsError as error:
        return f"AIOVERBS_SOFT_ADDRESS: {error.advice}"
    return None


def _names(folder: Path) -> list[str]:
    """Return the sorted names of a folder's entries; an empty list if there is no such folder.

    :raises OSError: the folder exists but cannot be listed.
    """
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    """Return the text of a file, such as a kernel attribute, without the white space around it. Bytes that are not
    UTF-8 are replaced. If the file cannot be read, as is the case for an empty GID entry, return an empty string.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _package_manager(root: Path) -> str | None:
    """Return the package manager of the machine's distribution, or of a distribution that it is derived from:
    ``"apt-get"`` or ``"dnf"``; None if unknown.
    """
    fields = dict(line.split("=", 1) for line in _text(root / "etc/os-release").splitlines() if "=" in line)
    names = " ".join(fields.get(name, "").strip("\"'") for name in ("ID", "ID_LIKE")).split()
    return next((_PACKAGE_MANAGERS[name] for name in names if name in _PACKAGE_MANAGERS), None)


def _is_container(root: Path) -> bool:
    """Return whether this machine is a container, judging by marker files and the environment of process 1."""
    marks = ("run/.containerenv", ".dockerenv")
    environment = _text(root / "proc/1/environ").split("\0")
    return any((root / mark).exists() for mark in marks) or any(item.startswith("container=") for item in environment)


def _memlock(root: Path) -> int | None:
    """Return this process's limit of locked memory in bytes; None if there is no limit, if the limit does not apply to
    this process, or if it is unknown.
    """
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1 and _is_initial_user(root):
            return None  # CAP_IPC_LOCK lifts the limit
    found = re.search(r"^Max locked memory +(\d+)", _text(root / "proc/self/limits"), re.MULTILINE)
    return int(found[1]) if found else None


def _is_initial_user(root: Path) -> bool:
    """Return whether this process is in the initial user namespace, whose capabilities the kernel looks at when memory
    is locked: those of a container without root privileges do not count. True if this is unknown.
    """
    return _text(root / "proc/self/uid_map").split() in ([], ["0", "0", "4294967295"])


def _loadable(folder: Path) -> frozenset[str] | None:
    """Return the names of the kernel modules that can be loaded or are built in; None if unknown.

    :param folder: folder with the running kernel's modules.
    """
    listed = [_text(folder / name) for name in ("modules.dep", "modules.builtin")]
    if not any(listed):
        return None
    files = (line.partition(":")[0].rpartition("/")[2] for text in listed for line in text.splitlines())
    return frozenset(name.partition(".")[0].replace("-", "_") for name in files)


def _hardware(folder: Path) -> Iterator[str]:
    """Yield the name of the kernel module that drives each PCI function of known RDMA hardware (by NVIDIA and Amazon),
    whether or not the module is loaded. A name occurs once for each function.

    :param folder: folder of the PCI devices in sysfs.
    """
    for name in _names(folder):
        vendor, number = _text(folder / name / "vendor"), _text(folder / name / "device")
        if vendor == _MELLANOX and _text(folder / name / "class").startswith("0x02"):
            with contextlib.suppress(ValueError):  # the number cannot be read
                yield "mlx4_ib" if int(number, 16) < 0x1011 else "mlx5_ib"
        elif vendor == _AMAZON and number.startswith("0xefa"):
            yield "efa"


def _devices(root: Path, try_open: Callable[[Path], int]) -> Iterator[Device]:
    """Yield a `Device` for each RDMA device that the kernel knows, sorted by name.

    :param try_open: function that returns the errno of opening a device file, or 0 if the file can be opened.
    """
    nodes = device_nodes(root)
    folder = root / "sys/class/infiniband"
    for name in _names(folder):
        node = nodes.get(name)
        open_errno = try_open(node) if node is not None else 0
        numbers = sorted(map(int, _names(folder / name / "ports")))
        ports = tuple(_port(root, folder / name, number) for number in numbers)
        path = f"/{node.relative_to(root)}" if node is not None else None
        yield Device(name, path, open_errno, ports)


def _port(root: Path, device: Path, number: int) -> Port:
    """Return a `Port` with what the kernel reports about a port of a device.

    :param root: root directory of the file system.
    :param device: the device's folder in sysfs.
    :param number: number of the port.
    """
    port = device / "ports" / str(number)
    found = port_gids(port) if (port / "gids").is_dir() else []
    gids = tuple(Gid(index, gid.hex(":", 2), kind) for index, gid, kind in found)
    folder = port / "gid_attrs/ndevs"
    netdevs = filter(None, (_text(folder / index) for index in sorted(_names(folder), key=int)))
    netdev = next(netdevs, None) or _text(device / _PARENT) or None
    return Port(
        number,
        _text(port / "state").rpartition(" ")[2],
        _text(port / "phys_state").rpartition(" ")[2],
        _text(port / "link_layer"),
        netdev,
        gids,
        netdev is None or _has_ipv6(root, netdev),
    )


def _has_ipv6(root: Path, interface: str) -> bool:
    """Return whether IPv6 is enabled on a network interface; True also if the interface is not visible here, so that
    this is unknown.
    """
    if not (root / "sys/class/net" / interface).exists():  # in another network namespace: unknown
        return True
    return _text(root / "proc/sys/net/ipv6/conf" / interface / "disable_ipv6") == "0"
