"""The client: a connection to a storage server, and the volumes that are open on it.

    async with connect(host, port, token, domain=domain) as storage:
        await storage.create("disk", 1 << 30)
        async with storage.open("disk", write=True) as volume:
            await volume.write(0, b"hello")
            await volume.flush()

Reads and writes go one-sidedly, by memory that the server granted, or by messages (`by_messages`), which a server's
program answers. They are done in no order: await what is to be before something else. What was written is durable when
a `flush` that began after it has returned, and may be lost before that.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aioverbs
from aioverbs import BrokenResourceError, BufferPool, ConnectionSettings, RemoteGrant, ResourceDomain
from storage_server.cancelling import to_its_end
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
_LARGE_BUFFERS = 4  # to begin with, and four times as many at most
_ANSWER_S = 5.0  # for what must be known though who asked is cancelled


class Storage:
    """A server, as a client sees it. Made by `connect`; used on one loop, by any number of tasks.

    Whatever the server refuses is a `StorageError`; a connection that is lost is a `BrokenResourceError`, whereupon
    another one is to be made: what was flushed is there.
    """

    def __init__(self, rpc: RpcClient, pools: tuple[BufferPool, BufferPool]) -> None:
        self._rpc = rpc
        self._pools = pools
        self._opening = asyncio.Lock()  # one at a time, so that the grant that comes is its own

    # ---- Volumes

    async def volumes(self) -> tuple[VolumeInfo, ...]:
        """Those that this client may read, by name."""
        return (await self._rpc.expect(ListVolumes(), Listing)).volumes

    async def create(self, name: str, size: int) -> None:
        """Make a volume of zeros; it is durable when this returns.

        :param size: bytes, whole blocks of 4096.
        :raises ExistsError: there is one of that name.
        :raises InvalidError: none can have that name or size.
        :raises NoRoomError: the disk has not so many bytes.
        :raises RefusedError: this client may not; so the others here.
        """
        await self._rpc.done(Create(size, name))

    async def resize(self, name: str, size: int) -> None:
        """Give a volume another size, with zeros at its end; who has it open gets a `ChangedError`."""
        await self._rpc.done(Resize(size, name))

    async def delete(self, name: str) -> None:
        """Take a volume away; who has it open gets a `ChangedError`.

        :raises UnknownVolumeError: there is none of that name.
        """
        await self._rpc.done(Delete(name))

    async def snapshot(self, source: str, name: str) -> None:
        """Make a volume that is as another one is at this moment, and stays so. Who writes there waits meanwhile."""
        await self._rpc.done(Copy(True, source, name))

    async def clone(self, source: str, name: str) -> None:
        """The same, to be written to."""
        await self._rpc.done(Copy(False, source, name))

    @contextlib.asynccontextmanager
    async def open(self, name: str, *, write: bool = False, by_messages: bool = False) -> AsyncIterator[RemoteVolume]:
        """Use a volume, for the time of the block.

        :param write: whether it is to be written to.
        :param by_messages: whether reads and writes are to go by messages, and not one-sidedly.
        :raises RefusedError: this client may not.
        :raises UnknownVolumeError: there is none of that name.
        """
        opened, granted = await self._opened(Open(Mode.WRITE if write else Mode.READ, name))
        volume = RemoteVolume(name, self._rpc, self._pools, self._opened, opened, granted, by_messages=by_messages)
        try:
            yield volume
        finally:
            await self._close(opened)

    async def _close(self, opened: Opened) -> None:
        """Close a volume, whoever is cancelled; a server that does not answer is given up."""
        if self._rpc.over is None:
            await to_its_end(self._ask_to_close(opened))

    async def _ask_to_close(self, opened: Opened) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                with contextlib.suppress(BrokenResourceError, StorageError):
                    await self._rpc.done(Close(opened.volume))
        except TimeoutError:
            await self._rpc.connection.abort()

    async def _opened(self, request: Open | Reopen) -> tuple[Opened, RemoteGrant]:
        async with self._opening:
            opening = asyncio.create_task(self._grant(request))
            try:
                return await asyncio.shield(opening)
            except asyncio.CancelledError:
                # Who is cancelled in the middle would not know what it has open.
                await to_its_end(self._give_up(opening, request))
                raise

    async def _give_up(self, opening: asyncio.Task[tuple[Opened, RemoteGrant]], request: Open | Reopen) -> None:
        if not (await asyncio.wait([opening], timeout=_ANSWER_S))[0]:
            await self._rpc.connection.abort()
            await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None and isinstance(request, Open):
            await self._close(opening.result()[0])

    async def _grant(self, request: Open | Reopen) -> tuple[Opened, RemoteGrant]:
        opened = await self._rpc.expect(request, Opened)
        while True:  # grants of what was given up before came before
            granted = await self._rpc.connection.receive_grant()
            if granted.remote.rkey == opened.rkey:
                return opened, granted


@contextlib.asynccontextmanager
async def connect(
    host: str, port: int, token: str, *, domain: ResourceDomain, settings: ConnectionSettings | None = None
) -> AsyncIterator[Storage]:
    """A connection to a server, for the time of the block.

    :param token: what `access add` printed, or the server's owner.token has in it.
    :param domain: what the connection is made on.
    :raises RefusedError: the server does not know the token.
    :raises OSError: nobody is there, or it is no aioverbs server.
    """
    name, key = name_of(token), key_of(token)
    async with (
        domain.buffer_pool(SMALL, _SMALL_BUFFERS) as small,
        domain.buffer_pool(PIECE, _LARGE_BUFFERS, limit=4 * _LARGE_BUFFERS) as large,
        aioverbs.connect(host, port, domain=domain, settings=settings) as connection,
    ):
        _, challenge = parse(await connection.receive())
        if not isinstance(challenge, Challenge):
            raise ProtocolError(f"a server begins with a challenge, and not with {type(challenge).__name__}")
        await connection.send(pack(0, Hello(VERSION, proof_of(key, challenge.nonce), name)))
        _, answer = parse(await connection.receive())
        if isinstance(answer, Failed):
            raise error_of(answer.code, answer.text)
        if not isinstance(answer, Done):
            raise ProtocolError(f"a server says that it knows the client, and not {type(answer).__name__}")
        rpc = RpcClient(connection)
        try:
            yield Storage(rpc, (small, large))
        finally:
            await rpc.aclose()
