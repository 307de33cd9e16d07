"""Says in one sentence what is missing to compile aioverbs, and which package has it.

Standard library only, and no import of the package: it runs before anything is installed, as a
script (``python aioverbs/_build/toolchain.py``, silent when all is there) and from the build.
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
    """The command that setuptools will call: ``$CC``, else the compiler that Python was built with."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return shlex.split(str(command))


def missing() -> str | None:
    """What is missing, as a sentence that names the package to install, or None."""
    command = compiler()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if shutil.which(command[0]) is None:
        return (
            f"aioverbs is compiled when it is installed, and the C compiler {command[0]!r} is not on this machine: "
            "install the package gcc (`apt-get install gcc libc6-dev` on Debian and Ubuntu), or set CC to the compiler to use."
        )
    include = [Path(sysconfig.get_path(name)) for name in ("include", "platinclude")]
    if not any((directory / "Python.h").is_file() for directory in include):
        return (
            f"aioverbs is compiled when it is installed, and Python.h, the C header of this Python {version}, is not in "
            f"{include[0]}: install the package python{version}-dev (`apt-get install python{version}-dev` on Debian and Ubuntu)."
        )
    probe = subprocess.run(
        [*command, *(f"-I{directory}" for directory in include), "-fsyntax-only", "-x", "c", "-"],
        input=_PROBE,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    if probe.returncode:
        reason = next((line for line in probe.stderr.splitlines() if "error" in line), "no reason given")
        return (
            f"aioverbs is compiled when it is installed, and {shlex.join(command)} cannot compile against the C library and "
            f"Python.h ({reason.strip()}): install the packages libc6-dev and python{version}-dev "
            f"(`apt-get install libc6-dev python{version}-dev` on Debian and Ubuntu)."
        )
    return None


if __name__ == "__main__":
    sys.exit(missing())
