"""A cache of keys and values: who asks reads the server's memory, and its program does nothing for that.

    python examples/key_value.py [HOST]                    a server, and a process that uses it
    python examples/key_value.py serve HOST [PORT]
    python examples/key_value.py get HOST PORT KEY
    python examples/key_value.py put HOST PORT KEY VALUE

Values are put by messages, and got by one-sided reads of the table. A reader may see a slot that is being written just
then: the checksum tells, and it reads again.

HOST is the server's address: 127.0.0.1, or that of an RDMA device, where rdma_cm connects the two.
"""

import asyncio
import hashlib
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aioverbs
from aioverbs import AccessFlags, BufferPool, Connection, MemoryRegion, ResourceDomain

SLOT = 1024  # bytes
SLOTS = 4096
NEIGHBOURS = 4  # slots that a key may be in, side by side: one read gets them all
HEADER = struct.Struct("<IHH")  # checksum of what follows, lengths of key and value; all 0: nothing is here
LONGEST = SLOT - HEADER.size
READS = 100  # of a slot that is being written

PUT, DELETE = b"+", b"-"
DONE, FULL, UNKNOWN = b"done", b"full", b"unknown"


def place_of(key: bytes) -> int:
    """Where in the table the slots of a key begin."""
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return number % (SLOTS - NEIGHBOURS + 1) * SLOT


def pack(key: bytes, value: bytes) -> bytes:
    """A slot's content.

    :raises ValueError: it does not fit.
    """
    if not key or len(key) + len(value) > LONGEST:
        raise ValueError(f"a key, which is not empty, and its value have {LONGEST} bytes at most")
    rest = struct.pack("<HH", len(key), len(value)) + key + value
    return struct.pack("<I", zlib.crc32(rest)) + rest


def unpack(slot: memoryview) -> tuple[bytes, bytes] | None:
    """Key and value; None where there are none.

    :raises ValueError: it is being written.
    """
    checksum, key_length, value_length = HEADER.unpack_from(slot)
    end = HEADER.size + key_length + value_length
    if not checksum and not key_length and not value_length:
        return None
    if end > SLOT or zlib.crc32(slot[4:end]) != checksum:
        raise ValueError("the slot is being written")
    return bytes(slot[HEADER.size : end - value_length]), bytes(slot[end - value_length : end])


# ---- The server


class Table:
    """The slots, in memory that clients read. Only the server's loop writes there."""

    def __init__(self, region: MemoryRegion) -> None:
        self.region = region

    def _slots(self, key: bytes) -> list[memoryview]:
        first = place_of(key)
        return [self.region.buffer[first + at * SLOT : first + (at + 1) * SLOT] for at in range(NEIGHBOURS)]

    def put(self, key: bytes, value: bytes) -> bool:
        """Whether there was room."""
        content = pack(key, value)
        free = None
        for slot in self._slots(key):
            found = unpack(slot)
            if found is not None and found[0] == key:
                slot[: len(content)] = content
                return True
            if found is None and free is None:
                free = slot
        if free is not None:
            free[: len(content)] = content
        return free is not None

    def delete(self, key: bytes) -> bool:
        """Whether it was there."""
        for slot in self._slots(key):
            found = unpack(slot)
            if found is not None and found[0] == key:
                slot[: HEADER.size] = bytes(HEADER.size)
                return True
        return False

    def answer(self, request: bytes) -> bytes:
        """Do what a message asks for."""
        key_length = int.from_bytes(request[1:3], "little")
        key, value = request[3 : 3 + key_length], request[3 + key_length :]
        match request[:1]:
            case b"+":
                return DONE if self.put(key, value) else FULL
            case b"-":
                return DONE if self.delete(key) else UNKNOWN
        raise ValueError(f"no request begins with {request[:1]!r}")


