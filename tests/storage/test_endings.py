"""Clients that violate the protocol, disconnect or are cancelled; disks that fail; and the effect on other clients."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from storage_server.catalog import VolumeRow, key_of
from storage_server.client import connect
from storage_server.errors import BusyError, ChangedError, DiskError, InvalidError
from storage_server.handle import Handle
from storage_server.metrics import Metrics
from storage_server.protocol import (
    MAX_DATA,
    VERSION,
    Challenge,
    Close,
    Done,
    Failed,
    Flush,
    Hello,
    Message,
    Mode,
    Open,
    Opened,
    Read,
    Write,
    pack,
    parse,
    proof_of,
)
from storage_server.volumes import Volume, Volumes

import aioverbs
from aioverbs import BrokenResourceError, Connection, ConnectionSettings, Device
from tests.pace import patience
from tests.storage.parts import BLOCK, HOST, Server, serve_here
from tests.storage.power import Power
from tests.waiting import until

SIZE = 16 * BLOCK


class Raw:
    """A client that sends arbitrary messages."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def ask(self, message: Message) -> Message:
        await self.connection.send(pack(1, message))
        _, answer = parse(await self.connection.receive())
        return answer

    async def ended(self) -> bool:
        """Return whether the server ends the connection."""
        try:
            async with asyncio.timeout(patience(20)):
                while True:
                    await self.connection.receive()
        except (anyio.EndOfStream, BrokenResourceError):
            return True


@contextlib.asynccontextmanager
async def raw_client(
    server: Server, *, authenticate: bool = True, settings: ConnectionSettings | None = None
) -> AsyncIterator[Raw]:
    async with (
        server.device.resource_domain() as domain,
        aioverbs.connect(HOST, server.serving.port, domain=domain, settings=settings) as connection,
    ):
        _, challenge = parse(await connection.receive())
        assert isinstance(challenge, Challenge)
        raw = Raw(connection)
        if authenticate:
            key = key_of(server.serving.token_file.read_text())
            assert await raw.ask(Hello(VERSION, proof_of(key, challenge.nonce), "owner")) == Done()
        yield raw


