"""Server and clients in one process: volumes, reads and writes, rights, and changes of open volumes."""

import asyncio
import os
import zlib
from pathlib import Path

import pytest
from storage_server.errors import (
    ChangedError,
    ExistsError,
    InvalidError,
    NoRoomError,
    RefusedError,
    UnknownVolumeError,
)
from storage_server.protocol import Mode, VolumeInfo
from storage_server.remote_volume import PIECE

from aioverbs import Device
from tests.pace import fewer, patience
from tests.storage.parts import BLOCK, serve_here
from tests.waiting import until

SIZE = 64 * BLOCK

both_backings = pytest.mark.parametrize("backing", ["mapped", "cached"])


@both_backings
@pytest.mark.parametrize("by_messages", [False, True], ids=["one-sided", "messages"])
async def test_written_data_is_read_back(device: Device, tmp_path: Path, backing: str, by_messages: bool) -> None:
    data = os.urandom(SIZE)
    async with serve_here(device, tmp_path, backing) as server, server.client() as storage:
        await storage.create("disk", SIZE)
        async with storage.open("disk", write=True, by_messages=by_messages) as volume:
            assert await volume.read(0, SIZE) == bytes(SIZE)
            await volume.write(0, data)
            await volume.write(10, b"hello", verify=True)
            expected = data[:10] + b"hello" + data[15:]
            assert await volume.read(0, SIZE) == expected
            assert await volume.read(8, 9, verify=True) == expected[8:17]
            assert await volume.checksum(5, 1000) == zlib.crc32(expected[5:1005])
            assert await volume.read(SIZE, 0) == b""
            await volume.flush()
    async with (
        serve_here(device, tmp_path, backing) as server,
        server.client() as storage,
        storage.open("disk") as volume,
    ):
        assert await volume.read(0, SIZE, verify=True) == expected


async def test_what_is_long_goes_in_pieces(device: Device, tmp_path: Path, backing: str) -> None:
    size = 3 * PIECE + BLOCK
    data = os.urandom(size)
    async with serve_here(device, tmp_path, backing) as server, server.client() as storage:
        await storage.create("disk", size)
        for by_messages in (False, True):
            async with storage.open("disk", write=True, by_messages=by_messages) as volume:
                await volume.write(0, data, verify=True)
                assert await volume.read(1, size - 1, verify=True) == data[1:]
                data = data[::-1]


async def test_what_was_not_flushed_is_there_as_long_as_nothing_crashes(
    device: Device, tmp_path: Path, backing: str
) -> None:
    async with serve_here(device, tmp_path, backing) as server:
        async with server.client() as storage:
            await storage.create("disk", SIZE)
            async with storage.open("disk", write=True) as volume:
                await volume.write(BLOCK, b"one-sided")
        async with server.client() as storage, storage.open("disk") as volume:
            assert await volume.read(BLOCK, 9) == b"one-sided"


@both_backings
async def test_volumes_are_made_listed_resized_and_deleted(device: Device, tmp_path: Path, backing: str) -> None:
    async with serve_here(device, tmp_path, backing) as server, server.client() as storage:
        assert await storage.volumes() == ()
        await storage.create("b", SIZE)
        await storage.create("a", BLOCK)
        assert await storage.volumes() == (VolumeInfo("a", BLOCK, False), VolumeInfo("b", SIZE, False))
        await storage.resize("a", 3 * BLOCK)
        async with storage.open("a", write=True) as volume:
            await volume.write(0, b"x" * 3 * BLOCK)
        await storage.resize("a", BLOCK)
        await storage.resize("a", 2 * BLOCK)
        async with storage.open("a") as volume:
            assert await volume.read(0, 2 * BLOCK) == b"x" * BLOCK + bytes(BLOCK), "truncated bytes are zero"
        await storage.delete("a")
        await storage.create("a", SIZE)
        await storage.delete("b")
        assert await storage.volumes() == (VolumeInfo("a", SIZE, False),)
        assert len(list((tmp_path / "volumes").iterdir())) == 1


