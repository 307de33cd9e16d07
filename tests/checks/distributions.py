"""Check the contents of an sdist and a wheel.

    python tests/checks/distributions.py DIST_DIR

The sdist contains all sources; the wheel contains modules and stubs, but no sources of C and Cython.
"""

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_SOURCES = (".c", ".h", ".pyx", ".pxd", ".pxi")
_BESIDE = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "noxfile.py", "tests/conftest.py")
_NOT_SHIPPED = ("_build", "_docs")  # folders for building the package and its documentation


def sdist_faults(names: set[str]) -> Iterator[str]:
    """Yield the faults of an sdist.

    :param names: names of its files, without the top folder.
    """
    generated = {path.with_suffix(".c") for path in ROOT.glob("aioverbs/**/*.pyx")}
    for suffix in (*_SOURCES, ".pyi", ".py"):
        for path in ROOT.glob(f"aioverbs/**/*{suffix}"):
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


def wheel_faults(names: set[str]) -> Iterator[str]:
    """Yield the faults of a wheel with files of these names."""
    for path in ROOT.glob("aioverbs/**/*.pyx"):
        module = path.relative_to(ROOT).with_suffix("").as_posix()
        if not any(name.startswith(f"{module}.") and name.endswith(".so") for name in names):
            yield f"the wheel lacks {module}.*.so"
        if f"{module}.pyi" not in names:
            yield f"the wheel lacks {module}.pyi"
    yield from (f"the wheel lacks {name}" for name in (*_programs(), "aioverbs/py.typed") if name not in names)
    for name in names:
        outside = not name.startswith("aioverbs/") and ".dist-info/" not in name
        if outside or name.endswith(_SOURCES) or name.startswith(tuple(f"aioverbs/{each}" for each in _NOT_SHIPPED)):
            yield f"the wheel holds {name}"


def main() -> int:
    dist = Path(sys.argv[1])
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    faults = [*sdist_faults(in_sdist), *wheel_faults(in_wheel)]
    print(
        "\n".join(faults)
        if faults
        else f"{sdist.name}: {len(in_sdist)} files, {wheel.name}: {len(in_wheel)} files: complete"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