@pytest.mark.parametrize(
    "message",
    [b"", b"nonsense", pack(1, Done())[:-1], pack(1, Close(1)) + b"x", bytes(MAX_DATA + 100)],
    ids=["nothing", "nonsense", "half", "too much", "long"],
)
async def test_invalid_messages_disconnect_only_their_client(
    device: Device, tmp_path: Path, backing: str, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_here(device, tmp_path, backing) as server, server.client() as other:
        await other.create("disk", SIZE)
        async with other.open("disk", write=True) as volume, raw_client(server) as raw:
            assert isinstance(await raw.ask(Open(Mode.WRITE, "disk")), Opened)
            with contextlib.suppress(ValueError):  # longer than the server's limit
                await raw.connection.send(message)
                assert await raw.ended()
            await volume.write(0, b"still there")
            await volume.flush()
            assert await volume.read(0, 11) == b"still there"
        await other.resize("disk", 2 * SIZE)
    assert "Traceback" not in caplog.text


async def test_invalid_requests_are_rejected(device: Device, tmp_path: Path, backing: str) -> None:
    """The server answers with an error, and the connection stays usable."""
    async with serve_here(device, tmp_path, backing) as server, raw_client(server) as raw:
        async with server.client() as storage:
            await storage.create("disk", SIZE)
        opened = await raw.ask(Open(Mode.WRITE, "disk"))
        assert isinstance(opened, Opened)
        for message in (
            Read(opened.volume, SIZE, 1, False),
            Read(opened.volume, 2**64 - 1, 2**32 - 1, False),
            Read(opened.volume, 0, MAX_DATA + 1, False),
            Read(opened.volume + 1, 0, 1, False),
            Write(opened.volume, SIZE - 1, False, 0, b"xx"),
            Write(opened.volume, 0, True, 7, b"arrived otherwise"),
            Flush(opened.volume, ((0, SIZE + 1),)),
            Flush(77, ()),
            Close(77),
            Done(),
            Hello(VERSION, bytes(32), "again"),
        ):
            answer = await raw.ask(message)
            assert isinstance(answer, Failed), message
            assert answer.code == InvalidError.code, answer
        assert await raw.ask(Write(opened.volume, 0, False, 0, b"fine")) == Done()
        assert await raw.ask(Flush(opened.volume, ((0, 4),))) == Done()
        assert await raw.ask(Close(opened.volume)) == Done()
        for number in range(256):
            opened = await raw.ask(Open(Mode.READ, "disk"))
            assert isinstance(opened, Opened), number
        assert isinstance(await raw.ask(Open(Mode.READ, "disk")), Failed), "the limit is reached"


async def test_closing_a_volume_that_is_being_opened(device: Device, tmp_path: Path, backing: str) -> None:
    """The client cannot know the volume's number yet. No volume stays open for ever."""
    async with serve_here(device, tmp_path, backing) as server, server.client() as storage:
        await storage.create("disk", SIZE)
        async with raw_client(server) as raw:
            for number in (1, 2, 3):
                await raw.connection.send(pack(2 * number, Open(Mode.READ, "disk")))
                await raw.connection.send(pack(2 * number + 1, Close(number)))
            answers = dict([parse(await raw.connection.receive()) for _ in range(6)])
            assert all(isinstance(answers[2 * number], Opened | Failed) for number in (1, 2, 3))
        (volume,) = server.serving.volumes._volumes.values()
        await until(lambda: not volume.users)
        assert volume.backing is None
        assert server.metric("grants", mode="read") == 0


async def test_a_client_that_receives_nothing_does_not_block_others(
    device: Device, tmp_path: Path, backing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "storage_server.handle._REVOKE_TIMEOUT_S", 0.1
    )  # the client does not confirm revocations, either
    async with serve_here(device, tmp_path, backing) as server, server.client() as storage:
        await storage.create("disk", SIZE)
        async with raw_client(server, settings=ConnectionSettings(receive_depth=4)) as raw:
            for number in range(1, 17):
                await raw.connection.send(pack(number, Open(Mode.WRITE, "disk")))
            (volume,) = server.serving.volumes._volumes.values()
            await until(lambda: len(volume.users) == 16)
            async with asyncio.timeout(patience(5)), storage.open("disk", write=True) as disk:
                await disk.write(0, b"in time")
            async with asyncio.timeout(patience(5)):
                await storage.delete("disk")


async def test_open_can_be_cancelled_if_the_server_does_not_answer(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that is cancelled while it opens a volume waits for the answer, but not for ever."""
    monkeypatch.setattr("storage_server.client._ANSWER_TIMEOUT_S", 0.1)

    async def silent(connection: Connection) -> None:
        await connection.send(pack(0, Challenge(VERSION, bytes(16))))
        await connection.receive()
        await connection.send(pack(0, Done()))
        async for _ in connection:
            pass

    async with serve_here(device, tmp_path, "mapped" if device.software else "cached") as server:
        token = server.serving.token_file.read_text()
    async with (
        device.resource_domain() as domain,
        aioverbs.serve(silent, HOST, domain=domain) as served,
        connect(HOST, served.port, token, domain=domain) as storage,
    ):
        async with asyncio.timeout(patience(5)):
            with anyio.move_on_after(0.1) as scope:
                async with storage.open("disk"):
                    pass
            assert scope.cancelled_caught
            with pytest.raises(BrokenResourceError):
                await storage.create("disk", SIZE)


async def test_unauthenticated_clients_are_rejected(
    device: Device, tmp_path: Path, backing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_here(device, tmp_path, backing) as server:
        with monkeypatch.context() as patch:
            patch.setattr("storage_server.session.HELLO_TIMEOUT_S", 0.2)
            async with raw_client(server, authenticate=False) as silent:
                assert await silent.ended()
        async with raw_client(server, authenticate=False) as eager:
            await eager.connection.send(pack(1, Open(Mode.READ, "disk")))
            assert await eager.ended()
        async with raw_client(server, authenticate=False) as other:
            answer = await other.ask(Hello(VERSION + 1, bytes(32), "owner"))
            assert isinstance(answer, Failed)
            assert "supports version 1" in answer.text
        async with raw_client(server, authenticate=False) as nobody:
            assert isinstance(await nobody.ask(Hello(VERSION, bytes(32), "n" * 512)), Failed), "the error is reported"


async def test_volumes_of_a_disconnected_client_are_closed(device: Device, tmp_path: Path, backing: str) -> None:
    async with serve_here(device, tmp_path, backing) as server, server.client() as other:
        await other.create("disk", SIZE)
        async with other.open("disk", write=True) as volume:
            async with raw_client(server) as raw:
                opened = await raw.ask(Open(Mode.WRITE, "disk"))
                assert isinstance(opened, Opened)
                await raw.ask(Write(opened.volume, 0, False, 0, b"never flushed"))
                raw.connection.abort()
            await volume.write(BLOCK, b"flushed")
            await volume.flush()
        await until(lambda: not server.metric("grants", mode="write") and server.metric("sessions") == 1)
        await other.resize("disk", 2 * SIZE)
        async with other.open("disk") as volume:
            assert await volume.read(BLOCK, 7) == b"flushed"
            assert await volume.read(0, 13) == b"never flushed", "unflushed data survives without a crash"


async def test_requests_work_after_cancelled_requests(device: Device, tmp_path: Path, backing: str) -> None:
    """Answers to cancelled requests are dropped."""
    async with serve_here(device, tmp_path, backing) as server, server.client() as storage:
        await storage.create("disk", SIZE)
        async with storage.open("disk", write=True, by_messages=True) as volume:
            begun = time.perf_counter()
            await volume.write(0, b"x" * BLOCK)
            await volume.flush()
            usual = time.perf_counter() - begun
            for turn in range(40):
                tasks = [
                    asyncio.create_task(each)
                    for each in (volume.write(0, b"x" * BLOCK), volume.flush(), volume.read(0, SIZE), storage.volumes())
                ]
                await asyncio.sleep(usual * 2 * turn / 40)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            assert await volume.read(0, BLOCK, verify=True) == b"x" * BLOCK
            await volume.flush()


@pytest.mark.parametrize("at", ["open", "close"])
async def test_repeated_cancellation_leaves_no_volume_open(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """A client cancelled twice, while it opens or closes a volume, leaves no volume open."""
    begun, answer = asyncio.Event(), asyncio.Event()
    done = getattr(Volumes, at)

    async def slowly(*args: Any) -> None:
        begun.set()
        await answer.wait()
        await done(*args)

    backing = "mapped" if device.software else "cached"
    async with serve_here(device, tmp_path, backing) as server, server.client() as storage:
        await storage.create("disk", SIZE)
        (volume,) = server.serving.volumes._volumes.values()

        async def use() -> None:
            async with storage.open("disk"):
                pass

        with monkeypatch.context() as patch:
            patch.setattr(Volumes, at, slowly)
            using = asyncio.create_task(use())
            async with asyncio.timeout(patience(5)):
                await begun.wait()
                for _ in range(3):
                    using.cancel()
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                assert not using.done()
                answer.set()
                with pytest.raises(asyncio.CancelledError):
                    await using
        assert not volume.users


async def test_a_repeatedly_cancelled_server_closes_its_volumes(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server closes its volumes nevertheless."""
    serves, closes, go_on, closed = (asyncio.Event() for _ in range(4))
    close_all = Volumes._close_all

    async def slowly(self: Volumes) -> None:
        closes.set()
        await go_on.wait()
        await close_all(self)
        closed.set()

    async def serve() -> None:
        async with serve_here(device, tmp_path, "mapped" if device.software else "cached"):
            serves.set()
            await anyio.sleep_forever()

    monkeypatch.setattr(Volumes, "_close_all", slowly)
    serving = asyncio.create_task(serve())
    async with asyncio.timeout(patience(10)):
        await serves.wait()
        serving.cancel()
        await closes.wait()
        for _ in range(3):
            serving.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not serving.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert closed.is_set()


@pytest.mark.parametrize("backing", ["mapped", "cached"])
async def test_no_flush_succeeds_after_a_disk_failure(device: Device, tmp_path: Path, backing: str) -> None:
    """No later flush succeeds; reads still do."""
    power = Power(tmp_path, 0)
    async with serve_here(device, tmp_path, backing, power) as server, server.client() as storage:
        await storage.create("disk", SIZE)
        await storage.create("other", SIZE)
        async with storage.open("disk", write=True) as volume:
            await volume.write(0, b"good")
            await volume.flush()
            await volume.write(0, b"lost")
            power.failing_calls = 1
            for _ in range(3):
                with pytest.raises(DiskError, match="the disk failed"):
                    await volume.flush()
            assert await volume.read(0, 4) == b"lost"
        with pytest.raises(DiskError):
            async with storage.open("disk", write=True) as volume:
                await volume.flush()
        async with storage.open("other", write=True) as volume:
            await volume.write(0, b"good")
            await volume.flush()


async def test_a_resize_that_timed_out_can_be_repeated(
    device: Device, tmp_path: Path, backing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that hangs prevents a resize. Once the flush ends, the next resize succeeds."""
    power = Power(tmp_path, 0)
    async with serve_here(device, tmp_path, backing, power) as server:
        async with server.client() as owner, server.client() as other:
            await owner.create("disk", SIZE)
            async with other.open("disk", write=True) as volume:
                power.syncs_may_end.clear()
                flushing = asyncio.create_task(volume.flush())
                await until(lambda: power.done[-1] == "datasync")
                with monkeypatch.context() as patch:
                    patch.setattr("storage_server.volumes.RELEASE_TIMEOUT_S", 0.02)
                    with pytest.raises(BusyError, match="does not release"):
                        await owner.resize("disk", 2 * SIZE)
                power.syncs_may_end.set()
                await flushing
                await owner.resize("disk", 2 * SIZE)
                with pytest.raises(ChangedError, match="resized"):
                    await volume.read(0, 1)
        assert server.metric("grants", mode="write") == 0


async def test_concurrent_pauses_revoke_the_grant_once() -> None:
    """Two concurrent calls revoke the grant only once: the first may still be running after its caller timed out."""

    class Grant:
        async def revoke(self, *, timeout_s: float) -> None:
            await asyncio.sleep(0)

    class Peer:
        async def grant(self, *_: object) -> Grant:
            return Grant()

    metrics = Metrics()
    handle = Handle(cast(Any, Peer()), "owner", 1, Mode.WRITE, metrics)
    volume = Volume(VolumeRow(1, "disk", SIZE, read_only=False), cast(Any, None), metrics)
    volume.backing = cast(Any, SimpleNamespace(region=None))
    await handle.begin(volume)
    await asyncio.gather(handle.pause(), handle.pause())
    assert handle.grant is None
    assert metrics.registry.get_sample_value("storage_grants", {"mode": "write"}) == 0


@pytest.mark.parametrize("backing", ["mapped", "cached"])
async def test_memory_stays_until_running_syncs_end(device: Device, tmp_path: Path, backing: str) -> None:
    """Data of a running sync stays in memory, even if its client and the client of the next sync disconnect."""
    power = Power(tmp_path, 0)
    async with serve_here(device, tmp_path, backing, power, workers=1) as server, server.client() as other:
        await other.create("disk", SIZE)
        async with raw_client(server) as raw:
            opened = await raw.ask(Open(Mode.WRITE, "disk"))
            assert isinstance(opened, Opened)
            before = len(power.done)
            power.syncs_may_end.clear()
            for number in (2, 3):
                await raw.connection.send(pack(number, Flush(opened.volume, ((0, 1),))))
            await until(lambda: power.done[before:] and power.done[-1] == "datasync")
            steps = len(power.done)
            raw.connection.abort()
            resizing = asyncio.create_task(other.resize("disk", 2 * SIZE))
            await asyncio.sleep(0.2)
            assert len(power.done) == steps, "no other operation uses the file"
            assert not resizing.done()
            power.syncs_may_end.set()
            await resizing
        await until(lambda: server.metric("sessions") == 1)
        async with other.open("disk", write=True) as volume:
            await volume.flush()
