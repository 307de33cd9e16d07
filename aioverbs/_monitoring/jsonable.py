"""PURE: values as JSON has them."""

from dataclasses import is_dataclass
from enum import Enum

__all__ = ["to_jsonable"]

_JSON_TYPES = frozenset((int, str, bool, float, type(None)))


def to_jsonable(value: object) -> object:
    """What JSON has, of anything: dataclasses are objects, members of enumerations their names; sets are sorted.

    :raises TypeError: nothing in JSON is like that.
    """
    if type(value) in _JSON_TYPES:  # most are
        return value
    match value:
        case Enum():
            return value.name
        case list() | tuple():
            return [to_jsonable(each) for each in value]
        case dict():
            return {str(key): to_jsonable(each) for key, each in value.items()}
        case set() | frozenset():
            return sorted(map(to_jsonable, value), key=str)
    if is_dataclass(value):
        return {name: to_jsonable(getattr(value, name)) for name in value.__dataclass_fields__}
    raise TypeError(f"nothing in JSON is like {value!r}")
