"""What there is on a machine for RDMA, as data: read from its files, and by a process that tries the libraries."""

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aioverbs._durations import duration
from aioverbs._providers.software_settings import SoftSettings
from aioverbs._providers.sysfs import device_nodes, try_open

__all__ = ["Device", "Gid", "Library", "Machine", "Port", "Probe", "Trial", "look"]

_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_PROBE_S = 60.0
_CAP_IPC_LOCK = 14
_PARENT = "parent"  # an attribute that links of soft-RoCE have, and no other device: the interface below
_UNLOADED = re.compile(r"couldn't load driver '(?:.*/)?lib([^'/]+)-rdmav\d+\.so'")  # of libibverbs, on its stderr
_DIST_PACKAGES = Path("usr/lib/python3/dist-packages")

# Which module of the kernel drives what stands on the PCI bus, where the vendor's number leaves no doubt.
_MELLANOX, _AMAZON = "0x15b3", "0x1d0f"


@dataclass(frozen=True)
class Gid:
    """An address of a port: its place in the port's table, the address, and its kind, as ``"RoCE v2"``."""

    index: int
    address: str
    kind: str


@dataclass(frozen=True)
class Port:
    """A port, as the kernel tells of it.

    :param state: as ``"ACTIVE"``.
    :param physical: as ``"LinkUp"``.
    :param link_layer: ``"Ethernet"`` or ``"InfiniBand"``.
    :param netdev: the network interface that it goes with.
    :param ipv6: whether that interface has IPv6, or nothing is known of it here.
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
    """An RDMA device, as the kernel tells of it.

    :param node: the file by which programs reach it; None where the kernel offers none.
    :param refused: the error number of opening that; 0 where it can be opened.
    """

    name: str
    node: str | None
    refused: int
    ports: tuple[Port, ...]


@dataclass(frozen=True)
class Library:
    """A library: where it was found and its version, or what the loader said."""

    path: str | None = None
    version: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Trial:
    """What came of making a queue pair and registering memory on a device.

    :param problem: what was raised; None where all went well.
    :param number: its error number, if it had one.
    """

    problem: str | None = None
    number: int = 0


@dataclass(frozen=True)
class Probe:
    """What a process of its own found when it used the libraries.

    :param listed: the devices that libibverbs has a provider for.
    :param trials: what came of using a device, by its name; of those that pyverbs can open.
    :param warnings: what the libraries wrote.
    :param crash: how the process ended, where it did not end well.
    :param optimized: whether the compiler optimized the compiled core.
    """

    libibverbs: Library = Library()
    librdmacm: Library = Library()
    pyverbs: Library = Library()
    listed: tuple[str, ...] = ()
    trials: dict[str, Trial] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    crash: str | None = None
    optimized: bool = True


@dataclass(frozen=True)
class Machine:
    """All that a diagnosis is made from.

    :param kernel: its release.
    :param soabi: what extensions for this Python have in their names, as ``"cpython-311"``.
    :param platlib: where this Python has packages with extensions.
    :param container: whether this is a container, which has of the machine what it was given.
    :param memlock: bytes that may be locked in memory; None: any number.
    :param modules: that the kernel has.
    :param loadable: that it could load; None where that is not known.
    :param hardware: the modules that drive what stands on the PCI bus.
    :param interfaces: of the network, but for the loopback.
    :param rdma_cm: the error number of opening the file of connection management, 0 where it can be opened.
    :param pyverbs_builds: which Pythons the distribution's pyverbs is for.
    :param providers: of libibverbs, as ``"mlx5"``: those that are configured, without those that it could not load.
    :param soft_problem: what cannot be understood of the environment variables of the software device; None: nothing.
    """

    kernel: str
    soabi: str
    platlib: str
    container: bool
    memlock: int | None
    modules: frozenset[str]
    loadable: frozenset[str] | None
    hardware: tuple[str, ...]
    interfaces: tuple[str, ...]
    devices: tuple[Device, ...]
    rdma_cm: int
    pyverbs_builds: tuple[str, ...]
    providers: tuple[str, ...]
    probe: Probe
    soft_problem: str | None = None


def probe() -> Probe:
    """Use the libraries in a process of its own, which may crash."""
    command = [sys.executable, "-P", "-m", "aioverbs.cli.probe"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # it is to find what this finds
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return Probe(crash=f"did not end within {duration(_PROBE_S)}")
    warnings = tuple(done.stderr.strip().splitlines())
    if done.returncode:
        return Probe(warnings=warnings, crash=f"ended with status {done.returncode}")
    return parse_probe(done.stdout, warnings)


def parse_probe(text: str, warnings: tuple[str, ...] = ()) -> Probe:
    """What the probing process printed."""
    told = json.loads(text)
    return Probe(
        libibverbs=Library(**told["libibverbs"]),
        librdmacm=Library(**told["librdmacm"]),
        pyverbs=Library(**told["pyverbs"]),
        listed=tuple(told["listed"]),
        trials={name: Trial(**trial) for name, trial in told["trials"].items()},
        warnings=warnings,
        optimized=told["optimized"],
    )


def look(
    root: Path = Path("/"),
    *,
    try_open: Callable[[Path], int] = try_open,
    probe: Callable[[], Probe] = probe,
    kernel: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Machine:
    """What there is.

    :param root: where the machine's files are.
    :param try_open: tells whether a device's file can be opened.
    :param probe: tries the libraries.
    :param kernel: its release; None: that of the running one.
    :param environment: the variables of the process.
    """
    release = platform.release() if kernel is None else kernel
    builds = (root / _DIST_PACKAGES / "pyverbs").glob("device.*.so")
    found = probe()
    unloaded = {match[1] for line in found.warnings for match in _UNLOADED.finditer(line)}
    configured = {path.stem for path in (root / "etc/libibverbs.d").glob("*.driver")}
    return Machine(
        kernel=release,
        soabi="-".join(str(sysconfig.get_config_var("SOABI")).split("-")[:2]),
        platlib=sysconfig.get_path("platlib"),
        container=_is_container(root),
        memlock=_memlock(root),
        modules=frozenset(_names(root / "sys/module")),
        loadable=_loadable(root / "lib/modules" / release),
        hardware=tuple(sorted(set(_hardware(root / "sys/bus/pci/devices")))),
        interfaces=tuple(name for name in _names(root / "sys/class/net") if name != "lo"),
        devices=tuple(_devices(root, try_open)),
        rdma_cm=try_open(root / "dev/infiniband/rdma_cm"),
        pyverbs_builds=tuple(sorted("-".join(path.name.split(".")[1].split("-")[:2]) for path in builds)),
        providers=tuple(sorted(configured - unloaded)),
        probe=found,
        soft_problem=_soft_problem(environment),
    )


def _soft_problem(environment: Mapping[str, str]) -> str | None:
    try:
        SoftSettings.read(environment, os.geteuid())
    except ValueError as error:
        return str(error)
    return None


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    """What an attribute of the kernel says; empty ones cannot be read at all."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _is_container(root: Path) -> bool:
    marks = ("run/.containerenv", ".dockerenv")
    environment = _text(root / "proc/1/environ").split("\0")
    return any((root / mark).exists() for mark in marks) or any(item.startswith("container=") for item in environment)


