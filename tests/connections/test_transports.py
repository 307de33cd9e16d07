"""Peers that are looked for by rdma_cm, with a stand-in for it, and found or not."""

from unittest import mock

import pytest

from aioverbs import Device, HandshakeError, establishing, ports
from aioverbs._core import engine
from aioverbs.cm_line import CmLine
from aioverbs.gids import Gid
from aioverbs.handshake import Reason
from tests.connections.ends import HOST, SMALL
from tests.connections.serving import asked, served

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _rdma_cm_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the end that connects; the one that listens is there by TCP only."""
    monkeypatch.setattr(establishing, "by_manager", lambda transport, domain, ssl: transport != "tcp")


def without_gids(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let the port have none when its table is read for the time of that number."""
    gid_table, looks = ports.gid_table, [0]

    def read(context: engine.Context, port: int) -> list[Gid]:
        looks[0] += 1
        return [] if looks[0] == at else gid_table(context, port)

    monkeypatch.setattr(ports, "gid_table", read)


async def test_a_port_without_a_gid_leaves_the_way_by_tcp(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    without_gids(monkeypatch, 1)
    async with (
        device.resource_domain() as domain,
        served(domain) as server,
        asked(server, domain, transport="auto") as near,
    ):
        await near.send(b"hello")
        assert await near.receive() == b"hello"


async def test_a_gid_that_goes_before_rdma_cm_connects(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    identifier, channel = mock.AsyncMock(), mock.AsyncMock()
    monkeypatch.setattr(establishing, "resolve", mock.AsyncMock(return_value=CmLine(identifier, channel)))
    without_gids(monkeypatch, 2)
    async with device.resource_domain() as domain:
        with pytest.raises(HandshakeError, match="has no GID") as caught:
            await establishing.connect(HOST, 1, domain=domain, transport="rdmacm", settings=SMALL)
    assert caught.value.reason == Reason.TEMPORARY
    identifier.aclose.assert_awaited_once()
    channel.leave.assert_awaited_once()
