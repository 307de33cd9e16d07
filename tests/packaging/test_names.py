"""Public objects report the module that users import them from, and are pickled by that name."""

import contextlib
import dataclasses
import enum
import importlib
import inspect
import pickle
import subprocess
import sys
import traceback
from types import FunctionType

import pytest

import aioverbs
from aioverbs import addresses, allocators, attributes, errors, rdma_cm, types

SUBMODULES = (addresses, allocators, attributes, errors, rdma_cm, types)
# Each public name, with the module that users import it from.
PUBLIC = [("aioverbs", name) for name in aioverbs.__all__]
PUBLIC += [(each.__name__, name) for each in SUBMODULES for name in each.__all__ if name not in aioverbs.__all__]
OBJECTS = {f"{module}.{name}": getattr(importlib.import_module(module), name) for module, name in PUBLIC}
DEFINED = {full: value for full, value in OBJECTS.items() if isinstance(value, type | FunctionType)}
ALIASES = {"aioverbs.addresses.Address", "aioverbs.attributes.Execution", "aioverbs.attributes.FrameKind"}
CLASSES = {full: value for full, value in DEFINED.items() if isinstance(value, type)}


def test_only_constants_and_type_aliases_are_not_checked() -> None:
    assert {"aioverbs.connect", "aioverbs.Operation", "aioverbs.Affinity", "aioverbs.rdma_cm.Listener"} <= set(DEFINED)
    assert set(OBJECTS) - set(DEFINED) == {"aioverbs.USE_DEFAULT", *ALIASES}


def test_public_objects_report_their_public_module() -> None:
    names = {full: f"{value.__module__}.{value.__qualname__}" for full, value in DEFINED.items()}
    assert names == {full: full for full in DEFINED}
    starts = {
        full: (f"<class '{full}'>", f"<enum '{value.__name__}'>", f"<flag '{value.__name__}'>", "<fun")
        for full, value in DEFINED.items()
    }
    assert [repr(value) for full, value in DEFINED.items() if not repr(value).startswith(starts[full])] == []


def is_picklable(value: object, protocol: int) -> bool:
    """Return whether a value survives pickling, and its pickle contains public names only."""
    pickled = pickle.dumps(value, protocol)
    return pickle.loads(pickled) is value and b"aioverbs._" not in pickled


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_public_objects_are_picklable(protocol: int) -> None:
    values = {**DEFINED, "aioverbs.USE_DEFAULT": aioverbs.USE_DEFAULT}
    assert [full for full, value in values.items() if not is_picklable(value, protocol)] == []


def test_enumeration_members_are_picklable() -> None:
    members = [member for value in CLASSES.values() if issubclass(value, enum.Enum) for member in value]
    assert aioverbs.WcStatus.SUCCESS in members
    assert [each for each in members if not is_picklable(each, pickle.DEFAULT_PROTOCOL)] == []


def test_dataclasses_are_picklable() -> None:
    changed = []
    dataclasses_ = {full: value for full, value in CLASSES.items() if dataclasses.is_dataclass(value)}
    assert "aioverbs.AddressVector" in dataclasses_
    for full, value in dataclasses_.items():
        names = [field.name for field in dataclasses.fields(value)]
        made = object.__new__(value)
        for number, name in enumerate(names):
            object.__setattr__(made, name, number)
        pickled = pickle.dumps(made)
        twin = pickle.loads(pickled)
        as_before = type(twin) is value and [getattr(twin, name) for name in names] == list(range(len(names)))
        if not as_before or b"aioverbs._" in pickled:
            changed.append((full, twin, pickled))
    assert changed == []


def test_tracebacks_show_public_names_of_errors() -> None:
    errors_ = {full: value for full, value in CLASSES.items() if issubclass(value, BaseException)}
    lines = {full: traceback.format_exception_only(value.__new__(value))[0] for full, value in errors_.items()}
    assert {full: line.partition(":")[0].rstrip() for full, line in lines.items()} == {full: full for full in lines}
    assert "aioverbs.WorkCompletionError" in errors_


def test_getsource_returns_no_other_class() -> None:
    """`inspect` searches a class in the source of its `__module__`, which is not the defining module."""
    wrong = []
    for full, value in CLASSES.items():
        with contextlib.suppress(OSError, TypeError):  # no source found
            if f"class {value.__name__}" not in inspect.getsource(value):
                wrong.append(full)
    assert wrong == []


def test_getsource_finds_functions_and_methods() -> None:
    assert inspect.getsource(aioverbs.open_device).startswith("def open_device(")
    assert inspect.getsource(aioverbs.QueuePair.connect).lstrip().startswith("def connect(")


def test_public_module_is_set_when_the_defining_module_is_imported() -> None:
    """Objects report `aioverbs` as their module even if they were never accessed through it."""
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
