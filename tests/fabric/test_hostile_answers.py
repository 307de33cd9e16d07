"""Answers that no honest peer gives: they change nothing but what they are about, whoever executes."""

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

LARGE = 4 << 20  # more than a socket and both of its ends keep
AHEAD = range(1, 300)  # more than there are places in the completion queue of `ends`
NEVER: dict[str, Any] = {"timeout": 0}  # nothing is sent again, however long somebody stands still


@dataclass
class Scene:
    """Near's device meets the hostile peer where it looks for far's."""

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

    async def say(self, *answers: bytes) -> None:
        """Send answers, and wait until near's device has read them all."""
        before = self.link().frames_in
        self.peer.say(*answers)
        await until(lambda: self.link().frames_in == before + len(answers))

    async def waits_for_room(self) -> None:
        await until(lambda: self.link().waiting_queue_pairs)

    async def stops(self) -> None:
        """Wait until the peer has heard all that is sent, and nobody waits for room in the socket."""

        def stopped() -> bool:
            link = self.link()
            return not link.waiting_queue_pairs and link.frames_out == self.frames_before + len(self.peer.requests)

        await until(stopped)


async def _name(device: Device) -> str:
    """Of the socket by which the device is found."""
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
        own, name = await _name(near), await _name(far)
        await opened(proxy(theirs / own, ours / own, Proxy()))
        peer = await opened(hostile_peer(ours / name, theirs / name))
        refused = soft_context(near).fabric().refused_frames
        remote_devices[near] = far
        try:
            yield Scene(near, peer)
        finally:
            del remote_devices[near]
        assert soft_context(near).fabric().refused_frames == refused


