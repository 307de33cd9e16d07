"""A peer that may move data from memory to memory, and does not leave the memory when it is to.

Only what it was asked waits for it, and that not for ever.
"""

import asyncio
import contextlib
import ctypes
import mmap
import os
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from aioverbs import BrokenResourceError, Device, Endpoint, MemoryRegion, Mtu, QueuePair, RemoteRegion, WcStatus
from aioverbs._core.data_path.data_path import Operation
from aioverbs.software_peers import Peer
from tests.data_path.ends import ACCESS, PEERS
from tests.fabric.hostile import Request
from tests.fabric.test_frames import Scene, scene
from tests.fabric.test_hostile_answers import outcomes
from tests.pace import patience
from tests.waiting import until

inline = pytest.mark.parametrize("device", ["direct-inline"], indirect=True)
in_thread = pytest.mark.parametrize("device", ["direct-thread"], indirect=True)

FRAME = struct.Struct("<8B10IQ4I2Q2HI")  # as soft/fabric/frame.h has it
HELLO, PROOF, PROBE_AT, NONCE_AT, NONCE = 112, 40, 48, 72, 32  # as protocol.md has it
DIRECT_HELLO, DIRECT_FRAME = 2, 8
TOKENS, FREE, OPEN, BUSY = 4096, 0, 1, 2
PART = 65536
COUNT = 4
REMOTE = RemoteRegion(0, COUNT * PART, 1)


@dataclass(frozen=True, slots=True)
class Asked(Request):
    """A request frame, and the token by which the peer may copy."""

    direct: bool
    copy_token: int
    serial: int


class Keeper:
    """Somebody who is connected to, and speaks by hand. He is of this process, so he can write to its memory."""

    def __init__(self, folder: Path) -> None:
        self.gids = os.urandom(32)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / self.gids[:16].hex()))
        self.listener.listen()
        self.listener.settimeout(patience(20))

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.gids[:16], 17, 0, Mtu.MTU_4096)

    def accept(self) -> None:
        """Shake hands, and take what is offered."""
        self.stream, _ = self.listener.accept()
        self.stream.settimeout(patience(20))
        hello, descriptors, _, _ = socket.recv_fds(self.stream, HELLO, 1)
        assert len(hello) == HELLO
        self.offered = bool(hello[10] & DIRECT_HELLO)
        nonce = os.urandom(NONCE)
        if self.offered:
            (probe,) = struct.unpack_from("<Q", hello, PROBE_AT)
            ctypes.memmove(probe, nonce, NONCE)
            self.page = mmap.mmap(descriptors[0], TOKENS)
        for descriptor in descriptors:
            os.close(descriptor)
        flags = DIRECT_HELLO if self.offered else 0
        self.stream.sendall(struct.pack("<8sHHI32s32s32x", b"aioverbs", 1, flags, 0, self.gids, nonce))
        self._take(PROOF)

    def hear(self, count: int) -> list[Asked]:
        return [self._hear() for _ in range(count)]

    def _hear(self) -> Asked:
        _, _, flags, _, _, _, _, _, size, *numbers, copy_token, _, serial = FRAME.unpack(self._take(FRAME.size))
        self._take(size)
        to, sender, token, psn, packets, *_ = numbers
        return Asked(to, sender, token, psn, packets, bool(flags & DIRECT_FRAME), copy_token, serial)

    def _take(self, size: int) -> bytes:
        taken = b""
        while len(taken) < size:
            part = self.stream.recv(size - len(taken))
            assert part, "the device closed the connection"
            taken += part
        return taken

    def mark(self, state: int, asked: list[Asked]) -> None:
        for each in asked:
            assert each.direct
            struct.pack_into("<Q", self.page, 8 * each.copy_token, state << 32 | each.serial)

    def look(self, asked: Asked) -> int:
        """What state the copy token is in."""
        (word,) = struct.unpack_from("<Q", self.page, 8 * asked.copy_token)
        return int(word >> 32)

    def close(self) -> None:
        for each in (self.listener, self.stream):
            each.close()


@dataclass
class Held:
    """Four writes of a queue pair, and a peer who is at the memory of all of them."""

    scene: Scene
    peer: Keeper
    qp: QueuePair
    region: MemoryRegion
    remote: RemoteRegion
    writes: list[Operation[None]]
    asked: list[Asked]

    @property
    def device(self) -> Device:
        return self.scene.pair.device

    def link(self) -> Peer:
        gid = self.peer.gids[:16]
        (link,) = (each for each in self.device.peers() if each.connected_by_us and gid in each.gids)
        return link

    async def say(self, answer: bytes) -> None:
        """Send an answer, and wait until the device has read it."""
        before = self.link().frames_in
        self.peer.stream.sendall(answer)
        await until(lambda: self.link().frames_in > before)

    def in_flight(self) -> bool:
        return not any(write.ended for write in self.writes)


