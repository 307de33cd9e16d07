"""What is done with a peer of a server, where its connection is to be: on the server's loop, or on a pool's worker."""

import contextlib
import functools
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio

from aioverbs._connection.connection import Connection, ControlChannel, on_closed
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
"""What a server calls with each connection."""

ReportOpen = Callable[[bool], object]
"""Is told True when the peer has become a connection, and False when that is closed. It blocks nobody."""


@dataclass(frozen=True)
class Service:
    """What peers get. With a handler, and a `TlsContext`, that can be pickled it goes to other processes."""

    handler: Handler
    accept_settings: AcceptSettings


@dataclass(frozen=True)
class HandlerResult:
    """How it ended.

    :param why: what kept it from being a connection; empty where it was one.
    :param failure: what the handler raised that is not how a peer's end is told.
    """

    reason: str = ""
    failure: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Its traceback cannot be pickled, but what it says can.
        return _unpickled_result, (self.reason, self.failure and pickled_error(self.failure))


def _unpickled_result(reason: str, failure: bytes | None) -> HandlerResult:
    return HandlerResult(reason, failure and unpickled_error(failure))  # type: ignore[arg-type]  # bytes are not empty


async def handle(
    control: Awaitable[ControlChannel], peer: str, report_open: ReportOpen, domain: Domain, service: Service
) -> HandlerResult:
    """Make a connection, on the running loop, and have the handler called with it; it is closed at the end."""
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
        await connection.abort()
        return HandlerResult(failure=error)
    except BaseException:
        await wait_uncancelled(connection.abort())
        raise
    else:
        with contextlib.suppress(BrokenResourceError):
            await connection.aclose()
        return HandlerResult()
    await connection.abort()
    return HandlerResult()


async def handle_on_worker(sock: socket.socket, report_open: ReportOpen, service: Service) -> HandlerResult:
    """`handle` on the worker that this is called by, with its domain.

    :param sock: of the peer, non-blocking; it is taken out of this object.
    """
    peer, detached = peer_name(sock), socket.socket(fileno=sock.detach())
    control = accept_tcp(detached, service.accept_settings.context, service.accept_settings.handshake_timeout_s)
    return await handle(control, peer, report_open, current_worker().domain, service)
