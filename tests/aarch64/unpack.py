"""A system for arm64, unpacked beside this one, and an emulator that runs its programs here; nothing is installed.

    python tests/aarch64/unpack.py DIR

prints the folder of programs: `run`, which runs a program for arm64 with that system's libraries, and `python`, for
which an environment is made by `python -m venv --without-pip`. The cross compiler is installed, where it is missing.
"""

import sys
from pathlib import Path

# This is run as a script, and its parts are found from the project's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.debian import PackageError, install_missing
from tests.debian_python import unpack_python

COMPILER = ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross")

if __name__ == "__main__":
    try:
        install_missing(COMPILER)
        print(unpack_python(Path(sys.argv[1]).resolve() / "root"))
    except PackageError as error:
        sys.exit(str(error))
