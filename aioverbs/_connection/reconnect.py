"""Reconnecting: a new connection each time the last one is lost."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from typing import Unpack

from aioverbs._connection.backoff import Backoff
from aioverbs._connection.connect import Connecting, ConnectOptions, connect
from aioverbs._connection.connection import Connection
from aioverbs._connection.handshake import Reason
from aioverbs._durations import duration
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import OwnedIterator, running_loop
from aioverbs._verbs.base_domain import check_caller
from aioverbs.errors import BrokenResourceError, HandshakeError

__all__ = ["reconnect"]

logger = logging.getLogger("aioverbs")

# Reasons that do not go away by waiting.
_PERMANENT_REASONS = {Reason.VERSION, Reason.SECRET, Reason.PROTOCOL, Reason.DEVICE}


def reconnect(
    host: str,
    port: int,
    *,
    backoff: Backoff | None = None,
    steady_s: float = 10.0,
    **options: Unpack[ConnectOptions],
) -> AsyncGenerator[Connection, None]:
    """Iterate over connections to a peer. A new one is made each time the loop body ends or executes ``continue``.

        async for connection in reconnect("storage-1", 7471, domain=domain):
            try:
                ...
            except anyio.BrokenResourceError:
                continue

    A connection is closed when the next one is requested, or when the iterator is closed or garbage-collected, as after
    a ``break`` or an exception in the loop body. Before each further attempt to connect, the iterator waits as
    `backoff` says. The waits begin anew after a connection that lasted for `steady_s`. When `backoff` allows no further
    attempt, the exception of the last attempt is raised; if the last attempt succeeded, the loop ends. The event loop
    that requests the first connection owns the iterator, even if any loop may use the domain. The call itself raises
    only the `ValueError` that `connect` raises for an invalid argument.

    :param host: as for `connect`.
    :param port: as for `connect`.
    :param backoff: waits between attempts; None for ``Backoff()``.
    :param steady_s: time in seconds that a connection has to last for the waits to begin anew.
    :param options: keyword arguments of `connect`; ``domain`` is required.
    :returns: an async iterator of open connections. It closes them; the caller does not have to.
    :raises AffinityError: another event loop owns the domain or requested the first connection; nothing was done.
    :raises HandshakeError: one end refuses the other for a permanent reason: the version, secret, protocol or device.
    :raises OSError: the last attempt that `backoff` allows failed; this is the exception of that attempt. Or, as
        `VerbsError`: a connection cannot be closed.
    :raises TimeoutError: the last attempt that `backoff` allows took too long.
    :raises BrokenResourceError: the peer went away during the last attempt that `backoff` allows.
    :raises ValueError: an argument of `connect` is not valid.
    :raises Exception: any other exception that `connect` raises, such as `ClosedResourceError`, after which there is no
        further attempt.
    """
    peer, connecting = f"{host}:{port}", connect(host, port, **options)
    connections = _connections(connecting, peer, backoff if backoff is not None else Backoff(), steady_s)
    domain = options["domain"]
    return OwnedIterator(f"reconnecting to {peer}", connections, lambda: check_caller(domain, "reconnect"))


async def _connections(
    connecting: Connecting, peer: str, policy: Backoff, steady_s: float
) -> AsyncGenerator[Connection, None]:
    """Yield open connections to `peer`, and close each one when the next is requested.

    The iteration ends when `policy` allows no further attempt and the last attempt succeeded.

    :param connecting: makes a connection each time it is awaited.
    :param peer: description of the peer for logs.
    :param policy: waits between attempts.
    :param steady_s: time in seconds that a connection has to last for the waits to begin anew.
    :raises HandshakeError: one end refuses the other for a permanent reason.
    :raises OSError: the last attempt that `policy` allows failed; or, as `VerbsError`, a connection cannot be closed.
    :raises BrokenResourceError: the peer went away during the last attempt that `policy` allows.
    :raises Exception: any other exception that `connect` raises, such as `ClosedResourceError`, after which there is no
        further attempt.
    """
    rng = random.Random()
    waits = policy.waits(rng)
    clock = running_loop().time
    while True:
        failure: Exception | None = None
        try:
            connection = await connecting
        except (OSError, BrokenResourceError) as error:  # OSError includes TimeoutError and HandshakeError
            if isinstance(error, HandshakeError) and error.reason in _PERMANENT_REASONS:
                raise
            failure = error
        else:
            opened_at = clock()
            try:
                yield connection
            finally:
                await connection.aclose()
            if clock() - opened_at >= steady_s:
                waits = policy.waits(rng)
        wait_s = next(waits, None)
        if wait_s is None:
            if failure is not None:
                raise failure
            return
        logger.debug("reconnecting to %s in %s: %s", peer, duration(wait_s), failure or "the last connection ended")
        await asyncio.sleep(wait_s)


publish(__name__)
