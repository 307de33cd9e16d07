"""Opening the software device, and closing it with all that was made of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.testing import destroy_all

# How long after its posting a request is executed; the last is long enough to be in flight when the next line runs.
_DELAYS_NS = {"inline": None, "thread": 0, "thread-delayed": 200_000}
MODES = list(_DELAYS_NS)


def open_context(mode: str, delay_ns: int | None = None) -> software.Context:
    """Open the software device in one of `MODES`; with another delay, where the mode has one."""
    delay = _DELAYS_NS[mode]
    if delay is None:
        return software.Context.open()
    return software.Context.open(execution="thread", delay_ns=delay_ns if delay and delay_ns is not None else delay)


def children(context: handles.Context) -> list[handles.Handle]:
    """What is open of a context, oldest first, without itself."""
    return [handle for handle in handles.open_handles() if handle.context is context and handle is not context]


@contextmanager
def opened(mode: str, delay_ns: int | None = None) -> Iterator[software.Context]:
    """An open context; what was made of it is destroyed at the end, and the device agrees that nothing is left."""
    context = open_context(mode, delay_ns)
    try:
        yield context
    finally:
        destroy_all(children(context))
        counts = context.counts() if not context.closed else None
        context.destroy()
    assert counts is None or not any(count for kind, count in counts.items() if kind != "overlaps"), counts
