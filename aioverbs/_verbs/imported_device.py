"""Devices whose context is another one's, of this process or another: for what is shared between them."""

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
    """A device for what another process shares: ``ibv_import_device``. Made by `import_device`."""

    def __init__(
        self,
        socket: socket.socket,
        shared_id: int,
        share_key: int,
        name: str | None,
        max_native_thread_domains: int | None,
    ) -> None:
        super().__init__(name, max_native_thread_domains, "inline", 0)
        self._from = socket, shared_id, share_key
        # Shares that the device may be opened with, one for each call of open() in flight.
        self._given: list[ReceivedShare | ReceivedSoftwareShare] = []

    async def open(self) -> Self:
        """Open it; see `import_device` for what that raises."""
        if self.state is not ResourceState.NEW:
            return await super().open()  # which says why it cannot be
        given = await receive(*self._from)
        self._given.append(given)
        try:
            return await super().open()
        finally:
            if given in self._given:  # and not taken, for this call or for one that came before
                self._given.remove(given)
                given.share.destroy()
            given.close()

    def _make_context(self) -> handles.Context:
        given = self._given.pop()
        self._lifecycle.hold(given.share)
        return given.open_context(self._name)


def import_device(
    socket: socket.socket,
    shared_id: int,
    share_key: int,
    *,
    name: str | None = None,
    max_native_thread_domains: int | None = None,
) -> Device:
    """A device to be opened, for a protection domain of the process at the other end of a socket.

    That process calls `SharedProtectionDomain.send`. `Device.shared_protection_domain` then opens an instance of what
    it shares, and everything else is made as on any device.

    An RDMA device is over the context of that process. To the kernel both are one, which ends with the last of its
    descriptors: what a process leaves open when it dies stays until then. A software device is this process' own, with
    its own address and queue pairs, and a process that dies takes its own with it, not more.

    Opening raises `VerbsError`: with ENOENT, EACCES or EXDEV where nothing is shared by that id, with that key, or on
    that device; with EOPNOTSUPP where the provider has no ``ibv_import_device``; with EPROTO or EPROTONOSUPPORT where
    the peer says something else. It raises `BrokenResourceError` where the peer is gone, and `LibraryNotFoundError`;
    and what `open_device` raises of a software device.

    :param socket: a connected stream socket of the Unix domain, not blocking; it stays the caller's, and is read and
        written by nobody else meanwhile.
    :param shared_id: `SharedProtectionDomain.id`.
    :param share_key: the key that it was shared with, 64 bits.
    :param name: which software device of this process, as for `open_device`, where it is one; None: ``"soft0"``.
    :param max_native_thread_domains: as for `open_device`.
    """
    check_share(shared_id, share_key)
    return ImportedDevice(socket, shared_id, share_key, name, max_native_thread_domains)


publish(__name__)
