"""Build commands named in pyproject.toml, for what setuptools does not do itself.

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
    """Return the sorted matches of each pattern; a name without wildcards stays, so that a missing file is an error."""
    paths: list[str] = []
    for name in [os.fspath(pattern) for pattern in patterns]:
        paths += sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else [name]
    return paths


class BuildExtensions(build_ext):
    """Build command: checks the tools, expands patterns, runs Cython outside of the tree, compiles in parallel."""

    def finalize_options(self) -> None:
        """Expand the patterns in ``sources`` and ``depends``."""
        for extension in self.distribution.ext_modules or []:
            extension.sources = _expand(extension.sources)
            extension.depends = [*_expand(extension.depends), *extension.sources]
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count() or 1

    def run(self) -> None:
        """Build the extensions.

        :raises PlatformError: the compiler or a header is missing; the message names the package to install.
        """
        problem = runpy.run_path(str(_HERE / "toolchain.py"))["missing"]()
        if problem is not None:
            raise PlatformError(problem)
        super().run()

    def build_extensions(self) -> None:
        """Translate every .pyx before the compilers start in parallel, since Cython is not thread-safe."""
        translated = importlib.import_module("Cython.Build").cythonize(
            self.extensions,
            build_dir=str(Path(self.build_temp) / "cython"),
            # Without attributes for doctests and pickling, which the stubs would have to declare.
            compiler_directives={"auto_pickle": False, "autotestdict": False},
            force=self.force,
            quiet=self.verbose == 0,
        )
        for extension, new in zip(self.extensions, translated, strict=True):
            extension.sources = new.sources
        super().build_extensions()


class SourceDistribution(sdist):
    """Command that builds an sdist as complete as a clone: with tests, examples and nox sessions."""

    def make_distribution(self) -> None:
        """Add the files that belong to no package, then build the sdist."""
        for directory in ("tests", "examples", "aioverbs/_build", "aioverbs/_docs"):
            self.filelist.graft(directory)
        for pattern in ("noxfile.py", "CHANGELOG.md", ".ci/run", ".clang-format"):
            self.filelist.include(pattern)
        for pattern in ("*.py[co]", "*.so", "*.o"):
            self.filelist.global_exclude(pattern)
        self.filelist.sort()
        self.filelist.remove_duplicates()
        super().make_distribution()
