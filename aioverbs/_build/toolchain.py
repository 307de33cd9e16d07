"""Check that the tools to compile aioverbs are installed, and name the package of a missing one.

Runs before anything is installed, so it uses only the standard library and does not import aioverbs. The build calls
it, and ``python aioverbs/_build/toolchain.py`` prints the problem, or nothing.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_PROBE = "#include <stdlib.h>\n#include <pthread.h>\n#include <Python.h>\n"


def compiler() -> list[str]:
    """Return the compiler command that setuptools uses: ``$CC``, else the compiler that built Python."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return shlex.split(str(command))


def missing() -> str | None:
    """Return a sentence about a missing tool, with the package to install; None if nothing is missing."""
    command = compiler()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if shutil.which(command[0]) is None:
        return (
            f"installing aioverbs needs a C compiler, and {command[0]!r} is not installed: install the package gcc "
            "(`apt-get install gcc libc6-dev` on Debian and Ubuntu), or set CC to another compiler."
        )
    include = [Path(sysconfig.get_path(name)) for name in ("include", "platinclude")]
    if not any((directory / "Python.h").is_file() for directory in include):
        return (
            f"installing aioverbs needs Python.h, the C header of this Python {version}, which is not in {include[0]}: "
            f"install the package python{version}-dev (`apt-get install python{version}-dev` on Debian and Ubuntu)."
        )
    probe = subprocess.run(
        [*command, *(f"-I{directory}" for directory in include), "-E", "-x", "c", "-"],
        input=_PROBE,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    if probe.returncode:
        reason = next((line for line in probe.stderr.splitlines() if "error" in line), "no error message")
        return (
            f"installing aioverbs needs the headers of the C library and Python.h, and {shlex.join(command)} cannot "
            f"compile against these ({reason.strip()}): install the packages libc6-dev and python{version}-dev "
            f"(`apt-get install libc6-dev python{version}-dev` on Debian and Ubuntu)."
        )
    return None


if __name__ == "__main__":
    sys.exit(missing())
