"""Two processes, and between them somebody who tears what they say into bytes, slows it, stops it, or cuts it."""

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
from tests.fabric.two import End, Other, end, other
from tests.pace import patience
from tests.soft_context import soft_context
from tests.waiting import until

QUICK: dict[str, Any] = {"timeout": 14, "retry_cnt": 2}  # 67 ms, three times


@dataclass
class Destination:
    """Both find each other's name in a directory of their own, and behind it the proxy."""

    here: End
    there: Other
    qp: QueuePair
    refused: int

    async def exchange(self, **more: Any) -> None:
        await exchange(self.here, self.there, self.qp, **more)

    def check(self) -> None:
        assert len(self.here.region.pins) == 0
        assert soft_context(self.here.device).fabric().refused_frames == self.refused, "both are honest"


@contextlib.contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """One that nobody else is given: it is bound. Another process may still listen there, as nobody does here."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        yield sock.getsockname()[1]


@contextlib.asynccontextmanager
async def way(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, carrier: str, how: Proxy, **attributes: Any
) -> AsyncIterator[Destination]:
    """Near connects to the proxy by a Unix socket, which connects to far by one, or by TCP."""
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
        there = await stack.enter_async_context(other(environment=environment))
        here = await stack.enter_async_context(end())
        (qp,) = here.qps
        refused = soft_context(here.device).fabric().refused_frames
        name = gid_name(await there.connect(qp, **attributes))
        own = gid_name(qp.local_endpoint())
        async with proxy(ours / name, address if host else theirs / name, how), proxy(theirs / own, ours / own, how):
            made = Destination(here, there, qp, refused)
            yield made
            made.check()


@pytest.mark.parametrize("carrier", ["unix", "tcp4", "tcp6"])
async def test_a_stream_in_single_bytes_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, carrier: str
) -> None:
    how = Proxy(piece=1)
    async with way(monkeypatch, short_path, carrier, how) as between:
        await between.exchange(most=2000)
        assert how.connections == 2
        assert how.passed > 6000


async def test_a_slow_stream_changes_nothing(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    async with way(monkeypatch, short_path, "unix", Proxy(piece=3000, pause_s=0.001)) as between:
        await between.exchange(most=50_000)


# Within HELLO, WELCOME and PROOF, within a head, behind one, within data.
CUTS = [1, 150, 260, 400, 4500, 200_000]


@pytest.mark.parametrize("carrier", ["unix", "tcp4"])
async def test_a_stream_that_is_cut_again_and_again_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, carrier: str
) -> None:
    """Each connection lasts a little longer than the one before it."""
    how = Proxy(cut_after=list(CUTS))
    attributes = {"timeout": 15, "retry_cnt": 7}  # 134 ms, eight times: each cut takes one of them
    async with way(monkeypatch, short_path, carrier, how, **attributes) as between:
        for seed in range(3):
            await between.exchange(seed=seed)
        assert not how.cut_after
        assert how.connections > len(CUTS)


async def exchange_for_ever(between: Destination) -> None:
    while True:
        await between.exchange(most=5000)


@pytest.mark.parametrize(("carrier", "after"), [("tcp6", 0), ("unix", 300), ("tcp4", 700), ("unix", 20_000)])
async def test_a_stream_that_stops_is_told_of_in_time_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, carrier: str, after: int
) -> None:
    """Nothing passes any more: that is told in time, and when it goes on there is nothing wrong."""
    how = Proxy(stall_after=after)
    async with way(monkeypatch, short_path, carrier, how, **QUICK) as between:
        begun = time.monotonic()
        with pytest.raises(WorkCompletionError) as caught:
            await exchange_for_ever(between)
        assert caught.value.status is WcStatus.RETRY_EXC_ERR
        assert 3 * 0.067 < time.monotonic() - begun < patience(5)
        how.stall_after = None
        how.go_on.set()
        qp = between.qp
        assert qp.query().qp_state is QpState.ERR
        await until(lambda: not qp.statistics().in_flight)
        qp.to_reset()
        await between.there.connect(qp)
        await between.exchange()