@asynccontextmanager
async def serving(domain: ResourceDomain, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """A server on a domain, for the time of the block; its port."""
    access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.MW_BIND
    async with domain.register(SLOTS * SLOT, access) as region:
        table = Table(region)

        async def serve_one(connection: Connection) -> None:
            await connection.grant(region, AccessFlags.REMOTE_READ)
            async for request in connection:
                await connection.send(table.answer(request))

        async with aioverbs.serve(serve_one, host, port, domain=domain) as server:
            yield server.port


# ---- The client


class Cache:
    """A server's table, as a client sees it. Made by `cache`."""

    def __init__(self, connection: Connection, table: aioverbs.Granted, pool: BufferPool) -> None:
        self._connection = connection
        self._table = table
        self._pool = pool
        self._asking = asyncio.Lock()  # one question at a time, so that the next answer is its own

    async def get(self, key: bytes) -> bytes | None:
        """The value of a key, None where it has none. Any number of tasks may get at once."""
        first = place_of(key)
        async with self._pool.lease() as buffer:
            for _ in range(READS):
                await self._connection.read(buffer, self._table[first : first + NEIGHBOURS * SLOT])
                try:
                    slots = [unpack(buffer.buffer[at * SLOT : (at + 1) * SLOT]) for at in range(NEIGHBOURS)]
                except ValueError:
                    await asyncio.sleep(0)
                    continue
                return next((value for found, value in filter(None, slots) if found == key), None)
        raise TimeoutError(f"the slots of {key!r} were being written, {READS} times")

    async def _ask(self, what: bytes, key: bytes, value: bytes = b"") -> bytes:
        async with self._asking:
            await self._connection.send(what + len(key).to_bytes(2, "little") + key + value)
            return await self._connection.receive()

    async def put(self, key: bytes, value: bytes) -> None:
        """Give a key a value.

        :raises ValueError: they are too long.
        :raises RuntimeError: there is no room where the key could stand.
        """
        pack(key, value)
        if await self._ask(PUT, key, value) == FULL:
            raise RuntimeError(f"there is no room for {key!r}")

    async def delete(self, key: bytes) -> bool:
        """Take a key away: whether it was there."""
        return await self._ask(DELETE, key) == DONE


@asynccontextmanager
async def cache(domain: ResourceDomain, host: str, port: int) -> AsyncIterator[Cache]:
    """A connection to a server."""
    async with (
        domain.buffer_pool(NEIGHBOURS * SLOT, 16) as pool,
        aioverbs.connect(host, port, domain=domain) as connection,
    ):
        yield Cache(connection, await connection.receive_grant(), pool)


# ---- The command


async def serve(host: str, port: int = 0) -> None:
    """Until the input ends."""
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,
        serving(domain, host, port) as chosen,
    ):
        print(chosen, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def use(host: str, port: int, what: str, key: str, value: str = "") -> None:
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,
        cache(domain, host, port) as values,
    ):
        if what == "put":
            await values.put(key.encode(), value.encode())
        else:
            found = await values.get(key.encode())
            print("nothing" if found is None else found.decode())


async def try_out(host: str, port: int) -> None:
    """What one does with a server."""
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,
        cache(domain, host, port) as values,
    ):
        await asyncio.gather(*(values.put(f"key {at}".encode(), f"value {at}".encode()) for at in range(100)))
        got = await asyncio.gather(*(values.get(f"key {at}".encode()) for at in range(100)))
        print(f"put 100 values, got {sum(value == f'value {at}'.encode() for at, value in enumerate(got))} of them")
        await values.delete(b"key 7")
        print(f"after it was deleted: {await values.get(b'key 7')!r}")


def both(host: str = "127.0.0.1") -> None:
    command = [sys.executable, __file__, "serve", host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        asyncio.run(try_out(host, int(server.stdout.readline())))
        server.communicate()


def main() -> None:
    match sys.argv[1:]:
        case []:
            both()
        case ["serve", host, *port]:
            asyncio.run(serve(host, *map(int, port)))
        case ["get", host, port, key]:
            asyncio.run(use(host, int(port), "get", key))
        case ["put", host, port, key, value]:
            asyncio.run(use(host, int(port), "put", key, value))
        case [host]:
            both(host)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
