"""Answers that no honest peer sends change only the request that they name, wherever the device executes."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aioverbs import (
    Device,
    MemoryRegion,
    Mtu,
    QpCapabilities,
    QpState,
    QpType,
    QueuePair,
    RemoteRegion,
    WcStatus,
    WorkCompletionError,
    open_device,
)
from aioverbs._core.data_path.data_path import Operation
from aioverbs.software_peers import Peer
from tests.data_path.ends import ACCESS, PEERS, Ends, ends
from tests.devices import remote_devices
from tests.fabric.exchange import gid_name
from tests.fabric.hostile import HostilePeer, hostile_peer
from tests.fabric.proxy import Proxy, proxy
from tests.listening import own_address
from tests.soft_context import soft_context
from tests.waiting import until

LARGE = 4 << 20  # more than a socket and both of its ends buffer, in bytes
AHEAD = range(1, 300)  # more than the depth of the completion queue of `ends`
NO_RETRANSMISSION: dict[str, Any] = {"timeout": 0}  # no retransmission, however long a side is blocked


@dataclass
class Scene:
    """A device with a hostile peer at the address where it looks for the far device."""

    device: Device
    peer: HostilePeer
    frames_before: int = 0

    def take_over(self, limit: int | None = None) -> None:
        """Have the peer answer from here on: see `HostilePeer`."""
        self.frames_before = self.link().frames_out
        self.peer.take_over(limit)

    def link(self) -> Peer:
        (link,) = (each for each in self.device.peers() if each.connected_by_us)
        return link

    async def send(self, *answers: bytes) -> None:
        """Send answers, and wait until the near device has read them all."""
        before = self.link().frames_in
        self.peer.send(*answers)
        await until(lambda: self.link().frames_in == before + len(answers))

    async def wait_for_full_socket(self) -> None:
        await until(lambda: self.link().waiting_queue_pairs)

    async def wait_until_sent(self) -> None:
        """Wait until the peer has received everything sent, and no queue pair waits for room in the socket."""

        def stopped() -> bool:
            link = self.link()
            return not link.waiting_queue_pairs and link.frames_out == self.frames_before + len(self.peer.requests)

        await until(stopped)


async def socket_name(device: Device) -> str:
    """Return the name of the socket by which the device is found."""
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq, domain.queue_pair(cq) as qp:
        return gid_name(qp.local_endpoint())


@pytest_asyncio.fixture(params=["inline", "thread"])
async def scene(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> AsyncIterator[Scene]:
    ours, theirs = short_path / "near", short_path / "far"
    for folder in (ours, theirs):
        folder.mkdir(mode=0o700)
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", "0")
    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(ours))
        near = await opened(open_device("soft0", execution=request.param))
        monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(theirs))
        far = await opened(open_device(f"soft0@{own_address()}:7475"))
        near_name, peer_name = await socket_name(near), await socket_name(far)
        await opened(proxy(theirs / near_name, ours / near_name, Proxy()))
        peer = await opened(hostile_peer(ours / peer_name, theirs / peer_name))
        refused = soft_context(near).fabric().refused_frames
        remote_devices[near] = far
        try:
            yield Scene(near, peer)
        finally:
            del remote_devices[near]
        assert soft_context(near).fabric().refused_frames == refused


@asynccontextmanager
async def unrelated_pair(pair: Ends) -> AsyncIterator[tuple[QueuePair, MemoryRegion]]:
    """Open a queue pair that is not connected to the peer, but shares near's completion queue.

    Afterwards check that its requests complete, and that none is in flight on the completion queue.
    """
    async with (
        pair.domain.register(LARGE, ACCESS) as region,
        pair.domain.queue_pair(pair.cq) as one,
        pair.domain.queue_pair(pair.cq) as other,
    ):
        one.connect(other.local_endpoint(), PEERS)
        other.connect(one.local_endpoint(), PEERS)
        yield one, region
        region.buffer[:4] = b"safe"
        await one.write(region[:4], region.remote()[8:12])
        assert bytes(region.buffer[8:12]) == b"safe"
        assert pair.cq.statistics().in_flight == 0


async def outcomes(operations: Iterable[Operation[None]]) -> list[WcStatus]:
    statuses = []
    for operation in operations:
        try:
            await operation
            statuses.append(WcStatus.SUCCESS)
        except WorkCompletionError as error:
            statuses.append(error.status)
    return statuses


@pytest.mark.parametrize(
    "status", [WcStatus.RNR_RETRY_EXC_ERR, WcStatus.REM_ACCESS_ERR], ids=["not ready for the last time", "refused"]
)
async def test_requests_behind_a_refused_one_do_not_complete(scene: Scene, status: WcStatus) -> None:
    """Send, together with the refusal, acknowledgements of flushed requests and of requests never sent."""
    async with ends(scene.device, rnr_retry=0, **NO_RETRANSMISSION) as pair, unrelated_pair(pair):
        await pair.write(b"honest")
        scene.take_over()
        sends = [pair.near.send(pair.source[n : n + 1]) for n in range(8)]
        first, *others = await scene.peer.receive_requests(8)
        ahead = [others[-1].ack(n) for n in AHEAD]
        await scene.send(first.nak(status), *[each.ack() for each in others], *ahead)
        assert await outcomes(sends) == [status] + [WcStatus.WR_FLUSH_ERR] * 7
        assert pair.near.query().qp_state is QpState.ERR


async def test_a_write_with_a_refused_part_does_not_complete(scene: Scene) -> None:
    async with ends(scene.device, **NO_RETRANSMISSION) as pair, unrelated_pair(pair) as (_, region):
        await pair.write(b"honest")
        scene.take_over(limit=1)
        write = pair.near.write(region[:], RemoteRegion(0, LARGE, 1))
        (first,) = await scene.peer.receive_requests(1)
        await scene.wait_for_full_socket()
        await scene.send(first.nak(WcStatus.REM_ACCESS_ERR), *[first.ack(n) for n in AHEAD])
        scene.peer.go_on.set()
        assert await outcomes([write]) == [WcStatus.REM_ACCESS_ERR]
        assert pair.near.query().qp_state is QpState.ERR


QUICK: dict[str, Any] = {"timeout": 15, "retry_cnt": 2}  # 134 ms, three times


async def repeat_answer(peer: HostilePeer, operation: Operation[None], answer: bytes) -> WcStatus:
    """Have the peer repeat one answer until the operation ends; return its status."""
    ended = asyncio.ensure_future(outcomes([operation]))
    for _ in range(5000):
        if ended.done():
            break
        peer.send(answer)
        await asyncio.sleep(0.001)  # less than the timeout of a request
    else:
        ended.cancel()
        pytest.fail("the operation does not end")
    (status,) = await ended
    return status


async def test_a_request_with_repeated_partial_acks_ends(scene: Scene) -> None:
    """A repeated acknowledgement is no progress: retries run out as with a silent peer."""
    async with ends(scene.device, path_mtu=Mtu.MTU_1024, **QUICK) as pair, unrelated_pair(pair) as (_, region):
        await pair.write(b"honest")
        scene.take_over()
        write = pair.near.write(region[:8192], RemoteRegion(0, 8192, 1))
        (first,) = await scene.peer.receive_requests(1)
        assert first.packets == 8
        assert await repeat_answer(scene.peer, write, first.ack(-7)) is WcStatus.RETRY_EXC_ERR


async def test_a_read_with_repeated_partial_responses_ends(scene: Scene) -> None:
    """Each repetition carries the same bytes, and does not restore the retries."""
    async with ends(scene.device, path_mtu=Mtu.MTU_1024, **QUICK) as pair, unrelated_pair(pair) as (_, region):
        await pair.write(b"honest")
        scene.take_over()
        read = pair.near.read(region[:8192], RemoteRegion(0, 8192, 1))
        (first,) = await scene.peer.receive_requests(1)
        assert await repeat_answer(scene.peer, read, first.read_response(b"x" * 1024, 1)) is WcStatus.RETRY_EXC_ERR


async def test_answers_to_datagrams_are_ignored(scene: Scene) -> None:
    async with ends(scene.device, QpType.UD) as pair, unrelated_pair(pair):
        scene.take_over()
        for turn in (1, 2):
            for _ in range(3):
                await pair.near.send(pair.source[:8], **pair.addressing)
            last = (await scene.peer.receive_requests(3 * turn))[-1]
            refusals = [last.nak(status) for status in (WcStatus.REM_ACCESS_ERR, WcStatus.RNR_RETRY_EXC_ERR)]
            await scene.send(*refusals, *[last.ack(n) for n in AHEAD])
        assert pair.near.query().qp_state is QpState.RTS


async def test_answers_to_unreliable_connections_are_ignored(scene: Scene) -> None:
    async with ends(scene.device, QpType.UC) as pair, unrelated_pair(pair) as (_, region):
        scene.take_over(limit=1)
        write = pair.near.write(region[:], RemoteRegion(0, LARGE, 1))
        (first,) = await scene.peer.receive_requests(1)
        refusals = [first.nak(status) for status in (WcStatus.REM_ACCESS_ERR, WcStatus.RNR_RETRY_EXC_ERR)]
        await scene.send(*refusals, *[first.ack(n) for n in AHEAD])
        scene.peer.go_on.set()
        assert await outcomes([write]) == [WcStatus.SUCCESS]
        assert pair.near.query().qp_state is QpState.RTS


async def test_packets_in_flight_are_limited_to_half_the_psn_space(scene: Scene) -> None:
    """Some of the requests with 2^23 packets and more wait for answers, and process them."""
    capabilities = QpCapabilities(max_send_sge=32)
    async with (
        ends(scene.device, capabilities=capabilities, path_mtu=Mtu.MTU_256, **NO_RETRANSMISSION) as pair,
        pair.domain.register(32 << 20, ACCESS) as region,
    ):
        peer, remote = scene.peer, RemoteRegion(0, 1 << 30, 1)
        await pair.write(b"honest")
        scene.take_over()
        write = pair.near.write(region[: 256 << 10], remote[: 256 << 10])
        reads = [pair.near.read([region[:]] * 32, remote) for _ in range(3)]  # 2^22 packets each
        await until(lambda: peer.packets() > 1 << 22)
        await scene.wait_until_sent()
        in_flight = peer.packets()
        assert in_flight < 1 << 23
        peer.send(peer.requests[1].ack())  # the last part of the write
        await write
        await until(lambda: peer.packets() > in_flight)
        await scene.wait_until_sent()
        assert peer.packets() - sum(each.packets for each in peer.requests[:2]) < 1 << 23
        peer.send(peer.requests[2].nak(WcStatus.REM_ACCESS_ERR))
        assert await outcomes(reads) == [WcStatus.REM_ACCESS_ERR] + [WcStatus.WR_FLUSH_ERR] * 2