async def ask(peer: Keeper, qp: QueuePair, region: MemoryRegion) -> tuple[list[Operation[None]], list[Asked]]:
    """Connect a queue pair to the peer, and have it write: what is under way, and what the peer was asked."""
    qp.connect(peer.endpoint, PEERS, timeout=0)  # nothing is sent again, however long somebody stands still
    parts = [slice(n * PART, (n + 1) * PART) for n in range(COUNT)]
    writes = [qp.write(region[part], REMOTE[part]) for part in parts]
    await asyncio.to_thread(peer.accept)
    return writes, await asyncio.to_thread(peer.hear, COUNT)


@pytest_asyncio.fixture
async def held(device: Device, short_path: Path) -> AsyncIterator[Held]:
    async with (
        scene(device) as here,
        here.pair.domain.register(COUNT * PART, ACCESS) as region,
        here.pair.domain.queue_pair(here.pair.cq) as qp,
    ):
        with contextlib.closing(Keeper(short_path / "near")) as peer:
            writes, asked = await ask(peer, qp, region)
            peer.mark(BUSY, asked)
            yield Held(here, peer, qp, region, REMOTE, writes, asked)


@inline
async def test_only_what_the_peer_was_asked_waits_for_it(held: Held) -> None:
    """It says that it has done it, while it is still at the memory of all of it."""
    await held.say(held.asked[-1].done())
    here, pair = held.scene, held.scene.pair
    here.local.buffer[:PART] = os.urandom(PART)
    await pair.near.write(*here.part(0, PART))
    assert here.remote.buffer[:PART] == here.local.buffer[:PART]
    async with pair.domain.register(PART, ACCESS) as region:
        await pair.near.write(region[:], here.remote.remote()[:PART])
    assert held.in_flight()
    held.qp.to_error()
    held.peer.mark(OPEN, held.asked)
    assert await outcomes(held.writes) == [WcStatus.WR_FLUSH_ERR] * COUNT


@in_thread
async def test_what_was_answered_too_early_is_asked_again(held: Held) -> None:
    await held.say(held.asked[-1].done())
    assert held.in_flight()
    held.peer.mark(OPEN, held.asked)
    again = await asyncio.to_thread(held.peer.hear, 1)
    assert (again[0].psn, again[0].direct) == (held.asked[0].psn, False)
    await held.say(held.asked[-1].done())
    assert await outcomes(held.writes) == [WcStatus.SUCCESS] * COUNT


@inline
async def test_who_does_not_leave_loses_the_link(held: Held) -> None:
    """And is not trusted with memory any more."""
    held.qp.to_error()
    assert held.in_flight()
    assert await outcomes(held.writes) == [WcStatus.WR_FLUSH_ERR] * COUNT
    assert await asyncio.to_thread(held.peer.stream.recv, 1) == b"", "the device closed the connection"
    held.peer.stream.close()
    async with held.scene.pair.domain.queue_pair(held.scene.pair.cq) as qp:
        qp.connect(held.peer.endpoint, PEERS, timeout=16)
        write = qp.write(held.region[:PART], held.remote[:PART])
        await asyncio.to_thread(held.peer.accept)
        assert not held.peer.offered
        (asked,) = await asyncio.to_thread(held.peer.hear, 1)
        assert not asked.direct
        await held.say(asked.done())
        assert await outcomes([write]) == [WcStatus.SUCCESS]
        assert held.link().why_not_direct == "the peer did not end a copy within 2 s"


@inline
async def test_a_lost_device_takes_the_memory_back_first(device: Device, short_path: Path) -> None:
    """The peer was about to move data, as one that was stopped: what was under way is the user's memory again."""
    async with (
        device.resource_domain() as domain,
        domain.register(COUNT * PART, ACCESS) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
    ):
        with contextlib.closing(Keeper(short_path / "near")) as peer:
            writes, asked = await ask(peer, qp, region)
            assert [peer.look(each) for each in asked] == [OPEN] * COUNT
            device.faults.lose_device()
            for write in writes:
                with pytest.raises(BrokenResourceError, match="DEVICE_FATAL"):
                    await write
            assert len(region.pins) == 0
            assert [peer.look(each) for each in asked] == [FREE] * COUNT
