"""`python examples/storage_server`, or `python -m storage_server` where examples is on the path."""

import sys
from pathlib import Path

if not __package__:  # started as a folder: its files are found as those of a package all the same
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(here.parent), *(each for each in sys.path if Path(each).resolve() != here)]

from storage_server.commands import main

if __name__ == "__main__":
    main(prog_name="storage_server")
