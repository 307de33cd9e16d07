"""Opening the software device, and closing it with all of its children."""

from collections.abc import Iterator
from contextlib import contextmanager

from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.testing import destroy_all

# Delay from posting to execution, in ns; the last one keeps a request in flight while the next line runs.
_DELAYS_NS = {"inline": None, "thread": 0, "thread-delayed": 200_000}
MODES = list(_DELAYS_NS)


def open_context(mode: str, delay_ns: int | None = None) -> software.Context:
    """Open the software device in one of `MODES`, with another delay if the mode has one."""
    delay = _DELAYS_NS[mode]
    if delay is None:
        return software.Context.open()
    return software.Context.open(execution="thread", delay_ns=delay_ns if delay and delay_ns is not None else delay)


def children(context: handles.Context) -> list[handles.Handle]:
    """Return the open handles of a context, oldest first, without the context."""
    return [handle for handle in handles.open_handles() if handle.context is context and handle is not context]


@contextmanager
def opened(mode: str, delay_ns: int | None = None) -> Iterator[software.Context]:
    """Open a context; destroy its children at the end, and check that the device has no objects left."""
    context = open_context(mode, delay_ns)
    try:
        yield context
    finally:
        destroy_all(children(context))
        counts = context.counts() if not context.closed else None
        context.destroy()
    assert counts is None or not any(count for kind, count in counts.items() if kind != "overlaps"), counts
