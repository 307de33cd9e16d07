"""Entry point of `python examples/storage_server`, and of `python -m storage_server` with examples on the path."""

import sys
from pathlib import Path

if not __package__:  # Run as a folder: import its files as modules of the package.
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(here.parent), *(each for each in sys.path if Path(each).resolve() != here)]

from storage_server.commands import main

if __name__ == "__main__":
    main(prog_name="storage_server")
