"""Check that the folders of the C core include and call only downwards, and that its functions have names of their own.

    python tests/checks/core_layers.py [CORE]

Calls are read from symbol tables, not from sources: every source and every header is compiled by itself, with all of
its static and inline functions kept, and what an object leaves undefined is looked up among what the others define. So
a declaration copied by hand, an `extern` in a function or a call in a macro does not get past it.
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

# Bottom to top. The fault plan stands above the fabric, which it cuts and stalls by direct calls and whose streams it
# looks into; the fabric asks it one question, through a hook. The other way round five calls would be hooks.
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
# Functions that nothing calls are kept, so that what they call is seen, for which clang has no flag; -g names the file
# that a function is from.
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
    """Return the sources and headers of all layers, and of folders that should be layers."""
    tops = sorted({layer.split("/")[0] for layer in LAYERS})
    return sorted(path for top in tops for path in (core / top).rglob("*.[ch]"))


def parse_symbols(listing: str) -> Symbols:
    """Read what `nm -P -l` prints: name, type, value and size, then a tab and the line that a symbol is from."""
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
    """Compile each source and header by itself, and read its symbols.

    :raises subprocess.CalledProcessError: a file does not compile by itself; the compiler has said why.
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
    """Report includes of what stands above, and folders without a place in the order."""
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
                yield f"{path.relative_to(core)}:{line}: includes {match[1]}, which stands above {own}"


def wrong_calls(found: dict[Path, Symbols], core: Path) -> Iterator[str]:
    """Report uses of functions and objects that a folder above defines."""
    definers = {name: path for path, each in found.items() for name in each.defined}
    for path, each in found.items():
        own = folder(path, core)
        for name in sorted(each.undefined & definers.keys()):
            other = folder(definers[name], core)
            if LAYERS.index(other) > LAYERS.index(own):
                yield f"{path.relative_to(core)}: uses {name} of {definers[name].relative_to(core)}, above {own}"


def shared_names(found: dict[Path, Symbols], core: Path) -> Iterator[str]:
    """Report static functions of which there are several by one name, or which shadow a function of the C library."""
    definers: dict[str, set[Path]] = defaultdict(set)
    for path, each in found.items():
        for name in each.defined:
            definers[name].add(path)
        for name, place in each.static:
            if core in place.parents:  # and not a header of the system
                definers[name].add(place)
    library = CDLL(None)
    for name, paths in sorted(definers.items()):
        places = ", ".join(sorted(path.relative_to(core).as_posix() for path in paths))
        if len(paths) > 1:
            yield f"{name}: several functions have this name: {places}"
        elif hasattr(library, name):
            yield f"{name}: shadows the C library's: {places}"


def problems(core: Path) -> list[str]:
    """Report everything that is wrong with the core in this folder, a line each."""
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
    print("\n".join(found) if found else "every folder of the C core includes and calls only what stands below it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
