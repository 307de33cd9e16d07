"""The build commands that pyproject.toml names: what setuptools does not do by itself.

setuptools loads this file by its path, without importing the package.
"""

import glob
import importlib
import os
import runpy
from collections.abc import Iterable
from pathlib import Path

from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import PlatformError

_HERE = Path(__file__).parent


def _expand(patterns: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Sorted matches of each pattern; a plain name stays, so that a missing file is reported by who needs it."""
    names = [os.fspath(pattern) for pattern in patterns]
    return [path for name in names for path in (sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else [name])]


class BuildExtensions(build_ext):
    """Checks the tools first, expands patterns, runs Cython once, outside the source tree, then compiles in parallel."""

    def finalize_options(self) -> None:
        """Expand the patterns in ``sources`` and ``depends``."""
        for extension in self.distribution.ext_modules or []:
            extension.sources = _expand(extension.sources)
            extension.depends = [*_expand(extension.depends), *extension.sources]
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count() or 1

    def run(self) -> None:
        """Build, unless a compiler or a header is missing: then one sentence says so."""
        sentence = runpy.run_path(str(_HERE / "toolchain.py"))["missing"]()
        if sentence is not None:
            raise PlatformError(sentence)
        super().run()

    def build_extensions(self) -> None:
        """Translate every .pyx before the first compiler starts: Cython's own state is not thread-safe."""
        translated = importlib.import_module("Cython.Build").cythonize(
            self.extensions,
            build_dir=str(Path(self.build_temp) / "cython"),
            # No attribute that a stub would have to explain: no doctests, no pickling of C pointers.
            compiler_directives={"auto_pickle": False, "autotestdict": False},
            force=self.force,
            quiet=self.verbose == 0,
        )
        for extension, new in zip(self.extensions, translated, strict=True):
            extension.sources = new.sources
        super().build_extensions()


class SourceDistribution(sdist):
    """An sdist from which everything works that works from a clone: tests, examples and nox sessions included."""

    def make_distribution(self) -> None:
        """Add what is not part of a package."""
        for directory in ("tests", "examples", "aioverbs/_build", "aioverbs/_docs"):
            self.filelist.graft(directory)
        for pattern in ("noxfile.py", "CHANGELOG.md", ".ci/run"):
            self.filelist.include(pattern)
        for pattern in ("*.py[co]", "*.so", "*.o"):
            self.filelist.global_exclude(pattern)
        self.filelist.sort()
        self.filelist.remove_duplicates()
        super().make_distribution()
