"""Parts of `aioverbs demo`: the call from a wrong loop, what a server counts, and the verdict."""

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import aioverbs
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs.cli.demonstration.misuse import Misuse, misuse
from aioverbs.cli.demonstration.outcome import Outcome, Plan, Transfer
from aioverbs.cli.demonstration.storage import Counts, NotInstalledError, parse_counts, storage_server
from aioverbs.cli.demonstration.summary import for_programs, print_summary
from aioverbs.cli.histogram import Histogram
from aioverbs.cli.inventory import DeviceReport
from tests.conftest import ROOT

# ---- The call from a wrong loop


async def test_the_call_is_stopped_and_the_queue_pair_works_on(aioverbs_device: aioverbs.Device) -> None:
    async with aioverbs_device as device, device.resource_domain() as domain:
        found = await misuse(domain)
    assert found.error is not None
    assert "which belongs to thread 'MainThread' with event loop" in found.error
    assert (found.untouched, found.works) == (True, True)


async def test_a_call_that_nothing_stops(aioverbs_device: aioverbs.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = asyncio.get_running_loop()
    write: Callable[..., Any] = QueuePair.write

    def unguarded(qp: QueuePair, *arguments: Any) -> Any:
        async def carried() -> None:
            await write(qp, *arguments)

        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(carried(), inside))

    monkeypatch.setattr(QueuePair, "write", unguarded)
    async with aioverbs_device as device, device.resource_domain() as domain:
        assert await misuse(domain) == Misuse(None, untouched=False, works=False)


# ---- The storage server


def test_where_the_storage_server_is(tmp_path: Path) -> None:
    assert storage_server(ROOT / "aioverbs") == ROOT / "examples" / "storage_server"
    with pytest.raises(NotInstalledError, match="install aioverbs again"):
        storage_server(tmp_path / "aioverbs")
    shipped = tmp_path / "aioverbs" / "_examples" / "storage_server"
    shipped.mkdir(parents=True)
    (shipped / "__main__.py").touch()
    assert storage_server(tmp_path / "aioverbs") == shipped


def test_what_a_server_counts() -> None:
    pytest.importorskip("prometheus_client")
    text = """\
# TYPE storage_requests counter
storage_requests_total{kind="flush",outcome="done"} 7.0
storage_requests_total{kind="flush",outcome="failed"} 2.0
storage_requests_total{kind="open",outcome="done"} 9.0
# TYPE storage_message_read_bytes counter
storage_message_read_bytes_total 30.0
# TYPE storage_message_written_bytes counter
storage_message_written_bytes_total 12.0
# TYPE storage_sync_seconds histogram
storage_sync_seconds_bucket{le="+Inf"} 4.0
storage_sync_seconds_count 4.0
storage_sync_seconds_sum 0.5
"""
    assert parse_counts(text) == Counts(7, 4, 0.125, 42)


# ---- The verdict


def histogram(*values: int) -> Histogram:
    made = Histogram()
    for value in values:
        made.record(value)
    return made


GOOD = Outcome(
    plan=Plan("soft0", 1000, 1, 2, 0.5, 1),
    device=DeviceReport("soft0", "software", native={"thread_domains": True, "allocators": False}),
    reason="it was named",
    loop="asyncio",
    files=3,
    bytes=1000,
    written=Transfer(1000, 0.5, (0.1,), 10_000.0),
    read=Transfer(1000, 0.5, (0.1,), 10_000.0),
    verified_files=3,
    verified_bytes=1000,
    faults=(),
    block_reads=histogram(1000, 2000, 3000),
    flushes=histogram(5_000_000),
    counts=Counts(1, 1, 0.005, 0),
    misuse=Misuse("called from thread 'x'", untouched=True, works=True),
    trees=(),
    seconds=2.0,
)


def printed(outcome: Outcome) -> str:
    out = Console(width=200, file=io.StringIO())
    with out.capture() as captured:
        print_summary(out, outcome)
    return captured.get()


def test_all_is_well() -> None:
    assert GOOD.good
    text = printed(GOOD)
    assert text.rstrip().endswith("verified: 1,000 bytes in 3 files, each byte and each SHA-256; 2.0 s")
    assert "10.0kB/s" in text
    assert "AffinityError: called from thread 'x'" in text
    assert for_programs(GOOD)["verified"] is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verified_files": 2}, "2 of 3 files, 1,000 of 1,000 bytes, were read back as they were written"),
        ({"verified_bytes": 999}, "3 of 3 files, 999 of 1,000 bytes, were read back as they were written"),
        ({"faults": ("file-0001 is bad",)}, "file-0001 is bad\n"),
        ({"misuse": Misuse(None, untouched=False, works=False)}, "nothing stopped that"),
        ({"misuse": Misuse("no", untouched=False, works=True)}, "and yet something was written"),
        ({"misuse": Misuse("no", untouched=True, works=False)}, "it could not be used any more"),
        ({"block_reads": Histogram()}, "no single block was read"),
    ],
)
def test_what_is_not_well(changes: dict[str, Any], said: str) -> None:
    outcome = replace(GOOD, **changes)
    assert not outcome.good
    text = printed(outcome)
    assert said in text
    assert "not as it should be: " in text.splitlines()[-1]
    assert for_programs(outcome)["verified"] is False
