"""rdma_cm on the event loop: addresses and routes, connecting, accepting, rejecting, disconnecting.

    async with rdma_cm.Channel() as channel:
        async with channel.identifier() as identifier:
            await identifier.resolve("10.77.0.2", 7174)
            await identifier.connect(qp)  # a queue pair of identifier.device_name

        async with channel.listener("10.77.0.1", 7174) as listener:
            async for identifier in listener:
                await identifier.accept(qp)

The queue pair is the user's own, made on any domain of the device: it is moved from state to state here, and its number
told to librdmacm. It stays open when its identifier is closed.

Events are taken by the loop that opened the channel, without a thread, and acknowledged when they are taken. What
blocks is librdmacm's own: it opens each device when it first meets it, and keeps it open for the process; and where the
daemon ibacm runs it asks that for the route and waits for its answer.
"""

from aioverbs.rdma_cm.cm_id import Identifier
from aioverbs.rdma_cm.events import EventChannel
from aioverbs.rdma_cm.listener import Listener

__all__ = ["Channel", "Identifier", "Listener"]


class Channel(EventChannel):
    """Where librdmacm tells of identifiers: ``rdma_create_event_channel``. It belongs to the loop that opens it.

    Closing it closes its identifiers and listeners, says goodbye to all peers at once, and waits a second at most for
    their answers.

    Opening raises `LibraryNotFoundError` where librdmacm is not installed; `VerbsError` where the kernel's module is
    not loaded, or the process may not use it.
    """

    def identifier(self) -> Identifier:
        """An identifier, to be opened, to connect with: see `Identifier`."""
        return Identifier(self)

    def listener(self, host: str | None = None, port: int = 0, *, backlog: int = 128) -> Listener:
        """A listener, to be opened: see `Listener`.

        :param host: the address to listen at; None: at all of this machine's.
        :param port: 0 for one that is free.
        :param backlog: how many peers may wait for an answer; the kernel refuses those that come then.
        """
        return Listener(self, host, port, backlog)


for _each in (Identifier, Listener):
    _each.__module__ = __name__  # whoever imports it from its own module has come here first
