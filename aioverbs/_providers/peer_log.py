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

__all__ = ["attend", "log"]

logger = logging.getLogger("aioverbs.fabric")

EVERY_S = 1.0

_lock = threading.RLock()  # reentrant: a signal handler may log in the middle of a section
_logged: dict[tuple[int, str], int] = {}  # number of rejections already logged, by process and device
_attended: weakref.WeakKeyDictionary[handles.Context, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # the holder of the lock does not exist in the child


os.register_at_fork(after_in_child=_forked)


def log(context: software.Context) -> FabricStatistics:
    """Log rejections of a software device that were not logged yet, and return the statistics of its fabric."""
    told = context.fabric()
    count = told.refused_peers + told.refused_frames
    key = os.getpid(), context.name
    with _lock:
        fresh = count - _logged.get(key, 0)
        if fresh > 0:  # otherwise another thread read the count later and logged first
            _logged[key] = count
    known = told.refusals[-fresh:] if fresh > 0 else ()
    if fresh > len(known):
        logger.warning("%s refused %d more peers, before these", context.name, fresh - len(known))
    for refusal in known:
        peer = f"peer {refusal.gid.hex()}" if refusal.gid is not None else "a peer"
        logger.warning("%s refused %s: %s", context.name, peer, refusal.reason)
    return told


def attend(context: handles.Context) -> None:
    """Have the running loop log rejections about once a second while it runs, if the device can have peers."""
    loop = asyncio._get_running_loop()
    if loop is None or not isinstance(context, software.Context) or not context.has_fabric:
        return
    with _lock:
        before = _attended.get(context)
        if before is not None and not before.is_closed():
            return
        _attended[context] = loop
    loop.call_later(EVERY_S, _look, loop, weakref.ref(context))


def _look(loop: asyncio.AbstractEventLoop, reference: weakref.ref[software.Context]) -> None:
    context = reference()
    if context is None or context.closed:
        return
    with contextlib.suppress(ClosedResourceError, VerbsError):  # another thread has just closed the context
        log(context)
        loop.call_later(EVERY_S, _look, loop, reference)
