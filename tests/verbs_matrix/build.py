"""Build the probe, including the software device.

    python tests/verbs_matrix/build.py OUT_DIR

The script prints the program's path. ``$CC`` is the compiler; ``$CFLAGS`` and ``$LDFLAGS`` are added. Optimization is
off: compiling takes longer than running.
"""

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

from tests.native.build import object_name

HERE = Path(__file__).resolve().parent
CORE = HERE.parent.parent / "aioverbs" / "_core"
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O0", "-pthread", f"-I{CORE}"]


def build(out_dir: Path) -> Path:
    """Compile everything; return the program's path.

    :raises subprocess.CalledProcessError: the compiler failed, and has printed its errors.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    out_dir.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> str:
        target = out_dir / f"{object_name(source)}.o"
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    sources = [*sorted(HERE.glob("*.c")), CORE / "abi/verbs_ops.c", *sorted(CORE.glob("soft/*/*.c"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    program = out_dir / "probe"
    link = ["-pthread", *shlex.split(os.environ.get("LDFLAGS", "")), "-ldl", "-o", str(program)]
    subprocess.run([*compiler, *objects, *link], check=True)
    return program


if __name__ == "__main__":
    try:
        print(build(Path(sys.argv[1])))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