def _memlock(root: Path) -> int | None:
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return None  # who may lock anything
    found = re.search(r"^Max locked memory +(\d+)", _text(root / "proc/self/limits"), re.MULTILINE)
    return int(found[1]) if found else None


def _loadable(folder: Path) -> frozenset[str] | None:
    listed = [_text(folder / name) for name in ("modules.dep", "modules.builtin")]
    if not any(listed):
        return None
    files = (line.partition(":")[0].rpartition("/")[2] for text in listed for line in text.splitlines())
    return frozenset(name.partition(".")[0].replace("-", "_") for name in files)


def _hardware(folder: Path) -> Iterator[str]:
    for name in _names(folder):
        vendor, number = _text(folder / name / "vendor"), _text(folder / name / "device")
        if vendor == _MELLANOX and _text(folder / name / "class").startswith("0x02"):
            yield "mlx4_ib" if int(number, 16) < 0x1011 else "mlx5_ib"
        elif vendor == _AMAZON and number.startswith("0xefa"):
            yield "efa"


def _devices(root: Path, try_open: Callable[[Path], int]) -> Iterator[Device]:
    nodes = device_nodes(root)
    folder = root / "sys/class/infiniband"
    for name in _names(folder):
        node = nodes.get(name)
        refused = try_open(node) if node is not None else 0
        numbers = sorted(map(int, _names(folder / name / "ports")))
        ports = tuple(_port(root, folder / name, number) for number in numbers)
        path = f"/{node.relative_to(root)}" if node is not None else None
        yield Device(name, path, refused, ports)


def _port(root: Path, device: Path, number: int) -> Port:
    port = device / "ports" / str(number)
    indices = sorted(map(int, _names(port / "gids")))
    found = ((index, _text(port / "gids" / str(index))) for index in indices)
    attributes = port / "gid_attrs"
    gids = tuple(
        Gid(index, address, _text(attributes / "types" / str(index)))
        for index, address in found
        if address not in ("", _NO_GID)
    )
    netdevs = filter(None, (_text(attributes / "ndevs" / str(index)) for index in indices))
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
    if not (root / "sys/class/net" / interface).exists():  # it is another network namespace's
        return True
    return _text(root / "proc/sys/net/ipv6/conf" / interface / "disable_ipv6") == "0"
