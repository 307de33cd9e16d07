"""PURE: conversion of values to types that JSON has."""

from dataclasses import is_dataclass
from enum import Enum

__all__ = ["to_jsonable"]

_JSON_TYPES = frozenset((int, str, bool, float, type(None)))


def to_jsonable(value: object) -> object:
    """Convert a value to types that JSON has.

    Dataclasses become dicts, members of enumerations their names, tuples lists, and sets lists sorted by the text of
    their elements. Keys of dicts become strings.

    :returns: an int, float, str or bool, None, or a list or dict of these, nested to any depth.
    :raises TypeError: JSON has no type for the value, or for a value in it.
    """
    if type(value) in _JSON_TYPES:  # the most frequent case
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
    raise TypeError(f"JSON has no type for {value!r}")
