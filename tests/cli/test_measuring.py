"""Cells, turns, figures and memory of `aioverbs bench`."""

import pytest
from hypothesis import given, strategies as st

from aioverbs.cli.bench import format_rate
from aioverbs.cli.bench_memory import Memory, expected_checksum
from aioverbs.cli.measuring import (
    MEMORY,
    OPERATIONS,
    SIZES,
    WINDOW,
    Cell,
    Samples,
    cells,
    count_for_turn,
    figures,
    next_count,
    percentile,
    slot_count,
    turn_order,
    turn_seconds,
)


def test_each_size_has_a_cell_with_window_1_and_a_larger_one() -> None:
    found = cells(("write", "read"))
    assert len(found) == len(set(found)) == 2 * 2 * len(SIZES)
    assert found[:2] == [Cell("write", 8, 1), Cell("write", 8, WINDOW)]
    assert found[-1] == Cell("read", 1 << 20, 2)
    assert all(cell.size * cell.window <= MEMORY for cell in cells(OPERATIONS))


def test_a_size_with_one_slot_has_one_cell() -> None:
    assert slot_count(MEMORY) == 1
    assert cells(("send",), (MEMORY,)) == [Cell("send", MEMORY, 1)]


def test_turns_rotate() -> None:
    assert list(turn_order(["a", "b", "c"], 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]
    assert list(turn_order([], 3)) == []


def test_turns_share_the_requested_time() -> None:
    one = turn_seconds(20, 42, 3)
    assert 0.005 < one < 20 / (42 * 3 * 7)
    assert turn_seconds(20, 42, 6) == pytest.approx(one / 2)
    assert turn_seconds(0.001, 42, 3) == 0.001
    assert turn_seconds(20, 0, 0) > 0


@given(operation_ns=st.floats(0, 1e9), wanted_s=st.floats(0.001, 1), begin=st.integers(1, 16))
def test_calibration_converges_in_few_steps(operation_ns: float, wanted_s: float, begin: int) -> None:
    count, tries = begin, 0
    while (more := next_count(count, count * operation_ns, wanted_s)) is not None:
        assert count < more <= 8 * count
        count, tries = more, tries + 1
        assert tries <= 10
    fitting = count_for_turn(operation_ns, wanted_s)
    assert fitting == 1 or fitting * operation_ns <= 1.6 * wanted_s * 1e9


def test_percentiles() -> None:
    values = [float(each) for each in range(100, 0, -1)]
    assert [percentile(values, each) for each in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert percentile([7.0], 99) == 7
    for wrong in (-1, 101):
        with pytest.raises(ValueError, match="from 0 to 100"):
            percentile(values, wrong)
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)


def test_figures_are_medians_and_ratios_are_of_one_round() -> None:
    cell = Cell("read", 1000, 1)
    samples = {
        "tcp": Samples([100.0, 200.0, 1000.0], [100, 100, 200, 200, 1000, 1000]),
        "soft0": Samples([50.0, 20.0, 500.0], [50, 50, 20, 20, 500, 500]),
        "dropped": Samples(),
    }
    tcp, soft = figures(cell, samples, "tcp")
    assert (tcp.contender, tcp.median_ns, tcp.p99_ns, tcp.ratio, tcp.rounds) == ("tcp", 200, 1000, 1, 3)
    assert (soft.median_ns, soft.ratio, soft.bytes_per_s) == (50, 2, 1000 / 50e-9)
    (alone,) = figures(Cell("read", 1000, 4), {"soft0": Samples([50.0])}, "tcp")
    assert (alone.ratio, alone.p99_ns) == (None, None)


@pytest.mark.parametrize(
    ("value", "text"), [(5, "5.00 B/s"), (12_345, "12.3 kB/s"), (987e6, "987 MB/s"), (1.5e9, "1.50 GB/s")]
)
def test_rates(value: float, text: str) -> None:
    assert format_rate(value) == text


class TestMemory:
    @pytest.mark.parametrize(("size", "count"), [(8, 1), (8, 16), (4096, 16), (MEMORY // 2, 2), (MEMORY, 1)])
    def test_checksum_of_a_turn(self, size: int, count: int) -> None:
        here, there = Memory(), Memory()
        here.prepare(size, count, 7)
        there.prepare(size, count, 7)
        assert there.checksum(size, count) != expected_checksum(size, count, 7), "nothing has arrived yet"
        there.incoming[: size * count] = here.outgoing[: size * count]
        assert there.checksum(size, count) == expected_checksum(size, count, 7)
        assert there.checksum(size, count) != expected_checksum(size, count, 8), "turn 8 has not arrived"
        there.incoming[size * count - 1] ^= 1
        assert there.checksum(size, count) != expected_checksum(size, count, 7)

    def test_messages_are_stored_in_their_slots(self) -> None:
        here, there = Memory(), Memory()
        here.prepare(512, 4, 3)
        there.prepare(512, 4, 3)
        for slot in (2, 0, 3, 1):
            there.store_message(bytes(here.outgoing[slot * 512 : (slot + 1) * 512]))
        assert there.checksum(512, 4) == expected_checksum(512, 4, 3)

    def test_an_answer_is_the_beginning_of_its_message(self) -> None:
        memory = Memory()
        memory.prepare(64, 2, 5)
        answer = bytes(memory.outgoing[64:72])
        memory.check_answer(answer, 64, 1)
        with pytest.raises(ValueError, match="message 0 of turn 5: the answer"):
            memory.check_answer(answer, 64, 0)
