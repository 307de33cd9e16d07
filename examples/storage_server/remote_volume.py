"""Client side of an open volume: one-sided reads and writes, messages, flushes."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from aioverbs import BufferPool, GrantRevokedError, RegionSlice, RemoteGrant
from storage_server.errors import ChangedError, InvalidError
from storage_server.protocol import MAX_DATA, Checksum, Data, Flush, Opened, ProtocolError, Read, Reopen, Write
from storage_server.ranges import Ranges
from storage_server.rpc import RpcClient

__all__ = ["PIECE", "SMALL", "Regrant", "RemoteVolume", "for_each_concurrently"]

PIECE = MAX_DATA  # bytes; longer operations are split
SMALL = 16 * 1024  # bytes of the buffers for short reads and writes
_MAX_CONCURRENT = 4
_TRIES = 1000  # of an operation that is interrupted by copies of the volume
_CHECKS = 10  # of data that another client may be writing

Regrant = Callable[[Reopen], Awaitable[tuple[Opened, RemoteGrant]]]
"""Requests another grant."""


class RemoteVolume:
    """An open volume. Created by `Storage.open`, which closes it. `size` is its size in bytes.

    All methods raise `BrokenResourceError` if the connection is lost, and `ChangedError` if the volume was resized or
    deleted, or this client lost its right: open the volume again.
    """

    def __init__(
        self,
        name: str,
        rpc: RpcClient,
        pools: tuple[BufferPool, BufferPool],
        regrant: Regrant,
        opened: Opened,
        granted: RemoteGrant,
        *,
        by_messages: bool,
    ) -> None:
        self.name = name
        self.size = opened.size
        self._rpc = rpc
        self._connection = rpc.connection
        self._small, self._large = pools
        self._ask_for_grant = regrant
        self._number = opened.volume
        self._report_writes = opened.report_writes
        self._granted = granted
        self._by_messages = by_messages
        self._written = Ranges()
        self._regrant_lock = asyncio.Lock()
        self._flushing = asyncio.Lock()
        self._wanted = self._flushed = 0

    def _check(self, offset: int, length: int) -> None:
        """Check that a range is in the volume.

        :raises ValueError: the range exceeds the volume.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(
                f"bytes {offset:,} to {offset + length:,} exceed volume {self.name!r} of {self.size:,} bytes"
            )

    def _buffers(self, length: int) -> BufferPool:
        """Return the pool whose buffers are large enough for ``length`` bytes, which must be at most `PIECE`."""
        return self._small if length <= SMALL else self._large

    # ---- One-sided, from and to registered memory

    def read_into(self, local: RegionSlice, offset: int) -> Awaitable[None]:
        """Read one-sidedly into registered memory: nothing is copied, and no code of the server runs.

        The read is posted by this call.

        :param local: destination; its length is the number of bytes to read.
        :param offset: first byte in the volume.
        :returns: an awaitable that completes when the bytes have arrived; its result is None.
        :raises ChangedError: when awaited: the volume was resized or deleted; open it again.
        :raises ValueError: the range exceeds the volume.
        """
        length = len(local)
        if not 0 <= offset <= self.size - length:
            self._check(offset, length)
        try:
            return self._connection.read(local, self._granted[offset : offset + length])
        except GrantRevokedError:
            return self._read_again(local, offset)

    async def _read_again(self, local: RegionSlice, offset: int) -> None:
        """Read one-sidedly after the server has revoked the grant; request a new grant each time that happens.

        :raises ChangedError: the volume was resized or deleted, or the read was interrupted too often.
        """
        for _ in range(_TRIES):
            granted = self._granted
            try:
                await self._connection.read(local, granted[offset : offset + len(local)])
            except GrantRevokedError:
                await self._regrant(granted)
            else:
                return
        raise ChangedError(f"copies of volume {self.name!r} interrupted a read {_TRIES} times")

    async def write_from(self, local: RegionSlice, offset: int) -> None:
        """Write one-sidedly from registered memory.

        :param local: source; its length is the number of bytes to write.
        :param offset: first byte in the volume.
        :raises ChangedError: the volume was resized or deleted, or the write was interrupted too often; open the volume
            again.
        :raises ValueError: the range exceeds the volume.
        :raises WorkCompletionError: the volume is open for reading only. The connection breaks.
        """
        self._check(offset, len(local))
        for _ in range(_TRIES):
            granted = self._granted
            try:
                await self._connection.write(local, granted[offset : offset + len(local)])
            except GrantRevokedError:
                await self._regrant(granted)
            else:
                return
            finally:
                # Record the range after completion, not before: a flush in between would list bytes that have not
                # arrived. A cancelled write may have arrived.
                if self._report_writes:
                    self._written.add(offset, offset + len(local))
        raise ChangedError(f"copies of volume {self.name!r} interrupted a write {_TRIES} times")

    async def _regrant(self, before: RemoteGrant) -> None:
        """Request a new grant after the server has revoked the grant `before`, unless another task has already done so.

        :raises ChangedError: the volume was resized or deleted.
        """
        async with self._regrant_lock:
            if self._granted is before:
                _, self._granted = await self._ask_for_grant(Reopen(self._number))

    # ---- Bytes

    async def read(self, offset: int, length: int, *, verify: bool = False) -> bytes:
        """Read bytes of the volume and return a copy of them.

        :param offset: first byte in the volume.
        :param length: number of bytes.
        :param verify: whether to compare the bytes with the server's checksum.
        :raises ChangedError: the volume was resized or deleted; open it again.
        :raises InvalidError: the checksums differed each time, as they do if another client keeps writing there.
        :raises ValueError: the range exceeds the volume.
        """
        self._check(offset, length)
        if length <= PIECE:
            return await self._read_piece(offset, length, verify)
        found = bytearray(length)

        async def read_piece(at: int) -> None:
            data = await self._read_piece(offset + at, min(PIECE, length - at), verify)
            found[at : at + len(data)] = data

        await for_each_concurrently(read_piece, range(0, length, PIECE))
        return bytes(found)

    async def _read_piece(self, offset: int, length: int, verify: bool) -> bytes:
        """Read at most `PIECE` bytes, by message or one-sidedly, and return them.

        :raises InvalidError: the checksums differed each time.
        :raises ProtocolError: the server sent a different number of bytes.
        """
        for _ in range(_CHECKS):
            if self._by_messages:
                answer = await self._data(Read(self._number, offset, length, verify))
                if len(answer.data) != length:
                    raise ProtocolError(f"requested {length:,} bytes, received {len(answer.data):,}")
                data, checksum = answer.data, answer.checksum
            else:
                async with self._buffers(length).lease() as buffer:
                    await self.read_into(buffer[:length], offset)
                    data = bytes(buffer.buffer[:length])
                checksum = await self.checksum(offset, length) if verify else 0
            if not verify or zlib.crc32(data) == checksum:
                return data
        raise InvalidError(f"{length:,} bytes read at {offset:,} differed from the server's checksum {_CHECKS} times")

    async def write(self, offset: int, data: bytes, *, verify: bool = False) -> None:
        """Write bytes. Later reads return them; `flush` makes them durable.

        :param offset: first byte in the volume.
        :param data: the bytes.
        :param verify: whether to compare the bytes with the server's checksum.
        :raises ChangedError: the volume was resized or deleted; open it again.
        :raises InvalidError: the checksums differed each time.
        :raises RefusedError: the volume is open for reading only, and messages are used.
        :raises ValueError: the range exceeds the volume.
        :raises WorkCompletionError: the volume is open for reading only, and one-sided RDMA is used. The connection
            breaks.
        """
        self._check(offset, len(data))
        view = memoryview(data)
        await for_each_concurrently(
            lambda at: self._write_piece(offset + at, view[at : at + PIECE], verify), range(0, len(data), PIECE)
        )

    async def _write_piece(self, offset: int, data: memoryview, verify: bool) -> None:
        """Write at most `PIECE` bytes, by message or one-sidedly.

        :raises InvalidError: the checksums differed each time.
        :raises RefusedError: the volume is open for reading only, and messages are used.
        :raises WorkCompletionError: the volume is open for reading only, and one-sided RDMA is used.
        """
        expected = zlib.crc32(data) if verify else 0
        if self._by_messages:
            await self._rpc.done(Write(self._number, offset, verify, expected, bytes(data)))
            return
        async with self._buffers(len(data)).lease() as buffer:
            buffer.buffer[: len(data)] = data
            for _ in range(_CHECKS):
                await self.write_from(buffer[: len(data)], offset)
                if not verify or await self.checksum(offset, len(data)) == expected:
                    return
        raise InvalidError(
            f"{len(data):,} bytes written at {offset:,} differed from the server's checksum {_CHECKS} times"
        )

    async def _data(self, request: Read | Checksum) -> Data:
        """Send a request that the server answers with `Data`; return the answer.

        Raises the same exceptions as `RpcClient.expect`.
        """
        return await self._rpc.expect(request, Data)

    async def checksum(self, offset: int, length: int) -> int:
        """Return the CRC-32 of a range, computed by the server.

        :param offset: first byte in the volume.
        :param length: number of bytes.
        :raises InvalidError: the range exceeds the volume.
        """
        return (await self._data(Checksum(self._number, offset, length))).checksum

    async def flush(self) -> None:
        """Make all writes durable that completed before this call.

        Calls that arrive while a flush is in flight share the next flush.

        :raises DiskError: the server's disk failed.
        :raises RefusedError: the volume is open for reading only.
        """
        self._wanted += 1
        mine = self._wanted
        async with self._flushing:
            if self._flushed >= mine:
                return
            all_until_now = self._wanted
            written = self._written.take()
            try:
                await self._rpc.done(Flush(self._number, written))
            except BaseException:
                self._written.update(written)
                raise
            self._flushed = all_until_now


async def for_each_concurrently(work: Callable[[int], Coroutine[Any, Any, None]], places: Iterable[int]) -> None:
    """Call `work` for each place, a few at a time, and wait until all calls have ended.

    If a call fails, the others are cancelled, and the error of the first call that failed is raised.

    :param work: coroutine function that is called with a place.
    :param places: the arguments of the calls.
    """
    rest = iter(places)

    async def work_on() -> None:
        for place in rest:
            await work(place)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_MAX_CONCURRENT):
                tasks.create_task(work_on())
    except* Exception as errors:
        raise errors.exceptions[0] from None
