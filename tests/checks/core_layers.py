"""Check that folders of the C core include and call only lower folders, and that names of functions are unique.

    python tests/checks/core_layers.py [CORE]

The check reads calls from symbol tables, not from sources: it compiles every source and header separately, keeps all
static and inline functions, and looks up each undefined symbol among the symbols defined by other files. So it also
finds a call through a copied declaration, an `extern` in a function, or a macro.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# From bottom to top. The fault plan is above the fabric: it cuts, stalls and inspects the fabric's streams by direct
# calls, and the fabric calls it through one hook. The reverse order would need five hooks.
LAYERS = (
    "abi",
    "alloc",
    "soft/base",
    "soft/objects",
    "soft/fabric",
    "soft/fault",
    "soft/transport",
    "soft/api",
)

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
# Unused functions are kept, so that their calls are found; clang has no flags for that. -g gives a function's file.
_GCC = (
    "gcc",
    "-std=c11",
    "-D_GNU_SOURCE",
    "-g1",
    "-O0",
    "-w",
    "-pthread",
    "-fkeep-inline-functions",
    "-fkeep-static-functions",
)


@dataclass(frozen=True)
class Symbols:
    """Names in the object of one source or header."""

    defined: frozenset[str]  # with external linkage
    undefined: frozenset[str]
    static: frozenset[tuple[str, Path]]  # functions, with the file that defines each


def folder(path: Path, core: Path) -> str:
    """Return the folder of a file, relative to the core."""
    return path.relative_to(core).parent.as_posix()


def sources(core: Path) -> list[Path]:
    """Return the sources and headers of all layers, and of folders that are missing in LAYERS."""
    tops = sorted({layer.split("/")[0] for layer in LAYERS})
    return sorted(path for top in tops for path in (core / top).rglob("*.[ch]"))


def parse_symbols(listing: str) -> Symbols:
    """Parse the output of `nm -P -l`: name, type, value and size, then a tab, the symbol's file and line."""
    names: dict[str, set[str]] = defaultdict(set)
    static = set()
    for line in listing.splitlines():
        symbol, _, place = line.partition("\t")
        name, kind = symbol.split()[:2]
        names["undefined" if kind in "Uvw" else "defined" if kind.isupper() else "local"].add(name)
        if kind == "t":
            static.add((name, Path(place.rpartition(":")[0]).resolve()))
    return Symbols(frozenset(names["defined"]), frozenset(names["undefined"]), frozenset(static))


def symbols(paths: Iterable[Path], core: Path) -> dict[Path, Symbols]:
    """Compile each source and header separately, and read its symbols.

    :raises subprocess.CalledProcessError: a file does not compile; the compiler has printed the errors.
    """

    def read(path: Path, target: Path) -> Symbols:
        subprocess.run([*_GCC, f"-I{core}", "-x", "c", "-c", str(path), "-o", str(target)], check=True)
        listed = subprocess.run(["nm", "-P", "-l", str(target)], check=True, capture_output=True, text=True)
        return parse_symbols(listed.stdout)

    paths = list(paths)
    with tempfile.TemporaryDirectory() as out_dir, ThreadPoolExecutor(os.cpu_count()) as pool:
        targets = [Path(out_dir, f"{number}.o") for number in range(len(paths))]
        return dict(zip(paths, pool.map(read, paths, targets), strict=True))


def wrong_includes(paths: Iterable[Path], core: Path) -> Iterator[str]:
    """Report includes of headers of higher layers, and folders that are missing in LAYERS."""
    for path in paths:
        own = folder(path, core)
        if own not in LAYERS:
            yield f"{path.relative_to(core)}: {own} has no place in LAYERS"
            continue
        text = path.read_text()
        for match in _INCLUDE.finditer(text):
            included = next((at for at in (path.parent / match[1], core / match[1]) if at.exists()), None)
            other = included and included.resolve().relative_to(core).parent.as_posix()
            if other not in LAYERS[: LAYERS.index(own) + 1]:
                line = text.count("\n", 0, match.start(1)) + 1
                yield f"{path.relative_to(core)}:{line}: includes {match[1]}, which is above {own}"


def wrong_calls(found: dict[Path, Symbols], core: Path) -> Iterator[str]:
    """Report uses of functions and objects that a higher layer defines."""
    definers = {name: path for path, each in found.items() for name in each.defined}
    for path, each in found.items():
        own = folder(path, core)
        for name in sorted(each.undefined & definers.keys()):
            other = folder(definers[name], core)
            if LAYERS.index(other) > LAYERS.index(own):
                yield f"{path.relative_to(core)}: uses {name} of {definers[name].relative_to(core)}, above {own}"


def shared_names(found: dict[Path, Symbols], core: Path) -> Iterator[str]:
    """Report names of several static functions, and static functions that shadow a function of the C library."""
    definers: dict[str, set[Path]] = defaultdict(set)
    for path, each in found.items():
        for name in each.defined:
            definers[name].add(path)
        for name, place in each.static:
            if core in place.parents:  # no system header
                definers[name].add(place)
    library = CDLL(None)
    for name, paths in sorted(definers.items()):
        places = ", ".join(sorted(path.relative_to(core).as_posix() for path in paths))
        if len(paths) > 1:
            yield f"{name}: several functions have this name: {places}"
        elif hasattr(library, name):
            yield f"{name}: shadows the C library's: {places}"


def problems(core: Path) -> list[str]:
    """Return all violations in the core in a folder."""
    core = core.resolve()
    paths = sources(core)
    placed = [path for path in paths if folder(path, core) in LAYERS]
    found = symbols(placed, core)
    return [*wrong_includes(paths, core), *wrong_calls(found, core), *shared_names(found, core)]


def main() -> int:
    core = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "aioverbs" / "_core"
    try:
        found = problems(core)
    except subprocess.CalledProcessError as error:
        print(f"{shlex.join(error.cmd)} ended with {error.returncode}")
        return 1
    print("\n".join(found) if found else "every folder of the C core includes and calls only lower folders")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
