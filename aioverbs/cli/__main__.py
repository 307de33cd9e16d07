"""Entry point of ``aioverbs`` and ``python -m aioverbs.cli``, which first checks that the needed packages are there."""

import io
import sys
from importlib.util import find_spec

from aioverbs.cli.status import Status

__all__ = ["main"]


def main() -> None:
    """Run the command ``aioverbs`` with the arguments of the process, and exit with the status of the command.

    If click or rich is not installed, print a line on standard error that says how to install them, and exit with
    `Status.FAILED`.

    :raises SystemExit: always, unless the option ``--traceback`` lets an exception of the command propagate unchanged.
    """
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        print(f"aioverbs: the command needs {' and '.join(missing)}: pip install 'aioverbs[cli]'", file=sys.stderr)
        sys.exit(Status.FAILED)
    if isinstance(sys.stdout, io.TextIOWrapper):  # as standard error, for names of devices that are not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    from aioverbs.cli import main as command

    command.main(prog_name="aioverbs")


if __name__ == "__main__":
    main()
