"""Two processes with a proxy between them that fragments, slows, stalls or cuts the streams."""

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aioverbs import QpState, QueuePair, WcStatus, WorkCompletionError
from tests.fabric.exchange import exchange, gid_name
from tests.fabric.proxy import Proxy, proxy
from tests.fabric.two import End, PeerProcess, end, peer_process
from tests.pace import patience
from tests.soft_context import soft_context
from tests.waiting import until

QUICK: dict[str, Any] = {"timeout": 14, "retry_cnt": 2}  # 67 ms, three times


@dataclass
class Connection:
    """A connection of two processes; each finds the name of the other in its own directory, and the proxy behind it."""

    here: End
    there: PeerProcess
    qp: QueuePair
    refused: int

    async def exchange(self, **more: Any) -> None:
        await exchange(self.here, self.there, self.qp, **more)

    def check(self) -> None:
        assert len(self.here.region.pins) == 0
        assert soft_context(self.here.device).fabric().refused_frames == self.refused, (
            "frames were refused between honest peers"
        )


@contextlib.contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Reserve a port by binding it: no other process is assigned it, and the device may still listen on it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        yield sock.getsockname()[1]


@contextlib.asynccontextmanager
async def connected(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, carrier: str, behaviour: Proxy, **attributes: Any
) -> AsyncIterator[Connection]:
    """Connect near to the proxy by a Unix socket, and the proxy to far by a Unix socket or TCP."""
    ours, theirs = short_path / "here", short_path / "there"
    for folder in (ours, theirs):
        folder.mkdir(mode=0o700)
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", "0")
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(ours))
    host = {"unix": "", "tcp4": "127.0.0.1", "tcp6": "::1"}[carrier]
    environment, address = {"AIOVERBS_SOFT_DIRECTORY": str(theirs)}, ("", 0)
    async with contextlib.AsyncExitStack() as stack:
        if host:
            address = host, stack.enter_context(reserved_port(host))
            environment["AIOVERBS_SOFT_ADDRESS"] = f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
        there = await stack.enter_async_context(peer_process(environment=environment))
        here = await stack.enter_async_context(end())
        (qp,) = here.qps
        refused = soft_context(here.device).fabric().refused_frames
        name = gid_name(await there.connect(qp, **attributes))
        own = gid_name(qp.local_endpoint())
        async with (
            proxy(ours / name, address if host else theirs / name, behaviour),
            proxy(theirs / own, ours / own, behaviour),
        ):
            connection = Connection(here, there, qp, refused)
            yield connection
            connection.check()


@pytest.mark.parametrize("carrier", ["unix", "tcp4", "tcp6"])
async def test_a_stream_in_single_bytes_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, carrier: str
) -> None:
    behaviour = Proxy(piece=1)
    async with connected(monkeypatch, short_path, carrier, behaviour) as connection:
        await connection.exchange(most=2000)
        assert behaviour.connections == 2
        assert behaviour.passed > 6000


async def test_a_slow_stream_changes_nothing(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    async with connected(monkeypatch, short_path, "unix", Proxy(piece=3000, pause_s=0.001)) as connection:
        await connection.exchange(most=50_000)


# Within HELLO, WELCOME and PROOF, within a header, behind a header, within data.
CUTS = [1, 150, 260, 400, 4500, 200_000]


@pytest.mark.parametrize("carrier", ["unix", "tcp4"])
async def test_a_stream_that_is_cut_repeatedly_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, carrier: str
) -> None:
    """Each connection lasts a little longer than the one before it."""
    behaviour = Proxy(cut_after=list(CUTS))
    attributes = {"timeout": 15, "retry_cnt": 7}  # 134 ms, eight times: each cut uses up one of them
    async with connected(monkeypatch, short_path, carrier, behaviour, **attributes) as connection:
        for seed in range(3):
            await connection.exchange(seed=seed)
        assert not behaviour.cut_after
        assert behaviour.connections > len(CUTS)


async def exchange_forever(connection: Connection) -> None:
    while True:
        await connection.exchange(most=5000)


@pytest.mark.parametrize(("carrier", "after"), [("tcp6", 0), ("unix", 300), ("tcp4", 700), ("unix", 20_000)])
async def test_a_stalled_stream_times_out_and_works_again(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, carrier: str, after: int
) -> None:
    """A stalled stream is reported in time, and works again afterwards."""
    behaviour = Proxy(stall_after=after)
    async with connected(monkeypatch, short_path, carrier, behaviour, **QUICK) as connection:
        begun = time.monotonic()
        with pytest.raises(WorkCompletionError) as caught:
            await exchange_forever(connection)
        assert caught.value.status is WcStatus.RETRY_EXC_ERR
        assert 3 * 0.067 < time.monotonic() - begun < patience(5)
        behaviour.stall_after = None
        behaviour.go_on.set()
        qp = connection.qp
        assert qp.query().qp_state is QpState.ERR
        await until(lambda: not qp.statistics().in_flight)
        qp.to_reset()
        await connection.there.connect(qp)
        await connection.exchange()