async def test_invalid_values_are_rejected(device: Device, tmp_path: Path, backing: str) -> None:
    async with serve_here(device, tmp_path, backing) as server, server.client() as storage:
        await storage.create("disk", SIZE)
        with pytest.raises(ExistsError, match="there is a volume 'disk' already"):
            await storage.create("disk", SIZE)
        for name in ("", "../x", ".hidden", "a/b", "x" * 65, "nul\0"):
            with pytest.raises(InvalidError, match="not a valid volume name"):
                await storage.create(name, SIZE)
        for size in (0, 1, BLOCK + 1, 1 << 62):
            with pytest.raises(InvalidError, match="whole blocks"):
                await storage.create("other", size)
            with pytest.raises(InvalidError, match="whole blocks"):
                await storage.resize("disk", size)
        with pytest.raises(NoRoomError, match="no room"):
            await storage.create("huge", 1 << 49)
        for wrong in (storage.delete("none"), storage.resize("none", SIZE), storage.snapshot("none", "x")):
            with pytest.raises(UnknownVolumeError, match="no volume 'none'"):
                await wrong
        with pytest.raises(UnknownVolumeError):
            async with storage.open("none"):
                pass
        async with storage.open("disk") as volume:
            for offset, length in ((-1, 1), (0, SIZE + 1), (SIZE, 1), (0, -1)):
                with pytest.raises(ValueError, match="exceed volume"):
                    await volume.read(offset, length)
        assert [each.name for each in await storage.volumes()] == ["disk"]
        assert len(list((tmp_path / "volumes").iterdir())) == 1


@both_backings
async def test_read_only_clients_cannot_write(device: Device, tmp_path: Path, backing: str) -> None:
    """The client can write neither by messages nor through the granted memory."""
    async with serve_here(device, tmp_path, backing) as server, server.client() as owner:
        await owner.create("disk", SIZE)
        await owner.create("secret", SIZE)
        token = server.add("reader", disk=Mode.READ)
        async with server.client(token) as reader:
            assert [each.name for each in await reader.volumes()] == ["disk"]
            with pytest.raises(RefusedError, match="may read 'disk', but not write"):
                async with reader.open("disk", write=True):
                    pass
            with pytest.raises(UnknownVolumeError):
                async with reader.open("secret"):
                    pass
            for wrong in (
                reader.create("x", SIZE),
                reader.delete("disk"),
                reader.resize("disk", BLOCK),
                reader.snapshot("disk", "x"),
                reader.clone("disk", "x"),
            ):
                with pytest.raises(RefusedError, match="only admins"):
                    await wrong
            async with reader.open("disk", by_messages=True) as volume:
                assert await volume.read(0, 5) == bytes(5)
                with pytest.raises(RefusedError, match="for reading only"):
                    await volume.write(0, b"x")
                with pytest.raises(RefusedError, match="for reading only"):
                    await volume.flush()
            async with reader.open("disk") as volume:
                with pytest.raises(Exception, match="REM_ACCESS_ERR"):
                    await volume.write(0, b"x")
        async with server.client(token) as reader, reader.open("disk") as volume:
            assert await volume.read(0, SIZE) == bytes(SIZE)


