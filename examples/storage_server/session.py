"""A client's session: authentication, open volumes and requests.

A session stays on one worker of the pool from the first to the last message of its connection. Reads and writes by
message are copies from or to memory, and answered immediately. Longer requests run as tasks, so answers come in the
order in which the tasks finish. A client with more than `MAX_CONCURRENT` such requests waits.
"""

import asyncio
import hmac
import logging
import os
import zlib
from collections import Counter
from dataclasses import dataclass, field

from aioverbs import BrokenResourceError, ClosedResourceError, Connection, current_worker
from storage_server.cancelling import wait_uncancelled
from storage_server.errors import InvalidError, RefusedError, StorageError
from storage_server.handle import Handle
from storage_server.metrics import Metrics
from storage_server.protocol import (
    MAX_DATA,
    MAX_TEXT,
    VERSION,
    Answer,
    Challenge,
    Checksum,
    Close,
    Copy,
    Create,
    Data,
    Delete,
    Done,
    Failed,
    Flush,
    Hello,
    Listing,
    ListVolumes,
    Message,
    Mode,
    Open,
    Opened,
    ProtocolError,
    Read,
    Reopen,
    Resize,
    Write,
    pack,
    parse,
    proof_of,
)
from storage_server.volumes import Volumes, to_client_error

__all__ = ["Shared", "serve_client"]

logger = logging.getLogger("storage_server")

MAX_CONCURRENT = 64
MAX_OPEN_VOLUMES = 256  # of one client
HELLO_TIMEOUT_S = 5.0
_MAX_CHECKSUM_INLINE = 256 * 1024  # checksums of more bytes are computed in a thread


@dataclass
class Shared:
    """State shared by all sessions.

    :param volumes: the server's volumes; use `Volumes.ask` to call them.
    :param metrics: the server's counters.
    :param session_counts: number of sessions by worker. Each worker changes only its own number.
    """

    volumes: Volumes
    metrics: Metrics
    session_counts: Counter[int] = field(default_factory=Counter)


