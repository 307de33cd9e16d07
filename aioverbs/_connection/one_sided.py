"""One-sided requests of a connection: access to memory that the peer granted."""

from aioverbs._connection.grants import Grants, RemoteGrant
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._connection.message_sender import check_immediate
from aioverbs._core.data_path.data_path import Operation, RegionSlice, RemoteRegion
from aioverbs._lifecycle.affinity import Affinity
from aioverbs._memory.region import MemoryRegion
from aioverbs.errors import BrokenResourceError

__all__ = ["Local", "OneSidedRequests", "Remote"]

Local = RegionSlice | MemoryRegion | list[RegionSlice] | tuple[RegionSlice, ...]
"""Registered memory of this end, in one piece or several."""

Remote = RemoteRegion | RemoteGrant
"""Memory of the peer: a grant, or a slice of one."""


class OneSidedRequests:
    """Writes, reads and atomics on memory of the peer. The methods are those of `Connection`, whose caller checks that
    the connection is open.

    The queue pair itself refuses calls from a forked child, and from a loop that does not own its domain. If no loop
    owns the domain, any loop may use the queue pair but only one may use the connection, which is checked here.

    :param channel: message channel of the connection.
    :param caller: owner of the connection if the queue pair does not check its caller; else None.
    """

    __slots__ = ("_caller", "_channel", "_qp", "grants")

    def __init__(self, channel: MessageChannel, caller: Affinity | None) -> None:
        self.grants: Grants | None = None  # of the connection; None before the first one
        self._channel = channel
        self._caller = caller
        self._qp = channel.qp

    def write(self, local: Local, remote: Remote, fence: bool) -> Operation[None]:
        """Post an RDMA write: see `Connection.write`."""
        if self._caller is not None or self._channel.broken is not None:
            self._check("write")
        try:
            return self._qp.write(local, self._region_of(remote), fence=fence)
        except BrokenResourceError as error:
            self._channel.raise_ended(error)

    def read(self, local: Local, remote: Remote, fence: bool) -> Operation[None]:
        """Post an RDMA read: see `Connection.read`."""
        if self._caller is not None or self._channel.broken is not None:
            self._check("read")
        try:
            return self._qp.read(local, self._region_of(remote), fence=fence)
        except BrokenResourceError as error:
            self._channel.raise_ended(error)

    def compare_and_swap(self, remote: Remote, compare: int, swap: int, fence: bool) -> Operation[int]:
        """Post an atomic compare-and-swap: see `Connection.compare_and_swap`."""
        self._check("compare_and_swap")
        try:
            return self._qp.compare_and_swap(self._region_of(remote), compare, swap, fence=fence)
        except BrokenResourceError as error:
            self._channel.raise_ended(error)

    def fetch_and_add(self, remote: Remote, add: int, fence: bool) -> Operation[int]:
        """Post an atomic fetch-and-add: see `Connection.fetch_and_add`."""
        self._check("fetch_and_add")
        try:
            return self._qp.fetch_and_add(self._region_of(remote), add, fence=fence)
        except BrokenResourceError as error:
            self._channel.raise_ended(error)

    async def write_with_immediate(self, local: Local, remote: Remote, immediate: int, fence: bool) -> None:
        """Write, then send an empty message with immediate data: see `Connection.write_with_immediate`."""
        channel = self._channel
        channel.check_caller("write_with_immediate")  # all checks come before the write is posted
        channel.check_sending()
        check_immediate(immediate)
        written = self.write(local, remote, fence)
        await channel.sender.send(b"", immediate)
        try:
            await written
        finally:
            if not written.ended:  # a cancellation must not withdraw the announced write
                channel.sender.keep_until_done(written)

    def _check(self, operation: str) -> None:
        """Check that the caller may use the connection, and that it is not broken.

        :param operation: name of the caller's method, for the error message.
        :raises AffinityError: another event loop owns the connection.
        :raises BrokenResourceError: the connection is broken.
        """
        if self._caller is not None:
            self._caller.check(self._channel, operation)
        if self._channel.broken is not None:
            raise self._channel.closed_error()

    def _region_of(self, remote: Remote) -> RemoteRegion:
        """Return the address, length and key of a grant, or of a slice of a grant, as a `RemoteRegion`.

        :raises GrantRevokedError: the peer has revoked the grant.
        """
        region = remote.remote if isinstance(remote, RemoteGrant) else remote
        if self.grants is not None and self.grants.revoked:
            self.grants.check(region)
        return region
