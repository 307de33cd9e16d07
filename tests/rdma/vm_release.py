"""rdma-core, Python and pyverbs of a later Debian release, unpacked next to this system, but not installed.

    python tests/rdma/vm_release.py trixie DIR [PROGRAM ...]

The script prints a folder of programs that use that release's C library, loader and libraries: `python`, with an
environment made by `python -m venv --without-pip`, the examples of rdma-core, and the given programs of this system,
such as its Python, for an environment made in the same way.
`vm_release.sh` lets them find their providers in the guest.
"""

import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Run as a script: import the project's packages from its root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.debian import Archive, PackageError
from tests.debian_python import write_launcher
from tests.rdma.vm_errors import Failure

LIBRARIES = "usr/lib/x86_64-linux-gnu"
PACKAGES = ("python3-pyverbs", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils")


@dataclass(frozen=True, slots=True)
class Release:
    """An unpacked release.

    Attributes:
        root: its files.
        python: the name of its Python, as `python3.13`.
    """

    root: Path
    python: str

    @property
    def programs(self) -> Path:
        """Return the folder of programs that run here."""
        return self.root / "usr/run"

    def add(self, program: Path) -> None:
        """Add a program of this system, to run with the release's libraries; not a Python that the release has."""
        if program.name == self.python:
            return
        for link, target in ((self.root / "usr/bin", program), (self.programs, Path(self.python))):
            (link / program.name).unlink(missing_ok=True)
            (link / program.name).symlink_to(target)


def unpack(name: str, cache: Path) -> Release:
    """Return a release in `cache`; download and unpack it first if missing.

    Raises:

            PackageError: its packages could not be downloaded or unpacked.
    """
    root = cache / name
    if not root.is_dir():
        print(f"vm: fetching rdma-core and Python of {name}", file=sys.stderr, flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f"{name}-") as scratch:
            made = Path(scratch, "root")
            archive = Archive(Path(scratch), name)
            python = _python_of(archive.dependencies(PACKAGES[0]))
            archive.fetch(*PACKAGES, python)
            # Without the C library's headers, which the package depends on: builds for the release use this system's
            # headers.
            archive.fetch_alone(f"lib{python}-dev")
            archive.unpack(made)
            _write_programs(Release(made, python), root)
            _copy_providers(made / LIBRARIES / "libibverbs")
            made.rename(root)
    (module,) = (root / "usr/lib/python3/dist-packages/pyverbs").glob("device.cpython-*.so")
    return Release(root, _python_of(module.name))


def _python_of(text: str) -> str:
    """Return the Python version in the name of a file or a package."""
    found = re.search(r"cpython-3(\d+)-|libpython3\.(\d+)", text)
    if found is None:
        raise PackageError(f"python3-pyverbs does not name its Python version: {text}")
    return f"python3.{found[1] or found[2]}"


def _write_programs(release: Release, final: Path) -> None:
    """Write the wrappers of the programs; `final` is their later path."""
    release.programs.mkdir()
    names = [path.name for path in (release.root / "usr/bin").iterdir() if path.name.startswith(("ibv_", "rping"))]
    write_launcher(release.programs, final, release.python, names)


def _copy_providers(folder: Path) -> None:
    """Replace links among the providers by copies: in the guest's directory the links would point elsewhere."""
    for provider in folder.iterdir():
        if provider.is_symlink():
            library = provider.resolve(strict=True)
            provider.unlink()
            shutil.copy(library, provider)


if __name__ == "__main__":
    try:
        release = unpack(sys.argv[1], Path(sys.argv[2]).resolve())
        for argument in sys.argv[3:]:
            release.add(Path(argument).resolve())
        print(release.programs)
    except PackageError as error:
        print(f"vm: {error}", file=sys.stderr)
        sys.exit(Failure.NOT_PREPARED)
