"""Functions that run in a child of this process."""

import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_child(function: Callable[[], T]) -> T:
    """Call a function in a child made by fork; what it returns there.

    The child ends at once, without what the interpreter does at its end. What fails there fails here.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Forking beside other threads is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(reader)
        status = 1
        try:
            try:
                answer: tuple[bool, object] = True, function()
            except BaseException:
                answer = False, traceback.format_exc()
            with os.fdopen(writer, "wb") as stream:
                pickle.dump(answer, stream)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
    result: tuple[bool, T] = pickle.loads(data)
    worked, value = result
    assert worked, f"in the child: {value}"
    return value
