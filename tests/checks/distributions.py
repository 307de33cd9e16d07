"""Check the contents of sdists and wheels.

    python tests/checks/distributions.py FILE ...

An sdist contains all sources; a wheel contains modules and stubs, but no sources of C and Cython, and no library. Its
extensions are compiled for what its name says, and need the C library only. A wheel for manylinux is also small.
"""

import io
import itertools
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerSymSection
from elftools.elf.sections import StringTableSection, SymbolTableSection

ROOT = Path(__file__).resolve().parent.parent.parent
_SOURCES = (".c", ".h", ".pyx", ".pxd", ".pxi")
_BESIDE = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "noxfile.py", ".clang-format")
_NOT_SHIPPED = ("_build", "_docs")  # folders for building the package and its documentation
_NEEDED = {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
_ELF_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
_MANYLINUX_BYTES = 3_000_000  # limit of a wheel for manylinux, whose extensions are stripped


def sdist_faults(names: set[str]) -> Iterator[str]:
    """Yield the faults of an sdist.

    :param names: names of its files, without the top folder.
    """
    generated = {path.with_suffix(".c") for path in ROOT.glob("aioverbs/**/*.pyx")}
    for folder, suffix in itertools.product(("aioverbs", "tests", "examples"), (*_SOURCES, ".pyi", ".py", ".toml")):
        for path in ROOT.glob(f"{folder}/**/*{suffix}"):
            if path not in generated and path.relative_to(ROOT).as_posix() not in names:
                yield f"the sdist lacks {path.relative_to(ROOT)}"
    yield from (f"the sdist lacks {name}" for name in ("aioverbs/py.typed", *_BESIDE) if name not in names)
    unwanted = (name for name in names if name.endswith((".so", ".pyc", ".o")))
    yield from (f"the sdist holds {name}" for name in unwanted)


def _programs() -> Iterator[str]:
    """Yield the Python files of a complete wheel."""
    for path in ROOT.glob("aioverbs/**/*.py"):
        if not any(ROOT / "aioverbs" / name in path.parents for name in _NOT_SHIPPED):
            yield path.relative_to(ROOT).as_posix()


def wheel_faults(wheel: Path) -> Iterator[str]:
    """Yield the faults of a wheel."""
    _, _, _, abi, platform_tag = wheel.stem.split("-")
    machine = next((each for each in _ELF_MACHINES if platform_tag.endswith(each)), None)
    if machine is None:
        yield f"the platform {platform_tag} is none of those whose wheels can be checked: {', '.join(_ELF_MACHINES)}"
        return
    suffix = f".cpython-{abi.removeprefix('cp')}-{machine}-linux-gnu.so"
    with zipfile.ZipFile(wheel) as archive:
        extensions = {name: archive.read(name) for name in archive.namelist() if ".so" in name}
        names = set(archive.namelist())
    yield from _file_faults(names, suffix)
    for name, content in extensions.items():
        if not name.endswith(suffix):
            yield f"the wheel holds {name}, which is not for {abi} on {machine}"
            continue
        elf = ELFFile(io.BytesIO(content))
        yield from (f"{name} {fault}" for fault in _extension_faults(elf, machine))
        if platform_tag.startswith("manylinux"):
            yield from (f"{name} {fault}" for fault in _release_faults(elf))
    size = wheel.stat().st_size
    if platform_tag.startswith("manylinux") and size > _MANYLINUX_BYTES:
        yield f"the wheel is larger than {_MANYLINUX_BYTES} bytes: {size}"


def _file_faults(names: set[str], suffix: str) -> Iterator[str]:
    """Yield the faults of a wheel with files of these names, and extensions of this suffix."""
    for path in ROOT.glob("aioverbs/**/*.pyx"):
        module = path.relative_to(ROOT).with_suffix("").as_posix()
        yield from (f"the wheel lacks {module}{each}" for each in (suffix, ".pyi") if f"{module}{each}" not in names)
    yield from (f"the wheel lacks {name}" for name in (*_programs(), "aioverbs/py.typed") if name not in names)
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield "the wheel lacks the licence"
    for name in names:
        outside = not name.startswith("aioverbs/") and ".dist-info/" not in name
        if outside or name.endswith(_SOURCES) or name.startswith(tuple(f"aioverbs/{each}" for each in _NOT_SHIPPED)):
            yield f"the wheel holds {name}"


def _release_faults(elf: ELFFile) -> Iterator[str]:
    """Yield the faults of an extension that is to be released, each to stand after its name."""
    if elf.get_section_by_name(".symtab") is not None:
        yield "is not stripped"
    dynamic = elf.get_section_by_name(".dynamic")
    assert isinstance(dynamic, DynamicSection)
    for tag in dynamic.iter_tags():
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            yield f"looks for libraries in {getattr(tag, tag.entry.d_tag.removeprefix('DT_').lower())}"


def _extension_faults(elf: ELFFile, machine: str) -> Iterator[str]:
    """Yield the faults of an extension, each to stand after its name."""
    if elf["e_machine"] != _ELF_MACHINES[machine]:
        yield f"is compiled for {elf['e_machine']}"
    dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
    strings, versions = elf.get_section_by_name(".dynstr"), elf.get_section_by_name(".gnu.version")
    assert isinstance(dynamic, DynamicSection)
    assert isinstance(symbols, SymbolTableSection)
    assert isinstance(strings, StringTableSection)
    assert isinstance(versions, GNUVerSymSection)
    needed = {strings.get_string(tag["d_val"]) for tag in dynamic.iter_tags("DT_NEEDED")}
    yield from (f"needs {library}" for library in sorted(needed - _NEEDED))
    for number, symbol in enumerate(symbols.iter_symbols()):
        # A symbol of a newer C library has no version, and is missing where the extension runs.
        versioned = versions.get_symbol(number)["ndx"] not in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL")
        undefined = symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        if undefined and not versioned and not symbol.name.startswith(("Py", "_Py")):
            yield f"needs {symbol.name}, which is neither of Python nor of the C library that it is for"


def main() -> int:
    status = 0
    for distribution in map(Path, sys.argv[1:]):
        if distribution.suffix == ".whl":
            with zipfile.ZipFile(distribution) as archive:
                count = len(archive.namelist())
            faults = list(wheel_faults(distribution))
        else:
            with tarfile.open(distribution) as archive:
                in_sdist = {member.name.partition("/")[2] for member in archive if member.isfile()}
            count, faults = len(in_sdist), list(sdist_faults(in_sdist))
        size = f"{distribution.stat().st_size / 1e6:.2f} MB"
        print(f"{distribution.name}: {count} files, {size}", *(faults or ["complete"]), sep="\n  ")
        status |= bool(faults)
    return status


if __name__ == "__main__":
    sys.exit(main())
