"""Build a manylinux wheel for each CPython and architecture whose headers can be had on this machine.

    python tests/wheels/build.py CACHE DIST [NAME ...]

Writes wheels to DIST: all of them, or those of the given names, such as `3.13-aarch64`. Prints a line of JSON for each:
the wheel's path, its name, and the program that runs the CPython it is for. Those that cannot be built are named on
standard error.

This Python compiles all wheels, by zig's C compiler, which contains the headers and symbols of older C libraries. It
gets each CPython's settings from a module that replaces the one that `sysconfig` reads.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Run as a script: import the project's packages from its root.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.debian import PackageError
from tests.wheels.interpreters import Interpreter, find

ROOT = Path(__file__).resolve().parents[2]
GLIBC_MINOR = 28  # of manylinux_2_28
SETTINGS = "_aioverbs_wheel_settings"


def settings(interpreter: Interpreter) -> dict[str, str]:
    """Return the variables of `sysconfig` from which setuptools makes its commands."""
    compiler = f"{sys.executable} -m ziglang cc -target {interpreter.machine}-linux-gnu.2.{GLIBC_MINOR}"
    suffix = f".cpython-{interpreter.version.replace('.', '')}-{interpreter.machine}-linux-gnu.so"
    return {
        "AR": "ar",
        "ARFLAGS": "rcs",
        "CC": " ".join([compiler, *(f"-I{folder}" for folder in interpreter.include)]),
        "CXX": compiler,
        "CCSHARED": "-fPIC",
        "CFLAGS": "-O3 -DNDEBUG -fwrapv -Wall",
        "EXT_SUFFIX": suffix,
        "INCLUDEPY": str(interpreter.include[0]),
        "CONFINCLUDEPY": str(interpreter.include[0]),
        "LDCXXSHARED": f"{compiler} -shared",
        "LDSHARED": f"{compiler} -shared -Wl,--strip-all",
        "SHLIB_SUFFIX": ".so",
    }


def build(interpreter: Interpreter, dist: Path) -> Path:
    """Build the wheel for one interpreter in `dist`, and return its path."""
    with tempfile.TemporaryDirectory(prefix="aioverbs-wheel-") as name:
        scratch = Path(name)
        variables = f"build_time_vars = {settings(interpreter)!r}\n"
        (scratch / f"{SETTINGS}.py").write_text(variables)
        (scratch / "setup.cfg").write_text(f"[build]\nbuild_base = {scratch}\n[egg_info]\negg_base = {scratch}\n")
        env = {name: value for name, value in os.environ.items() if name not in ("CC", "CFLAGS", "LDFLAGS", "LDSHARED")}
        env |= {
            "DIST_EXTRA_CONFIG": str(scratch / "setup.cfg"),
            "PYTHONPATH": name,
            "_PYTHON_HOST_PLATFORM": f"linux-{interpreter.machine}",
            "_PYTHON_SYSCONFIGDATA_NAME": SETTINGS,
        }
        pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", name, str(ROOT))
        subprocess.run(pip, env=env, check=True, stdout=sys.stderr)
        (wheel,) = scratch.glob("*.whl")
        return _tag(wheel, interpreter, dist)


def _tag(wheel: Path, interpreter: Interpreter, dist: Path) -> Path:
    """Name a wheel after what it was compiled for, check that with auditwheel, and move it to `dist`.

    :raises SystemExit: auditwheel cannot read the wheel, or the wheel needs a newer C library, or other libraries than
        manylinux allows.
    """
    python = f"cp{interpreter.version.replace('.', '')}"
    tags = ("--python-tag", python, "--abi-tag", python, "--platform-tag", f"linux_{interpreter.machine}")
    wheel = _retag(wheel, *tags)
    shown = subprocess.run(("auditwheel", "show", "--json", str(wheel)), capture_output=True, text=True, check=False)
    if shown.returncode or not is_compatible(json.loads(shown.stdout)["overall_tag"], interpreter.machine):
        sys.exit(f"{wheel.name} is no wheel for manylinux_2_{GLIBC_MINOR}:\n{shown.stdout}{shown.stderr}")
    tagged = _retag(wheel, "--platform-tag", f"manylinux_2_{GLIBC_MINOR}_{interpreter.machine}")
    return Path(shutil.move(tagged, dist / tagged.name))


def is_compatible(tag: str, machine: str) -> bool:
    """Return whether a wheel with a platform tag is one for manylinux_2_28 and an architecture."""
    found = re.fullmatch(rf"manylinux_2_(\d+)_{machine}", tag)
    return found is not None and int(found[1]) <= GLIBC_MINOR


def _retag(wheel: Path, *tags: str) -> Path:
    """Rename a wheel, also in its metadata, and return its new path."""
    command = (sys.executable, "-m", "wheel", "tags", "--remove", *tags, str(wheel))
    renamed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return wheel.parent / renamed.strip()


def main() -> None:
    cache, dist, chosen = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:]
    try:
        interpreters, missing = find(cache, chosen)
    except PackageError as error:
        sys.exit(str(error))
    for name in missing:
        print(f"no wheel for {name}: neither this machine nor Debian has that Python with headers", file=sys.stderr)
    if chosen and missing:
        sys.exit(1)
    for each in interpreters:
        wheel = build(each, dist)
        print(json.dumps({"wheel": str(wheel), "name": each.name, "program": str(each.program)}), flush=True)


if __name__ == "__main__":
    main()
