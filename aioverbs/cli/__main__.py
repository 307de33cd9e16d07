"""The start of the command ``aioverbs``, also by ``python -m aioverbs.cli``: checks that its packages are installed."""

import sys
from importlib.util import find_spec

from aioverbs.cli.status import Status

__all__ = ["main"]


def main() -> None:
    """Run the command; without click or rich, print a line that says how to install them, and exit."""
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        print(f"aioverbs: the command needs {' and '.join(missing)}: pip install 'aioverbs[cli]'", file=sys.stderr)
        sys.exit(Status.FAILED)
    from aioverbs.cli import main as command

    command.main(prog_name="aioverbs")


if __name__ == "__main__":
    main()
