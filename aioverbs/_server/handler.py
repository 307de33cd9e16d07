"""Handling a peer of a server on the event loop that owns its connection: the server's loop or that of a worker."""

import contextlib
import functools
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio

from aioverbs._connection.connection import Connection, on_closed
from aioverbs._connection.control_channel import ControlChannel
from aioverbs._connection.tcp_control import accept_tcp
from aioverbs._lifecycle.affinity import wait_uncancelled
from aioverbs._pool.pickled_errors import pickled_error, unpickled_error
from aioverbs._pool.worker import current_worker
from aioverbs._server.accept import AcceptSettings, peer_name, try_accept
from aioverbs._verbs.base_domain import Domain
from aioverbs.errors import BrokenResourceError

__all__ = ["Handler", "HandlerResult", "ReportOpen", "Service", "handle", "handle_on_worker"]

logger = logging.getLogger("aioverbs")

Handler = Callable[[Connection], Awaitable[object]]
"""Async function that a server calls with each connection."""

ReportOpen = Callable[[bool], object]
"""Callback that is called with True when the peer has become a connection, and with False when the connection is
closed. The callback does not block.
"""


@dataclass(frozen=True)
class Service:
    """Handler and settings of a server.

    To be sent to worker processes, a service must be picklable, and so must its handler and the function that makes the
    TLS context.
    """

    handler: Handler
    accept_settings: AcceptSettings


@dataclass(frozen=True)
class HandlerResult:
    """Result of handling one peer.

    :param reason: reason why the peer did not become a connection; "" if it did.
    :param failure: exception that the handler raised, except for those that report the end of the peer; None if there
        is none.
    """

    reason: str = ""
    failure: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a function and its arguments that restore the result, for pickle.

        The traceback of the failure cannot be pickled, so it is replaced by its text.
        """
        return _unpickled_result, (self.reason, self.failure and pickled_error(self.failure))


def _unpickled_result(reason: str, failure: bytes | None) -> HandlerResult:
    """Return a new `HandlerResult` made from the arguments that `HandlerResult.__reduce__` returned."""
    # bytes are never empty
    return HandlerResult(reason, failure and unpickled_error(failure))  # type: ignore[arg-type]


async def handle(
    control: Awaitable[ControlChannel], peer: str, report_open: ReportOpen, domain: Domain, service: Service
) -> HandlerResult:
    """Make a connection to an accepted peer, call the handler with it, then close the connection.

    All of this happens on the running loop. If the handler raises or is cancelled, the connection is aborted.

    :param control: awaitable that opens the control channel to the peer.
    :param peer: description of the peer for logs.
    :param report_open: called with True when the connection is open, and with False when it is closed.
    :param domain: domain that the queue pair is created on.
    :param service: the handler and the settings for accepted peers.
    :returns: a result with the reason why there is no connection, or with the `Exception` that the handler raised.
        `anyio.EndOfStream` and `anyio.BrokenResourceError`, which report that the peer is gone, are left out.
    :raises ValueError: the device has no such port or GID, or does not support the queue depths of the settings; or the
        domain cannot use ``spin_ns``.
    :raises ClosedResourceError: the domain is not open, or was closed during the handshake.
    :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
    :raises VerbsError: the connection cannot be closed.
    :raises BaseException: this was cancelled, or the handler raised an exception that is not an `Exception`.
    """
    connection, reason = await try_accept(control, peer, domain, service.accept_settings)
    if connection is None:
        return HandlerResult(reason)
    on_closed(connection, functools.partial(report_open, False))
    report_open(True)
    try:
        await service.handler(connection)
    except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
        logger.debug("%r ended: %s", connection, error)
    except Exception as error:
        connection.abort()
        await connection.aclose()
        return HandlerResult(failure=error)
    except BaseException:
        connection.abort()
        await wait_uncancelled(connection.aclose())
        raise
    else:
        with contextlib.suppress(BrokenResourceError):
            await connection.aclose()
        return HandlerResult()
    connection.abort()
    await connection.aclose()
    return HandlerResult()


async def handle_on_worker(sock: socket.socket, report_open: ReportOpen, service: Service) -> HandlerResult:
    """Handle a peer on the current worker of a pool, using the worker's domain: see `handle`.

    :param sock: non-blocking socket of the peer. Its descriptor is detached from this object.
    :param report_open: called with True when the connection is open, and with False when it is closed.
    :param service: the handler and the settings for accepted peers.
    :returns: the result of `handle`.
    :raises BaseException: whatever `handle` raises, or the function that makes the TLS context.
    """
    peer, detached = peer_name(sock), socket.socket(fileno=sock.detach())
    control = accept_tcp(detached, service.accept_settings.context, service.accept_settings.handshake_timeout_s)
    return await handle(control, peer, report_open, current_worker().domain, service)
