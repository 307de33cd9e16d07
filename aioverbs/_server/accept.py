"""What becomes of a peer that was accepted: a connection, or a reason why not."""

import asyncio
import functools
import logging
import socket
import ssl as tls
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aioverbs._connection.connect import accept_connection, check_secret
from aioverbs._connection.connection import Connection, ControlChannel
from aioverbs._connection.handshake import Reason
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._verbs.base_domain import Domain
from aioverbs.addresses import format_address
from aioverbs.errors import BrokenResourceError, HandshakeError, WorkCompletionError

__all__ = ["AcceptSettings", "TlsContext", "peer_name", "try_accept"]

logger = logging.getLogger("aioverbs")

TlsContext = tls.SSLContext | Callable[[], tls.SSLContext]
"""What TLS has of a server, its certificate first of all; or a function that makes it, which can go where it cannot."""


@dataclass(frozen=True)
class AcceptSettings:
    """On which terms peers are taken in.

    :param ssl: for TLS on the TCP connections, with a certificate.
    :param secret: what peers are to know.
    :param settings: of the connections.
    :param handshake_timeout_s: the longest that a peer may take to get through.
    :param max_handshakes: peers that may be on their way at once; who comes then waits, and the oldest gives way.
    :param max_connections: open connections, at most; who comes then is refused.
    """

    ssl: TlsContext | None
    secret: bytes | None
    settings: ConnectionSettings
    handshake_timeout_s: float
    max_handshakes: int
    max_connections: int | None

    def __post_init__(self) -> None:
        check_secret(self.secret)
        if not self.handshake_timeout_s > 0:
            raise ValueError(f"handshake_timeout_s is above 0, not {self.handshake_timeout_s}")
        for name in ("max_handshakes", "max_connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is 1 or more, not {value}")

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "context"}  # which is this process's

    @functools.cached_property
    def context(self) -> tls.SSLContext | None:
        """What is to be used of `ssl`, here: it is made once in each process."""
        return self.ssl if self.ssl is None or isinstance(self.ssl, tls.SSLContext) else self.ssl()


async def try_accept(
    control: Awaitable[ControlChannel], peer: str, domain: Domain, accept_settings: AcceptSettings
) -> tuple[Connection | None, str]:
    """The connection that a peer becomes, on the running loop; or None and what stopped it, which was logged.

    :param line: the line to the peer, which is made now.
    :param peer: who it is, for people.
    """
    try:
        return await accept_connection(await control, domain, accept_settings.secret, accept_settings.settings), ""
    except HandshakeError as error:
        reason, text = _reason_name(error), str(error)
    except (OSError, BrokenResourceError, MemoryError, WorkCompletionError) as error:  # of OSError SSLError, VerbsError
        reason = type(error).__name__
        text = str(error) or reason
    except asyncio.CancelledError:
        logger.info("%s did not become a connection: it took too long, or nobody is served any more", peer)
        raise
    logger.info("%s did not become a connection: %s", peer, text)
    return None, reason


def _reason_name(error: HandshakeError) -> str:
    try:
        return Reason(error.reason).name
    except ValueError:
        return str(error.reason)


def peer_name(sock: socket.socket) -> str:
    """Who is at the other end of a TCP connection, for people."""
    try:
        return format_address(sock.getpeername())
    except OSError:
        return "a peer that is gone"
