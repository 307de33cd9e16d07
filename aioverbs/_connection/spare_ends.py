"""Ends of connections that a listener keeps ready, so that its next peer does not wait until one is made."""

import contextlib
import logging
from contextvars import Context

import anyio

from aioverbs._connection.connection import Connection, end_of
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._connection.shared_queues import completion_queue_for, lease_block_now
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.lifecycle import OPEN
from aioverbs._lifecycle.resource import loop_callback, open_now, suppress_warning
from aioverbs._lifecycle.turns import OPENING, spend
from aioverbs._memory.buffer_pool import LeasedBuffer
from aioverbs._verbs.base_domain import Domain, shared_resources_of
from aioverbs.errors import BrokenResourceError, ClosedResourceError, ConcurrentAccessError, VerbsError

__all__ = ["SpareEnd", "open_end", "spare_end_of", "take_spare_end"]

logger = logging.getLogger("aioverbs")


def open_end(domain: Domain, settings: ConnectionSettings, block: LeasedBuffer) -> Connection:
    """Create one end of a connection, whose queue pair is in RESET.

    :param domain: domain that the queue pair is created on.
    :param settings: sizes and times of the end.
    :param block: memory of its buffers, which belongs to the end from now on, also if this raises.
    :returns: the end, to be closed by the caller.
    :raises VerbsError: the device has no queue pair or completion queue left.
    :raises OSError: the process has no file descriptor left.
    :raises ValueError: the device has no such port or GID, or does not support the queue depths of the settings; or the
        domain cannot use ``spin_ns``.
    :raises ClosedResourceError: the domain is not open.
    :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
    """
    try:
        connection = Connection(domain, settings, block, completion_queue_for(domain, settings))
        open_now(connection)
    except BaseException:
        block.release()
        raise
    return connection


class SpareEnd:
    """One end of a connection that is ready for a peer: its queue pair is in INIT, and its receives are posted.

    The listeners of an event loop on one domain with the same settings share it. A peer gets it when its offer over TCP
    is accepted, after it has proved that it knows the secret if there is one; or with its request over rdma_cm, whose
    handshake goes over the queue pair. In the next turn of the loop another one is made, also if that peer stops in the
    middle of its handshake. So there is never more than one beside those of handshakes and connections. If none can be
    made, the peers of the listener wait until their own is made, and get the error if that fails.

    :param domain: domain that the queue pair is created on.
    :param settings: sizes and times of the end.
    """

    def __init__(self, domain: Domain, settings: ConnectionSettings) -> None:
        self._domain = domain
        self._settings = settings
        self._loop = running_loop()
        self._connection: Connection | None = None
        self._listeners = 0
        self._is_filling = False

    def hold(self) -> None:
        """Keep an end ready until `release` is called once more than this."""
        self._listeners += 1
        self._fill()

    def release(self) -> Connection | None:
        """Undo `hold`.

        :returns: the end that is no longer needed, to be closed by the caller; None if there is none.
        """
        self._listeners -= 1
        if self._listeners:
            return None
        connection, self._connection = self._connection, None
        return connection

    def take(self) -> Connection | None:
        """Take the end for a peer, and make another one in the next turn of the loop.

        :returns: the end, to be closed by the caller; None if there is none that works.
        """
        if self._listeners and not self._is_filling:
            self._is_filling = True
            self._loop.call_soon(self._fill, context=Context())  # not that of the peer's handshake
        connection, self._connection = self._connection, None
        if connection is None:
            return None
        if connection.state is not OPEN or end_of(connection).channel.broken is not None:
            _abort(connection)  # the device or the completion queue failed
            return None
        suppress_warning(connection, False)
        return connection

    @loop_callback
    def _fill(self) -> None:
        """Make an end, unless there is one or no listener needs one. A failure is logged."""
        self._is_filling = False
        if self._connection is not None or not self._listeners:
            return
        spend(OPENING)  # so that tasks do less in this turn of the loop
        connection = None
        try:
            connection = open_end(self._domain, self._settings, lease_block_now(self._domain, self._settings))
            suppress_warning(connection)  # the user does not know of it
            end_of(connection).post_receives()
        except (
            anyio.WouldBlock,
            OSError,
            MemoryError,
            ValueError,
            BrokenResourceError,
            ClosedResourceError,
            ConcurrentAccessError,
        ) as error:
            logger.debug("no end of a connection could be made ready: %r", error)
            if connection is not None:
                _abort(connection)
            return
        self._connection = connection


def _abort(connection: Connection) -> None:
    """Abort an end. If a verb fails, it is closed together with its domain."""
    with contextlib.suppress(VerbsError):
        connection.abort()


def take_spare_end(domain: Domain, settings: ConnectionSettings) -> Connection | None:
    """Take the end that the listeners of the running loop keep ready on a domain: see `SpareEnd.take`.

    :returns: the end, to be closed by the caller; None if there is none that works.
    """
    spare = shared_resources_of(domain).get(_key(settings))
    assert spare is None or isinstance(spare, SpareEnd)
    return spare.take() if spare is not None else None


def _key(settings: ConnectionSettings) -> tuple[object, ...]:
    """Return the key of the `SpareEnd` of the running loop in the shared resources of a domain."""
    return "spare end", settings, running_loop()


def spare_end_of(domain: Domain, settings: ConnectionSettings) -> SpareEnd:
    """Return the `SpareEnd` of the running loop for a domain and settings."""
    spare = shared_resources_of(domain).setdefault(_key(settings), SpareEnd(domain, settings))
    assert isinstance(spare, SpareEnd)
    return spare
