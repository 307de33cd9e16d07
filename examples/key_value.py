"""A key-value cache whose clients read the server's memory by RDMA, without running code on the server.

    python examples/key_value.py [HOST]

Clients put values by message and get them with one-sided reads of the table. A read may overlap with a write to the
slot; the client detects that with the checksum and reads again.

HOST is the server's address: 127.0.0.1, or that of an RDMA device, where rdma_cm connects the two.
"""

import asyncio
import hashlib
import struct
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aioverbs
from aioverbs import AccessFlags, BufferPool, Connection, ResourceDomain

HOST = "127.0.0.1"
SLOT = 1024  # bytes
SLOTS = 4096
NEIGHBOURS = 4  # adjacent slots that may hold a key; one read fetches all of them
HEADER = struct.Struct("<IHH")  # checksum of the rest, lengths of key and value; all 0: the slot is empty
MAX_PAIR = SLOT - HEADER.size
MAX_READS = 100  # limit of attempts to read a slot that is being written

DONE, FULL = b"done", b"full"


def slot_offset(key: bytes) -> int:
    """Return the offset in the table of the first slot in which a key may be stored."""
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return number % (SLOTS - NEIGHBOURS + 1) * SLOT


def pack(key: bytes, value: bytes) -> bytes:
    """Return the contents of a slot that holds a key and its value.

    :raises ValueError: key and value are too long, or the key is empty.
    """
    if not key or len(key) + len(value) > MAX_PAIR:
        raise ValueError(
            f"key and value must have at most {MAX_PAIR} bytes together, and the key at least one, "
            f"got {len(key)} and {len(value)}"
        )
    rest = struct.pack("<HH", len(key), len(value)) + key + value
    return struct.pack("<I", zlib.crc32(rest)) + rest


def unpack(slot: memoryview) -> tuple[bytes, bytes] | None:
    """Return the key and the value in a slot; None if the slot is empty.

    :raises ValueError: the checksum is wrong, which means that the slot is being written.
    """
    checksum, key_length, value_length = HEADER.unpack_from(slot)
    end = HEADER.size + key_length + value_length
    if not checksum and not key_length and not value_length:
        return None
    if end > SLOT or zlib.crc32(slot[4:end]) != checksum:
        raise ValueError("the slot is being written")
    return bytes(slot[HEADER.size : end - value_length]), bytes(slot[end - value_length : end])


# ---- The server


def find_slot(table: memoryview, key: bytes) -> memoryview | None:
    """Find the slot in which a key is stored or can be stored.

    :param table: memory of the whole table.
    :param key: the key.
    :returns: a view of the slot that holds the key, otherwise of an empty slot for it; None if there is neither.
    :raises ValueError: a slot has a wrong checksum.
    """
    first, free = slot_offset(key), None
    for at in range(first, first + NEIGHBOURS * SLOT, SLOT):
        slot = table[at : at + SLOT]
        found = unpack(slot)
        if found is not None and found[0] == key:
            return slot
        if found is None and free is None:
            free = slot
    return free


def put(table: memoryview, content: bytes) -> bytes:
    """Store the slot contents that a client sent in the table. Only the server's loop writes to the table.

    :param table: memory of the whole table.
    :param content: result of `pack`.
    :returns: the answer to the client: `DONE`, or `FULL` if there is no slot for the key.
    :raises ValueError: the contents are malformed, or a slot has a wrong checksum.
    """
    found = unpack(memoryview(content))
    slot = find_slot(table, found[0]) if found is not None else None
    if slot is None:
        return FULL
    slot[: len(content)] = content
    return DONE


@asynccontextmanager
async def serving(domain: ResourceDomain, host: str = HOST, port: int = 0) -> AsyncIterator[int]:
    """Run a server in a domain for the duration of the block; yield its port.

    :param domain: domain that owns the connections and the table.
    :param host: address at which to listen.
    :param port: TCP port; 0 for a free one.
    :raises OSError: listening at the address failed.
    """
    access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.MW_BIND
    async with domain.register(SLOTS * SLOT, access) as region:

        async def serve_one(connection: Connection) -> None:
            await connection.grant(region, AccessFlags.REMOTE_READ)
            async for content in connection:
                await connection.send(put(region.buffer, content))

        # Clients stay connected for any time: do not wait for them at the end.
        async with aioverbs.serve(serve_one, host, port, domain=domain, drain_timeout_s=0) as server:
            yield server.port


# ---- The client


class Cache:
    """A client's view of a server's table. Created by `cache`."""

    def __init__(self, connection: Connection, table: aioverbs.RemoteGrant, pool: BufferPool) -> None:
        self.connection = connection
        self._table = table
        self._pool = pool
        self._put_lock = asyncio.Lock()  # one request at a time, so that the next answer belongs to it

    async def get(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if the key has none. Several tasks may call this concurrently.

        :raises TimeoutError: all reads overlapped with writes.
        :raises WorkCompletionError: the read failed.
        :raises BrokenResourceError: the connection broke.
        """
        first = slot_offset(key)
        async with self._pool.lease() as buffer:
            for _ in range(MAX_READS):
                await self.connection.read(buffer, self._table[first : first + NEIGHBOURS * SLOT])
                try:
                    slots = [unpack(buffer.buffer[at * SLOT : (at + 1) * SLOT]) for at in range(NEIGHBOURS)]
                except ValueError:
                    await asyncio.sleep(0)
                    continue
                return next((value for found, value in filter(None, slots) if found == key), None)
        raise TimeoutError(f"all {MAX_READS} reads of the slots for {key!r} overlapped with writes")

    async def put(self, key: bytes, value: bytes) -> bool:
        """Store a value; return whether there was a free slot for the key. Several tasks may call this concurrently.

        :raises ValueError: key and value are too long, or the key is empty.
        :raises BrokenResourceError: the connection broke.
        :raises anyio.EndOfStream: the server closed the connection.
        """
        content = pack(key, value)
        async with self._put_lock:
            await self.connection.send(content)
            return await self.connection.receive() == DONE


@asynccontextmanager
async def cache(domain: ResourceDomain, host: str, port: int) -> AsyncIterator[Cache]:
    """Connect to a server and yield a `Cache`; disconnect when the block ends.

    :raises OSError: no server listens at that address.
    """
    async with (
        domain.buffer_pool(NEIGHBOURS * SLOT, 16) as pool,
        aioverbs.connect(host, port, domain=domain) as connection,
    ):
        yield Cache(connection, await connection.receive_grant(), pool)


async def main(host: str = HOST) -> None:
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,
        serving(domain, host) as port,
        cache(domain, host, port) as values,
    ):
        await asyncio.gather(*(values.put(f"key {at}".encode(), f"value {at}".encode()) for at in range(100)))
        got = await asyncio.gather(*(values.get(f"key {at}".encode()) for at in range(100)))
        print(f"put 100 values, got {sum(value == f'value {at}'.encode() for at, value in enumerate(got))} of them")
        print(f"value of a key that was never put: {await values.get(b'key 100')!r}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
