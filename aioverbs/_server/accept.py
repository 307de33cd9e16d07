"""Making a connection from an accepted peer, or a reason why the peer did not become one."""

import asyncio
import functools
import logging
import socket
import ssl as tls
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aioverbs._connection.connect import accept_connection, check_secret
from aioverbs._connection.connection import Connection
from aioverbs._connection.control_channel import ControlChannel
from aioverbs._connection.handshake import Reason
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._verbs.base_domain import Domain
from aioverbs.addresses import format_address
from aioverbs.errors import BrokenResourceError, HandshakeError, WorkCompletionError

__all__ = ["AcceptSettings", "TlsContext", "peer_name", "try_accept"]

logger = logging.getLogger("aioverbs")

TlsContext = tls.SSLContext | Callable[[], tls.SSLContext]
"""TLS context of a server, with a certificate; or a function that makes one. The function, unlike a context, can be
pickled."""


@dataclass(frozen=True)
class AcceptSettings:
    """Settings and limits for accepted peers.

    :param ssl: TLS context for the TCP connections, or a function that makes one; None for no TLS.
    :param secret: secret that peers must prove that they know; None for no secret.
    :param settings: sizes and times of the connections.
    :param handshake_timeout_s: limit of a peer's handshake in seconds, above 0.
    :param max_handshakes: largest number of handshakes at the same time, 1 or more.
    :param max_connections: largest number of open connections, 1 or more; None for no limit.
    :raises ValueError: a value is out of its range.
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
            raise ValueError(f"`handshake_timeout_s` must be above 0, got {self.handshake_timeout_s}")
        for name in ("max_handshakes", "max_connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be 1 or more, got {value}")

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "context"}  # made anew in each process

    @functools.cached_property
    def context(self) -> tls.SSLContext | None:
        """TLS context of this process, made on first use if `ssl` is a function; None if there is no TLS.

        :raises Exception: whatever that function raises, such as `ssl.SSLError` or `OSError` if it cannot load a
            certificate.
        """
        return self.ssl if self.ssl is None or isinstance(self.ssl, tls.SSLContext) else self.ssl()


async def try_accept(
    control: Awaitable[ControlChannel], peer: str, domain: Domain, accept_settings: AcceptSettings
) -> tuple[Connection | None, str]:
    """Make a connection to an accepted peer on the running loop. If that fails, log why.

    :param control: awaitable that opens the control channel to the peer.
    :param peer: description of the peer for logs.
    :param domain: domain that the queue pair is created on.
    :param accept_settings: secret and settings of the connection.
    :returns: a tuple: the open connection, which the caller closes, and ``""``; on failure, None and the reason as
        text: the name of a `Reason`, the number of an unknown reason, or the name of an exception class.
    :raises ValueError: the device has no such port or GID, or does not support the queue depths of the settings; or the
        domain cannot use ``spin_ns``. This and the exceptions below are not logged.
    :raises ClosedResourceError: the domain is not open, or was closed during the handshake.
    :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
    """
    try:
        return await accept_connection(await control, domain, accept_settings.secret, accept_settings.settings), ""
    except HandshakeError as error:
        reason, text = _reason_name(error), str(error)
    # OSError includes SSLError and VerbsError
    except (OSError, BrokenResourceError, MemoryError, WorkCompletionError) as error:
        reason = type(error).__name__
        text = str(error) or reason
    except asyncio.CancelledError:
        logger.info("%s did not become a connection: the handshake took too long, or the server is stopping", peer)
        raise
    logger.info("%s did not become a connection: %s", peer, text)
    return None, reason


def _reason_name(error: HandshakeError) -> str:
    """Return the name of the `Reason` of a failed handshake; if the reason is unknown, its number as text."""
    try:
        return Reason(error.reason).name
    except ValueError:
        return str(error.reason)


def peer_name(sock: socket.socket) -> str:
    """Return the address of a TCP peer as text for logs; ``"a peer that is gone"`` if the socket is not connected."""
    try:
        return format_address(sock.getpeername())
    except OSError:
        return "a peer that is gone"
