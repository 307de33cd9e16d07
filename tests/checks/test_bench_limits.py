"""Benchmarks on RDMA devices: missed limits are printed and set the exit status."""

import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from tests.bench import rdma
from tests.bench.measuring import Limit, Result
from tests.bench.table import missed

LIMITS = {"to_c": Limit(at_most=1.3), "per_s": Limit(at_least=1e6)}


async def run_benchmark(monkeypatch: pytest.MonkeyPatch, figures: Mapping[str, object]) -> int:
    """Run one benchmark with these figures, and return the exit status."""

    async def measure() -> Result:
        return Result("write_8", figures, LIMITS)

    def benchmarks(*_: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(all={"write": measure})

    monkeypatch.setattr(rdma, "Benchmarks", benchmarks)
    monkeypatch.setattr(rdma, "rdma_devices", lambda: ["rxe0"])
    monkeypatch.setattr(rdma, "check_build", lambda: None)
    monkeypatch.setattr(sys, "argv", ["rdma.py", "--baseline", "baseline"])
    return await rdma.main()


async def test_no_missed_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not await run_benchmark(monkeypatch, {"to_c": 1.3, "per_s": 2e6})
    assert not capsys.readouterr().err


async def test_missed_limit_sets_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run_benchmark(monkeypatch, {"to_c": 1.4567, "per_s": 2e6}) == 1
    assert capsys.readouterr().err == "not met: write_8: to_c is 1.46, and its limit ≤ 1.3\n"


def test_a_figure_that_was_not_measured_misses_its_limit() -> None:
    (line,) = missed(Result("write_8", {"to_c": None, "per_s": 2e6}, LIMITS))
    assert line == "write_8: to_c is None, and its limit ≤ 1.3"
