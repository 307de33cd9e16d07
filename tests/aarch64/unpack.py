"""A system for arm64, unpacked beside this one, and an emulator that runs its programs here; nothing is installed.

    python tests/aarch64/unpack.py DIR

prints the folder of programs: `run`, which runs a program for arm64 with that system's libraries, and `python`, for
which an environment is made by `python -m venv --without-pip`. The cross compiler is installed, where it is missing.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

# This is run as a script, and its parts are found from the project's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.debian import Archive, PackageError, install_missing

COMPILER = ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross")
# Its emulator is linked statically, so it runs on other releases, too. With that of bookworm, 7.2, the child of a fork
# of a process with threads ends as soon as it starts a thread.
EMULATOR_RELEASE = "trixie"

# The emulator gets the name that the program is called by: so Python finds itself, and the environment that it is
# called from.
RUN = '#!/bin/sh\nexec {programs}/qemu-aarch64 -L {root} "$@"\n'
RUN_PYTHON = '#!/bin/sh\nexec {programs}/qemu-aarch64 -L {root} -0 "$0" {root}/usr/bin/{python} "$@"\n'


def unpack(cache: Path) -> Path:
    """Return the folder of programs of a system that is kept in `cache`, fetching it first where it is not there.

    :raises PackageError: its packages could not be fetched or unpacked.
    """
    root = cache / "root"
    if not root.is_dir():
        print("fetching Python for arm64, and an emulator", file=sys.stderr, flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch, "root")
            python = _unpack_python(Path(scratch, "python"), made)
            programs = made / "usr/run"
            programs.mkdir()
            _unpack_emulator(Path(scratch, "emulator"), programs)
            places = {"programs": root / "usr/run", "root": root, "python": python}
            for name, text in (("run", RUN), (python, RUN_PYTHON)):
                (programs / name).write_text(text.format(**places))
                (programs / name).chmod(0o755)
            for name in ("python", "python3"):
                (programs / name).symlink_to(python)
            made.rename(root)
    return root / "usr/run"


def _unpack_python(scratch: Path, root: Path) -> str:
    """Unpack this release's Python and all that it needs for arm64, with its headers; the name of its program."""
    archive = Archive(scratch, architecture="arm64")
    found = re.search(r"Depends: (python3\.\d+)$", archive.dependencies("python3"), re.MULTILINE)
    if found is None:
        raise PackageError("apt knows no Python that python3 for arm64 depends on")
    python = found[1]
    archive.fetch(python)
    archive.fetch_alone(f"lib{python}-dev")  # without the C library's, which come with the cross compiler
    archive.unpack(root)
    return python


def _unpack_emulator(scratch: Path, programs: Path) -> None:
    archive = Archive(scratch, EMULATOR_RELEASE)
    archive.fetch_alone("qemu-user")
    archive.unpack(scratch / "unpacked")
    shutil.copy(scratch / "unpacked/usr/bin/qemu-aarch64", programs)


if __name__ == "__main__":
    try:
        install_missing(COMPILER)
        print(unpack(Path(sys.argv[1]).resolve()))
    except PackageError as error:
        sys.exit(str(error))
