"""Exceptions that are sent to another process, with their tracebacks as text."""

import pickle
import traceback

__all__ = ["pickled_error", "unpickled_error"]


def pickled_error(error: BaseException) -> bytes:
    """Return `error` and the text of its traceback as pickled bytes.

    If `error` cannot be pickled and unpickled again, it is replaced with a `RuntimeError` whose message contains the
    type and message of `error`, and says why it cannot be pickled.

    :returns: bytes for `unpickled_error`.
    """
    text = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # some exceptions can be pickled, but not unpickled
    except Exception as why:
        stand_in = RuntimeError(f"{type(error).__name__}: {error} (the original exception cannot be pickled: {why})")
        data = pickle.dumps(stand_in)
    return pickle.dumps((data, text))


def unpickled_error(payload: bytes) -> BaseException:
    """Return the exception that `pickled_error` pickled, with the original traceback added as a note.

    If the exception cannot be unpickled in this process, return a `RuntimeError` that says so, with the same note.

    :param payload: result of `pickled_error`.
    """
    data, text = pickle.loads(payload)
    try:
        error: BaseException = pickle.loads(data)
    except Exception as why:
        error = RuntimeError(f"a worker process raised an exception that cannot be unpickled: {why}")
    error.add_note(f"in the worker process:\n{text.rstrip()}")
    return error
