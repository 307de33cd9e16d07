"""Errors that go to another process by pickle, with what they looked like where they were raised."""

import pickle
import traceback

__all__ = ["pickled_error", "unpickled_error"]


def pickled_error(error: BaseException) -> bytes:
    """An error and where it came from, so that it can be raised in another process."""
    text = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # some go in and never come out
    except Exception as why:
        stand_in = RuntimeError(f"{type(error).__name__}: {error} (which cannot be sent: {why})")
        data = pickle.dumps(stand_in)
    return pickle.dumps((data, text))


def unpickled_error(payload: bytes) -> BaseException:
    """That error, with a note of where it came from."""
    data, text = pickle.loads(payload)
    try:
        error: BaseException = pickle.loads(data)
    except Exception as why:
        error = RuntimeError(f"a worker process raised what cannot be made here: {why}")
    error.add_note(f"in the worker process:\n{text.rstrip()}")
    return error
