"""rdma_cm on the event loop: resolve addresses and routes, connect, accept, reject and disconnect.

    async with rdma_cm.Channel() as channel:
        async with channel.identifier() as identifier:
            await identifier.resolve("10.77.0.2", 7174)
            await identifier.connect(qp)  # a queue pair of identifier.device_name

        async with channel.listener("10.77.0.1", 7174) as listener:
            async for identifier in listener:
                await identifier.accept(qp)

The caller makes the queue pair, on any domain of the device. This package modifies its state and passes its number to
librdmacm. The queue pair stays open when its identifier is closed.

The event loop that opened the channel reads its events, without a thread, and acknowledges each one as it is read.
librdmacm itself may block: when it opens a device for the first time (it keeps the device open until the process ends),
and when it asks the daemon ibacm for a route, if that daemon is running.
"""

from aioverbs.rdma_cm.cm_id import Identifier
from aioverbs.rdma_cm.events import EventChannel
from aioverbs.rdma_cm.listener import Listener

__all__ = ["Channel", "Identifier", "Listener"]


class Channel(EventChannel):
    """Event channel of librdmacm: ``rdma_create_event_channel``. It belongs to the event loop that opens it.

    Closing the channel closes its identifiers and listeners. All peers are disconnected at the same time, and closing
    waits at most one second for their answers.

    Opening raises `LibraryNotFoundError` if librdmacm is not installed, `VerbsError` if the kernel module rdma_ucm is
    not loaded or the process may not use it, and `RuntimeError` if no asyncio event loop is running.
    """

    def identifier(self) -> Identifier:
        """Return an unopened `Identifier` for an outgoing connection.

        Use ``async with`` to open the identifier, which is closed at the end of the block. `Identifier.open` lists the
        exceptions that opening raises.
        """
        return Identifier(self)

    def listener(self, host: str | None = None, port: int = 0, *, backlog: int = 128) -> Listener:
        """Return an unopened `Listener` for incoming connections.

        Use ``async with`` to open the listener, which is closed at the end of the block. `Listener.open` lists the
        exceptions that opening raises.

        :param host: address or host name to listen on; None for all IPv4 addresses of this machine.
        :param port: port to listen on, 0..65535; 0 for any free port.
        :param backlog: number of connection requests that may wait to be accepted, 1 or more; the kernel rejects
            further ones.
        :raises ValueError: `port` is not in 0..65535, or `backlog` is less than 1.
        """
        return Listener(self, host, port, backlog)


for _each in (Identifier, Listener):
    _each.__module__ = __name__  # importing the defining module imports this one first
