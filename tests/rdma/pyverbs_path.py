"""Make the distribution's pyverbs importable in a virtual environment, and nothing else from the distribution.

    .venv/bin/python tests/rdma/pyverbs_path.py [PACKAGE]

A build of pyverbs fits exactly one libibverbs, so the tests use the one that Debian or Ubuntu built beside theirs:
python3-pyverbs. It is not available as a wheel, and `--system-site-packages` would expose all other packages of the
distribution, too; a link to this one package does not. This works only for the Python version that the distribution
built it for.
"""

import importlib.machinery
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

DISTRIBUTION = Path("/usr/lib/python3/dist-packages/pyverbs")


class PyverbsPathError(Exception):
    """This Python cannot use the distribution's pyverbs; the message has the reason and the remedy."""


def expose_pyverbs(distribution: Path = DISTRIBUTION) -> str:
    """Link pyverbs into the running Python's virtual environment, and import it to be sure.

    A pyverbs that can be imported already is left as it is.

    Arguments:
        distribution: the installed package.

    Returns:
        The directory that pyverbs is imported from.

    Raises:
        PyverbsPathError: it is not installed, or built for another Python, or does not load.
    """
    link = Path(sysconfig.get_path("platlib"), "pyverbs")
    if link.is_symlink() and not link.exists():
        link.unlink()
    if importlib.util.find_spec("pyverbs") is None:
        _check(distribution)
        link.symlink_to(distribution, target_is_directory=True)
    return _import_anew()


def _check(distribution: Path) -> None:
    if not distribution.is_dir():
        raise PyverbsPathError(f"{distribution} is missing: run apt-get install python3-pyverbs ibverbs-providers")
    modules = list(distribution.glob("device.*.so"))
    if not any((distribution / f"device{end}").exists() for end in _endings()):
        built_for = ", ".join(module.name.split(".")[1] for module in modules) or "nothing known"
        raise PyverbsPathError(
            f"the distribution's pyverbs is built for {built_for}, but this is "
            f"{sysconfig.get_config_var('SOABI')} ({sys.executable}): make the environment with "
            "that version of Python, or build pyverbs with this one from the sources of exactly the "
            "rdma-core whose libibverbs is installed"
        )
    if sys.prefix == sys.base_prefix:
        raise PyverbsPathError(
            f"{sys.executable} is not in a virtual environment, and what it shares with others is "
            f"left alone: make one with {sys.executable} -m venv"
        )


def _endings() -> list[str]:
    """Endings of extensions that this Python loads and that name its version."""
    return [end for end in importlib.machinery.EXTENSION_SUFFIXES if "cpython" in end]


def _import_anew() -> str:
    """Import pyverbs in a new process, so that a library that does not load cannot crash this one."""
    code = "import pyverbs, pyverbs.device; print(pyverbs.__path__[0])"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise PyverbsPathError(f"pyverbs is installed but cannot be imported: {reason}")
    return done.stdout.strip()


if __name__ == "__main__":
    try:
        print(f"pyverbs is imported from {expose_pyverbs(*map(Path, sys.argv[1:]))}")
    except PyverbsPathError as error:
        sys.exit(f"pyverbs_path: {error}")
