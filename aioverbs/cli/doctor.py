"""What `aioverbs doctor` prints: a diagnosis for people and, as JSON, for programs."""

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from enum import IntEnum
from importlib import metadata
from typing import Any

import click

from aioverbs.cli.diagnosis import Diagnosis, Finding, Severity
from aioverbs.cli.machine import Device, Library, Machine

__all__ = ["Status", "as_json", "as_text", "status_of"]

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow"}


class Status(IntEnum):
    """The exit status of the command; 2 is click's, for a command line that is wrong."""

    USABLE = 0
    UNUSABLE = 1
    NO_DEVICE = 3


def status_of(diagnosis: Diagnosis, name: str | None = None) -> Status:
    """Whether a device, or where none is named any RDMA device, can be used."""
    if name is not None:
        if name in diagnosis.usable:
            return Status.USABLE
        return Status.UNUSABLE if name in diagnosis.unusable else Status.NO_DEVICE
    if diagnosis.usable:
        return Status.USABLE
    return Status.UNUSABLE if diagnosis.unusable else Status.NO_DEVICE


def as_json(machine: Machine, diagnosis: Diagnosis, status: Status) -> str:
    """All that was found, of the machine and of what is wrong with it."""
    described = asdict(machine)
    del described["modules"], described["loadable"]  # hundreds, and nothing of RDMA
    told: dict[str, Any] = {
        "aioverbs": metadata.version("aioverbs"),
        "python": platform.python_version(),
        "status": status,
        "usable": diagnosis.usable,
        "unusable": diagnosis.unusable,
        "findings": [{**asdict(finding), "severity": finding.severity.value} for finding in diagnosis.findings],
        "machine": described,
    }
    return json.dumps(told, indent=2)


def as_text(machine: Machine, diagnosis: Diagnosis) -> Iterator[str]:
    """Lines, coloured."""
    yield f"aioverbs {metadata.version('aioverbs')}, Python {platform.python_version()}, Linux {machine.kernel}"
    probe = machine.probe
    if probe.crash is None:
        libraries = (("libibverbs", probe.libibverbs), ("librdmacm", probe.librdmacm), ("pyverbs", probe.pyverbs))
        yield ", ".join(_library(name, library) for name, library in libraries)
    yield f"providers: {', '.join(machine.providers) or 'none'}"
    yield ""
    for device in machine.devices:
        good = device.name in diagnosis.usable
        yield from _device(device, good)
        yield from _findings(diagnosis, device.name)
    if machine.soft_problem is None:
        yield f"{click.style('soft0', bold=True)}  {_verdict(True)}: the software device needs nothing"
    else:
        yield f"{click.style('soft0', bold=True)}  {_verdict(False)}"
        yield from _findings(diagnosis, "soft0")
    yield from _findings(diagnosis, "system", indent="")


def _library(name: str, library: Library) -> str:
    if library.problem is not None:
        return f"no {name}"
    return f"{name} {library.version or f'in {library.path}'}"


def _verdict(good: bool) -> str:
    return click.style("usable", fg="green") if good else click.style("unusable", fg="red")


def _device(device: Device, good: bool) -> Iterator[str]:
    yield f"{click.style(device.name, bold=True)}  {_verdict(good)}"
    for port in device.ports:
        of = f", {port.netdev}" if port.netdev is not None else ""
        yield f"  port {port.number}: {port.state}, {port.link_layer}{of}"
        yield from (f"    GID {gid.index}: {gid.address} {gid.kind}" for gid in port.gids)


def _findings(diagnosis: Diagnosis, subject: str, indent: str = "  ") -> Iterator[str]:
    for finding in diagnosis.findings:
        if finding.subject == subject:
            yield from (f"{indent}{line}" for line in _finding(finding))


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{click.style(finding.severity.value, fg=_COLOURS[finding.severity], bold=True)}: {finding.message}"
    yield from (f"    {command}" for command in finding.commands)
    if finding.hint is not None:
        yield f"  {finding.hint}"
