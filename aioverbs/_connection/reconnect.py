"""Connections that are made again when they are lost."""

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

# What does not change by waiting.
_PERMANENT_REASONS = {Reason.VERSION, Reason.SECRET, Reason.PROTOCOL, Reason.DEVICE}


def reconnect(
    host: str,
    port: int,
    *,
    backoff: Backoff | None = None,
    steady_s: float = 10.0,
    **options: Unpack[ConnectOptions],
) -> AsyncGenerator[Connection, None]:
    """A connection, and another one whenever the body of the loop comes back for it: when it was lost, or is closed.

        async for connection in reconnect("storage-1", 7471, domain=domain):
            try:
                ...
            except anyio.BrokenResourceError:
                continue

    The connection is closed when the next one is asked for, or the loop ends by ``break`` or an error. Between attempts
    it waits as `backoff` has it, which begins anew after a connection that lasted for `steady_s`. The event
    loop that asks for the first connection owns the iterator, whoever may use the domain.

    :param host: where the peer listens: an address, or a name.
    :param port: where it listens.
    :param backoff: when to try again; None: that of `Backoff()`.
    :param steady_s: how long a connection lasts, in seconds, before it counts as one that came about.
    :param options: what `connect` takes by name, ``domain`` and others: see there.
    :raises AffinityError: another event loop owns the domain, or asked for the first connection; nothing was done.
    :raises HandshakeError: the peer refuses for a reason that stays, as another secret.
    :raises OSError: the last attempt's error, where `backoff` has no further one; TimeoutError and BrokenResourceError
        likewise.
    """
    peer, connecting = f"{host}:{port}", connect(host, port, **options)
    connections = _connections(connecting, peer, backoff if backoff is not None else Backoff(), steady_s)
    domain = options["domain"]
    return OwnedIterator(f"reconnecting to {peer}", connections, lambda: check_caller(domain, "reconnect"))


async def _connections(
    connecting: Connecting, peer: str, policy: Backoff, steady_s: float
) -> AsyncGenerator[Connection, None]:
    rng = random.Random()
    waits = policy.waits(rng)
    clock = running_loop().time
    while True:
        failure: Exception | None = None
        try:
            connection = await connecting
        except (OSError, BrokenResourceError) as error:  # of these TimeoutError and HandshakeError
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
        logger.debug("connecting to %s again in %s: %s", peer, duration(wait_s), failure or "the last one ended")
        await asyncio.sleep(wait_s)


publish(__name__)
