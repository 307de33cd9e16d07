"""The backend, which `distributed` finds by its entry point."""

from collections.abc import Awaitable, Callable
from typing import Any

from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.registry import Backend
from distributed.utils import ensure_ip, get_ip

from aioverbs.distributed.comm import AioverbsComm
from aioverbs.distributed.connector import AioverbsConnector
from aioverbs.distributed.listener import AioverbsListener

__all__ = ["AioverbsBackend"]


class AioverbsBackend(Backend):
    """Backend of the scheme ``aioverbs``. An address is a host and a port, as in ``aioverbs://10.0.0.1:8786``."""

    def get_connector(self) -> AioverbsConnector:
        """Return a new connector."""
        return AioverbsConnector()

    def get_listener(
        self,
        loc: str,
        handle_comm: Callable[[AioverbsComm], Awaitable[object]],
        deserialize: bool,
        **connection_args: Any,
    ) -> AioverbsListener:
        """Return a new listener, which is not started.

        :param loc: host and port; the port may be missing.
        :param handle_comm: coroutine function that is called with each comm.
        :param deserialize: False to leave the objects in received messages serialized.
        :param connection_args: further arguments of `AioverbsListener`.
        :raises RuntimeError: the configuration requires encryption.
        :raises ValueError: the address is malformed.
        """
        return AioverbsListener(loc, handle_comm, deserialize, **connection_args)

    def get_address_host(self, loc: str) -> str:
        """Return the host of an address.

        :param loc: host and port.
        :raises ValueError: the address is malformed.
        """
        return self.get_address_host_port(loc)[0]

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        """Return the host and the port of an address.

        :param loc: host and port.
        :raises ValueError: the address is malformed.
        """
        host, port = parse_host_port(loc)
        return host, port

    def resolve_address(self, loc: str) -> str:
        """Return an address with the IP address of its host.

        :param loc: host and port.
        :raises ValueError: the address is malformed.
        :raises OSError: the name has no address.
        """
        host, port = parse_host_port(loc)
        return unparse_host_port(ensure_ip(host), port)

    def get_local_address_for(self, loc: str) -> str:
        """Return the address of this machine from which an address is reached, without a port.

        :param loc: host and port.
        :raises ValueError: the address is malformed.
        :raises OSError: the name has no address.
        """
        return unparse_host_port(get_ip(ensure_ip(parse_host_port(loc)[0])))