@asynccontextmanager
async def bystanders(pair: Ends) -> AsyncIterator[tuple[QueuePair, MemoryRegion]]:
    """A queue pair of near's device that has nothing to do with the peer, but shares the completion queue with near.

    Afterwards, its requests are done, and nothing is left in the completion queue.
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
    found = []
    for operation in operations:
        try:
            await operation
            found.append(WcStatus.SUCCESS)
        except WorkCompletionError as error:
            found.append(error.status)
    return found


@pytest.mark.parametrize(
    "status", [WcStatus.RNR_RETRY_EXC_ERR, WcStatus.REM_ACCESS_ERR], ids=["not ready for the last time", "refused"]
)
async def test_nothing_is_done_behind_a_refusal(scene: Scene, status: WcStatus) -> None:
    """Acknowledgements of what is flushed, and of what was never sent, come at once with the refusal."""
    async with ends(scene.device, rnr_retry=0, **NEVER) as pair, bystanders(pair):
        await pair.write(b"honest")
        scene.take_over()
        sends = [pair.near.send(pair.source[n : n + 1]) for n in range(8)]
        first, *others = await scene.peer.hear(8)
        ahead = [others[-1].done(n) for n in AHEAD]
        await scene.say(first.refused(status), *[each.done() for each in others], *ahead)
        assert await outcomes(sends) == [status] + [WcStatus.WR_FLUSH_ERR] * 7
        assert pair.near.query().qp_state is QpState.ERR


async def test_nothing_is_done_behind_a_part_that_is_refused(scene: Scene) -> None:
    async with ends(scene.device, **NEVER) as pair, bystanders(pair) as (_, region):
        await pair.write(b"honest")
        scene.take_over(limit=1)
        write = pair.near.write(region[:], RemoteRegion(0, LARGE, 1))
        (first,) = await scene.peer.hear(1)
        await scene.waits_for_room()
        await scene.say(first.refused(WcStatus.REM_ACCESS_ERR), *[first.done(n) for n in AHEAD])
        scene.peer.go_on.set()
        assert await outcomes([write]) == [WcStatus.REM_ACCESS_ERR]
        assert pair.near.query().qp_state is QpState.ERR


QUICK: dict[str, Any] = {"timeout": 15, "retry_cnt": 2}  # 134 ms, three times


async def ends_beside(peer: HostilePeer, operation: Operation[None], answer: bytes) -> WcStatus:
    """Have the peer give one answer again and again, until the operation ends: how it does."""
    ended = asyncio.ensure_future(outcomes([operation]))
    for _ in range(5000):
        if ended.done():
            break
        peer.say(answer)
        await asyncio.sleep(0.001)  # more often than the time of an answer passes
    else:
        ended.cancel()
        pytest.fail("the operation does not end")
    (status,) = await ended
    return status


async def test_a_request_whose_beginning_is_acknowledged_for_ever_ends(scene: Scene) -> None:
    """The same acknowledgement again is no sign of life: retries run out as with a peer that is silent."""
    async with ends(scene.device, path_mtu=Mtu.MTU_1024, **QUICK) as pair, bystanders(pair) as (_, region):
        await pair.write(b"honest")
        scene.take_over()
        write = pair.near.write(region[:8192], RemoteRegion(0, 8192, 1))
        (first,) = await scene.peer.hear(1)
        assert first.packets == 8
        assert await ends_beside(scene.peer, write, first.done(-7)) is WcStatus.RETRY_EXC_ERR


async def test_a_read_whose_beginning_is_answered_for_ever_ends(scene: Scene) -> None:
    """Each repetition brings the same bytes, and the retries are not given back for them."""
    async with ends(scene.device, path_mtu=Mtu.MTU_1024, **QUICK) as pair, bystanders(pair) as (_, region):
        await pair.write(b"honest")
        scene.take_over()
        read = pair.near.read(region[:8192], RemoteRegion(0, 8192, 1))
        (first,) = await scene.peer.hear(1)
        assert await ends_beside(scene.peer, read, first.answered(b"x" * 1024, 1)) is WcStatus.RETRY_EXC_ERR


async def test_datagrams_are_not_answered(scene: Scene) -> None:
    async with ends(scene.device, QpType.UD) as pair, bystanders(pair):
        scene.take_over()
        for turn in (1, 2):
            for _ in range(3):
                await pair.near.send(pair.source[:8], **pair.way)
            last = (await scene.peer.hear(3 * turn))[-1]
            refusals = [last.refused(status) for status in (WcStatus.REM_ACCESS_ERR, WcStatus.RNR_RETRY_EXC_ERR)]
            await scene.say(*refusals, *[last.done(n) for n in AHEAD])
        assert pair.near.query().qp_state is QpState.RTS


async def test_unreliable_connections_are_not_answered(scene: Scene) -> None:
    async with ends(scene.device, QpType.UC) as pair, bystanders(pair) as (_, region):
        scene.take_over(limit=1)
        write = pair.near.write(region[:], RemoteRegion(0, LARGE, 1))
        (first,) = await scene.peer.hear(1)
        refusals = [first.refused(status) for status in (WcStatus.REM_ACCESS_ERR, WcStatus.RNR_RETRY_EXC_ERR)]
        await scene.say(*refusals, *[first.done(n) for n in AHEAD])
        scene.peer.go_on.set()
        assert await outcomes([write]) == [WcStatus.SUCCESS]
        assert pair.near.query().qp_state is QpState.RTS


async def test_fewer_packets_are_in_flight_than_can_be_told_apart(scene: Scene) -> None:
    """Of requests with 2^23 packets and more, some wait for answers, which are heard."""
    capabilities = QpCapabilities(max_send_sge=32)
    async with (
        ends(scene.device, capabilities=capabilities, path_mtu=Mtu.MTU_256, **NEVER) as pair,
        pair.domain.register(32 << 20, ACCESS) as region,
    ):
        peer, remote = scene.peer, RemoteRegion(0, 1 << 30, 1)
        await pair.write(b"honest")
        scene.take_over()
        write = pair.near.write(region[: 256 << 10], remote[: 256 << 10])
        reads = [pair.near.read([region[:]] * 32, remote) for _ in range(3)]  # 2^22 packets each
        await until(lambda: peer.packets() > 1 << 22)
        await scene.stops()
        in_flight = peer.packets()
        assert in_flight < 1 << 23
        peer.say(peer.requests[1].done())  # the write's last part
        await write
        await until(lambda: peer.packets() > in_flight)
        await scene.stops()
        assert peer.packets() - sum(each.packets for each in peer.requests[:2]) < 1 << 23
        peer.say(peer.requests[2].refused(WcStatus.REM_ACCESS_ERR))
        assert await outcomes(reads) == [WcStatus.REM_ACCESS_ERR] + [WcStatus.WR_FLUSH_ERR] * 2
