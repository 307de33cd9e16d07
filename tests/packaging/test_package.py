"""The installed package: exports, version, light import, type information."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys
import types as modules
import typing
from pathlib import Path

import pytest

import aioverbs
from aioverbs import errors, types


def run(code: str) -> str:
    """Run code in a fresh interpreter outside of the source tree, and return its output."""
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout.strip()


def test_exports_are_what_their_modules_export() -> None:
    tree = ast.parse(Path(str(aioverbs.__file__)).with_suffix(".pyi").read_text())
    exports = [(node.module, alias) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(alias.name for _, alias in exports) == aioverbs.__all__ == dir(aioverbs)
    for module, alias in exports:
        assert alias.asname == alias.name  # type checkers require this form for a re-export
        definer = importlib.import_module(str(module))
        if not definer.__name__.startswith("aioverbs._core."):  # compiled modules have no such list
            assert alias.name in definer.__all__
        assert getattr(aioverbs, alias.name) is getattr(definer, alias.name)


def test_errors_and_types_are_exported() -> None:
    assert set(aioverbs.__all__) >= {*errors.__all__, *types.__all__}


def _mentioned(annotation: object) -> set[type]:
    """Return the classes in an annotation."""
    parts = typing.get_args(annotation)
    if parts:
        return set().union(*map(_mentioned, parts))
    return {annotation} if isinstance(annotation, type) else set()


def test_attribute_classes_in_public_signatures_are_exported() -> None:
    """Check the annotations of the methods and properties of public classes."""
    seen: set[type] = set()
    for name in aioverbs.__all__:
        public = getattr(aioverbs, name)
        if not isinstance(public, type):
            continue
        for member_name, member in vars(public).items():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, modules.FunctionType) and (
                not member_name.startswith("_") or member_name == "__init__"
            ):
                seen = seen.union(*map(_mentioned, inspect.get_annotations(function).values()))
    assert {each for each in seen if each.__module__ == "aioverbs.attributes"} == set(), "not exported"
    assert {aioverbs.AddressVector, aioverbs.SrqAttributes} <= seen


def test_version() -> None:
    assert aioverbs.__version__ == importlib.metadata.version("aioverbs")
    name = "no_such_name"
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        getattr(aioverbs, name)


def test_a_compiled_core_that_cannot_be_loaded_is_reported_at_first_use() -> None:
    """The package can be imported all the same, because `aioverbs doctor` has to explain what is wrong."""
    code = """
import sys
sys.modules["aioverbs._core.handles.handles"] = None
import aioverbs, aioverbs.cli.main, aioverbs.errors
try:
    aioverbs.open_device
except ImportError as error:
    print(error.name)
"""
    assert run(code) == "aioverbs._core.handles.handles"


@pytest.mark.parametrize("device", ["open_device('soft0')", "open_device()"])
def test_opening_a_device_imports_nothing(device: str) -> None:
    """An import takes tens of milliseconds, for which no other task on the event loop would run."""
    code = f"""
import asyncio, logging, sys, aioverbs
logging.disable()
before = set(sys.modules)

async def open_first():
    async with aioverbs.{device} as device, device.loop_domain() as domain, domain.completion_queue(64) as cq:
        async with domain.queue_pair(cq), domain.register(64), domain.buffer_pool(64, 2) as pool, pool.lease():
            print(*sorted(set(sys.modules) - before))

asyncio.run(open_first())
"""
    assert run(code) == ""


def test_the_package_is_typed_and_contains_no_sources() -> None:
    files = {str(file) for file in importlib.metadata.files("aioverbs") or ()}
    assert "aioverbs/py.typed" in files
    assert not any(
        name.endswith((".pyx", ".pxd", ".c", ".h")) or name.startswith(("aioverbs/_build", "aioverbs/_docs"))
        for name in files
    )


@pytest.mark.parametrize("module", ["aioverbs.allocators", "aioverbs._core.handles.parent_domain"])
def test_the_software_device_watches_forks_before_allocators(module: str) -> None:
    """`pthread_atfork` runs prepare handlers in reverse order, so `fork` locks allocators first, as threads do."""
    found = run(f"import sys, {module}; print(*(each for each in sys.modules if each.startswith('aioverbs._core.')))")
    order = found.split()
    assert order.index("aioverbs._core.software.software") < order.index("aioverbs._core.alloc.allocators")
