"""Devices that import the context of another process in order to open the protection domains that it shares."""

import socket
from typing import Self

from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._sharing.exchange import ReceivedShare, ReceivedSoftwareShare, receive
from aioverbs._sharing.shared_pd import check_share
from aioverbs._verbs.device import Device

__all__ = ["ImportedDevice", "import_device"]


class ImportedDevice(Device):
    """A device that opens the protection domains that another process shares: ``ibv_import_device``.

    Made by `import_device`.
    """

    def __init__(
        self,
        socket: socket.socket,
        shared_id: int,
        share_key: int,
        name: str | None,
        max_native_thread_domains: int | None,
    ) -> None:
        super().__init__(name, max_native_thread_domains, "inline", 0)
        self._exchange_arguments = socket, shared_id, share_key
        # Shares that the device may be opened with, one for each call of open() in flight.
        self._received: list[ReceivedShare | ReceivedSoftwareShare] = []

    async def open(self) -> Self:
        """Open the device: request access from the process at the other end of the socket given to `import_device`.

        If this fails, the device stays unopened. Exceptions other than `ClosedResourceError` are those that
        `import_device` lists for opening.

        :returns: the device itself, to be closed by the caller.
        :raises ClosedResourceError: the device was opened before.
        """
        if self.state is not ResourceState.NEW:
            return await super().open()  # raises the reason why it cannot be opened
        received = await receive(*self._exchange_arguments)
        self._received.append(received)
        try:
            return await super().open()
        finally:
            if received in self._received:  # not taken by _make_context: opening failed
                self._received.remove(received)
                received.share.destroy()
            received.close()

    def _make_context(self) -> handles.Context:
        """Open the context to which the other process has given access, and return it; the caller must destroy it.

        This raises the exceptions that `import_device` lists for opening.
        """
        received = self._received.pop()
        self._lifecycle.hold(received.share)
        return received.open_context(self._name)


def import_device(
    socket: socket.socket,
    shared_id: int,
    share_key: int,
    *,
    name: str | None = None,
    max_native_thread_domains: int | None = None,
) -> Device:
    """Return a `Device`, to be opened, that can use a protection domain of the process at the other end of a socket.

    While the device is being opened, the other process must call `SharedProtectionDomain.send`. On the open device,
    `Device.shared_protection_domain` returns an instance of the shared domain; other resources are made as on any
    device.

    An RDMA device uses the context of the other process. For the kernel, this is one context, which exists until its
    last file descriptor is closed; so do the resources that a process has left open when it dies. A software device
    belongs to this process and has its own address and queue pairs; when a process dies, only its own resources are
    lost.

    :param socket: connected non-blocking stream socket of the Unix domain. The caller continues to own the socket and
        must not read or write it while the device is being opened.
    :param shared_id: `SharedProtectionDomain.id`, 0..2**96-1.
    :param share_key: the key that the domain was shared with, 0..2**64-1.
    :param name: name of the software device of this process to use, as for `open_device`, if the shared device is a
        software device; None for ``"soft0"``.
    :param max_native_thread_domains: as for `open_device`.
    :raises TypeError: `shared_id` or `share_key` is not an integer.
    :raises ValueError: `shared_id` does not fit in 96 bits, `share_key` does not fit in 64 bits, or
        `max_native_thread_domains` is negative. On opening: `socket` is blocking or not a Unix stream socket;
        `name` is given and the shared device is an RDMA device; or the address in `name`, or an environment variable of
        the software device, is invalid.
    :raises VerbsError: on opening: with ENOENT if no domain is shared under that id, with EACCES if the key is wrong,
        with EXDEV if the id belongs to another device, with EOPNOTSUPP if the provider does not implement
        ``ibv_import_device``, with EPROTO if the peer does not speak the protocol, with EPROTONOSUPPORT if it speaks
        a different version of the protocol. If the shared device is a software device, also for the reasons given in
        `open_device`.
    :raises OSError: on opening: with EMFILE if no file descriptor is left.
    :raises BrokenResourceError: on opening: the peer closed the connection.
    :raises RuntimeError: on opening: no asyncio event loop is running.
    :raises DeviceNotFoundError: on opening: `name` is not the name of a software device.
    :raises LibraryNotFoundError: on opening: libibverbs is missing and the shared device is an RDMA device.
    """
    check_share(shared_id, share_key)
    return ImportedDevice(socket, shared_id, share_key, name, max_native_thread_domains)


publish(__name__)
