"""What is measured in which order, and what comes out of it."""

import pytest
from hypothesis import given, strategies as st

from aioverbs.cli.bench import rate
from aioverbs.cli.bench_memory import Memory, expected
from aioverbs.cli.measuring import (
    MEMORY,
    OPERATIONS,
    SIZES,
    WINDOW,
    Cell,
    Samples,
    cells,
    figures,
    fitting_count,
    next_count,
    percentile,
    places,
    turn_s,
    turns,
)


def test_each_size_goes_one_by_one_and_with_a_window() -> None:
    found = cells(("write", "read"))
    assert len(found) == len(set(found)) == 2 * 2 * len(SIZES)
    assert found[:2] == [Cell("write", 8, 1), Cell("write", 8, WINDOW)]
    assert found[-1] == Cell("read", 1 << 20, 2)
    assert all(cell.size * cell.window <= MEMORY for cell in cells(OPERATIONS))


def test_what_has_no_room_for_two_goes_one_by_one_only() -> None:
    assert places(MEMORY) == 1
    assert cells(("send",), (MEMORY,)) == [Cell("send", MEMORY, 1)]


def test_turns_rotate() -> None:
    assert list(turns(["a", "b", "c"], 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]
    assert list(turns([], 3)) == []


def test_turns_take_the_time_that_there_is() -> None:
    one = turn_s(20, 42, 3)
    assert 0.005 < one < 20 / (42 * 3 * 7)
    assert turn_s(20, 42, 6) == pytest.approx(one / 2)
    assert turn_s(0.001, 42, 3) == 0.001
    assert turn_s(20, 0, 0) > 0


@given(operation_ns=st.floats(0, 1e9), wanted_s=st.floats(0.001, 1), begin=st.integers(1, 16))
def test_the_number_of_operations_is_found_soon(operation_ns: float, wanted_s: float, begin: int) -> None:
    count, tries = begin, 0
    while (more := next_count(count, count * operation_ns, wanted_s)) is not None:
        assert count < more <= 8 * count
        count, tries = more, tries + 1
        assert tries <= 10
    fitting = fitting_count(operation_ns, wanted_s)
    assert fitting == 1 or fitting * operation_ns <= 1.6 * wanted_s * 1e9


def test_percentiles() -> None:
    values = [float(each) for each in range(100, 0, -1)]
    assert [percentile(values, each) for each in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert percentile([7.0], 99) == 7
    for wrong in (-1, 101):
        with pytest.raises(ValueError, match="from 0 to 100"):
            percentile(values, wrong)
    with pytest.raises(ValueError, match="one value at least"):
        percentile([], 50)


def test_figures_are_medians_and_ratios_are_of_one_round() -> None:
    cell = Cell("read", 1000, 1)
    samples = {
        "tcp": Samples([100.0, 200.0, 1000.0], [100, 100, 200, 200, 1000, 1000]),
        "soft0": Samples([50.0, 20.0, 500.0], [50, 50, 20, 20, 500, 500]),
        "gone": Samples(),
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
    assert rate(value) == text


class TestMemory:
    """Both sides see whether the bytes of a turn arrived."""

    @pytest.mark.parametrize(("size", "count"), [(8, 1), (8, 16), (4096, 16), (MEMORY // 2, 2), (MEMORY, 1)])
    def test_all_of_a_turn(self, size: int, count: int) -> None:
        here, there = Memory(), Memory()
        here.begin(size, count, 7)
        there.begin(size, count, 7)
        assert there.checksum(size, count) != expected("write", size, count, 7), "nothing came yet"
        there.incoming[: size * count] = here.outgoing[: size * count]
        assert there.checksum(size, count) == expected("write", size, count, 7)
        assert there.checksum(size, count) != expected("write", size, count, 8), "of the next turn nothing came"
        there.incoming[size * count - 1] ^= 1
        assert there.checksum(size, count) != expected("write", size, count, 7)

    def test_messages_are_kept_where_they_belong(self) -> None:
        here, there = Memory(), Memory()
        here.begin(512, 4, 3)
        there.begin(512, 4, 3)
        for place in (2, 0, 3, 1):
            there.message(bytes(here.outgoing[place * 512 : (place + 1) * 512]))
        assert there.checksum(512, 4) == expected("send", 512, 4, 3)

    def test_an_answer_is_the_beginning_of_its_message(self) -> None:
        memory = Memory()
        memory.begin(64, 2, 5)
        answer = bytes(memory.outgoing[64:72])
        memory.check_answer(answer, 64, 1)
        with pytest.raises(ValueError, match="message 0 of turn 5 was answered by"):
            memory.check_answer(answer, 64, 0)
