"""Write the list of the documentation's versions in a folder.

    python aioverbs/_docs/versions.py FOLDER

Writes ``versions.js``, which the sidebar of every page reads, and an ``index.html`` that leads to the newest version.
"""

import json
import sys
from pathlib import Path

from packaging.version import Version

__all__ = ["write"]


def write(folder: Path) -> list[str]:
    """Write both files, for the subfolders with an ``index.html``; return the versions, newest first."""
    found = sorted((each.parent.name for each in folder.glob("*/index.html")), key=Version, reverse=True)
    (folder / "versions.js").write_text(f"var AIOVERBS_VERSIONS = {json.dumps(found)};\n")
    target = f"{found[0]}/index.html"
    (folder / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">'
        f'<title>aioverbs</title><a href="{target}">aioverbs {found[0]}</a>\n'
    )
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]))
