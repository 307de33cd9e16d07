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

# Reasons that do not pass by waiting.
_PERMANENT_REASONS = {Reason.VERSION, Reason.SECRET, Reason.PROTOCOL, Reason.DEVICE}


def reconnect(
    host: str,
    port: int,
    *,
    backoff: Backoff | None = None,
    steady_s: float = 10.0,
    **options: Unpack[ConnectOptions],
) -> AsyncGenerator[Connection, None]:
    """Iterate over connections to a peer: a new one is made each time the loop body ends or continues.

        async for connection in reconnect("storage-1", 7471, domain=domain):
            try:
                ...
            except anyio.BrokenResourceError:
                continue

    The connection is closed when the next one is requested, or when the loop ends by ``break`` or an error. Failed
    attempts are repeated after the waits of `backoff`, which start again after a connection that lasted for `steady_s`.
    When `backoff` allows no further attempt, the last attempt's error is raised, or the loop ends if that succeeded.
    The event loop that requests the first connection owns the iterator, even if any loop may use the domain.

    :param host: address or name at which the peer listens.
    :param port: port at which the peer listens, 1..65535.
    :param backoff: waits between attempts; None: ``Backoff()``.
    :param steady_s: time in seconds after which a connection counts as successful.
    :param options: keyword arguments of `connect`; ``domain`` is required.
    :returns: an async iterator of open connections, which it closes itself.
    :raises AffinityError: another event loop owns the domain, or requested the first connection; nothing was done.
    :raises HandshakeError: the peer refuses for a permanent reason: version, secret, protocol or device.
    :raises OSError: `backoff` allows no further attempt; the last attempt's error.
    :raises TimeoutError: likewise, if the last attempt took too long.
    :raises BrokenResourceError: likewise, if the peer went away during the last attempt.
    :raises ValueError: an argument of `connect` is not valid.
    """
    peer, connecting = f"{host}:{port}", connect(host, port, **options)
    connections = _connections(connecting, peer, backoff if backoff is not None else Backoff(), steady_s)
    domain = options["domain"]
    return OwnedIterator(f"reconnecting to {peer}", connections, lambda: check_caller(domain, "reconnect"))


async def _connections(
    connecting: Connecting, peer: str, policy: Backoff, steady_s: float
) -> AsyncGenerator[Connection, None]:
    """Yield open connections to `peer`, and close each one when the next is requested.

    :param connecting: makes a connection each time it is awaited.
    :param peer: description of the peer for logs.
    :param policy: waits between attempts.
    :param steady_s: time in seconds after which a connection counts as successful.
    :raises HandshakeError: the peer refuses for a permanent reason.
    :raises OSError: no further attempt is allowed; the last attempt's error, or in its place a `BrokenResourceError`.
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
