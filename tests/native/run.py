"""Build the Python-free C programs and run them, as many at once as there are processors.

    python tests/native/run.py {plain,asan,tsan,coverage} OUT_DIR [-- WRAPPER ...]

prints how long each program took, and what the failed ones printed. WRAPPER is a command that runs the program. The
exit status is 0 if all passed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# This is run as a script, and its parts are found from the project's root.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.native.build import KINDS, build, environments
from tests.running import run

LIMIT_S = 900.0


def run_program(program: Path, environment: Mapping[str, str], wrapper: Sequence[str]) -> str:
    """Run a program and print how long it took; return what a failed one printed, else nothing."""
    begin = time.monotonic()
    name = " ".join((program.name, *(f"{name}={value}" for name, value in environment.items())))
    try:
        done = run([*wrapper, str(program)], LIMIT_S, env={**os.environ, **environment})
        printed = f"{done.stdout}{done.stderr}ended with {done.returncode}\n" if done.returncode else ""
    except TimeoutError as error:
        printed = f"{error}\n"
    print(f"{time.monotonic() - begin:7.1f} s  {'FAILED  ' if printed else ''}{name}", flush=True)
    return f"---- {name}\n{printed}" if printed else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build and run the Python-free C programs.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("wrapper", nargs="*", metavar="WRAPPER", help="after --")
    arguments = parser.parse_args()
    try:
        programs = build(arguments.kind, arguments.out_dir)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [(program, environment) for program in programs for environment in environments(program.name)]
        failures = list(filter(None, pool.map(lambda each: run_program(each[0], each[1], arguments.wrapper), runs)))
    print("".join(failures), f"{len(runs) - len(failures)} passed, {len(failures)} failed", sep="")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
