"""The CPythons that wheels are built for and tried with: this machine's own, and those of Debian releases."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.debian import LATER_RELEASES
from tests.debian_python import unpack_python

__all__ = ["Interpreter", "find"]

ROOT = Path(__file__).resolve().parents[2]
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
VERSIONS = [each[1] for each in (re.fullmatch(r".*:: Python :: (3\.\d+)", text) for text in CLASSIFIERS) if each]
RELEASES = (None, *LATER_RELEASES)  # None: this system's
DEBIAN_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}  # of the architectures
_DESCRIBE = "import platform, sysconfig; print(platform.machine(), sysconfig.get_path('include'))"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """CPython that runs on this machine.

    :param version: its version, such as ``"3.13"``.
    :param machine: the architecture that it is compiled for, such as ``"aarch64"``.
    :param program: path that runs it.
    :param include: folders of its headers.
    """

    version: str
    machine: str
    program: Path
    include: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Version and architecture, as ``"3.13-aarch64"``."""
        return f"{self.version}-{self.machine}"


def find(cache: Path, names: Sequence[str] = ()) -> tuple[list[Interpreter], list[str]]:
    """Return the interpreters, at most one of each version and architecture, and the names of those that are missing.

    Debian's releases are unpacked until all interpreters are found.

    :param cache: folder for Debian's releases, and for copies of headers.
    :param names: names of the interpreters; empty: of all versions and architectures.
    :raises PackageError: packages could not be downloaded or unpacked.
    """
    wanted = names or [f"{version}-{machine}" for version in VERSIONS for machine in DEBIAN_NAMES]
    found = {each.name: each for version in VERSIONS for each in _own(version, cache)}
    for release in RELEASES:
        for machine in DEBIAN_NAMES:
            if any(name.endswith(machine) for name in wanted if name not in found):
                unpacked = _unpacked(cache, release, machine)
                found.setdefault(unpacked.name, unpacked)
                if unpacked.version not in VERSIONS:
                    print(f"{release} has Python {unpacked.version}, which no wheel is made for", file=sys.stderr)
    return [found[name] for name in wanted if name in found], [name for name in wanted if name not in found]


def _unpacked(cache: Path, release: str | None, machine: str) -> Interpreter:
    """Return the interpreter of a Debian release, which is unpacked in `cache` if it was not before."""
    root = cache / f"{release or 'debian'}-{machine}"
    programs = unpack_python(root, release, DEBIAN_NAMES[machine])
    (headers,) = root.glob("usr/include/python3.*")
    version = headers.name.removeprefix("python")
    return Interpreter(version, machine, programs / headers.name, (headers, headers.parent))


def _own(version: str, cache: Path) -> Iterator[Interpreter]:
    """Yield this machine's interpreter of a version, if it has one with headers: on PATH, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    programs: list[str | Path] = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    if (on_path := shutil.which(f"python{version}")) is not None:
        programs.insert(0, on_path)
    for program in programs:
        described = subprocess.run([program, "-c", _DESCRIBE], capture_output=True, text=True, check=False)
        machine, _, include = described.stdout.strip().partition(" ")
        if described.returncode == 0 and Path(include, "Python.h").is_file():
            copy = cache / f"headers-{version}"
            _copy_headers(Path(include), copy)
            yield Interpreter(version, machine, Path(program), (copy / f"python{version}", copy))
            return


def _copy_headers(include: Path, copy: Path) -> None:
    """Copy headers away from those of this system's C library, which a wheel is not compiled with."""
    for folder in (include, include.parent / f"{platform.machine()}-linux-gnu" / include.name):
        if folder.is_dir():
            shutil.copytree(folder, copy / folder.relative_to(include.parent), dirs_exist_ok=True)