@both_backings
async def test_removing_a_right_closes_open_volumes(
    device: Device, tmp_path: Path, backing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage_server.volumes._RIGHTS_POLL_S", 0.02)
    async with serve_here(device, tmp_path, backing) as server, server.client() as owner:
        await owner.create("disk", SIZE)
        token = server.add("writer", disk=Mode.WRITE)
        async with server.client(token) as writer, writer.open("disk", write=True) as volume:
            await volume.write(0, b"mine")
            server.allow("writer", "disk", Mode.READ)

            async def write_on() -> None:
                while True:
                    await volume.write(0, b"mine")

            with pytest.raises(ChangedError, match="the client lost its right"):
                await asyncio.wait_for(write_on(), patience(20))
            async with writer.open("disk") as again:
                assert await again.read(0, 4) == b"mine"


async def test_unknown_tokens_are_rejected(device: Device, tmp_path: Path, backing: str) -> None:
    async with serve_here(device, tmp_path, backing) as server:
        server.add("known")
        for token in ("owner.wrong", "known.wrong", "nobody.wrong"):
            with pytest.raises(RefusedError, match="is not valid on this server"):
                async with server.client(token):
                    pass
        with pytest.raises(InvalidError, match=r"NAME\.SECRET"):
            async with server.client("nothing"):
                pass
        assert server.metric("refused_clients_total") == 3


@both_backings
async def test_resizing_or_deleting_closes_open_volumes(device: Device, tmp_path: Path, backing: str) -> None:
    async with serve_here(device, tmp_path, backing) as server, server.client() as owner, server.client() as other:
        await owner.create("disk", SIZE)
        async with (
            other.open("disk", write=True) as volume,
            other.open("disk", write=True, by_messages=True) as by_messages,
        ):
            await volume.write(0, b"before")
            await owner.resize("disk", 2 * SIZE)
            for wrong in (volume.write(0, b"x"), volume.read(0, 1), by_messages.write(0, b"x"), by_messages.read(0, 1)):
                with pytest.raises(ChangedError, match="it was resized: open it again"):
                    await wrong
            async with other.open("disk") as again:
                assert await again.read(0, 6) == b"before"
                assert again.size == 2 * SIZE
        async with other.open("disk") as volume:
            await owner.delete("disk")
            with pytest.raises(ChangedError, match="it was deleted"):
                await volume.read(0, 1)


@both_backings
async def test_requests_in_flight_during_a_resize_end(device: Device, tmp_path: Path, backing: str) -> None:
    """Each request succeeds or fails with the reason, and the connection stays usable."""
    async with serve_here(device, tmp_path, backing) as server, server.client() as owner, server.client() as other:
        await owner.create("disk", SIZE)
        begun = asyncio.Semaphore(0)

        async def use(by_messages: bool) -> str:
            try:
                async with other.open("disk", write=True, by_messages=by_messages) as volume:
                    begun.release()
                    while True:
                        await volume.write(0, b"x" * BLOCK)
                        assert await volume.read(0, BLOCK) == b"x" * BLOCK
                        await volume.flush()
            except ChangedError as error:
                return str(error)

        for turn in range(fewer(5, least=2)):
            users = [asyncio.create_task(use(bool(each % 2))) for each in range(6)]
            for _ in users:
                await begun.acquire()
            await owner.resize("disk", (turn % 2 + 1) * SIZE)
            for reason in await asyncio.gather(*users):
                assert "it was resized" in reason


@both_backings
async def test_snapshots_do_not_change(device: Device, tmp_path: Path, backing: str) -> None:
    async with serve_here(device, tmp_path, backing) as server, server.client() as storage:
        await storage.create("disk", SIZE)
        async with storage.open("disk", write=True) as volume:
            await volume.write(0, b"first")
            await storage.snapshot("disk", "then")
            await volume.write(0, b"later")
            await storage.clone("then", "again")
            async with storage.open("again", write=True) as again, storage.open("then") as then:
                await again.write(2, b"!")
                assert [await each.read(0, 5) for each in (volume, then, again)] == [b"later", b"first", b"fi!st"]
        with pytest.raises(RefusedError, match="read only"):
            async with storage.open("then", write=True):
                pass
        with pytest.raises(InvalidError, match="make a clone"):
            await storage.resize("then", BLOCK)
        await storage.delete("disk")
        assert [(each.name, each.read_only) for each in await storage.volumes()] == [("again", False), ("then", True)]


@both_backings
@pytest.mark.parametrize("by_messages", [False, True], ids=["one-sided", "messages"])
async def test_snapshots_are_consistent(device: Device, tmp_path: Path, backing: str, by_messages: bool) -> None:
    """A client writes a number to the first block, then to the last. No snapshot has a later number in the last."""
    async with serve_here(device, tmp_path, backing) as server, server.client() as storage, server.client() as other:
        await storage.create("disk", SIZE)

        written = 0

        async def count() -> None:
            nonlocal written
            async with other.open("disk", write=True, by_messages=by_messages) as volume:
                for number in range(1, 1 << 30):
                    data = number.to_bytes(8, "little")
                    await volume.write(0, data)
                    await volume.write(SIZE - 8, data)
                    written = number

        counting = asyncio.create_task(count())
        seen = [0]
        for turn in range(fewer(5, least=2)):
            await until(lambda: written > seen[-1])  # the writer continues after each snapshot
            await storage.snapshot("disk", f"at-{turn}")
            async with storage.open(f"at-{turn}") as volume:
                first, last = [int.from_bytes(await volume.read(at, 8), "little") for at in (0, SIZE - 8)]
                assert first - 1 <= last <= first
                seen.append(first)
        assert not counting.done()
        counting.cancel()
        await asyncio.wait([counting])
        assert seen == sorted(set(seen))


async def test_concurrent_flushes_share_syncs(device: Device, tmp_path: Path, backing: str) -> None:
    async with serve_here(device, tmp_path, backing) as server:
        async with server.client() as storage:
            await storage.create("disk", SIZE)

        async def flush_often(number: int) -> None:
            async with server.client() as storage, storage.open("disk", write=True) as volume:
                for _ in range(10):
                    await volume.write(number * BLOCK, b"x")
                    await volume.flush()

        await asyncio.gather(*map(flush_often, range(6)))
        assert server.metric("requests_total", kind="flush", outcome="done") == 60
        assert server.metric("sync_flushes_sum") == 60
        async with server.client() as storage:
            async with storage.open("disk", write=True) as volume:
                before = server.metric("requests_total", kind="flush", outcome="done")
                await asyncio.gather(*(volume.flush() for _ in range(50)))
            # The volume is closed, so all answers are counted.
            assert server.metric("requests_total", kind="flush", outcome="done") - before == 2


async def test_caches_are_limited_in_memory(device: Device, tmp_path: Path) -> None:
    async with (
        serve_here(device, tmp_path, "cached", memory=2 * SIZE) as server,
        server.client() as storage,
    ):
        for name in "abc":
            await storage.create(name, SIZE)
        async with storage.open("a"), storage.open("b"), storage.open("a"):
            assert server.metric("cached_bytes") == 2 * SIZE
            with pytest.raises(NoRoomError, match="--memory"):
                async with storage.open("c"):
                    pass
        async with storage.open("c") as volume:
            assert await volume.read(0, 1) == b"\0"
        assert server.metric("cached_bytes") == 0
        assert server.metric("grants", mode="read") == 0


async def test_many_clients_at_once(device: Device, tmp_path: Path, backing: str) -> None:
    clients = fewer(8, least=3)
    async with serve_here(device, tmp_path, backing) as server:
        async with server.client() as storage:
            await storage.create("disk", clients * SIZE)

        async def use(number: int) -> None:
            async with (
                server.client() as storage,
                storage.open("disk", write=True, by_messages=number % 2 == 0) as volume,
            ):
                data = bytes([number + 1]) * SIZE
                await volume.write(number * SIZE, data)
                await volume.flush()
                assert await volume.read(number * SIZE, SIZE, verify=True) == data

        await asyncio.gather(*map(use, range(clients)))
        async with server.client() as storage, storage.open("disk") as volume:
            whole = await volume.read(0, clients * SIZE)
            assert whole == b"".join(bytes([number + 1]) * SIZE for number in range(clients))


async def test_a_folder_has_one_server(device: Device, tmp_path: Path, backing: str) -> None:
    async with serve_here(device, tmp_path, backing):
        with pytest.raises(InvalidError, match="another server uses"):
            async with serve_here(device, tmp_path, backing):
                pass
