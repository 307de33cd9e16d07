"""Parsing samples, rates between two samples, and the table of `aioverbs top`."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from aioverbs.cli.rates import COUNTERS, Sample, report
from aioverbs.cli.top_view import quantity, view


def resource(number: int, kind: str, statistics: dict[str, Any] | None, *children: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": number,
        "kind": kind,
        "label": str(number),
        "state": "open",
        "owner": None,
        "created": "program.py:1",
        "native": None,
        "statistics": statistics,
        "children": list(children),
    }


def queue(completed: int, size: int = 0, **more: Any) -> dict[str, Any]:
    return {"completed": completed, "bytes": size, "doorbells": 0, "in_flight": 1, "queued": 0, "failed": [], **more}


def pair(number: int, sends: dict[str, Any], receives: dict[str, Any]) -> dict[str, Any]:
    return resource(number, "QueuePair", {"children": 0, "sends": sends, "receives": receives})


def line(seconds: float, *devices: dict[str, Any]) -> bytes:
    return json.dumps({"time_ns": int(seconds * 1e9), "truncated": False, "devices": devices}).encode()


BEFORE = line(
    10,
    resource(
        1,
        "Device",
        {"children": 2},
        resource(2, "CompletionQueue", {"completions": 100, "wakeups": 50, "in_flight": 3, "depth": 64}),
        pair(3, queue(10, 1000), queue(20)),
        pair(4, queue(5, 50), queue(5)),
    ),
)
AFTER = line(
    12,
    resource(
        1,
        "Device",
        {"children": 2},
        resource(2, "CompletionQueue", {"completions": 300, "wakeups": 60, "in_flight": 3, "depth": 64}),
        pair(3, queue(30, 5000), queue(40, failed=[["WR_FLUSH_ERR", 2], ["RETRY_EXC_ERR", 1]])),
        pair(5, queue(1000, 1000), queue(0)),
        resource(6, "MemoryRegion", {"children": 0}),
        resource(7, "MemoryRegion", {"children": 0}),
    ),
)


def test_rates_need_the_resource_in_both_samples() -> None:
    now = report(Sample.parse(AFTER), Sample.parse(BEFORE))
    assert now.seconds == 2
    cq, old, new, *_ = now.devices[0].children
    assert cq.rates == {"completions": 100, "wakeups": 5}
    assert old.rates == {"operations": 20, "bytes": 2000, "doorbells": 0}
    assert new.rates is None
    assert now.totals == {"operations": 20, "bytes": 2000, "doorbells": 0, "completions": 100, "wakeups": 5}


def test_first_sample_has_no_rates() -> None:
    now = report(Sample.parse(AFTER), None)
    assert now.seconds is None
    assert all(node.rates is None for node in now.devices[0].children)
    assert set(now.totals.values()) == {0}


def test_samples_of_the_same_time_have_no_rates() -> None:
    now = report(Sample.parse(AFTER), Sample.parse(AFTER))
    assert now.seconds is None


def test_decreasing_counters_give_a_rate_of_0() -> None:
    now = report(
        Sample.parse(line(11, pair(3, queue(1), queue(1)))), Sample.parse(line(10, pair(3, queue(9), queue(9))))
    )
    assert now.devices[0].rates == {"operations": 0, "bytes": 0, "doorbells": 0}


def test_missing_statistics_count_as_0() -> None:
    before, after = (line(at, *(resource(n, kind, None) for n, kind in enumerate(COUNTERS))) for at in (1, 2))
    now = report(Sample.parse(after), Sample.parse(before))
    assert set(now.totals.values()) == {0}


WRONG: dict[str, Any] = {
    "id": "1", "kind": None, "label": 1, "state": [], "owner": {}, "created": None, "native": 1, "statistics": [],
    "children": None,
}  # fmt: skip
DEEP = resource(0, "Device", None)
for _ in range(100):
    DEEP = resource(0, "Device", None, DEEP)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (b"", "Expecting value"),
        (b"[" * 100_000, "nested too deep"),
        (b"\xff", "decode"),
        (b"[]", "a sample must be dict, got list"),
        (b"{}", "devices must be list, got NoneType"),
        (b'{"devices": [], "truncated": false}', "time_ns must be int, got NoneType"),
        (b'{"devices": [], "truncated": 0, "time_ns": 1}', "truncated must be bool, got int"),
        (b'{"devices": [], "truncated": false, "time_ns": true}', "time_ns must be int, got bool"),
        (b'{"devices": [1], "truncated": false, "time_ns": 1}', "a resource must be dict, got int"),
        (line(1, DEEP), "nested too deep"),
    ]
    + [
        (line(1, {**resource(1, "Device", None), name: value}), f"{name} must be .*, got {type(value).__name__}")
        for name, value in WRONG.items()
    ],
)
def test_invalid_samples(fields: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample.parse(fields)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(resource(1, "x", {}))), inner),
)
ALIKE = st.lists(st.fixed_dictionaries(dict.fromkeys(resource(1, "x", {}), JSON)), max_size=3)


@given(st.binary() | JSON.map(json.dumps).map(str.encode) | ALIKE.map(lambda devices: line(1, *devices)))
def test_parsing_any_line_raises_no_other_error(fields: bytes) -> None:
    with contextlib.suppress(ValueError):
        shown(line(1), fields)
        shown(fields, line(1))


def test_control_characters_are_replaced() -> None:
    (device,) = Sample.parse(line(1, {**resource(1, "Device", None), "label": "\x1b[2Jsoft0\n"})).devices
    assert device.label == "�[2Jsoft0�"


# ---- Table


def shown(after: bytes, before: bytes | None, **more: Any) -> str:
    now = report(Sample.parse(after), Sample.parse(before) if before is not None else None)
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(view(4711, "python service.py", now, **more))
    return capture.get()


def test_table_of_all_resources() -> None:
    text = shown(AFTER, BEFORE)
    assert "4711  python service.py\n20 ops/s  2.00k bytes/s  100 compl/s  5 wake/s" in text
    assert [line.split() for line in text.splitlines()[3:]] == [
        ["Device", "1", "open"],
        ["├", "CompletionQueue", "2", "open", "100", "5", "3", "of", "64"],
        ["├", "QueuePair", "3", "open", "20", "2.00k", "2", "3", "failed"],
        ["├", "QueuePair", "5", "open", "2"],
        ["└", "2", "MemoryRegion"],
    ]


def test_table_without_rates() -> None:
    text = shown(AFTER, None)
    assert "ops/s" not in text
    assert "QueuePair 3" in text


def test_notes_above_the_table() -> None:
    assert "it does not answer" in shown(AFTER, BEFORE, note="it does not answer")
    assert "no device is open" in shown(line(1), None)
    cut = json.dumps({"time_ns": 1, "truncated": True, "devices": []}).encode()
    assert "not all resources are shown" in shown(cut, None)


def test_details_of_resources() -> None:
    native = {**resource(2, "ThreadDomain", {"children": 0}), "native": False}
    pool = resource(3, "BufferPool", {"children": 0, "leased": 1, "under_dma": 2, "free": 5, "waiting": 4})
    workers = resource(4, "WorkerPool", {"children": 0, "workers": [{"calls": 3}, {"calls": 4}]})
    waiting = pair(5, queue(1, queued=6), queue(1))
    text = shown(line(1, resource(1, "Device", None, native, pool, workers, waiting)), None)
    for message in ("not native", "3 of 8", "4 wait for a buffer", "7  2 workers", "6 queued"):
        assert message in text


QUANTITIES = [
    (0, "0"),
    (0.25, "0.2"),
    (7, "7"),
    (99.96, "100"),
    (999.4, "999"),
    (999.6, "1.00k"),
    (12_345, "12.3k"),
    (1e6, "1.00M"),
    (123e9, "123G"),
    (5e15, "5000T"),
]


def test_quantities_have_three_digits() -> None:
    assert [(value, quantity(value)) for value, _ in QUANTITIES] == QUANTITIES
