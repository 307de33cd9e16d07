"""Two processes in network namespaces, over TCP: packets are lost, small or late, or the link goes down."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aioverbs import QueuePair, WcStatus, WorkCompletionError
from tests.fabric.exchange import exchange
from tests.fabric.namespace import HOSTS, Network, network
from tests.fabric.two import End, PeerProcess, end, peer_process
from tests.pace import patience
from tests.soft_context import soft_context
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

PORT = 7479  # for IPv6, whose GIDs have no room for one that the system chooses
QUICK: dict[str, Any] = {"timeout": 14, "retry_cnt": 2}  # 67 ms, three times


@pytest.fixture
def cable() -> Iterator[Network]:
    with network() as created:
        yield created


@dataclass
class Connection:
    here: End
    there: PeerProcess
    qp: QueuePair

    async def exchange(self, **more: Any) -> None:
        await exchange(self.here, self.there, self.qp, **more)


@contextlib.asynccontextmanager
async def connected(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network, family: str
) -> AsyncIterator[Connection]:
    """Connect two processes with different socket directories, so that they find each other only by address."""
    ours, theirs = short_path / "here", short_path / "there"
    for folder in (ours, theirs):
        folder.mkdir(mode=0o700)
    near, far = (f"[{host}]:{PORT}" if ":" in host else f"{host}:0" for host in HOSTS[family])
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(ours))
    monkeypatch.setenv("AIOVERBS_SOFT_ADDRESS", near)
    environment = {"AIOVERBS_SOFT_DIRECTORY": str(theirs), "AIOVERBS_SOFT_ADDRESS": far}
    async with peer_process(environment=environment, prefix=cable.prefix) as there, end() as here:
        (qp,) = here.qps
        refused = soft_context(here.device).fabric().refused_frames
        await there.connect(qp)
        yield Connection(here, there, qp)
        assert {peer.transport for peer in here.device.peers()} <= {"tcp", None}
        assert soft_context(here.device).fabric().refused_frames == refused, "frames were refused between honest peers"
        assert len(here.region.pins) == 0


every_family = pytest.mark.parametrize("family", HOSTS)


@every_family
async def test_data_is_transferred_over_a_network(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network, family: str
) -> None:
    async with connected(monkeypatch, short_path, cable, family) as connection:
        for seed in range(3):
            await connection.exchange(seed=seed)


@every_family
async def test_data_is_transferred_in_small_packets(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network, family: str
) -> None:
    cable.set_mtu(1280 if family == "ipv6" else 100)
    async with connected(monkeypatch, short_path, cable, family) as connection:
        await connection.exchange(most=20_000)


async def test_lost_packets_change_nothing(monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network) -> None:
    cable.drop(5)
    async with connected(monkeypatch, short_path, cable, "ipv6") as connection:
        for seed in range(3):
            await connection.exchange(seed=seed)


@pytest.mark.parametrize(
    "settings", ["delay 5ms 3ms", "loss 5% delay 1ms", "delay 2ms reorder 25% 50%", "duplicate 20%"]
)
async def test_delayed_reordered_and_duplicated_packets_change_nothing(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network, settings: str
) -> None:
    cable.emulate(*settings.split())
    async with connected(monkeypatch, short_path, cable, "ipv6") as connection:
        await connection.exchange()


async def test_requests_wait_while_the_link_is_down(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network
) -> None:
    async with connected(monkeypatch, short_path, cable, "ipv6") as connection:
        await connection.exchange()
        cable.set_link(up=False)
        traffic = asyncio.ensure_future(connection.exchange(seed=1))
        await asyncio.sleep(0.3)
        assert not traffic.done()
        cable.set_link(up=True)
        await traffic


async def test_a_request_times_out_while_the_link_is_down(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network
) -> None:
    async with connected(monkeypatch, short_path, cable, "ipv4") as connection:
        await connection.exchange(most=4096)
        qp = connection.qp
        qp.to_reset()
        await connection.there.connect(qp, **QUICK)
        cable.set_link(up=False)
        begun = time.monotonic()
        with pytest.raises(WorkCompletionError) as caught:
            await connection.exchange()
        assert caught.value.status is WcStatus.RETRY_EXC_ERR
        assert 3 * 0.067 < time.monotonic() - begun < patience(3)
        cable.set_link(up=True)
        await until(lambda: not qp.statistics().in_flight)
        qp.to_reset()
        await connection.there.connect(qp)
        await connection.exchange()
