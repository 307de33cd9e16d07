"""What is public says where its users find it, and goes by pickle under that name."""

import dataclasses
import enum
import importlib
import inspect
import pickle
import subprocess
import sys
import traceback
from types import FunctionType
from typing import Any

import pytest

import aioverbs
from aioverbs import addresses, allocators, attributes, errors, rdma_cm, types

SUBMODULES = (addresses, allocators, attributes, errors, rdma_cm, types)
# Each public name, and where its users have it from.
PUBLIC = [("aioverbs", name) for name in aioverbs.__all__]
PUBLIC += [(each.__name__, name) for each in SUBMODULES for name in each.__all__ if name not in aioverbs.__all__]
OBJECTS = {f"{module}.{name}": getattr(importlib.import_module(module), name) for module, name in PUBLIC}
DEFINED = {full: value for full, value in OBJECTS.items() if isinstance(value, type | FunctionType)}
ALIASES = {"aioverbs.addresses.Address", "aioverbs.attributes.FrameKind"}
CLASSES = {full: value for full, value in DEFINED.items() if isinstance(value, type)}


def of(found: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("full", "value"), found.items(), ids=list(found))


def test_all_but_constants_and_aliases_of_types_are_asked() -> None:
    assert {"aioverbs.connect", "aioverbs.Operation", "aioverbs.Affinity", "aioverbs.rdma_cm.Listener"} <= set(DEFINED)
    assert set(OBJECTS) - set(DEFINED) == {"aioverbs.USE_DEFAULT", *ALIASES}


@of(DEFINED)
def test_it_says_where_its_users_find_it(full: str, value: Any) -> None:
    assert f"{value.__module__}.{value.__qualname__}" == full
    assert repr(value).startswith(
        (f"<class '{full}'>", f"<enum '{value.__name__}'>", f"<flag '{value.__name__}'>", "<fun")
    )


@of({**DEFINED, "aioverbs.USE_DEFAULT": aioverbs.USE_DEFAULT})
def test_it_goes_by_pickle(full: str, value: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(value, protocol)
        assert pickle.loads(pickled) is value
        assert b"aioverbs._" not in pickled, "who loads it needs to know public names only"


@of({full: value for full, value in CLASSES.items() if issubclass(value, enum.Enum)})
def test_members_go_by_pickle(full: str, value: type[enum.Enum]) -> None:
    for member in value:
        pickled = pickle.dumps(member)
        assert pickle.loads(pickled) is member
        assert b"aioverbs._" not in pickled


@of({full: value for full, value in CLASSES.items() if dataclasses.is_dataclass(value)})
def test_values_go_by_pickle(full: str, value: type[Any]) -> None:
    made = object.__new__(value)
    for number, field in enumerate(dataclasses.fields(value)):
        object.__setattr__(made, field.name, number)
    pickled = pickle.dumps(made)
    twin = pickle.loads(pickled)
    assert type(twin) is value
    assert [getattr(twin, field.name) for field in dataclasses.fields(value)] == [
        *range(len(dataclasses.fields(value)))
    ]
    assert b"aioverbs._" not in pickled


@of({full: value for full, value in CLASSES.items() if issubclass(value, BaseException)})
def test_tracebacks_name_it(full: str, value: type[BaseException]) -> None:
    line = traceback.format_exception_only(value.__new__(value))[0]
    assert line.rstrip("\n").partition(":")[0] == full


@of(CLASSES)
def test_no_other_source_is_taken_for_that_of_a_class(full: str, value: type) -> None:
    """It would be looked for in the file of the module that the class says."""
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError):
        return
    assert f"class {value.__name__}" in source


def test_sources_of_functions_and_methods_are_found() -> None:
    assert inspect.getsource(aioverbs.open_device).startswith("def open_device(")
    assert inspect.getsource(aioverbs.QueuePair.connect).lstrip().startswith("def connect(")


def test_it_does_so_wherever_it_was_imported_from() -> None:
    """Also before anybody has asked `aioverbs` for it."""
    code = """
import importlib, sys
from aioverbs import _exports
for name, module in _exports.DEFINED_IN.items():
    value = vars(importlib.import_module(module))[name]
    if name != "USE_DEFAULT" and value.__module__ != "aioverbs":
        print(module, name)
print(*set(vars(sys.modules["aioverbs"])) & set(_exports.DEFINED_IN))
"""
    command = [sys.executable, "-P", "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout == "\n"
