"""Two processes in networks of their own, over TCP: packets are lost, small or late, the cable is pulled out."""

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
from tests.fabric.two import End, Other, end, other
from tests.pace import patience
from tests.soft_context import soft_context
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

PORT = 7479
QUICK: dict[str, Any] = {"timeout": 14, "retry_cnt": 2}  # 67 ms, three times


@pytest.fixture
def cable() -> Iterator[Network]:
    with network() as made:
        yield made


@dataclass
class Destination:
    here: End
    there: Other
    qp: QueuePair

    async def exchange(self, **more: Any) -> None:
        await exchange(self.here, self.there, self.qp, **more)


@contextlib.asynccontextmanager
async def way(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network, family: str
) -> AsyncIterator[Destination]:
    """Each with a directory of its own, so that nobody finds anybody but by the address."""
    ours, theirs = short_path / "here", short_path / "there"
    for folder in (ours, theirs):
        folder.mkdir(mode=0o700)
    near, far = (f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}" for host in HOSTS[family])
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(ours))
    monkeypatch.setenv("AIOVERBS_SOFT_ADDRESS", near)
    environment = {"AIOVERBS_SOFT_DIRECTORY": str(theirs), "AIOVERBS_SOFT_ADDRESS": far}
    async with other(environment=environment, prefix=cable.prefix) as there, end() as here:
        (qp,) = here.qps
        refused = soft_context(here.device).fabric().refused_frames
        await there.connect(qp)
        yield Destination(here, there, qp)
        assert {peer.transport for peer in here.device.peers()} <= {"tcp", None}
        assert soft_context(here.device).fabric().refused_frames == refused, "both are honest"
        assert len(here.region.pins) == 0


every_family = pytest.mark.parametrize("family", HOSTS)


@every_family
async def test_data_comes_over_a_network(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network, family: str
) -> None:
    async with way(monkeypatch, short_path, cable, family) as between:
        for seed in range(3):
            await between.exchange(seed=seed)


@every_family
async def test_data_comes_in_small_packets(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network, family: str
) -> None:
    cable.packet_size(1280 if family == "ipv6" else 100)
    async with way(monkeypatch, short_path, cable, family) as between:
        await between.exchange(most=20_000)


async def test_lost_packets_change_nothing(monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network) -> None:
    cable.lose(5)
    async with way(monkeypatch, short_path, cable, "ipv6") as between:
        for seed in range(3):
            await between.exchange(seed=seed)


@pytest.mark.parametrize("what", ["delay 5ms 3ms", "loss 5% delay 1ms", "delay 2ms reorder 25% 50%", "duplicate 20%"])
async def test_what_netem_does_to_packets_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network, what: str
) -> None:
    cable.emulate(*what.split())
    async with way(monkeypatch, short_path, cable, "ipv6") as between:
        await between.exchange()


async def test_requests_wait_while_the_cable_is_out(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network
) -> None:
    async with way(monkeypatch, short_path, cable, "ipv6") as between:
        await between.exchange()
        cable.cable(up=False)
        asked = asyncio.ensure_future(between.exchange(seed=1))
        await asyncio.sleep(0.3)
        assert not asked.done()
        cable.cable(up=True)
        await asked


async def test_a_request_fails_in_time_where_the_cable_is_out(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, cable: Network
) -> None:
    async with way(monkeypatch, short_path, cable, "ipv4") as between:
        await between.exchange(most=4096)
        qp = between.qp
        qp.to_reset()
        await between.there.connect(qp, **QUICK)
        cable.cable(up=False)
        begun = time.monotonic()
        with pytest.raises(WorkCompletionError) as caught:
            await between.exchange()
        assert caught.value.status is WcStatus.RETRY_EXC_ERR
        assert 3 * 0.067 < time.monotonic() - begun < patience(3)
        cable.cable(up=True)
        await until(lambda: not qp.statistics().in_flight)
        qp.to_reset()
        await between.there.connect(qp)
        await between.exchange()
