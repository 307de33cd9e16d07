"""``python -m aioverbs.cli``."""

from aioverbs.cli.main import main

main(prog_name="aioverbs")