class Session:
    """A session with an authenticated client. Made by `serve_client`, on a worker of the pool.

    :param connection: connection to the client.
    :param client: the client's name.
    :param shared: state shared by all sessions.
    """

    def __init__(self, connection: Connection, client: str, shared: Shared) -> None:
        self.connection = connection
        self.client = client
        self.shared = shared
        self._volumes = shared.volumes
        self._handles: dict[int, Handle] = {}
        self._last = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._worker = current_worker().number

    async def run(self) -> None:
        """Answer requests until the client disconnects, then close its volumes.

        :raises ProtocolError: the client sent an invalid message.
        :raises BrokenResourceError: the connection broke.
        """
        self.shared.session_counts[self._worker] += 1
        self.shared.metrics.sessions.inc()
        try:
            async for data in self.connection:
                number, request = parse(data)
                answer = self._answer_immediately(request)
                if answer is not None:
                    await self._answer(number, request, answer)
                    continue
                await self._slots.acquire()
                task = asyncio.create_task(self._run_request(number, request))
                self._tasks.add(task)
                task.add_done_callback(self._on_task_done)
                # let the task start now: a connection that polls yields to the loop only after its spin time
                await asyncio.sleep(0)
        finally:
            await wait_uncancelled(self._end())
            self.shared.metrics.sessions.dec()
            self.shared.session_counts[self._worker] -= 1

    def _is_alone(self) -> bool:
        """Return whether the worker's loop has no other request and no other session to serve."""
        return not self._tasks and self.shared.session_counts[self._worker] == 1

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Free the slot of a request's task. If its answer was not sent, log the reason."""
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            disconnected = isinstance(error, BrokenResourceError | ClosedResourceError)
            logger.log(
                logging.DEBUG if disconnected else logging.ERROR,
                "an answer to client %r was not sent",
                self.client,
                exc_info=error,
            )

    async def _end(self) -> None:
        """Cancel the requests and close all volumes that the client has open. Errors are logged."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for handle in self._handles.values():
            if handle.opened is None:  # and it is not going to be opened
                handle.close_reason = "the client disconnected"
                continue
            try:
                await self._volumes.ask(self._volumes.close, handle.opened, handle)
            except StorageError:
                logger.exception("client %r: closing volume %r failed", self.client, handle.volume.row.name)

    # ---- Requests

    def _answer_immediately(self, request: Message) -> Answer | None:
        """Return the answer to a request that can be handled without waiting, or `Failed` if the request fails. Return
        None for a request that may have to wait.
        """
        try:
            match request:
                case Flush(number, written):
                    handle = self._handle(number)
                    if self._is_alone() and handle.usable:
                        self._record_writes(handle, written)
                        return Done() if handle.volume.commits.flush_here() else None
                case Read(number, offset, length, checked):
                    handle = self._handle(number)
                    return self._read(handle, offset, length, checked) if handle.usable else None
                case Write(number, offset, checked, checksum, data):
                    handle = self._handle(number)
                    return self._write(handle, offset, data, checksum if checked else None) if handle.usable else None
        except Exception as error:
            return self._failed(error)
        return None

    async def _run_request(self, number: int, request: Message) -> None:
        """Handle a request that may have to wait, and send its answer.

        Raises the same exceptions as `_answer`.
        """
        try:
            answer = await self._do(request)
        except Exception as error:
            answer = self._failed(error)
        await self._answer(number, request, answer)

    async def _answer(self, number: int, request: Message, answer: Answer) -> None:
        """Send the answer to a request and count it.

        :param number: number of the request.
        :param request: the request.
        :param answer: the answer.
        :raises BrokenResourceError: the connection broke.
        :raises ClosedResourceError: the connection is closed.
        """
        await self.connection.send(pack(number, answer))
        outcome = "failed" if isinstance(answer, Failed) else "done"
        self.shared.metrics.answered(type(request).__name__.lower(), outcome)

    def _failed(self, error: Exception) -> Failed:
        """Return the answer that reports an exception to the client; log the exception unless it is a StorageError."""
        known = to_client_error(error)
        if not isinstance(error, StorageError):
            logger.error("request of client %r failed", self.client, exc_info=error)
        return _failure(known)

    async def _do(self, request: Message) -> Answer:
        """Handle a request; return its answer.

        :raises StorageError: the request failed. Any other exception also means that it failed.
        """
        volumes = self._volumes
        match request:
            case Flush(number, written):
                await self._flush(self._handle(number), written)
            case Read(number, offset, length, checked):
                handle = self._handle(number)
                async with handle.use(volumes):
                    return self._read(handle, offset, length, checked)
            case Write(number, offset, checked, checksum, data):
                handle = self._handle(number)
                async with handle.use(volumes):
                    return self._write(handle, offset, data, checksum if checked else None)
            case Checksum(number, offset, length):
                handle = self._handle(number)
                async with handle.use(volumes):
                    piece = handle.piece(offset, length)
                    if length > _MAX_CHECKSUM_INLINE:
                        return Data(await asyncio.to_thread(zlib.crc32, piece), b"")
                    return Data(zlib.crc32(piece), b"")
            case Open(mode, name):
                return await self._open(name, Mode(mode))
            case Reopen(number):
                handle = self._handle(number)
                async with handle.use(volumes):
                    return self._opened(handle)
            case Close(number):
                handle = self._handle(number)
                del self._handles[number]
                await volumes.ask(volumes.close, handle.volume, handle)
            case ListVolumes():
                return Listing(await volumes.ask(volumes.list_volumes, self.client))
            case Create(size, name):
                await volumes.ask(volumes.create, self.client, name, size)
            case Copy(read_only, source, name):
                await volumes.ask(volumes.copy, self.client, source, name, read_only=read_only)
            case Resize(size, name):
                await volumes.ask(volumes.resize, self.client, name, size)
            case Delete(name):
                await volumes.ask(volumes.delete, self.client, name)
            case _:
                raise InvalidError(f"expected a request, got {type(request).__name__}")
        return Done()

    def _handle(self, number: int) -> Handle:
        """Return the client's handle with the given number.

        :raises InvalidError: no volume with that number is open.
        """
        handle = self._handles.get(number)
        # the volume may be in the middle of being opened: the client has not received the number
        if handle is None or handle.opened is None:
            raise InvalidError(f"no volume with the number {number} is open")
        return handle

    async def _open(self, name: str, mode: Mode) -> Opened:
        """Open a volume and wait until the client has received the grant; return the answer.

        :raises InvalidError: the client has too many volumes open.
        :raises BusyError: the client did not receive its grant.
        :raises RefusedError: the client lacks the right.
        :raises UnknownVolumeError: there is no such volume.
        """
        if len(self._handles) >= MAX_OPEN_VOLUMES:
            raise InvalidError(f"a client may have at most {MAX_OPEN_VOLUMES} volumes open: close some")
        self._last += 1
        number = self._last

        self._handles[number] = handle = Handle(self.connection, self.client, number, mode, self.shared.metrics)
        try:
            await self._volumes.ask(self._volumes.open, self.client, name, mode, handle)
        except Exception:
            del self._handles[number]
            raise
        try:
            async with handle.use(self._volumes):  # another operation may have paused the handle by now
                return self._opened(handle)
        except StorageError:  # or closed the handle; or the client does not receive its grant
            self._handles.pop(number, None)
            await self._volumes.ask(self._volumes.close, handle.volume, handle)
            raise

    def _opened(self, handle: Handle) -> Opened:
        """Return the answer to `Open` or `Reopen` for a handle that has a grant."""
        volume, grant = handle.volume, handle.grant
        assert volume.backing is not None
        assert grant is not None
        return Opened(handle.number, volume.row.size, handle.mode, volume.backing.report_writes, grant.remote.rkey)

    def _read(self, handle: Handle, offset: int, length: int, checked: bool) -> Data:
        """Return the answer to `Read`. The handle must be usable.

        :raises InvalidError: the range exceeds the volume, or is too long for a message.
        """
        if length > MAX_DATA:
            raise InvalidError(f"a message carries at most {MAX_DATA:,} bytes, not {length:,}: read one-sidedly")
        data = bytes(handle.piece(offset, length))
        self.shared.metrics.read_bytes.inc(length)
        return Data(zlib.crc32(data) if checked else 0, data)

    def _write(self, handle: Handle, offset: int, data: bytes, checksum: int | None) -> Done:
        """Copy data to the volume's memory, record it as written, and return the answer. The handle must be usable.

        :param checksum: CRC-32 that the data must have; None to check nothing.
        :raises InvalidError: the checksum differs, or the range exceeds the volume.
        :raises RefusedError: the volume is open for reading only.
        """
        handle.check_writable()
        if checksum is not None and zlib.crc32(data) != checksum:
            raise InvalidError("the data does not match its checksum: send it again")
        handle.piece(offset, len(data))[:] = data
        assert handle.volume.backing is not None
        handle.volume.backing.written([(offset, offset + len(data))])
        self.shared.metrics.written_bytes.inc(len(data))
        return Done()

    async def _flush(self, handle: Handle, written: tuple[tuple[int, int], ...]) -> None:
        """Record the ranges that the client wrote one-sidedly, and wait until all earlier writes are durable.

        :param written: pairs of start and end (exclusive).
        :raises DiskError: the disk failed.
        :raises InvalidError: a range exceeds the volume.
        :raises RefusedError: the volume is open for reading only.
        """
        async with handle.use(self._volumes):
            self._record_writes(handle, written)
            await handle.volume.commits.flush()

    def _record_writes(self, handle: Handle, written: tuple[tuple[int, int], ...]) -> None:
        """Record the ranges that the client's flush lists as written one-sidedly.

        :param written: pairs of start and end (exclusive), sorted.
        :raises InvalidError: a range exceeds the volume.
        :raises RefusedError: the volume is open for reading only.
        """
        handle.check_writable()
        for start, end in written[-1:]:  # the ranges are sorted: checking the last one suffices
            handle.piece(start, end - start)
        assert handle.volume.backing is not None
        handle.volume.backing.written(written)


def _failure(error: StorageError) -> Failed:
    """Return the answer that reports an error; a text that is too long is shortened."""
    return Failed(error.code, str(error)[:MAX_TEXT])


async def _authenticate(connection: Connection, shared: Shared) -> str:
    """Authenticate the client; return its name.

    :raises InvalidError: the client uses a different version of the protocol.
    :raises RefusedError: the token is wrong.
    :raises ProtocolError: a message is invalid, or the first one is not a `Hello`.
    """
    nonce = os.urandom(16)
    await connection.send(pack(0, Challenge(VERSION, nonce)))
    _, hello = parse(await connection.receive())
    if not isinstance(hello, Hello):
        raise ProtocolError(f"expected Hello as the client's first message, got {type(hello).__name__}")
    if hello.version != VERSION:
        raise InvalidError(f"this server supports version {VERSION} of the protocol, not {hello.version}")
    key = await shared.volumes.ask(shared.volumes.key, hello.name)
    # An unknown name gets the same answer as a wrong key, after the same work, so that names cannot be probed.
    expected = proof_of(key if key is not None else os.urandom(32), nonce)
    if not hmac.compare_digest(expected, hello.proof) or key is None:
        raise RefusedError(f"the token of client {hello.name!r} is not valid on this server")
    return hello.name


async def serve_client(shared: Shared, connection: Connection) -> None:
    """Handle a connection of the server until the client disconnects. An invalid message is logged and ends the
    connection.

    :param shared: state shared by all sessions.
    :param connection: connection to the client; the server closes it.
    :raises BrokenResourceError: the connection broke.
    """
    try:
        client = await _handshake(connection, shared)
        if client is not None:
            await Session(connection, client, shared).run()
    except ProtocolError as error:
        logger.warning("disconnecting the client at %s: %s", connection.remote_address, error)


async def _handshake(connection: Connection, shared: Shared) -> str | None:
    """Authenticate the client and tell it the result. A rejection is logged.

    :returns: the client's name; None if the client was rejected or did not authenticate in time.
    :raises ProtocolError: the client sent an invalid message.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            client = await _authenticate(connection, shared)
    except TimeoutError:
        logger.warning("the client at %s did not authenticate within %s s", connection.remote_address, HELLO_TIMEOUT_S)
        return None
    except StorageError as error:
        shared.metrics.refused.inc()
        logger.warning("rejected the client at %s: %s", connection.remote_address, error)
        await connection.send(pack(0, _failure(error)))
        return None
    await connection.send(pack(0, Done()))
    return client
