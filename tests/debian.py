"""Debian packages for tests: install them, or unpack those of another release or architecture in a folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["APT_LIMIT_S", "LATER_RELEASES", "Archive", "PackageError", "apt_get", "install_missing"]

APT_LIMIT_S = 600
# Code names of releases after Debian 12, with newer versions of rdma-core and Python. Those of unstable are the same as
# those of the last one.
LATER_RELEASES = ("trixie", "forky")
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class PackageError(Exception):
    """Packages cannot be installed, downloaded or unpacked."""


def install_missing(packages: Iterable[str]) -> None:
    """Install the packages that are missing.

    :param packages: names of packages.
    :raises PackageError: this is neither Debian nor Ubuntu, or packages are missing and the user is not root (then the
        message contains the command to run), or apt-get failed.
    """
    if shutil.which("dpkg-query") is None or shutil.which("apt-get") is None:
        raise PackageError(f"this needs Debian 12 or Ubuntu 24.04, with the packages {' '.join(packages)}")
    missing = _missing(packages)
    if not missing:
        return
    install = ("install", "-y", "--no-install-recommends", *missing)
    if os.geteuid() != 0:
        line = f"sudo apt-get update && sudo apt-get {' '.join(install)}"
        raise PackageError(f"packages are missing; install them with\n    {line}")
    print(f"installing {' '.join(missing)}", file=sys.stderr, flush=True)
    try:
        apt_get(*install)
    except PackageError:
        apt_get("update")
        apt_get(*install)


def apt_get(*arguments: str, cwd: Path | None = None) -> None:
    """Run `apt-get` without questions and with a time limit.

    Installing fails if the package lists are old or missing. Callers then update the lists and try again, so that
    nothing is updated on a machine with current lists.

    :param arguments: arguments of `apt-get`.
    :param cwd: directory to run in; `apt-get download` writes there.
    :raises PackageError: the command failed, or did not end in time.
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
        raise PackageError(f"{command} did not end within {APT_LIMIT_S} s") from error
    if done.returncode != 0:
        raise PackageError(f"{command} failed:\n{done.stdout}")


class Archive:
    """Package archive of a Debian release and architecture, from this system's mirror.

    apt uses separate lists and a separate state in which no package is installed.

    :param scratch: empty folder for apt's files.
    :param release: code name of the release; None: this system's.
    :param architecture: Debian's name of the architecture; None: this system's.
    :raises PackageError: the release's list of packages cannot be downloaded.
    """

    def __init__(self, scratch: Path, release: str | None = None, architecture: str | None = None) -> None:
        for folder in ("lists/partial", "cache/archives/partial", "state", "alone"):
            (scratch / folder).mkdir(parents=True)
        (scratch / "state/status").touch()
        uri, own_release = _origin()
        signed = f"[signed-by={KEYS}] " if KEYS.exists() else ""
        (scratch / "sources").write_text(f"deb {signed}{uri} {release or own_release} main\n")
        chosen = f'APT::Architecture "{architecture}";\nAPT::Architectures "{architecture}";\n' if architecture else ""
        (scratch / "apt.conf").write_text(
            f'{chosen}Dir::Etc::sourcelist "{scratch}/sources";\n'
            'Dir::Etc::sourceparts "/dev/null";\n'
            f'Dir::State "{scratch}/state";\n'
            f'Dir::State::lists "{scratch}/lists";\n'
            f'Dir::State::status "{scratch}/state/status";\n'
            f'Dir::Cache "{scratch}/cache";\n'
            'APT::Sandbox::User "root";\n'
        )
        self._scratch = scratch
        self._config = f"--config-file={scratch}/apt.conf"
        apt_get(self._config, "update")

    def dependencies(self, package: str) -> str:
        """Return the output of `apt-cache depends` for a package."""
        return _run("apt-cache", self._config, "depends", package)

    def fetch(self, *packages: str) -> None:
        """Download packages with their dependencies."""
        apt_get(self._config, "install", "-y", "--download-only", "--no-install-recommends", *packages)

    def fetch_alone(self, *packages: str) -> None:
        """Download packages without their dependencies."""
        apt_get(self._config, "download", *packages, cwd=self._scratch / "alone")

    def unpack(self, root: Path) -> None:
        """Unpack all downloaded packages into a folder."""
        for package in sorted(self._scratch.glob("**/*.deb")):
            _run("dpkg", "-x", str(package), str(root))


def _missing(packages: Iterable[str]) -> list[str]:
    query = subprocess.run(
        ("dpkg-query", "-W", "-f", "${Package} ${Status}\n", *packages),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    status = dict(line.split(" ", 1) for line in query.stdout.splitlines())
    return [name for name in packages if status.get(name) != "install ok installed"]


def _origin() -> tuple[str, str]:
    """Return the URI of this system's Debian mirror, and the code name of its release."""
    form = "$(ORIGIN) $(COMPONENT) $(CODENAME) $(REPO_URI)"
    for line in _run("apt-get", "indextargets", "Created-By: Packages", "--format", form).splitlines():
        origin, component, codename, uri = line.split()
        if (origin, component) == ("Debian", "main") and "-" not in codename:
            return uri, codename
    raise PackageError("apt has no Debian mirror configured: run this on Debian")


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise PackageError(f"{command[0]} is not installed: run this on Debian")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise PackageError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout
