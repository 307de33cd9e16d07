"""Client API: a connection to a storage server, and the volumes that are open on it.

    async with connect(host, port, token, domain=domain) as storage:
        await storage.create("disk", 1 << 30)
        async with storage.open("disk", write=True) as volume:
            await volume.write(0, b"hello")
            await volume.flush()

Reads and writes are one-sided, on memory granted by the server, or go by messages (`by_messages`), which the server
handles. Concurrent operations are not ordered: await one before starting another that depends on it. A write is durable
once a `flush` that began after the write returns, and may be lost before that.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aioverbs
from aioverbs import BrokenResourceError, BufferPool, ConnectionSettings, RemoteGrant, ResourceDomain
from storage_server.cancelling import wait_uncancelled
from storage_server.catalog import key_of, name_of
from storage_server.errors import StorageError, error_of
from storage_server.protocol import (
    VERSION,
    Challenge,
    Close,
    Copy,
    Create,
    Delete,
    Done,
    Failed,
    Hello,
    Listing,
    ListVolumes,
    Mode,
    Open,
    Opened,
    ProtocolError,
    Reopen,
    Resize,
    VolumeInfo,
    pack,
    parse,
    proof_of,
)
from storage_server.remote_volume import PIECE, SMALL, RemoteVolume
from storage_server.rpc import RpcClient

__all__ = ["Storage", "connect"]

_SMALL_BUFFERS = 64
_LARGE_BUFFERS = 4  # initial number; the limit is four times that
_ANSWER_TIMEOUT_S = 5.0  # limit for answers that must be received even if the caller is cancelled


class Storage:
    """A connection to a server. Created by `connect`; used on one loop, by any number of tasks.

    Errors reported by the server are `StorageError`. A lost connection raises `BrokenResourceError`: connect again;
    flushed data is safe.
    """

    def __init__(self, rpc: RpcClient, pools: tuple[BufferPool, BufferPool]) -> None:
        self._rpc = rpc
        self._pools = pools
        self._opening = asyncio.Lock()  # one request at a time, so that the next grant received belongs to it

    # ---- Volumes

    async def volumes(self) -> tuple[VolumeInfo, ...]:
        """Return the volumes that this client may read, sorted by name."""
        return (await self._rpc.expect(ListVolumes(), Listing)).volumes

    async def create(self, name: str, size: int) -> None:
        """Create a volume of zeros. The volume is durable when this returns.

        :param name: 1 to 64 letters, digits, '.', '_' and '-'.
        :param size: size in bytes, a multiple of 4096.
        :raises ExistsError: the name is taken.
        :raises InvalidError: the name or the size is invalid.
        :raises NoRoomError: the disk lacks space.
        :raises RefusedError: this client is not an admin.
        """
        await self._rpc.done(Create(size, name))

    async def resize(self, name: str, size: int) -> None:
        """Change the size of a volume; new bytes are zero. Operations of clients that have the volume open raise
        `ChangedError`.

        :param name: name of the volume.
        :param size: new size in bytes, a multiple of 4096.
        :raises BusyError: a client did not release the volume in time; try again.
        :raises InvalidError: the size is invalid, or the volume is a snapshot.
        :raises NoRoomError: the disk lacks space.
        :raises RefusedError: this client is not an admin.
        :raises UnknownVolumeError: there is no such volume.
        """
        await self._rpc.done(Resize(size, name))

    async def delete(self, name: str) -> None:
        """Delete a volume. Operations of clients that have it open raise `ChangedError`.

        :param name: name of the volume.
        :raises BusyError: a client did not release the volume in time; try again.
        :raises RefusedError: this client is not an admin.
        :raises UnknownVolumeError: there is no such volume.
        """
        await self._rpc.done(Delete(name))

    async def snapshot(self, source: str, name: str) -> None:
        """Create a read-only copy of a volume in its present state. Clients that write to the source wait meanwhile.

        :param source: name of the volume to copy.
        :param name: name of the copy.
        :raises BusyError: a writer did not release the volume in time; try again.
        :raises ExistsError: the name is taken.
        :raises InvalidError: the name is invalid.
        :raises NoRoomError: the disk lacks space.
        :raises RefusedError: this client is not an admin.
        :raises UnknownVolumeError: there is no such volume.
        """
        await self._rpc.done(Copy(True, source, name))

    async def clone(self, source: str, name: str) -> None:
        """Create a writable copy of a volume in its present state. Clients that write to the source wait meanwhile.

        :param source: name of the volume to copy.
        :param name: name of the copy.
        :raises BusyError: a writer did not release the volume in time; try again.
        :raises ExistsError: the name is taken.
        :raises InvalidError: the name is invalid.
        :raises NoRoomError: the disk lacks space.
        :raises RefusedError: this client is not an admin.
        :raises UnknownVolumeError: there is no such volume.
        """
        await self._rpc.done(Copy(False, source, name))

    @contextlib.asynccontextmanager
    async def open(self, name: str, *, write: bool = False, by_messages: bool = False) -> AsyncIterator[RemoteVolume]:
        """Open a volume for the duration of the block; yield a `RemoteVolume`.

        :param name: name of the volume.
        :param write: whether to open it for writing.
        :param by_messages: whether reads and writes use messages instead of one-sided RDMA.
        :raises InvalidError: this client has too many volumes open.
        :raises NoRoomError: the volume does not fit into the server's cache.
        :raises RefusedError: this client lacks the right.
        :raises UnknownVolumeError: there is no such volume, or this client may not read it.
        """
        opened, granted = await self._opened(Open(Mode.WRITE if write else Mode.READ, name))
        volume = RemoteVolume(name, self._rpc, self._pools, self._opened, opened, granted, by_messages=by_messages)
        try:
            yield volume
        finally:
            await self._close(opened)

    async def _close(self, opened: Opened) -> None:
        """Close an open volume on the server, even if the caller is cancelled. If the server does not answer, abort the
        connection.
        """
        if self._rpc.failure is None:
            await wait_uncancelled(self._ask_to_close(opened))

    async def _ask_to_close(self, opened: Opened) -> None:
        """Ask the server to close an open volume, and wait for the answer. If there is none in time, abort the
        connection. Errors are ignored.
        """
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                with contextlib.suppress(BrokenResourceError, StorageError):
                    await self._rpc.done(Close(opened.volume))
        except TimeoutError:
            self._rpc.connection.abort()

    async def _opened(self, request: Open | Reopen) -> tuple[Opened, RemoteGrant]:
        """Send a request that the server answers with a grant.

        If the caller is cancelled, a volume that was opened is closed.

        :returns: the answer, and the grant of the volume's memory.
        :raises StorageError: the server reported an error.
        :raises BrokenResourceError: the connection was lost.
        """
        async with self._opening:
            opening = asyncio.create_task(self._grant(request))
            try:
                return await asyncio.shield(opening)
            except asyncio.CancelledError:
                # A cancelled request may leave a volume open: find out, and close it.
                await wait_uncancelled(self._give_up(opening, request))
                raise

    async def _give_up(self, opening: asyncio.Task[tuple[Opened, RemoteGrant]], request: Open | Reopen) -> None:
        """Wait for the answer to a cancelled request, and close the volume if one was opened. If there is no answer in
        time, abort the connection.
        """
        if not (await asyncio.wait([opening], timeout=_ANSWER_TIMEOUT_S))[0]:
            self._rpc.connection.abort()
            await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None and isinstance(request, Open):
            await self._close(opening.result()[0])

    async def _grant(self, request: Open | Reopen) -> tuple[Opened, RemoteGrant]:
        """Send a request and wait for the grant that belongs to its answer; return the answer and the grant.

        :raises StorageError: the server reported an error.
        :raises BrokenResourceError: the connection was lost.
        """
        opened = await self._rpc.expect(request, Opened)
        while True:  # earlier grants belong to requests that were cancelled
            granted = await self._rpc.connection.receive_grant()
            if granted.remote.rkey == opened.rkey:
                return opened, granted


@contextlib.asynccontextmanager
async def connect(
    host: str, port: int, token: str, *, domain: ResourceDomain, settings: ConnectionSettings | None = None
) -> AsyncIterator[Storage]:
    """Connect to a server for the duration of the block; yield a `Storage`.

    :param host: the server's address.
    :param port: the server's TCP port.
    :param token: the output of `access add`, or the contents of the server's owner.token.
    :param domain: resource domain for the connection and its buffers.
    :param settings: settings of the connection; None for the defaults.
    :raises InvalidError: the text is not a token, or the server supports a different version of the protocol.
    :raises RefusedError: the server does not accept the token.
    :raises ProtocolError: the peer is an aioverbs server, but not a storage server.
    :raises OSError: no server listens at that address, or the peer is not an aioverbs server.
    """
    name, key = name_of(token), key_of(token)
    async with (
        domain.buffer_pool(SMALL, _SMALL_BUFFERS) as small,
        domain.buffer_pool(PIECE, _LARGE_BUFFERS, limit=4 * _LARGE_BUFFERS) as large,
        aioverbs.connect(host, port, domain=domain, settings=settings) as connection,
    ):
        _, challenge = parse(await connection.receive())
        if not isinstance(challenge, Challenge):
            raise ProtocolError(f"expected Challenge as the server's first message, got {type(challenge).__name__}")
        await connection.send(pack(0, Hello(VERSION, proof_of(key, challenge.nonce), name)))
        _, answer = parse(await connection.receive())
        if isinstance(answer, Failed):
            raise error_of(answer.code, answer.text)
        if not isinstance(answer, Done):
            raise ProtocolError(f"expected Done as the answer to Hello, got {type(answer).__name__}")
        rpc = RpcClient(connection)
        try:
            yield Storage(rpc, (small, large))
        finally:
            await rpc.aclose()
