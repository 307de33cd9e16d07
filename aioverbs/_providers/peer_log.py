"""Logging of the peers that the software device rejected, by an event loop that uses the device or when queried."""

import asyncio
import contextlib
import logging
import os
import threading
import weakref

from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.errors import ClosedResourceError, VerbsError
from aioverbs.software_peers import FabricStatistics

__all__ = ["log_periodically", "log_rejections"]

logger = logging.getLogger("aioverbs.fabric")

INTERVAL_S = 1.0

_lock = threading.RLock()  # reentrant: a signal handler may log in the middle of a section
_logged: dict[tuple[int, str], int] = {}  # number of rejections already logged, by process and device
_logging_loops: weakref.WeakKeyDictionary[handles.Context, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()


def _reset_lock() -> None:
    """Replace the lock of this module. This is called in the child of a fork."""
    global _lock
    _lock = threading.RLock()  # the holder of the lock does not exist in the child


os.register_at_fork(after_in_child=_reset_lock)


def log_rejections(context: software.Context) -> FabricStatistics:
    """Log the peers and frames that a software device has rejected and that were not logged yet.

    Each rejection is logged once for this process and device, no matter with which context this is called.

    :param context: context of the software device.
    :returns: the statistics of the device's connections, from which the rejections were taken.
    :raises ClosedResourceError: the context is closed.
    """
    statistics = context.fabric()
    count = statistics.refused_peers + statistics.refused_frames
    key = os.getpid(), context.name
    with _lock:
        unlogged = count - _logged.get(key, 0)
        if unlogged > 0:  # otherwise another thread read the count later and logged first
            _logged[key] = count
    recent = statistics.refusals[-unlogged:] if unlogged > 0 else ()
    if unlogged > len(recent):
        logger.warning("%s rejected %d more peers before these", context.name, unlogged - len(recent))
    for refusal in recent:
        peer = f"peer {refusal.gid.hex()}" if refusal.gid is not None else "a peer"
        logger.warning("%s rejected %s: %s", context.name, peer, refusal.reason)
    return statistics


def log_periodically(context: handles.Context) -> None:
    """Have the running event loop call `log_rejections` about once a second until the context is closed.

    Do nothing for an RDMA device, for a software device that has no peers in other processes yet, if no event loop is
    running, or if an event loop that is not closed is already doing this for the context.

    :raises ClosedResourceError: the context is closed.
    """
    loop = asyncio._get_running_loop()
    if loop is None or not isinstance(context, software.Context) or not context.has_fabric:
        return
    with _lock:
        before = _logging_loops.get(context)
        if before is not None and not before.is_closed():
            return
        _logging_loops[context] = loop
    loop.call_later(INTERVAL_S, _log_and_reschedule, loop, weakref.ref(context))


def _log_and_reschedule(loop: asyncio.AbstractEventLoop, reference: weakref.ref[software.Context]) -> None:
    """Log new rejections and schedule the next call to this function in a second.

    Do nothing if the context was closed or garbage-collected.
    """
    context = reference()
    if context is None or context.closed:
        return
    with contextlib.suppress(ClosedResourceError, VerbsError):  # another thread has just closed the context
        log_rejections(context)
        loop.call_later(INTERVAL_S, _log_and_reschedule, loop, reference)
