"""Memory that one end of a connection lets the other reach, and takes back."""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Self

import anyio

from aioverbs._connection.message_channel import MessageChannel
from aioverbs._connection.wire import FrameKind, GrantNotice
from aioverbs._core.data_path.data_path import RegionSlice, RemoteRegion
from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import running_loop, wait_uncancelled, wake
from aioverbs._lifecycle.resource import Resource, open_part
from aioverbs._memory.region import MemoryRegion, MemoryWindow
from aioverbs._verbs.quirks import is_soft_roce
from aioverbs.errors import GrantRevokedError, VerbsError
from aioverbs.types import AccessFlags, MwType

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Grant", "Grants", "RemoteGrant"]

_REMOTE_ACCESS = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
_WINDOW_FLAGS = 1 << 23 | 1 << 24  # IBV_DEVICE_MEM_WINDOW_TYPE_2A, _2B
_NUMBER_COUNT = 1 << 16


def has_windows(context: handles.Context) -> bool:
    """Whether a device has memory windows of type 2."""
    return bool(context.attributes.device_cap_flags & _WINDOW_FLAGS)


def _can_use_window(context: handles.Context, memory: RegionSlice) -> bool:
    """Whether a window of type 2 grants this memory, and no more than that."""
    if not has_windows(context) or not memory.region.access & AccessFlags.MW_BIND:
        return False
    # soft-RoCE checks the bounds of a window's region in place of the window's own.
    return not is_soft_roce(context) or len(memory) == len(memory.region)


class Grant:
    """Memory of this end that the peer may reach. Made by `Connection.grant`.

    :param remote: what the peer reaches it by.
    :param access: what it may do there.
    """

    def __init__(
        self, number: int, remote: RemoteRegion, access: AccessFlags, key: MemoryWindow | MemoryRegion, grants: "Grants"
    ) -> None:
        self.remote = remote
        self.access = access
        self._number = number
        self._key = key
        self._grants = grants
        self._acknowledged: asyncio.Future[None] | None = None  # the peer's word, since it was told of the revocation
        self._closing: asyncio.Task[None] | None = None  # the key from it

    def __repr__(self) -> str:
        state = "revoked" if self.revoked else "granted"
        return f"<Grant of {self.remote.length} bytes for {self.access!r} ({state})>"

    @property
    def revoked(self) -> bool:
        """Whether the peer reaches it no more."""
        return self._key.closed

    async def revoke(self, *, timeout_s: float = 5.0) -> None:
        """Take it back. When this returns no access of the peer's is under way or can come.

        The peer is told first, and what it asked for until then is done: nothing else of the connection is disturbed.
        Where it does not answer in time, or this is cancelled, the key is taken from it all the same; should it use it
        then, the device refuses that and breaks the connection.

        :raises AffinityError: another event loop than the connection's is running; nothing was done.
        :raises BrokenResourceError: the connection is broken; the peer has the key no more.
        """
        await self._grants.revoke(self, timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: "type[BaseException] | None", error: BaseException | None, traceback: "TracebackType | None"
    ) -> None:
        if error is None:
            await self.revoke()
            return
        # What went wrong in the block is what the caller is to hear of.
        try:
            await self.revoke()
        except Exception as revoke_error:
            error.add_note(f"and revoking {self!r} failed: {type(revoke_error).__name__}: {revoke_error}")


class RemoteGrant:
    """Memory of the peer's that this end may reach, until the peer revokes it. Parts are taken by slices.

    :param remote: what it is reached by.
    :param access: what may be done there.
    """

    def __init__(self, remote: RemoteRegion, access: AccessFlags) -> None:
        self.remote = remote
        self.access = access
        self.revoked = False

    def __repr__(self) -> str:
        return f"<RemoteGrant of {self.remote.length} bytes for {self.access!r}{' (revoked)' if self.revoked else ''}>"

    def __len__(self) -> int:
        return len(self.remote)

    def __getitem__(self, key: slice) -> RemoteRegion:
        return self.remote[key]


