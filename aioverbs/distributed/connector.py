"""Connecting to a listener."""

from typing import Any

from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.core import CommClosedError, Connector, FatalCommClosedError

from aioverbs._connection.connect import connect
from aioverbs._connection.handshake import Reason
from aioverbs.distributed.comm import PREFIX, AioverbsComm
from aioverbs.distributed.configuration import connect_timeout_s, connection_settings, transport
from aioverbs.distributed.domains import get_domain
from aioverbs.distributed.encryption import check_encryption
from aioverbs.errors import BrokenResourceError, ClosedResourceError, HandshakeError

__all__ = ["AioverbsConnector"]

_TRANSIENT = (Reason.BUSY, Reason.CLOSING, Reason.TEMPORARY)


class AioverbsConnector(Connector):
    """Connector of the scheme ``aioverbs``."""

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> AioverbsComm:
        """Connect to a listener, once: `distributed.comm.core.connect` repeats the call if it raises an `OSError`.

        :param address: host and port without scheme, such as ``10.0.0.1:8786`` or ``[fd00::1]:8786``.
        :param deserialize: False to leave the objects in received messages serialized.
        :param connection_args: arguments that `distributed` made from its `distributed.Security`; others are ignored.
        :returns: the comm, to be closed by the caller.
        :raises RuntimeError: the configuration requires encryption.
        :raises ValueError: the address is malformed, or a setting of the backend is invalid.
        :raises distributed.comm.core.FatalCommClosedError: one end refuses the other for a reason that does not go
            away, such as an RDMA device at one end and the software device at the other.
        :raises OSError: the listener cannot be reached or, as `distributed.comm.CommClosedError`, is gone or busy.
        :raises Exception: any other exception that `shared_device` or `aioverbs.connect` raises.
        """
        check_encryption(address, connection_args)
        host, port = parse_host_port(address)
        domain = await get_domain()
        try:
            connection = await connect(
                host,
                port,
                domain=domain,
                transport=transport(),
                settings=connection_settings(),
                timeout_s=connect_timeout_s(),
            )
        except HandshakeError as error:
            closed = CommClosedError if error.reason in _TRANSIENT else FatalCommClosedError
            raise closed(f"in the handshake with {PREFIX + address}: {error}") from error
        except (BrokenResourceError, ClosedResourceError) as error:
            raise CommClosedError(f"in the handshake with {PREFIX + address}: {error}") from error
        local = None if connection.closed else connection.local_address
        if local is None:
            connection.abort()
            raise CommClosedError(f"{PREFIX + address} closed the connection at once")
        return AioverbsComm(connection, PREFIX + unparse_host_port(*local[:2]), PREFIX + address, deserialize)
