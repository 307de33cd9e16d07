"""A peer that may copy between memories, and does not release a copy token when it has to.

Only the requests sent to that peer wait for the token, and only for a limited time.
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

FRAME = struct.Struct("<8B10IQ4I2Q2HI")  # layout: soft/fabric/frame.h
HELLO, PROOF, PROBE_AT, NONCE_AT, NONCE = 112, 40, 48, 72, 32  # offsets: protocol.md
DIRECT_HELLO, DIRECT_FRAME = 2, 8
TOKENS, FREE, OPEN, BUSY = 4096, 0, 1, 2
PART = 65536
COUNT = 4
REMOTE = RemoteRegion(0, COUNT * PART, 1)


@dataclass(frozen=True, slots=True)
class TokenRequest(Request):
    """A request frame, and the token by which the peer may copy."""

    direct: bool
    copy_token: int
    serial: int


class TokenHolder:
    """A listening peer whose messages are written by hand, in this process, so that it can write to its memory."""

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
        """Perform the handshake, and accept the offered memory access."""
        self.stream, _ = self.listener.accept()
        self.stream.settimeout(patience(20))
        hello, descriptors, _, _ = socket.recv_fds(self.stream, HELLO, 2)  # copy tokens, rings
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
        self.stream.sendall(struct.pack("<8sHHI32s32s32x", b"aioverbs", 3, flags, 0, self.gids, nonce))
        self._read_exactly(PROOF)

    def receive_requests(self, count: int) -> list[TokenRequest]:
        return [self._receive_request() for _ in range(count)]

    def _receive_request(self) -> TokenRequest:
        _, _, flags, _, _, _, _, _, size, *numbers, copy_token, _, serial = FRAME.unpack(self._read_exactly(FRAME.size))
        self._read_exactly(size)
        to, sender, token, psn, packets, *_ = numbers
        return TokenRequest(to, sender, token, psn, packets, bool(flags & DIRECT_FRAME), copy_token, serial)

    def _read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.stream.recv(size - len(data))
            assert part, "the device closed the connection"
            data += part
        return data

    def mark(self, state: int, requests: list[TokenRequest]) -> None:
        for each in requests:
            assert each.direct
            struct.pack_into("<Q", self.page, 8 * each.copy_token, state << 32 | each.serial)

    def token_state(self, request: TokenRequest) -> int:
        """Return the state of the copy token."""
        (word,) = struct.unpack_from("<Q", self.page, 8 * request.copy_token)
        return int(word >> 32)

    def close(self) -> None:
        for each in (self.listener, self.stream):
            each.close()


@dataclass
class HeldTokens:
    """Four writes of a queue pair, with the peer in the middle of copying all of them."""

    scene: Scene
    peer: TokenHolder
    qp: QueuePair
    region: MemoryRegion
    remote: RemoteRegion
    writes: list[Operation[None]]
    requests: list[TokenRequest]

    @property
    def device(self) -> Device:
        return self.scene.pair.device

    def link(self) -> Peer:
        gid = self.peer.gids[:16]
        (link,) = (each for each in self.device.peers() if each.connected_by_us and gid in each.gids)
        return link

    async def send(self, answer: bytes) -> None:
        """Send an answer, and wait until the device has read it."""
        before = self.link().frames_in
        self.peer.stream.sendall(answer)
        await until(lambda: self.link().frames_in > before)

    def in_flight(self) -> bool:
        return not any(write.ended for write in self.writes)


async def post_writes(
    peer: TokenHolder, qp: QueuePair, region: MemoryRegion
) -> tuple[list[Operation[None]], list[TokenRequest]]:
    """Connect a queue pair to the peer and post writes; return the writes, and the requests that the peer received."""
    qp.connect(peer.endpoint, PEERS, timeout=0)  # no retransmission, however long a side is blocked
    parts = [slice(n * PART, (n + 1) * PART) for n in range(COUNT)]
    writes = [qp.write(region[part], REMOTE[part]) for part in parts]
    await asyncio.to_thread(peer.accept)
    return writes, await asyncio.to_thread(peer.receive_requests, COUNT)


@pytest_asyncio.fixture
async def held(device: Device, short_path: Path) -> AsyncIterator[HeldTokens]:
    async with (
        scene(device) as here,
        here.pair.domain.register(COUNT * PART, ACCESS) as region,
        here.pair.domain.queue_pair(here.pair.cq) as qp,
    ):
        with contextlib.closing(TokenHolder(short_path / "near")) as peer:
            writes, requests = await post_writes(peer, qp, region)
            peer.mark(BUSY, requests)
            yield HeldTokens(here, peer, qp, region, REMOTE, writes, requests)


@inline
async def test_only_requests_to_the_peer_wait_for_its_copies(held: HeldTokens) -> None:
    """The peer acknowledges the writes while their copy tokens are still busy."""
    await held.send(held.requests[-1].ack())
    here, pair = held.scene, held.scene.pair
    here.local.buffer[:PART] = os.urandom(PART)
    await pair.near.write(*here.part(0, PART))
    assert here.remote.buffer[:PART] == here.local.buffer[:PART]
    async with pair.domain.register(PART, ACCESS) as region:
        await pair.near.write(region[:], here.remote.remote()[:PART])
    assert held.in_flight()
    held.qp.to_error()
    held.peer.mark(OPEN, held.requests)
    assert await outcomes(held.writes) == [WcStatus.WR_FLUSH_ERR] * COUNT


@in_thread
async def test_requests_answered_before_their_copy_ends_are_sent_again(held: HeldTokens) -> None:
    await held.send(held.requests[-1].ack())
    assert held.in_flight()
    held.peer.mark(OPEN, held.requests)
    repeated = await asyncio.to_thread(held.peer.receive_requests, 1)
    assert (repeated[0].psn, repeated[0].direct) == (held.requests[0].psn, False)
    await held.send(held.requests[-1].ack())
    assert await outcomes(held.writes) == [WcStatus.SUCCESS] * COUNT


@inline
async def test_a_peer_that_does_not_release_memory_loses_the_link(held: HeldTokens) -> None:
    """The peer also loses direct access to memory on later connections."""
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
        (request,) = await asyncio.to_thread(held.peer.receive_requests, 1)
        assert not request.direct
        await held.send(request.ack())
        assert await outcomes([write]) == [WcStatus.SUCCESS]
        assert held.link().why_not_direct == "the peer did not end a copy within 2 s"


@inline
async def test_a_lost_device_revokes_copy_tokens_first(device: Device, short_path: Path) -> None:
    """A stopped peer was about to copy: the memory in flight belongs to its user again once the device is lost."""
    async with (
        device.resource_domain() as domain,
        domain.register(COUNT * PART, ACCESS) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
    ):
        with contextlib.closing(TokenHolder(short_path / "near")) as peer:
            writes, requests = await post_writes(peer, qp, region)
            assert [peer.token_state(each) for each in requests] == [OPEN] * COUNT
            device.faults.lose_device()
            for write in writes:
                with pytest.raises(BrokenResourceError, match="DEVICE_FATAL"):
                    await write
            assert len(region.pins) == 0
            assert [peer.token_state(each) for each in requests] == [FREE] * COUNT
