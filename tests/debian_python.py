"""Python of a Debian release and architecture, unpacked in a folder with its headers; nothing is installed.

Programs for arm64 run under an emulator. Those for this machine's architecture run with the release's C library, which
may be newer than this system's.
"""

import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.debian import Archive, PackageError

__all__ = ["unpack_python", "write_launcher"]

# Its emulator is linked statically, so it runs on other releases, too. With that of bookworm, 7.2, the child of a fork
# of a process with threads ends as soon as it starts a thread.
EMULATOR_RELEASE = "trixie"
EMULATOR = "qemu-aarch64"

# The interpreter gets the name that the script is called by: so Python finds itself, and the environment that it is
# called from.
EMULATE = '#!/bin/sh\nexec {root}/usr/run/qemu-aarch64 -L {root} "$@"\n'
EMULATE_PYTHON = '#!/bin/sh\nexec {root}/usr/run/qemu-aarch64 -L {root} -0 "$0" {root}/usr/bin/{python} "$@"\n'
# The script may have many names: it runs the program of its name, or else Python, with the release's loader.
LOAD = """#!/bin/sh
program=${{0##*/}}
[ -x {root}/usr/bin/"$program" ] || program={python}
libraries={root}/usr/lib/x86_64-linux-gnu
exec $libraries/ld-linux-x86-64.so.2 --library-path $libraries --argv0 "$0" {root}/usr/bin/"$program" "$@"
"""


def unpack_python(root: Path, release: str | None = None, architecture: str = "arm64") -> Path:
    """Return the folder of programs of an unpacked release; download and unpack it first if missing.

    The folder contains `python`, with an environment made by `python -m venv --without-pip`, and for arm64 `run`, which
    runs a program with the release's libraries.

    :param root: folder to unpack the release in.
    :param release: code name of the release; None: this system's.
    :param architecture: ``"arm64"`` or ``"amd64"``.
    :raises PackageError: this machine is not x86_64, or packages could not be downloaded or unpacked.
    """
    if platform.machine() != "x86_64":
        raise PackageError(f"Debian's Pythons are run on x86_64 only; this is an {platform.machine()} machine")
    if not root.is_dir():
        name = f"{release or 'this release'}, {architecture}"
        print(f"fetching Python of {name}", file=sys.stderr, flush=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
            made = Path(scratch, "root")
            python = _unpack(Path(scratch, "python"), made, release, architecture)
            programs = made / "usr/run"
            programs.mkdir()
            if architecture == "arm64":
                _unpack_emulator(Path(scratch, "emulator"), programs)
                _write_script(programs / "run", EMULATE, root, python)
                _write_script(programs / python, EMULATE_PYTHON, root, python)
                _link(programs, python)
            else:
                write_launcher(programs, root, python)
            made.rename(root)
    return root / "usr/run"


def write_launcher(programs: Path, root: Path, python: str, others: Iterable[str] = ()) -> None:
    """Write a script that runs programs of an unpacked release for x86_64 with its C library and loader.

    :param programs: folder for the script, which is named `python`, and for links to it.
    :param root: folder that the release will be in.
    :param python: name of its Python, such as ``"python3.13"``, with which a program that it lacks is replaced.
    :param others: names of further programs to link.
    """
    _write_script(programs / python, LOAD, root, python)
    _link(programs, python, *others)


def _write_script(script: Path, text: str, root: Path, python: str) -> None:
    script.write_text(text.format(root=root, python=python))
    script.chmod(0o755)


def _link(programs: Path, python: str, *others: str) -> None:
    for each in ("python", "python3", *others):
        (programs / each).symlink_to(python)


def _unpack(scratch: Path, root: Path, release: str | None, architecture: str) -> str:
    """Unpack Python with its headers and all that it needs, and return the name of its program."""
    archive = Archive(scratch, release, architecture)
    found = re.search(r"Depends: (python3\.\d+)$", archive.dependencies("python3"), re.MULTILINE)
    if found is None:
        raise PackageError("apt knows no Python that python3 depends on")
    python = found[1]
    archive.fetch(python)
    archive.fetch_alone(f"lib{python}-dev")  # without the C library's headers, which come with the compiler
    archive.unpack(root)
    if not (root / "lib").exists():  # where the loader is looked for; later releases have all files in usr
        (root / "lib").symlink_to("usr/lib")
    return python


def _unpack_emulator(scratch: Path, programs: Path) -> None:
    archive = Archive(scratch, EMULATOR_RELEASE)
    archive.fetch_alone("qemu-user")
    archive.unpack(scratch / "unpacked")
    shutil.copy(scratch / "unpacked/usr/bin" / EMULATOR, programs)
