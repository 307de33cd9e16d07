"""Grants: memory that one end of a connection lets the other end access until it revokes the grant."""

import asyncio
import copy
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import anyio

from aioverbs._connection.message_channel import MessageChannel
from aioverbs._connection.wire import FrameKind, GrantNotice
from aioverbs._core.data_path.data_path import RegionSlice, RemoteRegion
from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import running_loop, wait_uncancelled, wake
from aioverbs._lifecycle.resource import Resource, open_part
from aioverbs._memory.region import MemoryRegion, MemoryWindow, WaitableInFlightCount
from aioverbs._verbs.capability_checks import has_windows
from aioverbs._verbs.quirks import is_soft_roce
from aioverbs.errors import GrantRevokedError, VerbsError
from aioverbs.types import AccessFlags, MwType

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Grant", "Grants", "RemoteGrant"]

_REMOTE_ACCESS = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
_WRITES = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
_NUMBER_COUNT = 1 << 16


def _can_use_window(context: handles.Context, memory: RegionSlice) -> bool:
    """Return whether a memory window of type 2 can grant access to exactly this memory, and to no other.

    False if the device has no such windows or does not check their bounds, or the region lacks ``MW_BIND``.

    :param context: context of the device.
    :param memory: the memory to grant.
    :raises VerbsError: the device cannot be queried.
    """
    if not has_windows(context.attributes) or not memory.region.access & AccessFlags.MW_BIND:
        return False
    # soft-RoCE checks the bounds of the window's region, not those of the window.
    return not is_soft_roce(context) or len(memory) == len(memory.region)


