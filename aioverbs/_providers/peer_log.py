"""Peers that the software device refused go to the log: on a loop of those who use it, or when they are asked for."""

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

_lock = threading.RLock()  # a handler of signals may ask in the middle of a section
_logged: dict[tuple[int, str], int] = {}  # by process and device: how many of its refusals
_attended: weakref.WeakKeyDictionary[handles.Context, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # who held it is not here


os.register_at_fork(after_in_child=_forked)


def log(context: software.Context) -> FabricStatistics:
    """Log what a software device refused that was not logged yet, and return what it tells."""
    told = context.fabric()
    count = told.refused_peers + told.refused_frames
    key = os.getpid(), context.name
    with _lock:
        fresh = count - _logged.get(key, 0)
        if fresh > 0:  # else another thread was told later, and was faster
            _logged[key] = count
    known = told.refusals[-fresh:] if fresh > 0 else ()
    if fresh > len(known):
        logger.warning("%s refused %d more peers, before these", context.name, fresh - len(known))
    for refusal in known:
        peer = f"peer {refusal.gid.hex()}" if refusal.gid is not None else "a peer"
        logger.warning("%s refused %s: %s", context.name, peer, refusal.reason)
    return told


def attend(context: handles.Context) -> None:
    """See that refusals are logged by the running loop about once a second, as long as it runs, if there can be any."""
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
    with contextlib.suppress(ClosedResourceError, VerbsError):  # by another thread, just now
        log(context)
        loop.call_later(EVERY_S, _look, loop, reference)
