"""Copies of the project for planting faults; ninja rebuilds one changed file at a time."""

import filecmp
import os
import shlex
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.mutation.processes import run_alone
from tests.native.build import KINDS, WRAPPED, object_name, programs

__all__ = ["COMPILER", "ROOT", "BuildError", "Workspace"]

ROOT = Path(__file__).resolve().parents[2]
BUILD_LIMIT_S = 1800.0
COMPILER = shlex.split(os.environ.get("CC", "cc"))
PRODUCTS = ".mutation"

_COPIED = ("aioverbs", "examples", "tests", "pyproject.toml", "noxfile.py", "README.md", "CHANGELOG.md", "LICENSE")
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "*.egg-info", ".*_cache", ".hypothesis")
_C = ["-std=c11", "-w", "-pthread", "-fPIC", "-Iaioverbs/_core", "-Itests/native"]
_COVERAGE = ["-O0", "-g", "--coverage", "-fprofile-update=atomic"]
_RULES = f"""
builddir = {PRODUCTS}
rule cc
  command = {shlex.join(COMPILER)} $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = {shlex.join(COMPILER)} $in $flags -o $out
rule cython
  command = {sys.executable} -m cython -X auto_pickle=False -X autotestdict=False $flags --depfile $in -o $out
  depfile = $out.dep
"""


class BuildError(Exception):
    """Something does not compile; the message is the compiler's output."""


class Workspace:
    """A copy of the project.

    :param folder: its path; files that differ from the project's are copied, and build outputs are kept.
    :param kinds: builds of the native programs: keys of `KINDS` in tests/native/build.py.
    :param counted: whether extension modules count executed lines.
    """

    def __init__(self, folder: Path, kinds: Sequence[str], *, counted: bool) -> None:
        self.tree = folder.resolve()
        self._copy()
        package = self.tree / "aioverbs" / "_examples" / "storage_server"  # installed there by pyproject.toml
        package.parent.mkdir(exist_ok=True)
        package.unlink(missing_ok=True)
        package.symlink_to(Path("../../examples/storage_server"))
        rules = self.tree / "build.ninja"
        text = "\n".join([_RULES, *self._native(kinds), *self._extensions(counted)]) + "\n"
        if not rules.exists() or rules.read_text() != text:
            rules.write_text(text)

    def _copy(self) -> None:
        """Update the copy. A copied file gets a new mtime, so that it is built again."""
        wanted: set[Path] = set()
        for name in _COPIED:
            source = ROOT / name
            for file in [source] if source.is_file() else _files(source):
                target = self.tree / file.relative_to(ROOT)
                wanted.add(target)
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists() or not filecmp.cmp(file, target, shallow=False):
                    shutil.copy(file, target)
        for name in ("aioverbs", "tests", "examples"):
            for file in _files(self.tree / name):
                if file not in wanted and not file.is_symlink() and "_examples" not in file.parts:
                    file.unlink()

    def build(self, *targets: str) -> None:
        """Build targets of build.ninja.

        :raises BuildError: one does not compile.
        """
        ended = run_alone([sys.executable, "-m", "ninja", *targets], BUILD_LIMIT_S, cwd=self.tree)
        if ended.status != 0:
            raise BuildError(ended.output)

    def assembly(self, path: str) -> str:
        """Return what the compiler makes of a C file.

        :raises BuildError: it does not compile.
        """
        ended = run_alone([*COMPILER, *_C, "-O2", "-g0", "-S", path, "-o", "-"], BUILD_LIMIT_S, cwd=self.tree)
        if ended.status != 0:
            raise BuildError(ended.output)
        return ended.output

    def plant(self, path: str, content: bytes) -> None:
        """Write a file; what depends on it is built again."""
        (self.tree / path).write_bytes(content)

    def program(self, kind: str, name: str) -> str:
        """Return the path of a native program in the copy, which is also the target to build."""
        return f"{PRODUCTS}/{kind}/{name}"

    def counts(self, kind: str) -> Path:
        """Return the folder of the compiler's notes for coverage of native programs, or of `extensions`."""
        return self.tree / PRODUCTS / kind

    def _native(self, kinds: Sequence[str]) -> Iterator[str]:
        core = ["aioverbs/_core/abi/verbs_ops.c"]
        core += self._sorted("aioverbs/_core/alloc/*.c", "aioverbs/_core/soft/*/*.c")
        support = self._sorted("tests/native/support_*.c")
        for kind in kinds:
            folder = f"{PRODUCTS}/{kind}"
            flags = [*_C, "-g", *KINDS[kind]]

            def compiled(source: str, folder: str = folder) -> str:
                return f"{folder}/{object_name(ROOT / source)}.o"

            tests = {program.stem: f"tests/native/{program.name}" for program in programs(kind)}
            for source in (*core, *support, *tests.values()):
                yield from _edge(compiled(source), "cc", [source], flags)
            library = f"{folder}/libcore.so"
            shared, supporting = [compiled(each) for each in core], [compiled(each) for each in support]
            named = ["-shared", "-Wl,-soname,libcore.so"]
            yield from _edge(library, "link", shared, [*KINDS[kind], *named, "-pthread", "-ldl"])
            for name, source in tests.items():
                parts = [compiled(source), *supporting]
                if name in WRAPPED:
                    parts += shared
                    how = [f"-Wl,--wrap={each}" for each in WRAPPED[name]]
                else:
                    how = [library, "-Wl,-rpath,'$$ORIGIN'"]
                    parts += ["||", library]  # order-only dependency: the program is not linked again
                yield from _edge(f"{folder}/{name}", "link", parts, [*KINDS[kind], *how, "-pthread", "-ldl"])
            yield from _edge(kind, "phony", [f"{folder}/{name}" for name in tests], [])

    def _extensions(self, counted: bool) -> Iterator[str]:
        settings = tomllib.loads((self.tree / "pyproject.toml").read_text())
        modules, seen = [], set()
        include = f"-I{sysconfig.get_path('include')}"
        for module in settings["tool"]["setuptools"]["ext-modules"]:
            objects = []
            flags = [*_C, *module["extra-compile-args"], include, *(_COVERAGE if counted else ["-O0", "-g"])]
            for source in self._sorted(*module["sources"]):
                target = f"{PRODUCTS}/extensions/{object_name(ROOT / source)}"
                objects.append(f"{target}.o")
                if target in seen:
                    continue
                seen.add(target)
                if source.endswith(".pyx"):
                    yield from _edge(f"{target}.c", "cython", [source], ["--line-directives"] if counted else [])
                yield from _edge(f"{target}.o", "cc", [f"{target}.c" if source.endswith(".pyx") else source], flags)
            library = f"{module['name'].replace('.', '/')}.so"
            link = ["-shared", "-pthread", "-ldl", *(["--coverage"] if counted else [])]
            yield from _edge(library, "link", objects, link)
            modules.append(library)
        yield from _edge("extensions", "phony", modules, [])

    def _sorted(self, *patterns: str) -> list[str]:
        return [str(each.relative_to(self.tree)) for pattern in patterns for each in sorted(self.tree.glob(pattern))]


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        ignored = _NOT_COPIED(place, [*folders, *names])
        folders[:] = [each for each in folders if each not in ignored]
        yield from (Path(place, each) for each in names if each not in ignored)


def _edge(target: str, rule: str, sources: Iterable[str], flags: Sequence[str]) -> Iterator[str]:
    yield f"build {target}: {rule} {' '.join(sources)}"
    if flags:
        yield f"  flags = {' '.join(flags)}"