class Grant:
    """Memory of this end that the peer may access. Use `Connection.grant` to create one.

    ``async with`` gives the grant itself and revokes it at the end of the block.

    :param number: number of the grant in the messages of the connection, 0..65535.
    :param remote: address, length and key that the peer uses.
    :param access: what the peer may do.
    :param key: the memory window or registration that carries the key.
    :param grants: all grants of the connection.
    """

    def __init__(
        self, number: int, remote: RemoteRegion, access: AccessFlags, key: MemoryWindow | MemoryRegion, grants: "Grants"
    ) -> None:
        self.remote = remote
        self.access = access
        self._number = number
        self._key = key
        self._grants = grants
        self._acknowledged: asyncio.Future[None] | None = None  # the peer's acknowledgement, once REVOKE is sent
        self._closing: asyncio.Task[None] | None = None  # closes the key

    def __repr__(self) -> str:
        state = "revoked" if self.revoked else "granted"
        return f"<Grant of {self.remote.length} bytes for {self.access!r} ({state})>"

    @property
    def revoked(self) -> bool:
        """Whether the peer's access has ended: this end revoked the grant, or the connection is closed."""
        return self._key.closed

    async def revoke(self, *, timeout_s: float = 5.0) -> None:
        """Revoke the grant. When this method returns, no access by the peer is in flight and none can follow.

        First the peer is asked to stop and completes its accesses in flight, so that nothing else on the connection is
        disturbed. Then the key is invalidated. The key is also invalidated if this call is cancelled, or, without an
        exception, if the peer does not acknowledge within `timeout_s`; if the peer then uses the key, its device gets
        an error and the connection breaks. Revoking twice has no effect.

        :param timeout_s: how long to wait for the peer's acknowledgement, in seconds.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises BrokenResourceError: the connection is broken; the key is invalidated.
        :raises ClosedResourceError: the connection is closed; the key is invalidated.
        :raises VerbsError: the key could not be invalidated; the connection breaks.
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
        # The exception of the block has priority; a failure to revoke becomes a note on that exception.
        try:
            await self.revoke()
        except Exception as revoke_error:
            error.add_note(f"and revoking {self!r} failed: {type(revoke_error).__name__}: {revoke_error}")


class RemoteGrant:
    """Memory of the peer that this end may access until the peer revokes the grant.

    Returned by `Connection.receive_grant`. Slices select parts: ``grant[8:16]`` is a `RemoteRegion` of 8 bytes. The
    attribute ``revoked`` becomes True when the peer asks this end to stop using the memory.

    :param remote: address, length and key of the memory.
    :param access: what this end may do.
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
    """All grants of a connection, in both directions.

    Revoking, with this end as the granter:

        granter                                      peer
        REVOKE number        ->
                                                     marks the grant as revoked, posts no more accesses
                             <-                      REVOKED number, fenced: after all earlier reads and atomics
        closes the key, reuses the number

    :param channel: the message channel of the connection.
    :param base: the protection domain.
    :param max_grants: number of the peer's grants that may exist at once.
    """

    def __init__(self, channel: MessageChannel, base: handles.ProtectionDomain, max_grants: int) -> None:
        self._channel = channel
        self._base = base
        self._max_grants = max_grants
        # By number: None, or once REVOKE is sent the future of the peer's acknowledgement. A number is free again when
        # the peer has acknowledged, or was never notified of the grant. Until then the peer would take a new grant of
        # that number for this one.
        self._local_grants: dict[int, asyncio.Future[None] | None] = {}
        self._has_failed = False  # no more frames arrive
        self._closing: set[asyncio.Task[None]] = set()  # of windows whose bind was cancelled
        self._last_number = 0
        self._remote_grants: dict[int, RemoteGrant] = {}  # by number
        self.revoked: dict[int, RemoteGrant] = {}  # by rkey: the grants that the peer revoked last
        # grants not yet returned by `receive`, at most 2 * `max_grants`
        self._unread: list[RemoteGrant] = []
        self._waiter: asyncio.Future[None] | None = None

    # ---- Grants of this end

    async def grant(self, owner: Resource, memory: RegionSlice, access: AccessFlags) -> Grant:
        """Let the peer access memory, and notify the peer: see `Connection.grant` for the details.

        :param owner: the connection, which owns the new memory window or registration.
        :param memory: the memory to grant.
        :param access: what the peer may do.
        :returns: the grant.
        :raises Exception: whatever `Connection.grant` raises.
        """
        self._channel.check_caller("grant")
        self._channel.check_sending()
        access = AccessFlags(access)
        if not access or access & ~_REMOTE_ACCESS:
            raise ValueError(
                f"`access` must be one or more of REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC, got {access!r}"
            )
        if not len(memory):
            raise ValueError("`local` must have at least 1 byte to be granted")
        held = memory.region.access
        if access & _WRITES and held & AccessFlags.MW_BIND and not held & AccessFlags.LOCAL_WRITE:
            raise ValueError(
                f"the region of `local` was registered without LOCAL_WRITE, so `access` cannot be {access!r}: "
                "register it with LOCAL_WRITE"
            )
        number = self._next_number()
        self._local_grants[number] = None  # reserves the number
        key: MemoryWindow | MemoryRegion | None = None
        try:
            key, remote = await self.make_key(owner, memory, access)
            notice = GrantNotice(remote.address, remote.length, remote.rkey, access)
            await self._channel.sender.send_frame(FrameKind.GRANT, number, notice.pack())
        except BaseException:
            # A cancelled `send_frame` has sent nothing, so the peer does not have the key.
            del self._local_grants[number]
            if key is not None:
                await wait_uncancelled(self.close_key(key))
            raise
        return Grant(number, remote, access, key, self)

    def _next_number(self) -> int:
        """Return a number, 0..65535, that no existing grant of this end has.

        :raises ValueError: this end has 65,535 grants already, including revoked ones that the peer has not
            acknowledged yet.
        """
        if len(self._local_grants) >= _NUMBER_COUNT - 1:
            raise ValueError("the connection already has 65,535 grants, the maximum: revoke some")
        while True:
            self._last_number = (self._last_number + 1) % _NUMBER_COUNT
            if self._last_number not in self._local_grants:
                return self._last_number

    def reserve_number(self) -> int:
        """Reserve a number for memory that the peer stops to access by itself, and return the number.

        :raises ValueError: all numbers are in use.
        """
        number = self._next_number()
        self._local_grants[number] = None
        return number

    def expect_answer(self, number: int, answered: "asyncio.Future[None]") -> None:
        """Accept REVOKED for a number that was reserved, from the moment at which the peer is told the number.

        :param number: the number, which the answer or the end of the connection makes free again.
        :param answered: future that is done when the peer sends REVOKED, and cancelled when the connection ends first.
        """
        self._local_grants[number] = answered
        if self._has_failed:
            answered.cancel()

    def release_number(self, number: int) -> None:
        """Make a number free again that was reserved, but that the peer was not told."""
        del self._local_grants[number]

    async def make_key(
        self, owner: Resource, memory: RegionSlice, access: AccessFlags
    ) -> tuple[MemoryWindow | MemoryRegion, RemoteRegion]:
        """Make the key of a grant: bind a memory window if possible, else register the memory a second time.

        A memory window belongs to this queue pair and does not affect other users of the region. If this is cancelled
        while the bind is in flight, a task closes the window when the bind has ended.

        :param owner: resource that owns the new window or registration.
        :param memory: the memory to grant.
        :param access: what the peer may do.
        :returns: the window or registration, which the caller closes, and the address, length and key for the peer.
        :raises VerbsError: the device cannot bind a window or register the memory.
        :raises WorkCompletionError: the window cannot be bound. The queue pair is then broken.
        :raises BufferError: the memory is read-only, and `access` permits writes or atomics.
        :raises Exception: any other exception that `MemoryRegion.open` or `QueuePair.bind_window` raises.
        """
        if not _can_use_window(self._base.context, memory):
            return await self.register(owner, memory.buffer, access)
        with ExitStack() as pinned:  # the device does not deregister a region while a window is bound to it
            memory.pins.add()
            pinned.callback(memory.pins.discard)
            window = await open_part(MemoryWindow(owner, self._base, MwType.TYPE_2))
            # A count of its own, because others may use the same region.
            binds = WaitableInFlightCount(memory.pins)
            local = RegionSlice(memory.region, memory.offset, len(memory), binds)
            try:
                return window, await self._channel.qp.bind_window(window, local, access)
            except BaseException:
                closing = running_loop().create_task(self._close_unused(window, binds, pinned.pop_all()))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
                if not binds:
                    await wait_uncancelled(closing)
                raise

    async def _close_unused(self, window: MemoryWindow, binds: WaitableInFlightCount, pinned: ExitStack) -> None:
        """Close a window that the peer does not know, as soon as no bind of it is in flight: until then it must not be
        destroyed, and that takes as long as the peer's device does not acknowledge earlier requests.

        :param window: window.
        :param binds: count of its binds in flight.
        :param pinned: pins the region, and is closed at the end.
        :raises VerbsError: the window cannot be closed. It is closed together with the queue pair.
        """
        with pinned:
            await binds.wait()
            await window.aclose()

    async def register(
        self, owner: Resource, memory: memoryview, access: AccessFlags
    ) -> tuple[MemoryRegion, RemoteRegion]:
        """Make a key by registering memory for it alone.

        :param owner: resource that owns the registration.
        :param memory: the memory.
        :param access: what the peer may do.
        :returns: the registration, which the caller closes, and the address, length and key for the peer.
        :raises VerbsError: the device cannot register the memory.
        :raises BufferError: the memory is read-only, and `access` permits writes or atomics.
        :raises Exception: any other exception that `MemoryRegion.open` raises.
        """
        local_access = AccessFlags.LOCAL_WRITE if access & _WRITES else AccessFlags(0)
        region = await open_part(MemoryRegion(owner, self._base, memory, access | local_access))
        return region, region.remote()

    async def revoke(self, grant: Grant, timeout_s: float) -> None:
        """Ask the peer to stop using a grant, then close the key of the grant: see `Grant.revoke` for the details.

        :param grant: the grant. Nothing is done if it has already been revoked.
        :param timeout_s: how long to wait for the peer's acknowledgement, in seconds.
        :raises Exception: whatever `Grant.revoke` raises.
        """
        self._channel.check_caller("revoke")  # first, because from here on the key is closed in every case
        key = grant._key
        if key.closed:
            return
        try:
            acknowledged = grant._acknowledged
            if acknowledged is None:
                self._channel.check_usable()
                # REVOKE is sent even if this caller is cancelled: the acknowledgement frees the number.
                acknowledged = grant._acknowledged = self._local_grants[grant._number] = running_loop().create_future()
                self._channel.sender.send_control(FrameKind.REVOKE, grant._number)
            with anyio.move_on_after(timeout_s):
                await asyncio.wait([acknowledged])
        finally:
            if grant._closing is None or (grant._closing.done() and not key.closed):
                # shared by all callers that revoke this grant
                grant._closing = running_loop().create_task(self.close_key(key))
            await wait_uncancelled(grant._closing)
        if acknowledged.cancelled():
            raise self._channel.closed_error()

    async def close_key(self, key: MemoryWindow | MemoryRegion) -> None:
        """Close the memory window or registration of a grant, which invalidates the key.

        A verb does this, as a local-invalidate request would wait in the send queue behind messages that the peer may
        take any length of time to acknowledge.

        :raises VerbsError: the verb failed. The channel is then broken.
        """
        try:
            await key.aclose()
        except VerbsError as error:  # failing the channel ends the queue pair, and with it its windows of type 2
            # a copy, because the traceback of the exception that is raised keeps the objects of the caller
            self._channel.fail(f"the key of a grant could not be invalidated: {error}", copy.copy(error))
            raise

    # ---- Grants of the peer

    async def receive(self) -> RemoteGrant:
        """Wait for the next grant from the peer.

        :returns: the grant, which the peer may have revoked already.
        :raises Exception: whatever `Connection.receive_grant` raises.
        """
        self._channel.check_caller("receive_grant")
        while not self._unread:
            if self._channel.broken is not None or self._channel.closed:
                raise self._channel.closed_error()
            if self._channel.eof_received:
                raise anyio.EndOfStream
            if self._waiter is None or self._waiter.done():
                self._waiter = running_loop().create_future()
            await asyncio.wait([self._waiter])
        return self._unread.pop(0)

    def check(self, remote: RemoteRegion) -> None:
        """Check that the peer has not revoked the grant that `remote` belongs to.

        :param remote: memory of the peer that is about to be accessed; its key identifies the grant.
        :raises GrantRevokedError: the peer has revoked the grant.
        """
        grant = self.revoked.get(remote.rkey)
        if grant is not None:
            raise GrantRevokedError(f"the peer revoked its grant of {grant.remote!r}: ask the peer for a new one")

    def on_frame(self, kind: FrameKind, number: int, data: bytes) -> None:
        """Handle a frame from the peer that is of kind GRANT, REVOKE, REVOKED or END.

        :param kind: kind of the frame.
        :param number: number of the grant; 0 for END.
        :param data: bytes of the frame: a packed `GrantNotice` for GRANT, empty for the other kinds.
        :raises ValueError: the frame violates the protocol.
        """
        if kind is FrameKind.GRANT:
            self._on_grant(number, GrantNotice.parse(data))
            return
        if kind is FrameKind.END:
            self.wake()
            return
        if data:
            raise ValueError(f"the peer sent {kind.name} with {len(data)} bytes, expected none")
        if kind is FrameKind.REVOKE:
            grant = self._remote_grants.pop(number, None)
            if grant is None:
                raise ValueError(f"the peer revoked grant {number}, which does not exist")
            grant.revoked = True
            self.revoked[grant.remote.rkey] = grant
            if len(self.revoked) > self._max_grants + 16:
                del self.revoked[next(iter(self.revoked))]
            self._channel.sender.send_control(FrameKind.REVOKED, number, fence=True)
        else:
            acknowledged = self._local_grants.get(number)
            if acknowledged is None:
                raise ValueError(f"the peer acknowledged the revocation of grant {number}, which was not revoked")
            del self._local_grants[number]
            if not acknowledged.done():  # not cancelled with its loop
                acknowledged.set_result(None)

    def _on_grant(self, number: int, notice: GrantNotice) -> None:
        """Store a new grant from the peer, which `receive` returns later.

        If twice `max_grants` grants wait for `receive`, drop the oldest revoked one of them.

        :raises ValueError: the number is in use, `max_grants` grants of the peer exist already, or REVOKED was not sent
            yet for an earlier grant with this number.
        """
        if number in self._remote_grants or len(self._remote_grants) >= self._max_grants:
            raise ValueError(f"the peer made grant {number}, which already exists or exceeds {self._max_grants} grants")
        if self._channel.sender.is_control_pending(FrameKind.REVOKED, number):
            raise ValueError(f"the peer made grant {number} again before its revocation was acknowledged")
        grant = RemoteGrant(RemoteRegion(notice.address, notice.length, notice.rkey), notice.access)
        self._remote_grants[number] = grant
        self.revoked.pop(notice.rkey, None)
        # bounds the memory that a peer can use by granting and revoking; at most `_max_grants` are not revoked
        if len(self._unread) >= 2 * self._max_grants:
            self._unread.remove(next(each for each in self._unread if each.revoked))
        self._unread.append(grant)
        self.wake()

    def wake(self) -> None:
        """Wake the callers of `receive` that are waiting for a grant."""
        wake(self._waiter)

    def fail(self) -> None:
        """Fail the callers of `revoke` and `receive` that are waiting for the peer, which raise the exception that
        `MessageChannel.closed_error` returns.

        This is called when no more frames can arrive.
        """
        self._has_failed = True
        for acknowledged in self._local_grants.values():
            if acknowledged is not None and not acknowledged.get_loop().is_closed():
                acknowledged.cancel()
        self.wake()


publish(__name__)