class Grants:
    """What the two ends of a connection granted each other. The connection's life keeps this.

    :param base: the protection domain.
    :param most: how many the peer may have granted at once.
    """

    def __init__(self, channel: MessageChannel, base: handles.ProtectionDomain, max_grants: int) -> None:
        self._channel = channel
        self._base = base
        self._max_grants = max_grants
        # By number: what becomes of the peer's word, from a revocation on. A number is free again when the peer let go
        # of what it stood for, or never heard of it: before that it would take another grant for this one.
        self._local_grants: dict[int, asyncio.Future[None] | None] = {}
        self._last_number = 0
        self._remote_grants: dict[int, RemoteGrant] = {}  # by number
        self.revoked: dict[int, RemoteGrant] = {}  # by rkey: the latest of those that the peer took back
        self._unread: deque[RemoteGrant] = (
            deque()
        )  # those that nobody asked for yet, at most twice as many as are granted
        self._waiter: asyncio.Future[None] | None = None

    # ---- What is granted here

    async def grant(self, owner: Resource, memory: RegionSlice, access: AccessFlags) -> Grant:
        """Let the peer reach memory."""
        self._channel.check_caller("grant")
        access = AccessFlags(access)
        if not access or access & ~_REMOTE_ACCESS:
            raise ValueError(f"what is granted is of REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC, not {access!r}")
        if not len(memory):
            raise ValueError("no bytes cannot be granted")
        number = self._number()
        self._local_grants[number] = None  # from here on it is nobody else's
        key: MemoryWindow | MemoryRegion | None = None
        try:
            key, remote = await self._make_key(owner, memory, access)
            notice = GrantNotice(remote.address, remote.length, remote.rkey, access)
            await self._channel.send_frame(FrameKind.GRANT, number, notice.pack())
        except BaseException:
            # Whether the peer heard of it is known: where it did not, nobody has the key.
            del self._local_grants[number]
            if key is not None:
                await wait_uncancelled(self._close_key(key))
            raise
        return Grant(number, remote, access, key, self)

    def _number(self) -> int:
        if len(self._local_grants) >= _NUMBER_COUNT - 1:
            raise ValueError("there are 65,535 grants of a connection at most: revoke some")
        while True:
            self._last_number = (self._last_number + 1) % _NUMBER_COUNT
            if self._last_number not in self._local_grants:
                return self._last_number

    async def _make_key(
        self, owner: Resource, memory: RegionSlice, access: AccessFlags
    ) -> tuple[MemoryWindow | MemoryRegion, RemoteRegion]:
        # A window goes with this queue pair and without touching the region. Else the memory is registered once more.
        if _can_use_window(self._base.context, memory):
            window = await open_part(MemoryWindow(owner, self._base, MwType.TYPE_2))
            try:  # a window is not destroyed while it is being bound
                return window, await wait_uncancelled(self._channel.qp.bind_window(window, memory, access))
            except BaseException:
                await wait_uncancelled(window.aclose())
                raise
        writes = access & (AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC)
        region = MemoryRegion(
            owner, self._base, memory.buffer, access | (AccessFlags.LOCAL_WRITE if writes else AccessFlags(0))
        )
        await open_part(region)
        return region, region.remote()

    async def revoke(self, grant: Grant, timeout_s: float) -> None:
        """Have the peer let go of it; then take the key."""
        self._channel.check_caller("revoke")  # before anything: the key is taken whatever happens after this
        key = grant._key
        if key.closed:
            return
        try:
            acknowledged = grant._acknowledged
            if acknowledged is None:
                self._channel.check_usable()
                # It goes to the peer as soon as it can, whatever becomes of who waits here: by the answer the number is
                # free again.
                acknowledged = grant._acknowledged = self._local_grants[grant._number] = running_loop().create_future()
                self._channel.send_control(FrameKind.REVOKE, grant._number)
            with anyio.move_on_after(timeout_s):
                await asyncio.wait([acknowledged])
        finally:
            if grant._closing is None or (grant._closing.done() and not key.closed):
                grant._closing = running_loop().create_task(self._close_key(key))  # one for all who revoke it
            await wait_uncancelled(grant._closing)
        if acknowledged.done():
            acknowledged.result()

    async def _close_key(self, key: MemoryWindow | MemoryRegion) -> None:
        # By a verb, which unbinds a window, too. Not by a request to invalidate it: that would wait in the send queue
        # behind messages that the peer does not acknowledge, for as long as it likes.
        try:
            await key.aclose()
        except VerbsError as error:  # a window of type 2 is of no use where its queue pair has ended
            self._channel.fail(f"a grant could not be taken back: {error}", error)
            raise

    # ---- What the peer granted

    async def receive(self) -> RemoteGrant:
        """The next that was not asked for yet."""
        self._channel.check_caller("receive_grant")
        while not self._unread:
            if self._channel.broken is not None or self._channel.closed:
                raise self._channel.closed_error()
            if self._channel.eof_received:
                raise anyio.EndOfStream
            if self._waiter is None or self._waiter.done():
                self._waiter = running_loop().create_future()
            await asyncio.wait([self._waiter])
        return self._unread.popleft()

    def check(self, remote: RemoteRegion) -> None:
        """See that it was not revoked.

        :raises GrantRevokedError: it was.
        """
        grant = self.revoked.get(remote.rkey)
        if grant is not None:
            raise GrantRevokedError(f"the peer revoked its grant of {grant.remote!r}")

    def on_frame(self, kind: FrameKind, number: int, data: bytes) -> None:
        """The peer's word."""
        if kind is FrameKind.GRANT:
            self._on_grant(number, GrantNotice.parse(data))
            return
        if kind is FrameKind.END:
            self.wake()
            return
        if data:
            raise ValueError(f"{kind.name} has {len(data)} bytes")
        if kind is FrameKind.REVOKE:
            grant = self._remote_grants.pop(number, None)
            if grant is None:
                raise ValueError(f"it revokes grant {number}, which there is not")
            grant.revoked = True
            self.revoked[grant.remote.rkey] = grant
            if len(self.revoked) > self._max_grants + 16:
                del self.revoked[next(iter(self.revoked))]
            self._channel.send_control(FrameKind.REVOKED, number, fence=True)
        else:
            acknowledged = self._local_grants.get(number)
            if acknowledged is None:
                raise ValueError(f"it lets go of grant {number}, which was not revoked")
            del self._local_grants[number]
            if not acknowledged.done():  # nobody has cancelled it
                acknowledged.set_result(None)

    def _on_grant(self, number: int, notice: GrantNotice) -> None:
        if number in self._remote_grants or len(self._remote_grants) >= self._max_grants:
            raise ValueError(f"it grants {number} where {len(self._remote_grants)} of {self._max_grants} are granted")
        if self._channel.is_control_pending(FrameKind.REVOKED, number):
            raise ValueError(f"it grants {number} again, and was not told yet that this end let go of that")
        grant = RemoteGrant(RemoteRegion(notice.address, notice.length, notice.rkey), notice.access)
        self._remote_grants[number] = grant
        self.revoked.pop(notice.rkey, None)
        if len(self._unread) >= 2 * self._max_grants:  # who grants and revokes alone fills no memory
            self._unread.remove(next(each for each in self._unread if each.revoked))  # others are `_most` at most
        self._unread.append(grant)
        self.wake()

    def wake(self) -> None:
        """Who waits is to look again."""
        wake(self._waiter)

    def fail(self, error: Exception) -> None:
        """No word comes any more."""
        for acknowledged in self._local_grants.values():
            if acknowledged is not None and not acknowledged.done() and not acknowledged.get_loop().is_closed():
                acknowledged.set_exception(error)
                acknowledged.exception()  # who waits may be gone
        self.wake()


publish(__name__)
