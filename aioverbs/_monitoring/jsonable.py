"""PURE: values as JSON has them."""

from dataclasses import is_dataclass
from enum import Enum

__all__ = ["plain"]

_AS_THEY_ARE = frozenset((int, str, bool, float, type(None)))


def plain(value: object) -> object:
    """What JSON has, of anything: dataclasses are objects, members of enumerations their names; sets are sorted.

    :raises TypeError: nothing in JSON is like that.
    """
    if type(value) in _AS_THEY_ARE:  # most are
        return value
    match value:
        case Enum():
            return value.name
        case list() | tuple():
            return [plain(each) for each in value]
        case dict():
            return {str(key): plain(each) for key, each in value.items()}
        case set() | frozenset():
            return sorted(map(plain, value), key=str)
    if is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    raise TypeError(f"nothing in JSON is like {value!r}")
