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
        _unpickle(data)  # some exceptions can be pickled, but not unpickled
    except Exception as why:
        stand_in = RuntimeError(
            f"{type(error).__name__}: {_text(error)} (the original exception cannot be pickled: {_text(why)})"
        )
        data = pickle.dumps(stand_in)
    return pickle.dumps((data, text))


def unpickled_error(payload: bytes) -> BaseException:
    """Return the exception that `pickled_error` pickled, with the original traceback added as a note.

    If the exception cannot be unpickled in this process, or takes no note, return a `RuntimeError` that says so, with
    the same note.

    :param payload: result of `pickled_error`.
    """
    data, text = pickle.loads(payload)
    note = f"in the worker process:\n{text.rstrip()}"
    try:
        error = _unpickle(data)
        error.add_note(note)
    except Exception as why:
        error = RuntimeError(f"a worker process raised an exception that cannot be unpickled: {_text(why)}")
        error.add_note(note)
    return error


def _unpickle(data: bytes) -> BaseException:
    """Return a new exception from its pickled bytes.

    :raises TypeError: the object is no exception.
    :raises Exception: whatever unpickling raised.
    """
    error = pickle.loads(data)
    if not isinstance(error, BaseException):
        raise TypeError(f"it is unpickled as {error!r}")
    return error


def _text(error: BaseException) -> str:
    """Return the text of an exception; if its ``__str__`` raises, text that says so."""
    try:
        return str(error)
    except Exception:
        return "(no text: its __str__ failed)"
